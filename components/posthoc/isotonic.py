"""Isotonic regression of being right on confidence (Zadrozny and Elkan 2002): a rising step function, fitted on labels.

It restates how sure the answer is and never which answer it is. To stay a distribution over the options, so that every
metric is defined, the rest of the mass goes to the other options in proportion to what they had, levelled towards equal
shares as far as it takes to keep the answer the most probable one. That bounds the confidence of an answer among K
options from below by 1 / K, which the most probable of K options cannot fall short of; where the step function says
less, the bound stands. From above it stops short of certainty, which a small sample suggests but never shows.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

FloatArray = NDArray[np.float64]

MARGIN = 1e-6
"""Confidence stays this far below 1, and the answer this share ahead of the runner-up (ours)."""


@dataclass(frozen=True)
class IsotonicFit:
    """The step function's corners, in plain numbers that JSON holds; linear between them, constant outside.

    Attributes:
        confidences: Where the corners are, rising, in [0, 1].
        accuracies: The function there, never falling, in [0, 1].
        n: Questions fitted on.
    """

    confidences: list[float]
    accuracies: list[float]
    n: int

    def of(self, confidence: ArrayLike) -> FloatArray:
        """The function's values, in [0, 1]; the same as scikit-learn's with `out_of_bounds="clip"`.

        Raises:
            ValueError: A confidence is NaN or outside [0, 1].
        """
        values = np.asarray(confidence, dtype=np.float64)
        if not ((values >= 0) & (values <= 1)).all():
            raise ValueError("confidence must hold numbers from 0 to 1")
        return np.interp(values, self.confidences, self.accuracies)


def fit_isotonic(confidence: ArrayLike, correct: ArrayLike) -> IsotonicFit:
    """Fits the step function by pooling adjacent violators.

    Args:
        confidence: Confidence in each answer, [n], in [0, 1], n >= 2.
        correct: Whether it was right, [n].

    Raises:
        ValueError: Lengths differ, fewer than 2 questions, a confidence outside [0, 1].
    """
    from sklearn.isotonic import IsotonicRegression

    values, outcomes = np.asarray(confidence, dtype=np.float64), np.asarray(correct, dtype=np.float64)
    if values.shape != outcomes.shape or values.ndim != 1 or len(values) < 2:
        raise ValueError(f"a fit needs at least 2 pairs, not confidence {values.shape} and correct {outcomes.shape}")
    if not ((values >= 0) & (values <= 1)).all():
        raise ValueError("confidence must hold numbers from 0 to 1")
    fitted = IsotonicRegression(y_min=0.0, y_max=1.0, out_of_bounds="clip").fit(values, outcomes)
    return IsotonicFit(fitted.X_thresholds_.tolist(), fitted.y_thresholds_.tolist(), len(values))


def restated(log_probabilities: FloatArray, confidence: FloatArray) -> FloatArray:
    """Scores with the same answers and other confidences.

    Args:
        log_probabilities: Over the options, [n, K], normalised; -inf where an option is absent.
        confidence: What the most probable option of each question (the first of equals) is to have, [n], in [0, 1]. It
            is held between just over 1 / K, for K options present, and just under 1.

    Returns:
        Log-probabilities, [n, K], -inf where an option is absent; a question with one option keeps what it has.
    """
    rows = np.arange(len(log_probabilities))
    answer = log_probabilities.argmax(axis=1)
    present = ~np.isneginf(log_probabilities)
    others = present.sum(axis=1) - 1
    # A runner-up of (1 - MARGIN) c at most: K - 1 such and the answer's c must be able to add up to 1.
    least = 1.0 / (1.0 + (1.0 - MARGIN) * others)
    wanted = np.clip(confidence, least, np.where(others > 0, 1.0 - MARGIN, 1.0))
    shares = _shares(log_probabilities, answer, others)
    result = np.full_like(log_probabilities, -np.inf)
    with np.errstate(divide="ignore", invalid="ignore"):
        most = wanted * (1.0 - MARGIN) / (1.0 - wanted)
        equal = 1.0 / others
        top = shares.max(axis=1)
        levelled = np.clip(np.where(top > most, (top - most) / (top - equal), 0.0), 0.0, 1.0)
        mixed = (1.0 - levelled)[:, None] * shares + levelled[:, None] * equal[:, None]
        rest = np.log(1.0 - wanted)[:, None] + np.log(np.maximum(mixed, np.finfo(np.float64).tiny))
    result[present] = np.where(others[:, None] > 0, rest, 0.0)[present]
    result[rows, answer] = np.log(wanted)
    return result


def _shares(log_probabilities: FloatArray, answer: NDArray[np.int64], others: NDArray[np.int64]) -> FloatArray:
    """How the options other than the answer divide what it leaves, [n, K]; 0 at the answer and at absent options."""
    without = log_probabilities.copy()
    without[np.arange(len(without)), answer] = -np.inf
    highest = np.where(others > 0, without.max(axis=1), 0.0)
    shares = np.exp(without - highest[:, None])
    return shares / np.maximum(shares.sum(axis=1), 1.0)[:, None]
