"""Which rows are compared, and which recalibrations a run asks for."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from components.config import HEAD_METHODS, ROUTED_METHODS
from components.training.methods import METHODS
from pipelines.calibrate import Calibration
from pipelines.run import pairs_worth_comparing

NAMES = ["base", "sft", "sft+temperature", "calm", "uq4ct", "uq4ct+temperature", "uq4ct+flc_temperature"]


def test_pairs_of_a_run_with_routers():
    assert pairs_worth_comparing(NAMES, {"uq4ct": "flc"}) == [
        *[("calm", other) for other in ("base", "sft", "sft+temperature")],
        *[("uq4ct", other) for other in ("base", "sft", "sft+temperature")],
        ("uq4ct+temperature", "sft+temperature"),
        *[("uq4ct+flc_temperature", other) for other in ("sft", "uq4ct", "sft+temperature")],
        *[("uq4ct (flc)", other) for other in ("sft", "uq4ct")],
        ("sft", "base"),
    ]


def test_the_softmax_needs_no_row_of_its_own():
    pairs = pairs_worth_comparing(["sft", "uq4ct"], {"uq4ct": "softmax"})
    assert pairs == [("uq4ct", "sft")]


def test_the_composition_is_compared_with_its_parts():
    pairs = pairs_worth_comparing(["calm", "uq4ct", "calm_uq4ct"], {"uq4ct": "flc", "calm_uq4ct": "flc"})
    assert pairs == [
        ("calm_uq4ct", "calm"),
        ("calm_uq4ct", "uq4ct"),
        ("uq4ct (flc)", "uq4ct"),
        ("calm_uq4ct (flc)", "calm_uq4ct"),
    ]


def test_baselines_are_compared_with_the_plain_methods_and_calm_with_its_ablations():
    names = ["base", "sft", "calm", "cft", "iterate", "learned_ts", "iterate+temperature"]
    assert pairs_worth_comparing(names) == [
        *[(ours, other) for ours in ("calm", "cft", "iterate", "learned_ts") for other in ("base", "sft")],
        ("calm", "iterate"),
        ("calm", "learned_ts"),
        ("sft", "base"),
    ]


def test_laplace_is_compared_with_plain_fine_tuning_and_the_model_as_it_is():
    pairs = pairs_worth_comparing(["base", "sft", "sft+isotonic", "laplace", "laplace+isotonic"])
    assert pairs == [
        *[("laplace", other) for other in ("base", "sft", "sft+isotonic")],
        ("laplace+isotonic", "sft+isotonic"),
        ("sft", "base"),
    ]


def test_methods_that_average_are_compared_with_what_they_would_replace():
    names = ["base", "sft", "sft+temperature", "mc_dropout", "ensemble", "ensemble+temperature", "blob"]
    plain = ("base", "sft", "sft+temperature")
    assert pairs_worth_comparing(names) == [
        *[(method, other) for method in ("mc_dropout", "ensemble", "blob") for other in plain],
        ("ensemble+temperature", "sft+temperature"),
        ("sft", "base"),
    ]


def test_more_freedom_is_compared_with_the_temperature_fitted_on_the_same_data():
    names = ["sft"] + [f"sft+{kind}{on}" for kind in ("temperature", "vector_scaling") for on in ("", "@both")]
    assert pairs_worth_comparing(names) == [
        ("sft+vector_scaling", "sft+temperature"),
        ("sft+vector_scaling@both", "sft+temperature@both"),
    ]


def test_one_method_has_no_pairs():
    assert pairs_worth_comparing(["base"]) == []


@pytest.mark.parametrize(
    ("methods", "stop", "more"),
    [
        (["uq4ct"], {"split": "both"}, {}),
        (["uq4ct", "calm"], {"split": "validation"}, {}),
        (["uq4ct", "calm"], {"split": "both", "rule": "budget"}, {}),
        (["uq4ct", "calm"], {"split": "both"}, {"@both": ("validation", "validation_shift")}),
        (["uq4ct", "calm_uq4ct"], {"split": "validation_shift"}, {"@validation_shift": ("validation_shift",)}),
        (["uq4ct", "iterate"], {"split": "validation_shift"}, {"@validation_shift": ("validation_shift",)}),
    ],
)
def test_temperatures_are_fitted_on_what_the_stop_rule_reads_too(small_run, methods, stop, more):
    config = small_run(Path("out"), methods=methods, recalibrate={"uq4ct": ["temperature"]}, calm={"stop": stop})
    stages = Calibration(config, None, Path(), None, None)
    assert stages.recalibrations("uq4ct", data_of(calibration=5)) == {
        f"uq4ct+temperature{suffix}": ("temperature", splits)
        for suffix, splits in {"": ("validation",), **more}.items()
    }


def data_of(**sizes):
    """Prepared data with so many questions a split; what they ask plays no part here."""
    names = {"train": 3, **sizes, "validation": 2, "validation_shift": 2, "id": 4, "ood": 4}
    return SimpleNamespace(splits={name: range(n) for name, n in names.items()})


@pytest.mark.parametrize(
    ("data", "reference"),
    [
        (data_of(calibration=5), ("calibration", "validation", "validation_shift")),
        (data_of(calibration=0), ("validation", "validation_shift")),
        (data_of(), ("validation", "validation_shift")),
    ],
)
def test_temperatures_from_routers_come_from_all_inputs_outside_training_and_test(small_run, data, reference):
    """One name, whatever a stop rule reads; and `calibration` is scored for it and for no other method."""
    kinds = ["temperature", "flc_temperature"]
    config = small_run(Path("out"), methods=["sft", "uq4ct", "calm"], recalibrate={"sft": kinds[:1], "uq4ct": kinds})
    stages = Calibration(config, None, Path(), None, None)
    found = stages.recalibrations("uq4ct", data)
    assert list(found) == ["uq4ct+temperature", "uq4ct+temperature@both", "uq4ct+flc_temperature"]
    assert found["uq4ct+flc_temperature"] == ("flc_temperature", reference)
    usual = ["validation", "validation_shift", "id", "ood"]
    assert stages.evaluated_splits("sft", data) == stages.evaluated_splits("calm", data) == usual
    more = ["calibration"] if "calibration" in reference else []
    assert stages.evaluated_splits("uq4ct", data) == [*more, *usual]


def test_routed_methods_are_those_that_train_experts():
    assert {name for name, method in METHODS.items() if method.adapter == "mixlora"} == set(ROUTED_METHODS)


def test_head_methods_are_those_that_train_one():
    assert {name for name, method in METHODS.items() if method.trains_head} == set(HEAD_METHODS)
