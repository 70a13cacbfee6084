"""Every metric of a report by its name in `metrics.json`, over predictions and bootstrap counts alike.

Most judge the pair (confidence, correct), whatever the confidence comes from. `nll`, `brier_score` and `cw_ece` judge
the probabilities of all options, which only the softmax states: for any other source they are undefined (NaN, null in
the file), so that a block of router confidence shows no figure that has nothing to do with it. The Brier score of the
answer alone, `top_label_brier_score`, is the proper score that every source has.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from components.evaluation import calibration_error, ranking, scores
from components.evaluation.checks import FloatArray
from components.evaluation.open_predictions import AnyPredictions
from components.evaluation.predictions import SOFTMAX, Predictions

Source = str | None
"""A confidence source; None is the predictions' primary one."""

Draws = Callable[[AnyPredictions, Source, FloatArray, int], FloatArray]
"""(predictions, confidence source, counts [B, n], bins) -> the metric of each draw, [B]."""


def _mean_of(per_question: Callable[[AnyPredictions, Source], FloatArray]) -> Draws:
    """A metric that is the mean over questions of `per_question`."""

    def draws(predictions: AnyPredictions, source: Source, counts: FloatArray, bins: int) -> FloatArray:
        return counts @ per_question(predictions, source) / counts.sum(axis=1)

    return draws


def _mean_of_options(
    per_question: Callable[[Predictions], FloatArray],
) -> Callable[[Predictions, Source, FloatArray, int], FloatArray]:
    """A metric that is the mean over questions of `per_question`, which reads the options' scores."""

    def draws(predictions: Predictions, source: Source, counts: FloatArray, bins: int) -> FloatArray:
        return counts @ per_question(predictions) / counts.sum(axis=1)

    return draws


def _of_pair(metric: Callable[[FloatArray, FloatArray, FloatArray], FloatArray]) -> Draws:
    """A metric of (confidence, correct, counts)."""

    def draws(predictions: AnyPredictions, source: Source, counts: FloatArray, bins: int) -> FloatArray:
        return metric(predictions.confidence(source), predictions.correctness(source).astype(np.float64), counts)

    return draws


def _of_binned_pair(metric: Callable[[FloatArray, FloatArray, FloatArray, int], FloatArray]) -> Draws:
    """A metric of (confidence, correct, counts, bins)."""

    def draws(predictions: AnyPredictions, source: Source, counts: FloatArray, bins: int) -> FloatArray:
        return metric(predictions.confidence(source), predictions.correctness(source).astype(np.float64), counts, bins)

    return draws


def _of_distribution(draws: Callable[[Predictions, Source, FloatArray, int], FloatArray]) -> Draws:
    """`draws` for the softmax over options, NaN for every other source."""

    def defined(predictions: AnyPredictions, source: Source, counts: FloatArray, bins: int) -> FloatArray:
        if not isinstance(predictions, Predictions) or predictions.named(source) != SOFTMAX:
            return np.full(len(counts), np.nan)
        return draws(predictions, source, counts, bins)

    return defined


def _squared_error(predictions: AnyPredictions, source: Source) -> FloatArray:
    return (predictions.confidence(source) - predictions.correctness(source)) ** 2


def _spread(predictions: AnyPredictions, source: Source, counts: FloatArray, bins: int) -> FloatArray:
    """Standard deviation over questions; centred first, so that rounding gives a constant none."""
    confidence = predictions.confidence(source)
    off = confidence - confidence.mean()
    n = counts.sum(axis=1)
    return np.sqrt(np.maximum(counts @ off**2 / n - (counts @ off / n) ** 2, 0.0))


def _classwise(predictions: Predictions, source: Source, counts: FloatArray, bins: int) -> FloatArray:
    return calibration_error.classwise_ece_draws(
        predictions.probabilities, predictions.gold, predictions.n_options, counts, bins
    )


METRICS: dict[str, Draws] = {
    "accuracy": _mean_of(lambda p, source: p.correctness(source).astype(np.float64)),
    "nll": _of_distribution(_mean_of_options(lambda p: scores.question_nll(p.log_probabilities, p.gold))),
    "brier_score": _of_distribution(_mean_of_options(lambda p: scores.question_brier(p.probabilities, p.gold))),
    "top_label_brier_score": _mean_of(_squared_error),
    "ece": _of_binned_pair(calibration_error.ece_draws),
    "ece_adaptive": _of_binned_pair(calibration_error.adaptive_ece_draws),
    "mce": _of_binned_pair(calibration_error.mce_draws),
    "cw_ece": _of_distribution(_classwise),
    "auroc": _of_pair(ranking.auroc_draws),
    "aurc": _of_pair(ranking.aurc_draws),
    "mean_confidence": _mean_of(lambda p, source: p.confidence(source)),
    "confidence_std": _spread,
    "option_mass": _mean_of(lambda p, source: p.option_mass),
}
"""`confidence_std` describes rather than judges: a constant confidence can have a low ECE, and this shows it."""


def metric_value(metric: str, predictions: AnyPredictions, bins: int, source: Source = None) -> float:
    """One metric on the sample as it is; NaN where it is undefined (AUROC with one class, NLL of router confidence).

    Args:
        metric: A name of `METRICS`.
        predictions: Scored questions.
        bins: Bins of the binned metrics; the others ignore it.
        source: Confidence source; None for the primary one.

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
