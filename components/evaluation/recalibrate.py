"""Post-hoc recalibration of a method's predictions: fitted on labelled validation splits, applied everywhere."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from components.evaluation.predictions import Predictions
from components.posthoc.temperature import FittedTemperature, fit_temperature


def temper(
    predictions: Mapping[str, Predictions], fit_on: Sequence[str]
) -> tuple[FittedTemperature, dict[str, Predictions]]:
    """Fits one temperature on some splits together and applies it to all.

    Args:
        predictions: One method's predictions by split.
        fit_on: Labelled validation splits, pooled.

    Returns:
        The temperature, and the tempered predictions of every split.
    """
    width = max(predictions[split].option_log_probs.shape[1] for split in fit_on)
    scores = np.concatenate([_widened(predictions[split].option_log_probs, width) for split in fit_on])
    gold = np.concatenate([predictions[split].gold for split in fit_on])
    fitted = fit_temperature(scores, gold)
    return fitted, {split: found.tempered(fitted.value) for split, found in predictions.items()}


def _widened(scores: np.ndarray, width: int) -> np.ndarray:
    return np.pad(scores, ((0, 0), (0, width - scores.shape[1])), constant_values=-np.inf)
