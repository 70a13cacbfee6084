"""What a question is, in memory. Every source yields these; everything later takes nothing else."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Question:
    """A multiple-choice question.

    Attributes:
        id: Unique within its set.
        question: The text, as it stands in the source.
        choices: At least two options, in the order shown.
        answer: 0-based index of the right choice.
        group: Relation, subject or topic; None where the source has none.
        entity: What the question is about; splits keep an entity whole. None where the source has none.
    """

    id: str
    question: str
    choices: tuple[str, ...]
    answer: int
    group: str | None = None
    entity: str | None = None

    def as_row(self) -> dict[str, object]:
        """The row of design's data contract, with group and entity where known."""
        row: dict[str, object] = {
            "id": self.id,
            "question": self.question,
            "choices": list(self.choices),
            "answer": self.answer,
        }
        if self.group is not None:
            row["group"] = self.group
        if self.entity is not None:
            row["entity"] = self.entity
        return row


@dataclass(frozen=True, slots=True)
class OpenQuestion:
    """An open-ended question: any of `answers` is right."""

    id: str
    question: str
    answers: tuple[str, ...]
    group: str | None = None
    entity: str | None = None

    def as_row(self) -> dict[str, object]:
        """The row of design's data contract, with group and entity where known."""
        row: dict[str, object] = {"id": self.id, "question": self.question, "answers": list(self.answers)}
        if self.group is not None:
            row["group"] = self.group
        if self.entity is not None:
            row["entity"] = self.entity
        return row


AnyQuestion = Question | OpenQuestion


@dataclass(frozen=True)
class QuestionSet:
    """Questions in a fixed order under one name.

    Attributes:
        name: Split name, e.g. `train`, `id`, `ood`.
        questions: The questions, all multiple-choice or all open-ended.
        oddities: Counts of legal but unusual rows by kind, e.g. `{"duplicate choices": 3}`.
        source: Where they came from, in words for reports.
    """

    name: str
    questions: tuple[AnyQuestion, ...]
    oddities: Mapping[str, int] = field(default_factory=dict)
    source: str = ""

    def __len__(self) -> int:
        return len(self.questions)

    def __iter__(self) -> Iterator[AnyQuestion]:
        return iter(self.questions)

    @property
    def open_ended(self) -> bool:
        """Whether the questions are to be answered in the model's own words."""
        return any(isinstance(question, OpenQuestion) for question in self.questions)

    @property
    def with_choices(self) -> tuple[Question, ...]:
        """The multiple-choice questions: all or none of them."""
        return tuple(question for question in self.questions if isinstance(question, Question))

    @property
    def without_choices(self) -> tuple[OpenQuestion, ...]:
        """The open-ended questions: all or none of them."""
        return tuple(question for question in self.questions if isinstance(question, OpenQuestion))

    @property
    def content_hash(self) -> str:
        """sha256 over the rows in order; equal sets have equal hashes whatever they are called."""
        digest = hashlib.sha256()
        for question in self.questions:
            digest.update(json.dumps(question.as_row(), ensure_ascii=False, sort_keys=True).encode())
            digest.update(b"\n")
        return digest.hexdigest()
