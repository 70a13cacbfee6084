"""`abstention.json`: the policies kept with an adapter, each a threshold and what is known of it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from components.errors import ModelError
from components.evaluation.open_predictions import AnyPredictions
from components.evaluation.selective import naive_threshold, threshold_for_coverage, threshold_for_risk
from components.files import read_json, write_json
from components.models.adapter_extras import ABSTENTION_FILE, add_file

FORMAT = 1

FIXED_SEQUENCE, CONFORMAL = "fixed-sequence binomial tests", "conformal quantile"

TargetKind = Literal["risk", "coverage"]


@dataclass(frozen=True)
class Target:
    """What a policy is to keep to.

    Attributes:
        kind: `risk`, the error rate among the answers, or `coverage`, the share of questions answered.
        value: At most this risk, in (0, 1), or at least this coverage, in (0, 1].
        delta: Probability that a risk is not kept to, in (0, 1); None for a coverage, which is kept to on average.
    """

    kind: TargetKind
    value: float
    delta: float | None

    @property
    def name(self) -> str:
        """A name for its policy: `risk_0.1`."""
        return f"{self.kind}_{self.value:g}"


@dataclass(frozen=True)
class Policy:
    """From which confidence on to answer.

    Attributes:
        source: Confidence source that the threshold is on.
        threshold: Answer where the confidence is this at least; None: the target cannot be guaranteed, never answer.
        target: What it was chosen for.
        n: Labelled questions it was chosen on.
        fitted_on: Their split.
        naive: The threshold that the same questions suggest without any guarantee; None where none does, and for a
            coverage.
    """

    source: str
    threshold: float | None
    target: Target
    n: int
    fitted_on: str
    naive: float | None

    def as_dict(self) -> dict[str, Any]:
        """Its entry in `abstention.json`."""
        return {
            "source": self.source,
            "threshold": self.threshold,
            "target": {"kind": self.target.kind, "value": self.target.value},
            "delta": self.target.delta,
            "method": FIXED_SEQUENCE if self.target.kind == "risk" else CONFORMAL,
            "n": self.n,
            "fitted_on": self.fitted_on,
            "guarantee": self.sentence,
        }

    @property
    def sentence(self) -> str:
        """What is guaranteed, and for which questions."""
        value, whose = self.target.value, f"questions like the {self.n} of the split '{self.fitted_on}'"
        if self.target.kind == "coverage":
            return f"at least {value:.1%} of {whose} are answered, on average over the draw of these"
        if self.threshold is None:
            return (
                f"none: no threshold could be shown to keep the error rate at {value:.1%} on {whose}, so every "
                "question is abstained from; a higher risk, more labelled questions or a better model would help"
            )
        assert self.target.delta is not None
        return (
            f"at most {value:.1%} of the answers to {whose} are wrong, with probability {1 - self.target.delta:.0%} "
            "over the draw of these"
        )


def choose_policy(predictions: AnyPredictions, source: str | None, target: Target, fitted_on: str) -> Policy:
    """Chooses the threshold for a target.

    Args:
        predictions: Of labelled questions that nothing was trained on.
        source: Confidence source; None takes the primary one.
        target: What to keep to.
        fitted_on: Name of the split.

    Raises:
        ValueError: There is no such source, or the target's value or delta is out of range.
    """
    named = predictions.named(source)
    confidence, correct = predictions.confidence(named), predictions.correctness(named)
    if target.kind == "coverage":
        threshold: float | None = threshold_for_coverage(confidence, target.value)
        return Policy(named, threshold, target, len(predictions), fitted_on, None)
    if target.delta is None:
        raise ValueError("a target risk needs a delta")
    right = correct.astype(np.float64)
    threshold = threshold_for_risk(confidence, right, target.value, target.delta)
    naive = naive_threshold(confidence, right, target.value)
    return Policy(named, threshold, target, len(predictions), fitted_on, naive)


def add_policy(folder: Path, name: str, policy: Policy) -> None:
    """Keeps a policy in an adapter folder and makes it the default; one of the same name is replaced.

    Args:
        folder: An adapter folder.
        name: What to call it.
        policy: The policy.

    Raises:
        ModelError: The folder is damaged, or its `abstention.json` is of another format.
        CaltuneError: That file is not JSON.
    """
    path = folder / ABSTENTION_FILE
    before: dict[str, Any] = {}
    if path.exists():
        kept = read_json(path, "choose the thresholds again")
        if kept.get("format") != FORMAT or not isinstance(kept.get("policies"), dict):
            raise ModelError(f"{path} is not of format {FORMAT}; delete it and choose the thresholds again")
        before = kept["policies"]
    content = {"format": FORMAT, "policies": before | {name: policy.as_dict()}, "default": name}
    add_file(folder, ABSTENTION_FILE, lambda temporary: write_json(temporary, content))
