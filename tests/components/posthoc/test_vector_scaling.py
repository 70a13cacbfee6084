"""Vector scaling: planted scales and offsets, the temperature as a special case, what keeps the fit well posed."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import minimize
from scipy.special import log_softmax

from components.posthoc.temperature import fit_temperature
from components.posthoc.vector_scaling import VectorScaling, fit_vector_scaling


def planted(
    n: int, scales: np.ndarray, offsets: np.ndarray, seed: int = 0, most_absent: int = 0
) -> tuple[np.ndarray, np.ndarray]:
    """Normalised scores z, and gold drawn from softmax(scales * z + offsets); up to `most_absent` last options away."""
    generator = np.random.default_rng(seed)
    z = 2.0 * generator.normal(size=(n, len(scales)))
    absent = np.arange(len(scales)) >= len(scales) - generator.integers(0, most_absent + 1, size=n)[:, None]
    z = log_softmax(np.where(absent, -np.inf, z), axis=1)
    with np.errstate(invalid="ignore"):
        true = np.where(absent, -np.inf, scales * z + offsets)
    return z, (true + generator.gumbel(size=z.shape)).argmax(axis=1)


def mean_nll(scores: np.ndarray, gold: np.ndarray) -> float:
    return float(-log_softmax(scores, axis=1)[np.arange(len(gold)), gold].mean())


def test_planted_scales_and_offsets_are_recovered() -> None:
    """With 20 000 questions the standard errors are about .02; an offset common to all has no effect and comes out 0.

    Every fourth question or so lacks its last option, of which the others' numbers must not take notice.
    """
    scales, offsets = np.array([0.3, 0.5, 0.8, 0.4]), np.array([0.8, -0.2, 0.1, -0.7])
    fitted = fit_vector_scaling(*planted(20_000, scales, offsets, most_absent=1))
    assert fitted.converged
    np.testing.assert_allclose(fitted.scales, scales, rtol=0.08)
    found = np.asarray(fitted.offsets) - np.mean(fitted.offsets)
    np.testing.assert_allclose(found, offsets - offsets.mean(), atol=0.08)


def test_the_optimum_is_that_of_another_optimiser() -> None:
    """scipy's BFGS with numerical gradients on the same penalised objective."""
    z, gold = planted(150, np.array([0.4, 0.7, 0.5]), np.array([0.5, 0.0, -0.5]), seed=3)
    temperature = fit_temperature(z, gold).value

    def objective(x: np.ndarray) -> float:
        return mean_nll(np.exp(x[:3]) * z / temperature + x[3:], gold) + float(x @ x) / (2 * len(gold))

    best = minimize(objective, np.zeros(6), method="BFGS", options={"gtol": 1e-8})
    fitted = fit_vector_scaling(z, gold)
    np.testing.assert_allclose(fitted.scales, np.exp(best.x[:3]) / temperature, atol=1e-4)
    np.testing.assert_allclose(fitted.offsets, best.x[3:], atol=1e-4)


@settings(max_examples=25, deadline=None)
@given(
    n=st.integers(2, 60),
    options=st.integers(1, 6),
    absent=st.integers(0, 4),
    seed=st.integers(0, 2**32 - 1),
    shift=st.floats(-20, 20),
)
def test_the_fit_never_raises_the_nll_it_was_fitted_on(n, options, absent, seed, shift) -> None:
    """Nor depends on a constant added to a question's scores, nor leaves an absent option present."""
    z, gold = planted(n, np.ones(options), np.zeros(options), seed, most_absent=min(absent, options - 1))
    fitted = fit_vector_scaling(z + shift, gold)
    assert fitted.nll_after <= fitted.nll_tempered + 1e-12
    assert fitted.nll_tempered <= fitted.nll_before + 1e-12
    assert min(fitted.scales) > 0
    after = fitted.of(z)
    np.testing.assert_array_equal(np.isneginf(after), np.isneginf(z))
    assert mean_nll(after, gold) == pytest.approx(fitted.nll_after, abs=1e-9)
    np.testing.assert_allclose(fitted.of(z + shift), after, atol=1e-9)


def test_a_position_that_few_questions_have_stays_near_the_temperature() -> None:
    """One question of 300 has a fifth option: its prior outweighs it."""
    z, gold = planted(300, np.full(5, 0.5), np.zeros(5), seed=1)
    z[1:, 4] = -np.inf
    gold = np.where((gold == 4) & (np.arange(300) > 0), 0, gold)
    fitted = fit_vector_scaling(z, gold)
    assert fitted.scales[4] * fitted.temperature == pytest.approx(1.0, abs=0.5)
    assert abs(fitted.offsets[4]) < 1.0


def test_separated_answers_have_an_end() -> None:
    """Every answer is right by a wide margin, so the NLL falls for ever: the penalty stops what would not."""
    fitted = fit_vector_scaling(np.log(np.array([[0.9, 0.1], [0.2, 0.8]])), np.array([0, 1]))
    assert np.isfinite([*fitted.scales, *fitted.offsets]).all()
    assert fitted.nll_after < 0.01


def test_more_or_fewer_options_than_fitted() -> None:
    fitted = VectorScaling([0.5, 2.0], [1.0, -1.0], 4.0, 1.0, 1.0, 1.0, 10, 3, True)
    z = np.log(np.array([[0.5, 0.25, 0.25]]))
    np.testing.assert_allclose(fitted.of(z), [[0.5 * z[0, 0] + 1, 2 * z[0, 1] - 1, z[0, 2] / 4]])
    np.testing.assert_allclose(fitted.of(np.log([[1.0]])), [[1.0]])


def test_bad_questions_are_refused() -> None:
    with pytest.raises(ValueError, match="gold is an absent option"):
        fit_vector_scaling(np.array([[0.0, -np.inf], [0.0, 0.0]]), np.array([1, 0]))
