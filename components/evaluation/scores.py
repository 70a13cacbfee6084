"""Averages over questions: accuracy, mean confidence, log-likelihood and Brier scores.

The proper scores see the whole distribution over the options, so a method cannot lower them by being vague.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from components.evaluation import checks
from components.evaluation.checks import FloatArray, IntArray


def accuracy(correct: ArrayLike) -> float:
    """Share of right answers.

    Raises:
        ValueError: Empty, or anything but true and false.
    """
    return float(checks.outcomes(np.zeros(np.shape(correct)), correct)[1].mean())


def mean_confidence(confidence: ArrayLike) -> float:
    """Mean confidence of the chosen answers.

    Raises:
        ValueError: Empty, NaN or outside [0, 1].
    """
    return float(checks.unit_interval(confidence, "confidence").mean())


def mean_option_mass(option_mass: ArrayLike) -> float:
    """Mean probability that the model puts on any of the options at all, before they are renormalised.

    Raises:
        ValueError: Empty, NaN or outside [0, 1].
    """
    return float(checks.unit_interval(option_mass, "option_mass").mean())


def negative_log_likelihood(log_probabilities: ArrayLike, gold: ArrayLike) -> float:
    """Mean of -log p(gold) over questions, in nats.

    Args:
        log_probabilities: Normalised over the options, [n, K]; -inf where an option is absent.
        gold: Right option, [n].

    Raises:
        ValueError: Shapes do not fit, NaN, rows not normalised, or gold names an absent option.
    """
    matrix = np.asarray(log_probabilities, dtype=np.float64)
    if np.isnan(matrix).any():
        raise ValueError("log_probabilities holds NaN")
    _, gold_n = checks.distribution(np.exp(matrix), gold)
    absent = np.flatnonzero(np.isneginf(matrix[np.arange(len(gold_n)), gold_n]))
    if absent.size:
        raise ValueError(f"gold[{absent[0]}] is {gold_n[absent[0]]}, an option without probability")
    return float(question_nll(matrix, gold_n).mean())


def brier_score(probabilities: ArrayLike, gold: ArrayLike) -> float:
    """Brier's (1950) score over all options: mean over questions of the sum over options of (p_k - [k is gold])^2.

    In [0, 2]; scikit-learn's multi-class default is half of it. `metrics.json` reports this one.

    Raises:
        ValueError: Shapes do not fit, NaN, rows not normalised, or a bad gold index.
    """
    return float(question_brier(*checks.distribution(probabilities, gold)).mean())


def top_label_brier_score(confidence: ArrayLike, correct: ArrayLike) -> float:
    """Mean of (confidence - correct)^2, the Brier score of the chosen answer alone; in [0, 1].

    Raises:
        ValueError: Lengths differ, NaN, confidence outside [0, 1], no questions.
    """
    confidence_n, correct_n = checks.outcomes(confidence, correct)
    return float(((confidence_n - correct_n) ** 2).mean())


def question_nll(log_probabilities: FloatArray, gold: IntArray) -> FloatArray:
    """-log p(gold) of each question, [n]."""
    return -log_probabilities[np.arange(len(gold)), gold]


def question_brier(probabilities: FloatArray, gold: IntArray) -> FloatArray:
    """Sum over options of the squared error, of each question, [n]."""
    target = np.zeros_like(probabilities)
    target[np.arange(len(gold)), gold] = 1.0
    return ((probabilities - target) ** 2).sum(axis=1)
