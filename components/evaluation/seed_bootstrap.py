"""Paired bootstrap over questions for methods that ran with several seeds.

A question is drawn as a whole: a draw says how often each question of any seed counts, and it counts as often in every
seed that has it and for every method. So neither seeds nor methods are treated as independent where they answered the
same question. A draw's figure is the mean over seeds of the metric; a difference is taken seed by seed. The seeds
themselves are not resampled: the interval says how far the figure moves with other questions, the standard deviation
over seeds, shown beside it, how far it moves with other seeds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from components.errors import CaltuneError
from components.evaluation.checks import FloatArray
from components.evaluation.intervals import (
    PairedDifference,
    bootstrap_counts,
    percentile_interval,
    same_questions,
    two_sided_p,
)
from components.evaluation.metrics import draws_of, metric_value
from components.evaluation.open_predictions import AnyPredictions


@dataclass(frozen=True)
class Side:
    """A method judged by one of its confidence sources, on one split.

    Attributes:
        predictions: By seed.
        source: Confidence source.
    """

    predictions: Mapping[int, AnyPredictions]
    source: str

    def values(self, metric: str, bins: int) -> list[float]:
        """The metric of each seed, in the seeds' order; NaN where undefined."""
        return [metric_value(metric, found, bins, self.source) for found in self.predictions.values()]


class SeedBootstrap:
    """Draws that all methods on a split share, and the metrics of each, which are computed once.

    Args:
        sides: By row name.
        bins: Bins of the binned metrics.
        draws: Bootstrap draws.
        seed: Of the bootstrap.

    Raises:
        CaltuneError: Two methods answered different questions with the same seed.
    """

    def __init__(self, sides: Mapping[str, Side], bins: int, draws: int, seed: int) -> None:
        self.sides, self.bins = sides, bins
        by_seed: dict[int, tuple[str, AnyPredictions]] = {}
        for name, side in sides.items():
            for number, found in side.predictions.items():
                other, known = by_seed.setdefault(number, (name, found))
                if not same_questions(known, found):
                    raise CaltuneError(
                        f"'{name}' and '{other}' answered different questions with seed {number}; evaluate them on the "
                        "same split"
                    )
        positions: dict[str, int] = {}
        for _, found in by_seed.values():
            for id_ in found.ids:
                positions.setdefault(id_, len(positions))
        self._places = {n: np.array([positions[i] for i in found.ids]) for n, (_, found) in by_seed.items()}
        self._blocks = [block.astype(np.uint16) for block in bootstrap_counts(len(positions), draws, seed)]
        self._known: dict[tuple[str, int, str], FloatArray] = {}

    def difference(self, metric: str, a: str, b: str, level: float) -> PairedDifference:
        """The metric of row a minus that of row b, averaged over the seeds that both have.

        Args:
            metric: A name of `METRICS`.
            a: Row name.
            b: Row name.
            level: Coverage of the interval.

        Raises:
            CaltuneError: No seed is shared.
        """
        seeds = [seed for seed in self.sides[a].predictions if seed in self.sides[b].predictions]
        if not seeds:
            raise CaltuneError(f"'{a}' and '{b}' share no seed, so that they cannot be compared")
        values = [self._value(metric, a, seed) - self._value(metric, b, seed) for seed in seeds]
        draws = np.mean([self._draws(metric, a, seed) - self._draws(metric, b, seed) for seed in seeds], axis=0)
        return PairedDifference(float(np.mean(values)), *percentile_interval(draws, level), two_sided_p(draws))

    def _value(self, metric: str, name: str, seed: int) -> float:
        side = self.sides[name]
        return metric_value(metric, side.predictions[seed], self.bins, side.source)

    def _draws(self, metric: str, name: str, seed: int) -> FloatArray:
        """The metric of each draw, [draws]; NaN where a draw has no question of this seed."""
        key = name, seed, metric
        if key not in self._known:
            side, parts = self.sides[name], []
            for block in self._blocks:
                counts = block[:, self._places[seed]].astype(np.float64)
                filled = counts.any(axis=1)
                part = np.full(len(counts), np.nan)
                if filled.any():
                    part[filled] = draws_of(metric)(side.predictions[seed], side.source, counts[filled], self.bins)
                parts.append(part)
            self._known[key] = np.concatenate(parts)
        return self._known[key]


def mean_and_spread(values: Sequence[float]) -> tuple[float, float]:
    """Mean and sample standard deviation over seeds; NaN where a value is undefined, no spread for a single one."""
    mean = float(np.mean(values))
    return mean, float(np.std(values, ddof=1)) if len(values) > 1 else float("nan")
