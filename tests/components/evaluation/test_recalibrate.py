"""Recalibration of predictions: what is fitted where, what stays."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from components.errors import CaltuneError
from components.evaluation.predictions import Predictions
from components.evaluation.recalibrate import recalibrate, temper_by_flc
from components.posthoc.flc_temperature import FlcTemperature, match_flc
from components.posthoc.temperature import FittedTemperature

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
    assert isinstance(by_flc.fitted, FlcTemperature)
    assert (tempered.fitted_on, by_flc.fitted_on) == (("validation",), ("calibration",))
    assert tempered.predictions.keys() == by_flc.predictions.keys() == routed.keys()
