"""What a model says about one question, as one JSON object: in files, from the pyfunc and over HTTP alike."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Prediction:
    """The answer to a question.

    Attributes:
        id: The question's.
        answer: Text of the chosen option; what the model said to an open-ended question.
        answer_index: 0-based index of the chosen option; None for an open-ended question.
        confidence: In [0, 1] by source: `softmax` and with routers `flc`, or `sequence` (the greedy answer's
            probability, geometric mean over its tokens) and `sequence_sum` (as a whole).
        probabilities: Of the options, which add up to one; None for an open-ended question.
        abstained: Whether the policy in force abstains; None without a policy.
    """

    id: str
    answer: str
    answer_index: int | None
    confidence: Mapping[str, float]
    probabilities: tuple[float, ...] | None
    abstained: bool | None = None

    def as_row(self) -> dict[str, Any]:
        """The JSON object; what an open-ended question does not have is left out."""
        row: dict[str, Any] = {"id": self.id, "answer": self.answer}
        if self.answer_index is not None:
            row["answer_index"] = self.answer_index
        row |= {f"confidence_{source}": value for source, value in self.confidence.items()}
        if self.probabilities is not None:
            row["probabilities"] = list(self.probabilities)
        return {**row, "abstained": self.abstained}


@dataclass(frozen=True)
class Refusal:
    """Why a question could not be answered.

    Attributes:
        problem: The error to raise where one bad question spoils the call.
    """

    problem: Exception

    @property
    def reason(self) -> str:
        """In words."""
        return str(self.problem)
