"""Post-hoc recalibration of a method's predictions: read off validation or calibration splits, applied everywhere."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from components.config import RecalibrationName
from components.errors import CaltuneError
from components.evaluation.checks import FloatArray
from components.evaluation.predictions import Predictions
from components.posthoc.flc_temperature import FlcTemperature, match_flc
from components.posthoc.temperature import FittedTemperature, fit_temperature


@dataclass(frozen=True)
class Recalibrated:
    """A method's predictions after recalibration.

    Attributes:
        fitted: What was fitted.
        fitted_on: The splits it was fitted on, pooled.
        predictions: By split.
    """

    fitted: FittedTemperature | FlcTemperature
    fitted_on: tuple[str, ...]
    predictions: dict[str, Predictions]


def recalibrate(
    kind: RecalibrationName, predictions: Mapping[str, Predictions], fit_on: tuple[str, ...]
) -> Recalibrated:
    """Fits and applies the recalibration of this name; see `temper` and `temper_by_flc`.

    Raises:
        CaltuneError: `flc_temperature` of a method without router confidence.
    """
    fitted, result = temper(predictions, fit_on) if kind == "temperature" else temper_by_flc(predictions, fit_on)
    return Recalibrated(fitted, fit_on, result)


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
    gold = np.concatenate([predictions[split].gold for split in fit_on])
    fitted = fit_temperature(_scores(predictions, fit_on), gold)
    return fitted, {split: found.tempered(fitted.value) for split, found in predictions.items()}


def temper_by_flc(
    predictions: Mapping[str, Predictions], reference: Sequence[str]
) -> tuple[FlcTemperature, dict[str, Predictions]]:
    """Reads a temperature for each router confidence off some splits together and applies it to all.

    Args:
        predictions: One method's predictions by split.
        reference: Splits whose option scores are read, pooled. Their labels are not.

    Returns:
        The function from router confidence to temperature, and predictions of every split, each question tempered by
        its own router confidence.

    Raises:
        CaltuneError: The method has no router confidence.
    """
    stated = {split: found.flc for split, found in predictions.items() if found.flc is not None}
    if len(stated) < len(predictions):
        raise CaltuneError(
            "'flc_temperature' tempers each question by its router confidence, but this method has no router; take it "
            "out of the run file's 'recalibrate'"
        )
    fitted = match_flc(_scores(predictions, reference))
    return fitted, {split: predictions[split].tempered(fitted.of(flc)) for split, flc in stated.items()}


def _scores(predictions: Mapping[str, Predictions], splits: Sequence[str]) -> FloatArray:
    """Option scores of the splits one below the other, [n, K], -inf where an option is absent."""
    matrices = [predictions[split].option_log_probs for split in splits]
    width = max(matrix.shape[1] for matrix in matrices)
    return np.concatenate([np.pad(m, ((0, 0), (0, width - m.shape[1])), constant_values=-np.inf) for m in matrices])
