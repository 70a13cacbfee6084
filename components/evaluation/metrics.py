"""Every metric of a report by its name in `metrics.json`, over predictions and bootstrap counts alike."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from components.evaluation import calibration_error, ranking, scores
from components.evaluation.checks import FloatArray
from components.evaluation.predictions import PRIMARY_SOURCE, Predictions

Draws = Callable[[Predictions, str, FloatArray, int], FloatArray]
"""(predictions, confidence source, counts [B, n], bins) -> the metric of each draw, [B]."""


def _mean_of(per_question: Callable[[Predictions, str], FloatArray]) -> Draws:
    """A metric that is the mean over questions of `per_question`."""

    def draws(predictions: Predictions, source: str, counts: FloatArray, bins: int) -> FloatArray:
        return counts @ per_question(predictions, source) / counts.sum(axis=1)

    return draws


def _of_pair(metric: Callable[[FloatArray, FloatArray, FloatArray], FloatArray]) -> Draws:
    """A metric of (confidence, correct, counts)."""

    def draws(predictions: Predictions, source: str, counts: FloatArray, bins: int) -> FloatArray:
        return metric(predictions.confidence(source), predictions.correct.astype(np.float64), counts)

    return draws


def _of_binned_pair(metric: Callable[[FloatArray, FloatArray, FloatArray, int], FloatArray]) -> Draws:
    """A metric of (confidence, correct, counts, bins)."""

    def draws(predictions: Predictions, source: str, counts: FloatArray, bins: int) -> FloatArray:
        return metric(predictions.confidence(source), predictions.correct.astype(np.float64), counts, bins)

    return draws


def _classwise(predictions: Predictions, source: str, counts: FloatArray, bins: int) -> FloatArray:
    return calibration_error.classwise_ece_draws(
        predictions.probabilities, predictions.gold, predictions.n_options, counts, bins
    )


METRICS: dict[str, Draws] = {
    "accuracy": _mean_of(lambda p, source: p.correct.astype(np.float64)),
    "nll": _mean_of(lambda p, source: scores.question_nll(p.log_probabilities, p.gold)),
    "brier_score": _mean_of(lambda p, source: scores.question_brier(p.probabilities, p.gold)),
    "ece": _of_binned_pair(calibration_error.ece_draws),
    "ece_adaptive": _of_binned_pair(calibration_error.adaptive_ece_draws),
    "mce": _of_binned_pair(calibration_error.mce_draws),
    "cw_ece": _classwise,
    "auroc": _of_pair(ranking.auroc_draws),
    "aurc": _of_pair(ranking.aurc_draws),
    "mean_confidence": _mean_of(lambda p, source: p.confidence(source)),
    "option_mass": _mean_of(lambda p, source: p.option_mass),
}
"""`nll`, `brier_score` and `cw_ece` judge the distribution over options, the others the answer and its confidence."""


def metric_value(metric: str, predictions: Predictions, bins: int, source: str = PRIMARY_SOURCE) -> float:
    """One metric on the sample as it is; NaN where it is undefined (AUROC with one class).

    Args:
        metric: A name of `METRICS`.
        predictions: Scored questions.
        bins: Bins of the binned metrics; the others ignore it.
        source: Confidence source.

    Raises:
        ValueError: Unknown metric or source.
    """
    return float(draws_of(metric)(predictions, source, np.ones((1, len(predictions))), bins)[0])


def draws_of(metric: str) -> Draws:
    """The named metric's function.

    Raises:
        ValueError: Unknown metric.
    """
    if metric not in METRICS:
        raise ValueError(f"no metric '{metric}'; there are: {', '.join(METRICS)}")
    return METRICS[metric]
