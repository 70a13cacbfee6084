"""The run file's sections `gate` and `drift`: what a new model must show before it ships, and when one is due."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, model_serializer, model_validator

from components.config_base import Fraction, Positive, Strict

GREATER_IS_BETTER: dict[str, bool] = {
    "accuracy": True,
    "nll": False,
    "brier_score": False,
    "top_label_brier_score": False,
    "ece": False,
    "ece_adaptive": False,
    "mce": False,
    "cw_ece": False,
    "auroc": True,
    "aurc": False,
    "option_mass": True,
}
"""Metrics that a gate may judge, and which end of each is good. Those that only describe are not here."""

Judged = Literal[
    "accuracy",
    "nll",
    "brier_score",
    "top_label_brier_score",
    "ece",
    "ece_adaptive",
    "mce",
    "cw_ece",
    "auroc",
    "aurc",
    "option_mass",
]
CHAMPION = "champion"
"""What `against` names the model in service by."""

_OF_SOFTMAX_ALONE = ("nll", "brier_score", "cw_ece")
_LIMITS = ("threshold", "min_absolute_change", "min_relative_change", "non_inferiority_margin")


class GateRule(Strict):
    """One demand on the candidate; exactly one of the four limits. The names are MLflow's (`MetricThreshold`).

    A rule is judged by the interval of the figure, not by the figure: the end that speaks against the candidate counts.
    """

    metric: Judged
    """A name in `metrics.json`."""
    split: str = "id"
    """Test data: `id`, or a name of `data.ood`."""
    source: Literal["softmax", "flc"] = "softmax"
    """Confidence that is judged; `flc` is the routers', which methods without routers lack."""
    threshold: float | None = None
    """The whole interval must be at or below it, for accuracy, auroc and option_mass at or above."""
    min_absolute_change: Annotated[float, Field(ge=0)] | None = None
    """The candidate must be better than `against` by more than this; 0 asks for any clear improvement."""
    min_relative_change: Annotated[float, Field(gt=0, le=1)] | None = None
    """The candidate must be better than `against` by more than this share of the other's figure."""
    non_inferiority_margin: Annotated[float, Field(ge=0)] | None = None
    """The candidate may be worse than `against` by this much at most."""
    against: str | None = None
    """`champion` or a method of the run, `sft` or `sft+temperature`; null is `champion` where something is compared."""

    @model_validator(mode="after")
    def _has_one_limit(self) -> GateRule:
        given = [name for name in _LIMITS if getattr(self, name) is not None]
        if len(given) != 1:
            raise ValueError(f"needs exactly one of {', '.join(_LIMITS)}")
        if self.threshold is not None and self.against is not None:
            raise ValueError("threshold is absolute: it takes no 'against'")
        if self.source == "flc" and self.metric in _OF_SOFTMAX_ALONE:
            raise ValueError(f"{self.metric} judges the probabilities of all options, which source flc does not state")
        return self

    @model_serializer
    def _without_nulls(self) -> dict[str, Any]:
        return {name: value for name, value in self if value is not None}

    @property
    def reference(self) -> str | None:
        """Whom the candidate is compared with; None for an absolute rule."""
        return None if self.threshold is not None else self.against or CHAMPION

    @property
    def greater_is_better(self) -> bool:
        """Which end of the metric is good."""
        return GREATER_IS_BETTER[self.metric]


class GateConfig(Strict):
    """What stands between a trained model and the alias `champion`."""

    method: str
    """The method whose adapter is registered and judged, `calm` or `sft+temperature`."""
    registered_model: Annotated[str, Field(pattern=r"^[A-Za-z0-9][\w .-]{0,199}$")] = "caltune"
    """Name of the model in the MLflow registry."""
    rules: Annotated[list[GateRule], Field(min_length=1)]
    """All must be met. A comparison with the champion is left out while there is none."""

    def misfit(self, methods: list[str], splits: list[str]) -> str | None:
        """What the section asks for and the run does not have, in words.

        Args:
            methods: Methods of the run, without the recalibrated ones.
            splits: Test splits of the run.
        """
        if _method(self.method) not in methods:
            return f"gate.method is '{self.method}', which 'methods' does not run"
        if _method(self.method) == "base":
            return f"gate.method is '{self.method}', which trains no adapter that could be registered"
        for i, rule in enumerate(self.rules):
            if rule.split not in splits:
                return f"gate.rules[{i}].split is '{rule.split}', but the test splits are {', '.join(splits)}"
            other = rule.reference
            if other not in (None, CHAMPION) and _method(str(other)) not in methods:
                return f"gate.rules[{i}].against is '{other}', neither '{CHAMPION}' nor one of 'methods'"
            if other == self.method:
                return f"gate.rules[{i}] compares '{other}' with itself"
        return None


class DriftConfig(Strict):
    """How far fresh data may be from the champion's own test before a retraining is due."""

    max_ece_increase: Fraction = 0.03
    """With labels: drift when the whole interval of the ECE's increase lies above it."""
    max_accuracy_drop: Fraction = 0.03
    """With labels: drift when the whole interval of the accuracy's drop lies above it."""
    prediction_log: Path | None = None
    """What the champion has answered in service, as .parquet or .jsonl with `confidence_softmax` and, with routers,
    `confidence_flc` a row: its confidences are compared with those on its test data. Null: only labels decide."""
    max_shift: Fraction = 0.15
    """Without labels: drift when a distribution of confidence has moved by more than this, as the greatest difference
    of the two distribution functions (Kolmogorov-Smirnov's D)."""
    significance: Annotated[Positive, Field(lt=1)] = 0.01
    """Without labels: a shift counts only when its p-value is below this, shared among the distributions tested."""


def _method(name: str) -> str:
    """The trained method behind a recalibrated one's name."""
    return name.partition("+")[0]
