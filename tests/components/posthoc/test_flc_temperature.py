"""Temperatures from router confidence: the level is met, the order of options stays, labels are never read."""

from __future__ import annotations

import json
import math
from dataclasses import asdict

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from components.posthoc.flc_temperature import FlcTemperature, match_flc
from components.posthoc.temperature import MAX_TEMPERATURE, MIN_TEMPERATURE


def confidence(scores, temperature):
    z = scores / np.asarray(temperature)[..., None]
    p = np.exp(z - z.max(axis=1, keepdims=True))
    return (p / p.sum(axis=1, keepdims=True)).max(axis=1)


def test_hand_worked_two_options():
    """One question, scores 0 and -2: confidence 1 / (1 + e^(-2/T)) = 3/4 at e^(-2/T) = 1/3, T = 2 / ln 3 = 1.8205."""
    found = match_flc([[0.0, -2.0]]).of([0.75])
    assert found[0] == pytest.approx(2 / math.log(3), rel=2e-3)


@settings(deadline=None)
@given(st.integers(0, 10**6), st.floats(0.35, 0.97))
@example(7468, 0.97)
def test_reference_questions_state_their_flc_on_average(seed, flc):
    """Or the most that the lowest temperature makes them state, where two options of one are nearly level."""
    rng = np.random.default_rng(seed)
    scores = rng.normal(scale=3.0, size=(50, 4))
    scores[rng.random(50) < 0.3, 3] = -np.inf
    temperature = match_flc(scores).of([flc])
    most = confidence(scores, np.full(50, MIN_TEMPERATURE)).mean()
    assert confidence(scores, np.repeat(temperature, 50)).mean() == pytest.approx(min(flc, most), abs=2e-3)


def test_surer_routers_never_flatten():
    scores = np.random.default_rng(0).normal(size=(30, 4))
    temperatures = match_flc(scores).of(np.linspace(0, 1, 101))
    assert (np.diff(temperatures) <= 0).all()
    assert temperatures.max() == pytest.approx(MAX_TEMPERATURE)
    assert temperatures.min() == pytest.approx(MIN_TEMPERATURE)


def test_a_question_between_domains_gets_a_temperature_of_its_own():
    scores = np.random.default_rng(1).normal(scale=3, size=(200, 4))
    low, high = match_flc(scores).of([0.5, 0.9])
    assert low > 2 * high


def test_it_is_plain_data():
    found = match_flc(np.random.default_rng(2).normal(size=(9, 4)))
    again = FlcTemperature(**json.loads(json.dumps(asdict(found))))
    assert again == found
    assert again.n == 9
    np.testing.assert_array_equal(again.of([0.3, 0.6]), found.of([0.3, 0.6]))


@pytest.mark.parametrize("scores", [[], np.zeros((0, 4)), [[np.nan, 0.0]], [[-np.inf, -np.inf]], [0.0, 1.0]])
def test_bad_scores_are_refused(scores):
    with pytest.raises(ValueError, match="option_log_probs"):
        match_flc(scores)


@pytest.mark.parametrize("flc", [[1.1], [-0.1], [float("nan")]])
def test_flc_out_of_range_is_refused(flc):
    with pytest.raises(ValueError, match="flc"):
        match_flc([[0.0, -1.0]]).of(flc)
