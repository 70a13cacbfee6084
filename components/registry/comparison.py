"""The difference of two models' figures with an interval, whether or not they answered the same questions.

On the same questions each draw takes the same ones for both (paired). On different questions each model's are drawn by
themselves, and one thing must be set right: binned calibration errors are biased upwards, the more the fewer the
questions, so a model judged on 100 questions looks worse than the same one on 1,000. The larger sample's figure is
therefore brought to the smaller one's size, by what the figure rises to, on average, in random parts of that size.
Draws are biased once more than the sample they come from; in a paired difference that cancels, here it is taken off.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from components.config import EvaluationConfig
from components.evaluation.checks import FloatArray
from components.evaluation.intervals import bootstrap_counts, percentile_interval, same_questions
from components.evaluation.metrics import draws_of, metric_value
from components.evaluation.predictions import Predictions

PAIRED, INDEPENDENT = "paired", "independent"

_BINNED = ("ece", "ece_adaptive", "mce", "cw_ece")
_PARTS = 200
"""Random parts whose mean figure is taken; its standard error is a fourteenth of a part's spread."""


@dataclass(frozen=True)
class Difference:
    """A figure of a minus `weight` times that of b.

    Attributes:
        a: The figure of a, of independent samples at the smaller one's size.
        b: The figure of b, likewise.
        value: a - weight * b.
        ci_low: Lower end of the percentile interval of `value`.
        ci_high: Upper end.
        questions: Questions of a and of b.
        kind: `paired` or `independent`.
    """

    a: float
    b: float
    value: float
    ci_low: float
    ci_high: float
    questions: tuple[int, int]
    kind: str


def difference(
    metric: str,
    a: Predictions,
    b: Predictions,
    config: EvaluationConfig,
    seed: int,
    *,
    source: str | None = None,
    weight: float = 1.0,
) -> Difference:
    """The metric of a minus `weight` times the metric of b, paired where the questions are the same.

    Args:
        metric: A name of `METRICS`.
        a: The one model's predictions.
        b: The other's.
        config: Bins, bootstrap draws and level.
        seed: Of the bootstrap.
        source: Confidence source of both; None is the primary one.
        weight: 1 for a plain difference; 0.9 asks whether a is below nine tenths of b. Linear, so that nothing is
            divided by a figure that may be zero.

    Raises:
        ValueError: Unknown metric, or a source that one of the two lacks.
    """
    value_a, value_b = (metric_value(metric, x, config.bins, source) for x in (a, b))
    function = draws_of(metric)
    if same_questions(a, b):
        draws = np.concatenate(
            [
                function(a, source, counts, config.bins) - weight * function(b, source, counts, config.bins)
                for counts in bootstrap_counts(len(a), config.bootstrap, seed)
            ]
        )
        return _result(value_a, value_b, weight, draws, config, (len(a), len(b)), PAIRED)
    rise_a, rise_b = (_rise(metric, x, min(len(a), len(b)), config.bins, source, seed) for x in (a, b))
    draws_a = _draws(metric, a, config, seed, source, value_a) + rise_a
    draws_b = _draws(metric, b, config, seed + 1, source, value_b) + rise_b
    draws = draws_a - weight * draws_b
    return _result(value_a + rise_a, value_b + rise_b, weight, draws, config, (len(a), len(b)), INDEPENDENT)


def _draws(
    metric: str, predictions: Predictions, config: EvaluationConfig, seed: int, source: str | None, value: float
) -> FloatArray:
    """The metric of each draw [draws]; a binned one without what being drawn anew adds to it."""
    counts = bootstrap_counts(len(predictions), config.bootstrap, seed)
    draws = np.concatenate([draws_of(metric)(predictions, source, block, config.bins) for block in counts])
    return draws + (value - draws.mean()) if metric in _BINNED else draws


def _rise(metric: str, predictions: Predictions, size: int, bins: int, source: str | None, seed: int) -> float:
    """What the metric gains, on average, when computed on `size` of the questions; nothing where it is not binned."""
    n = len(predictions)
    if size == n or metric not in _BINNED:
        return 0.0
    generator = np.random.default_rng(seed)
    counts = np.zeros((_PARTS, n))
    for row in counts:
        row[generator.choice(n, size, replace=False)] = 1.0
    parts = draws_of(metric)(predictions, source, counts, bins)
    return float(np.mean(parts)) - metric_value(metric, predictions, bins, source)


def _result(
    a: float,
    b: float,
    weight: float,
    draws: FloatArray,
    config: EvaluationConfig,
    questions: tuple[int, int],
    kind: str,
) -> Difference:
    low, high = percentile_interval(draws, config.level)
    return Difference(a, b, a - weight * b, low, high, questions, kind)
