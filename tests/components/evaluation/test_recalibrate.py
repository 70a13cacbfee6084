"""Recalibration of predictions: what is fitted where, what stays."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from components.errors import CaltuneError
from components.evaluation.predictions import Predictions
from components.evaluation.recalibrate import apply, read_fitted, recalibrate, temper_by_flc
from components.posthoc.flc_temperature import FlcTemperature, match_flc
from components.posthoc.isotonic import IsotonicFit
from components.posthoc.temperature import FittedTemperature
from components.posthoc.vector_scaling import VectorScaling

Simulate = Callable[..., Predictions]


@pytest.fixture
def routed(simulate: Simulate) -> dict[str, Predictions]:
    """Over-confident softmax, and a router confidence of noise, by split."""
    return {
        split: simulate(120, sharpening=3.0, seed=seed, flc=np.random.default_rng(seed).uniform(0.3, 0.9, 120))
        for seed, split in enumerate(("calibration", "validation", "id"))
    }


def test_temperatures_are_read_off_the_reference_and_applied_by_each_splits_own_flc(
    routed: dict[str, Predictions],
) -> None:
    fitted, found = temper_by_flc(routed, ["calibration", "validation"])
    pooled = np.concatenate([routed[split].option_log_probs for split in ("calibration", "validation")])
    assert fitted == match_flc(pooled)
    assert fitted.n == 240
    for split, before in routed.items():
        after = found[split]
        assert after.sources == ("softmax",)
        np.testing.assert_array_equal(after.answer, before.answer)
        expected = before.option_log_probs / fitted.of(before.confidence("flc"))[:, None]
        np.testing.assert_allclose(after.option_log_probs, expected, rtol=1e-15)


def test_questions_with_more_options_may_join(routed: dict[str, Predictions], simulate: Simulate) -> None:
    fitted, _ = temper_by_flc(routed | {"five": simulate(30, options=5, flc=0.5)}, ["calibration", "five"])
    assert fitted.n == 150


def test_no_label_is_read(routed: dict[str, Predictions]) -> None:
    """With every label changed the temperatures stay to the last bit."""
    relabelled = {split: replace(found, gold=(found.gold + 1) % 4) for split, found in routed.items()}
    assert temper_by_flc(relabelled, ["calibration"])[0] == temper_by_flc(routed, ["calibration"])[0]


def test_temperatures_from_flc_need_routers(routed: dict[str, Predictions], simulate: Simulate) -> None:
    with pytest.raises(CaltuneError, match="no router"):
        temper_by_flc(routed | {"validation": simulate(20)}, ["calibration"])


def test_each_kind_fits_its_own(routed: dict[str, Predictions]) -> None:
    tempered = recalibrate("temperature", routed, ("validation",))
    by_flc = recalibrate("flc_temperature", routed, ("calibration",))
    assert isinstance(tempered.fitted, FittedTemperature)
    assert isinstance(recalibrate("vector_scaling", routed, ("validation",)).fitted, VectorScaling)
    assert isinstance(by_flc.fitted, FlcTemperature)
    assert (tempered.fitted_on, by_flc.fitted_on) == (("validation",), ("calibration",))
    assert tempered.predictions.keys() == by_flc.predictions.keys() == routed.keys()


def test_isotonic_states_what_the_step_function_says_and_keeps_the_answers(simulate: Simulate) -> None:
    """Fitted on an over-confident model: confidence comes down to accuracy on the data fitted."""
    found = {split: simulate(400, sharpening=3.0, seed=seed) for seed, split in enumerate(("validation", "id"))}
    result = recalibrate("isotonic", found, ("validation",))
    assert isinstance(result.fitted, IsotonicFit)
    for split, before in found.items():
        after = result.predictions[split]
        np.testing.assert_array_equal(after.answer, before.answer)
        expected = np.clip(result.fitted.of(before.confidence()), 0.25, 1.0)
        np.testing.assert_allclose(after.confidence(), expected, atol=2e-6)
    fitted_on = result.predictions["validation"]
    assert fitted_on.confidence().mean() == pytest.approx(fitted_on.correct.mean(), abs=0.02)


@pytest.mark.parametrize("kind", ["temperature", "vector_scaling", "isotonic", "flc_temperature"])
def test_what_was_fitted_is_the_same_from_its_file(routed: dict[str, Predictions], kind: str) -> None:
    result = recalibrate(kind, routed, ("validation",))
    kept = json.loads(json.dumps({**vars(result.fitted), "fitted_on": ["validation"]}))
    again = apply(read_fitted(kind, kept), routed)
    for split, expected in result.predictions.items():
        np.testing.assert_array_equal(again[split].option_log_probs, expected.option_log_probs)
