"""Softmax and router confidence made into one, without labels (ours; neither paper has it).

FLC is trained to match how often the model is right, but hardly tells one question from another; the softmax over the
options tells them apart, but is too sure. So FLC sets the level and the softmax the order: each question's option
scores are divided by a temperature of its own,

    T(f) :  the mean over reference questions of max softmax(s / T) is f,        T_i = T(FLC_i),

so that a question whose routers are as sure as f is tempered as the reference questions would have to be to state f on
average. Reference questions need no labels: only their option scores are read. The mean falls strictly as T rises, so
T(f) is found by looking it up on a grid of log T. It ends at the bounds of the grid: no temperature takes the softmax
over K options below 1 / K.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from components.posthoc.temperature import MAX_TEMPERATURE, MIN_TEMPERATURE

FloatArray = NDArray[np.float64]

_GRID = np.linspace(np.log(MIN_TEMPERATURE), np.log(MAX_TEMPERATURE), 241)


@dataclass(frozen=True)
class FlcTemperature:
    """The function T(f), in plain numbers that JSON holds.

    Attributes:
        log_temperatures: Grid of log T, rising, g numbers.
        levels: Mean confidence of the reference questions at each, falling.
        n: Reference questions.
    """

    log_temperatures: list[float]
    levels: list[float]
    n: int

    def of(self, flc: ArrayLike) -> FloatArray:
        """Temperature of each question, [n], in [MIN_TEMPERATURE, MAX_TEMPERATURE]; never rises with FLC.

        Args:
            flc: Router confidence, [n], in [0, 1].

        Raises:
            ValueError: A value is NaN or outside [0, 1].
        """
        values = np.asarray(flc, dtype=np.float64)
        if not ((values >= 0) & (values <= 1)).all():
            raise ValueError("flc must hold numbers from 0 to 1")
        return np.exp(np.interp(-values, -np.asarray(self.levels), self.log_temperatures))


def match_flc(option_log_probs: ArrayLike) -> FlcTemperature:
    """Reads T(f) off reference questions.

    Args:
        option_log_probs: Scores of their options in nats, [n, K], n >= 1; -inf where an option is absent.

    Raises:
        ValueError: No questions, NaN or +inf, or a question without options.
    """
    scores = np.asarray(option_log_probs, dtype=np.float64)
    if scores.ndim != 2 or len(scores) == 0:
        raise ValueError(f"option_log_probs must be a matrix with at least one row, not of shape {scores.shape}")
    if np.isnan(scores).any() or np.isposinf(scores).any() or np.isneginf(scores).all(axis=1).any():
        raise ValueError("option_log_probs holds NaN or +inf, or a question without options")
    below_best = scores - scores.max(axis=1, keepdims=True)
    levels = [float((1.0 / np.exp(below_best / np.exp(t)).sum(axis=1)).mean()) for t in _GRID]
    # Where every question has one clear answer the first levels agree to the last bit; interpolation takes any of them.
    return FlcTemperature(_GRID.tolist(), np.minimum.accumulate(levels).tolist(), len(scores))
