"""Temperature scaling: planted temperatures, an independent optimiser, bounds, refusals."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import minimize_scalar
from scipy.special import log_softmax

from components.posthoc.temperature import MAX_TEMPERATURE, MIN_TEMPERATURE, fit_temperature


def planted(n: int, temperature: float, seed: int = 0, options: int = 4) -> tuple[np.ndarray, np.ndarray]:
    """Scores temperature * z with gold drawn from softmax(z): the right T is `temperature`."""
    generator = np.random.default_rng(seed)
    z = 2.0 * generator.normal(size=(n, options))
    gold = (z + generator.gumbel(size=z.shape)).argmax(axis=1)
    return temperature * z, gold


def nll(scores: np.ndarray, gold: np.ndarray, temperature: float) -> float:
    """Mean NLL of softmax(scores / temperature), by scipy."""
    return float(-log_softmax(scores / temperature, axis=1)[np.arange(len(gold)), gold].mean())


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0, 4.0])
def test_planted_temperature_is_recovered(temperature: float) -> None:
    """With 20 000 questions log T has a standard error of about .01."""
    fitted = fit_temperature(*planted(20_000, temperature))
    assert math.log(fitted.value) == pytest.approx(math.log(temperature), abs=0.04)
    assert fitted.converged
    assert fitted.n == 20_000


@settings(max_examples=25, deadline=None)
@given(n=st.integers(30, 200), temperature=st.floats(0.3, 6), options=st.integers(2, 8), seed=st.integers(0, 2**32 - 1))
def test_optimum_is_scipys(n: int, temperature: float, options: int, seed: int) -> None:
    scores, gold = planted(n, temperature, seed, options)
    fitted = fit_temperature(scores, gold)
    bounds = (math.log(MIN_TEMPERATURE), math.log(MAX_TEMPERATURE))
    reference = minimize_scalar(
        lambda log_t: nll(scores, gold, math.exp(log_t)), bounds=bounds, method="bounded", options={"xatol": 1e-10}
    )
    assert fitted.nll_after == pytest.approx(reference.fun, abs=1e-9)
    # The NLL is flat at its minimum, so a scalar search knows log T to about the root of machine precision.
    if fitted.converged:
        assert math.log(fitted.value) == pytest.approx(reference.x, abs=1e-6)
    assert fitted.nll_after <= fitted.nll_before
    assert fitted.nll_before == pytest.approx(nll(scores, gold, 1.0), abs=1e-12)


def test_absent_options_change_nothing() -> None:
    scores, gold = planted(200, 2.0, options=3)
    padded = np.column_stack([scores, np.full((200, 2), -np.inf)])
    assert fit_temperature(padded, gold).value == pytest.approx(fit_temperature(scores, gold).value, rel=1e-9)


def test_answers_stay() -> None:
    scores, gold = planted(100, 3.0)
    value = fit_temperature(scores, gold).value
    np.testing.assert_array_equal((scores / value).argmax(axis=1), scores.argmax(axis=1))


def test_separable_data_stop_at_the_lower_bound() -> None:
    """Every answer right: the sharper the better, without end."""
    scores = np.array([[1.0, 0.0], [0.0, 2.0], [3.0, 0.0]])
    fitted = fit_temperature(scores, np.array([0, 1, 0]))
    assert fitted.value == MIN_TEMPERATURE
    assert not fitted.converged
    assert fitted.nll_after < fitted.nll_before


def test_always_wrong_stops_at_the_upper_bound() -> None:
    scores = np.array([[1.0, 0.0], [0.0, 2.0], [3.0, 0.0]])
    fitted = fit_temperature(scores, np.array([1, 0, 1]))
    assert fitted.value == MAX_TEMPERATURE
    assert not fitted.converged


def test_scores_that_say_nothing_leave_temperature_at_one() -> None:
    fitted = fit_temperature(np.zeros((5, 3)), np.array([0, 1, 2, 0, 1]))
    assert fitted.value == 1.0
    assert fitted.converged


def test_long_options_do_not_overflow() -> None:
    """Log-probabilities of long texts lie hundreds of nats down and far apart."""
    scores, gold = planted(200, 2.0)
    fitted = fit_temperature(40 * scores - 900.0, gold)
    assert fitted.value == MAX_TEMPERATURE
    assert math.isfinite(fitted.nll_before)


def test_same_data_same_temperature() -> None:
    assert fit_temperature(*planted(100, 2.0)) == fit_temperature(*planted(100, 2.0))


@pytest.mark.parametrize(
    ("scores", "gold", "named"),
    [
        ([[0.0, 1.0]], [0], "at least 2 labelled questions, not 1"),
        ([[0.0, np.nan], [0.0, 1.0]], [0, 0], "question 0: a log-probability is NaN"),
        ([[0.0, 1.0], [-np.inf, -np.inf]], [0, 0], "question 1: all its options are absent"),
        ([[0.0, 1.0], [0.0, -np.inf]], [0, 1], "question 1: gold is an absent option"),
        ([[0.0, 1.0], [0.0, 1.0]], [0, 2], "question 1: gold names no option"),
        ([[0.0, 1.0], [0.0, 1.0]], [0, -1], "question 1: gold names no option"),
        ([[0.0, 1.0], [0.0, 1.0]], [0], "do not fit"),
        ([[0.0, 1.0], [0.0, 1.0]], [0.0, 1.0], "gold must hold integers"),
    ],
)
def test_bad_input_is_named(scores: list[list[float]], gold: list[float], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        fit_temperature(np.array(scores), np.array(gold))
