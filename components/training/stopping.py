"""Which step of a run is kept, and when the run ends.

CALM's paper does not state its rule, and going on too long overshoots into under-confidence (methods A.6), so a rule is
part of the method here. Each reads metrics on labelled data that training never sees.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass

from components.config_methods import StopConfig

SplitMetrics = Mapping[str, float]
"""At least `nll` of one split; of multiple-choice questions also `ece`, `accuracy` and `mean_confidence`."""


@dataclass
class StopState:
    """What a rule remembers; saved with every checkpoint.

    Attributes:
        kept_step: Steps taken at the state to keep; None while that is the last one.
        best: Value of `metric` there, for `keep_best`; None before the first evaluation.
        ended: The rule asked to end the run.
    """

    kept_step: int | None = None
    best: float | None = None
    ended: bool = False


class StopRule:
    """Judges each evaluation.

    Args:
        config: Rule, metric and split.
        state: To continue from a checkpoint.
    """

    def __init__(self, config: StopConfig, state: StopState | None = None) -> None:
        self.config, self.state = config, state or StopState()

    @property
    def split_names(self) -> tuple[str, ...]:
        """Splits whose metrics the rule reads."""
        return ("validation", "validation_shift") if self.config.split == "both" else (self.config.split,)

    def judge(self, steps_taken: int, metrics: Mapping[str, SplitMetrics]) -> bool:
        """Takes one evaluation in.

        Args:
            steps_taken: Optimiser steps so far.
            metrics: By split.

        Returns:
            Whether the state just evaluated is now the one to keep.

        Raises:
            FloatingPointError: The metric to be compared is not a number.
        """
        if self.config.rule == "budget":
            return False
        if self.config.rule == "match":
            return self._match(steps_taken, metrics)
        value = self._mean(metrics, self.config.metric)
        if self.state.best is None or value < self.state.best:
            self.state.best, self.state.kept_step = value, steps_taken
            return True
        return False

    def _match(self, steps_taken: int, metrics: Mapping[str, SplitMetrics]) -> bool:
        if self._mean(metrics, "mean_confidence") > self._mean(metrics, "accuracy"):
            return False
        self.state.kept_step, self.state.ended = steps_taken, True
        return True

    def _mean(self, metrics: Mapping[str, SplitMetrics], name: str) -> float:
        values = [metrics[split][name] for split in self.split_names]
        mean = sum(values) / len(values)
        if not math.isfinite(mean):
            raise FloatingPointError(f"validation {name} is {mean}: training diverged; lower the learning rates")
        return mean

    def as_dict(self) -> dict[str, object]:
        """The state, for a checkpoint."""
        return asdict(self.state)
