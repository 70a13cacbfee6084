"""Post-hoc recalibration of a method's predictions: read off validation or calibration splits, applied everywhere."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from components.config import RecalibrationName
from components.errors import CaltuneError
from components.evaluation.checks import FloatArray
from components.evaluation.predictions import Predictions
from components.posthoc.flc_temperature import FlcTemperature, match_flc
from components.posthoc.isotonic import IsotonicFit, fit_isotonic, restated
from components.posthoc.temperature import FittedTemperature, fit_temperature
from components.posthoc.vector_scaling import VectorScaling, fit_vector_scaling

Fitted = FittedTemperature | FlcTemperature | VectorScaling | IsotonicFit
"""What a recalibration fits: plain numbers, kept as JSON."""
FORMS: dict[RecalibrationName, type[Fitted]] = {
    "temperature": FittedTemperature,
    "flc_temperature": FlcTemperature,
    "vector_scaling": VectorScaling,
    "isotonic": IsotonicFit,
}


@dataclass(frozen=True)
class Recalibrated:
    """A method's predictions after recalibration.

    Attributes:
        fitted: What was fitted.
        fitted_on: The splits it was fitted on, pooled.
        predictions: By split.
    """

    fitted: Fitted
    fitted_on: tuple[str, ...]
    predictions: dict[str, Predictions]


def recalibrate(
    kind: RecalibrationName, predictions: Mapping[str, Predictions], fit_on: tuple[str, ...]
) -> Recalibrated:
    """Fits the recalibration of this name on some splits together and applies it to all.

    Args:
        kind: Which one.
        predictions: One method's predictions by split.
        fit_on: Splits, pooled: labelled ones, except for `flc_temperature`, which reads their option scores alone.

    Raises:
        CaltuneError: `flc_temperature` of a method without router confidence.
    """
    if kind == "flc_temperature":
        fitted, result = temper_by_flc(predictions, fit_on)
        return Recalibrated(fitted, fit_on, result)
    gold = np.concatenate([predictions[split].gold for split in fit_on])
    found: Fitted
    if kind == "temperature":
        found = fit_temperature(_scores(predictions, fit_on), gold)
    elif kind == "vector_scaling":
        found = fit_vector_scaling(_scores(predictions, fit_on), gold)
    else:
        confidence = np.concatenate([predictions[split].confidence() for split in fit_on])
        found = fit_isotonic(confidence, np.concatenate([predictions[split].correct for split in fit_on]))
    return Recalibrated(found, fit_on, apply(found, predictions))


def apply(fitted: Fitted, predictions: Mapping[str, Predictions]) -> dict[str, Predictions]:
    """Applies what was fitted, now or earlier, to predictions by split.

    Raises:
        CaltuneError: It speaks of router confidence, which the predictions lack.
    """
    if isinstance(fitted, FittedTemperature):
        return {split: found.tempered(fitted.value) for split, found in predictions.items()}
    if isinstance(fitted, VectorScaling):
        return {split: found.rescored(fitted.of(found.option_log_probs)) for split, found in predictions.items()}
    if isinstance(fitted, IsotonicFit):
        return {
            split: found.rescored(restated(found.log_probabilities, fitted.of(found.confidence())))
            for split, found in predictions.items()
        }
    stated = _stated(predictions)
    return {split: predictions[split].tempered(fitted.of(flc)) for split, flc in stated.items()}


def read_fitted(kind: RecalibrationName, content: Mapping[str, Any]) -> Fitted:
    """What was fitted, from the content of its JSON file, which may hold more.

    Raises:
        CaltuneError: A number is missing.
    """
    form = FORMS[kind]
    try:
        return form(**{field.name: content[field.name] for field in fields(form)})
    except KeyError as missing:
        raise CaltuneError(f"what was kept of '{kind}' lacks {missing}; fit it again") from missing


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
    _stated(predictions)
    fitted = match_flc(_scores(predictions, reference))
    return fitted, apply(fitted, predictions)


def _stated(predictions: Mapping[str, Predictions]) -> dict[str, FloatArray]:
    """Router confidence by split."""
    stated = {split: found.flc for split, found in predictions.items() if found.flc is not None}
    if len(stated) < len(predictions):
        raise CaltuneError(
            "'flc_temperature' tempers each question by its router confidence, but this method has no routers to take "
            "one from"
        )
    return stated


def _scores(predictions: Mapping[str, Predictions], splits: Sequence[str]) -> FloatArray:
    """Option scores of the splits one below the other, [n, K], -inf where an option is absent."""
    matrices = [predictions[split].option_log_probs for split in splits]
    width = max(matrix.shape[1] for matrix in matrices)
    return np.concatenate([np.pad(m, ((0, 0), (0, width - m.shape[1])), constant_values=-np.inf) for m in matrices])
