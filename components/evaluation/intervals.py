"""Percentile bootstrap over questions: an interval for every metric, and for the difference of two methods.

A draw is a row of counts saying how often each question was drawn, so all draws of a metric are one matrix product or
one pass over sorted groups. Undefined draws (AUROC with one class) are left out of the percentiles; when all are, the
interval is NaN. With one question every draw is the sample and the interval has no width.

Binned calibration errors are biased upwards, in draws more than in the sample: near zero the interval lies high, and
now and then above the value itself. It says how far the figure moves with other questions, not where a bias-free ECE
would be. In a paired difference most of that bias cancels.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from components.config import EvaluationConfig
from components.errors import CaltuneError
from components.evaluation.checks import FloatArray
from components.evaluation.metrics import METRICS, Source, draws_of, metric_value
from components.evaluation.open_predictions import AnyPredictions
from components.evaluation.predictions import Predictions

# Entries of one count matrix; bounds memory (16 MB a matrix) whatever the number of questions.
_CHUNK_ENTRIES = 2_000_000


@dataclass(frozen=True)
class Interval:
    """A metric with its bootstrap interval; NaN where undefined."""

    value: float
    ci_low: float
    ci_high: float


@dataclass(frozen=True)
class PairedDifference:
    """Metric of a minus metric of b on the same questions.

    Attributes:
        difference: On the sample.
        ci_low: Lower end of the percentile interval.
        ci_high: Upper end.
        p_value: Two-sided, (0, 1]: twice the smaller share of draws on one side of zero (or at it), each counted with
            one more draw so that it is never 0. NaN where the difference is undefined.
    """

    difference: float
    ci_low: float
    ci_high: float
    p_value: float


def bootstrap_counts(n: int, draws: int, seed: int) -> Iterator[FloatArray]:
    """Counts of `draws` resamples of n questions, in blocks [b, n]; rows add up to n. Same arguments, same counts."""
    generator = np.random.default_rng(seed)
    block = max(1, _CHUNK_ENTRIES // n)
    for start in range(0, draws, block):
        size = min(block, draws - start)
        drawn = generator.integers(0, n, size=(size, n)) + n * np.arange(size)[:, None]
        yield np.bincount(drawn.ravel(), minlength=size * n).reshape(size, n).astype(np.float64)


def bootstrap_intervals(
    predictions: AnyPredictions,
    config: EvaluationConfig,
    seed: int,
    source: Source = None,
    metrics: Sequence[str] = tuple(METRICS),
) -> dict[str, Interval]:
    """Value and interval of each metric of a confidence source (None: the primary one), all on the same draws.

    Raises:
        ValueError: Unknown metric or source.
    """
    values = {metric: metric_value(metric, predictions, config.bins, source) for metric in metrics}
    blocks: dict[str, list[FloatArray]] = {metric: [] for metric in metrics}
    for counts in bootstrap_counts(len(predictions), config.bootstrap, seed):
        for metric in metrics:
            blocks[metric].append(draws_of(metric)(predictions, source, counts, config.bins))
    return {
        metric: Interval(values[metric], *percentile_interval(np.concatenate(blocks[metric]), config.level))
        for metric in metrics
    }


def paired_bootstrap(
    metric: str,
    a: AnyPredictions,
    b: AnyPredictions,
    config: EvaluationConfig,
    seed: int,
    source_a: Source = None,
    source_b: Source = None,
) -> PairedDifference:
    """Does a, judged by its confidence source, differ from b, judged by its own? None is the primary source.

    Each draw takes the same questions for both.

    Raises:
        CaltuneError: a and b do not answer the same questions in the same order.
        ValueError: Unknown metric or source.
    """
    if not same_questions(a, b):
        raise CaltuneError(
            f"a paired comparison needs the same questions in the same order, but these sets of {len(a)} and {len(b)} "
            "differ; evaluate both methods on the same split"
        )
    function = draws_of(metric)
    difference = metric_value(metric, a, config.bins, source_a) - metric_value(metric, b, config.bins, source_b)
    draws = np.concatenate(
        [
            function(a, source_a, counts, config.bins) - function(b, source_b, counts, config.bins)
            for counts in bootstrap_counts(len(a), config.bootstrap, seed)
        ]
    )
    return PairedDifference(difference, *percentile_interval(draws, config.level), two_sided_p(draws))


def same_questions(a: AnyPredictions, b: AnyPredictions) -> bool:
    """Whether a and b answer the same questions in the same order, with the same right options where there are any."""
    if isinstance(a, Predictions) and isinstance(b, Predictions):
        return a.ids == b.ids and np.array_equal(a.gold, b.gold)
    return type(a) is type(b) and a.ids == b.ids


def percentile_interval(draws: FloatArray, level: float) -> tuple[float, float]:
    """The central `level` share of the defined draws, NaN when none is defined."""
    defined = draws[~np.isnan(draws)]
    if defined.size == 0:
        return float("nan"), float("nan")
    tail = (1 - level) / 2
    low, high = np.quantile(defined, [tail, 1 - tail])
    return float(low), float(high)


def two_sided_p(draws: FloatArray) -> float:
    """As `PairedDifference.p_value`, of the draws of a difference."""
    defined = draws[~np.isnan(draws)]
    if defined.size == 0:
        return float("nan")
    smaller_side = min((defined <= 0).sum(), (defined >= 0).sum())
    return float(min(1.0, 2 * (smaller_side + 1) / (defined.size + 1)))
