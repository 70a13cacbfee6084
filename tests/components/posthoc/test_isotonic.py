"""Isotonic regression: scikit-learn's function, answers that stay, and a distribution around the new confidence."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.special import log_softmax
from sklearn.isotonic import IsotonicRegression

from components.posthoc.isotonic import MARGIN, IsotonicFit, fit_isotonic, restated


def test_the_function_is_scikit_learns() -> None:
    generator = np.random.default_rng(0)
    confidence = generator.uniform(0.3, 0.9, 200)
    correct = generator.random(200) < confidence**2
    reference = IsotonicRegression(out_of_bounds="clip").fit(confidence, correct)
    asked = np.linspace(0, 1, 501)
    np.testing.assert_allclose(fit_isotonic(confidence, correct).of(asked), reference.predict(asked), atol=1e-12)


def test_violators_are_pooled() -> None:
    """Outcomes 0, 1, 0, 1 by rising confidence: the middle two share 1/2."""
    fitted = fit_isotonic([0.2, 0.4, 0.6, 0.8], [False, True, False, True])
    np.testing.assert_allclose(fitted.of([0.2, 0.4, 0.5, 0.6, 0.8]), [0, 0.5, 0.5, 0.5, 1])
    np.testing.assert_allclose(fitted.of([0.0, 1.0]), [0, 1])
    assert fitted.n == 4


def test_the_rest_keeps_its_proportions_where_it_can() -> None:
    """(.6, .3, .1) at .8: the other two share .2 as 3 to 1. At .4 that would give .45 to the second: it gets .4."""
    z = np.log(np.array([[0.6, 0.3, 0.1], [0.6, 0.3, 0.1]]))
    found = np.exp(restated(z, np.array([0.8, 0.4])))
    np.testing.assert_allclose(found, [[0.8, 0.15, 0.05], [0.4, 0.4, 0.2]], atol=2 * MARGIN)
    assert found[1, 0] > found[1, 1]


@settings(max_examples=100, deadline=None)
@given(
    n=st.integers(1, 20),
    options=st.integers(1, 6),
    spread=st.sampled_from([0.0, 1e-9, 1.0, 30.0, 900.0]),
    seed=st.integers(0, 2**32 - 1),
)
def test_answers_stay_and_rows_stay_distributions(n, options, spread, seed) -> None:
    """Whatever is asked for: ties, one option, certainty, the impossible. Confidence is as asked, within bounds."""
    generator = np.random.default_rng(seed)
    absent = np.arange(options) > generator.integers(0, options, size=n)[:, None]
    z = log_softmax(np.where(absent, -np.inf, spread * generator.normal(size=(n, options))), axis=1)
    wanted = generator.choice([0.0, 0.1, 0.5, 0.9, 1.0, generator.random()], n)
    found = restated(z, wanted)
    np.testing.assert_array_equal(found.argmax(axis=1), z.argmax(axis=1))
    np.testing.assert_array_equal(np.isneginf(found), absent)
    np.testing.assert_allclose(np.exp(found).sum(axis=1), 1.0, atol=1e-12)
    present = (~absent).sum(axis=1)
    expected = np.where(present > 1, np.clip(wanted, 1 / present, 1), 1.0)
    np.testing.assert_allclose(np.exp(found.max(axis=1)), expected, atol=2 * MARGIN)


def test_other_options_keep_their_order() -> None:
    z = log_softmax(np.random.default_rng(2).normal(size=(50, 5)), axis=1)
    found = restated(z, np.random.default_rng(3).random(50))
    others = np.argsort(z, axis=1)[:, :-1]
    assert (np.diff(np.take_along_axis(found, others, axis=1), axis=1) >= -1e-12).all()


def test_what_cannot_be_fitted_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 2"):
        fit_isotonic([0.5], [True])
    with pytest.raises(ValueError, match="from 0 to 1"):
        fit_isotonic([0.5, np.nan], [True, False])
    with pytest.raises(ValueError, match="from 0 to 1"):
        IsotonicFit([0.0, 1.0], [0.0, 1.0], 2).of([1.5])
