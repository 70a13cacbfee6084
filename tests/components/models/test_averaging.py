"""Means of several scorings, by hand and for any numbers."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from components.models.averaging import mean_of_logits, mean_of_probabilities
from components.models.score_questions import SplitScores

SCORES = arrays(np.float64, (3, 4, 3), elements=st.floats(-300, 0))


def scores(log_probs, mass=None, flc=None) -> SplitScores:
    matrix = np.array(log_probs, dtype=np.float64)
    total = np.exp(matrix).sum(axis=1) if mass is None else np.array(mass)
    return SplitScores(matrix, total, np.zeros(len(matrix), np.int64), flc)


def softmax(matrix):
    shifted = np.exp(matrix - matrix.max(axis=-1, keepdims=True))
    return shifted / shifted.sum(axis=-1, keepdims=True)


def test_two_members_by_hand():
    """Options hold .6 : .2 in one member and .1 : .1 in the other, so .75 / .25 and .5 / .5.

    Mean of probabilities .625 / .375. Mean of logits: odds sqrt(3 * 1), so sqrt 3 / (1 + sqrt 3) = .6339746. Together
    they hold .8 and .2, on average .5.
    """
    samples = [scores(np.log([[0.6, 0.2]])), scores(np.log([[0.1, 0.1]]))]
    by_probability, by_logit = mean_of_probabilities(samples), mean_of_logits(samples)
    np.testing.assert_allclose(softmax(by_probability.log_probs), [[0.625, 0.375]], atol=1e-12)
    np.testing.assert_allclose(softmax(by_logit.log_probs), [[0.6339746, 0.3660254]], atol=1e-7)
    for found in (by_probability, by_logit):
        np.testing.assert_allclose(found.mass, [0.5], atol=1e-12)
        np.testing.assert_allclose(np.exp(found.log_probs).sum(axis=1), [0.5], atol=1e-12)


@settings(max_examples=40, deadline=None)
@given(SCORES)
def test_it_is_the_mean_whatever_the_numbers(stack):
    samples = [scores(matrix) for matrix in stack]
    found = softmax(mean_of_probabilities(samples).log_probs)
    np.testing.assert_allclose(found, softmax(stack).mean(axis=0), atol=1e-12)
    np.testing.assert_allclose(softmax(mean_of_logits(samples).log_probs), softmax(stack.mean(axis=0)), atol=1e-12)
    turned = mean_of_probabilities(samples[::-1])
    np.testing.assert_allclose(turned.log_probs, mean_of_probabilities(samples).log_probs, atol=1e-9)


@settings(max_examples=40, deadline=None)
@given(SCORES, arrays(np.float64, (3, 4, 1), elements=st.floats(-50, 50)))
def test_constants_of_a_question_do_not_matter(stack, constants):
    """Each sample renormalises over the options first: one that finds all of them unlikely counts as much."""
    plain, shifted = ([scores(matrix, mass=np.ones(4)) for matrix in of] for of in (stack, stack + constants))
    for combine in (mean_of_probabilities, mean_of_logits):
        np.testing.assert_allclose(softmax(combine(plain).log_probs), softmax(combine(shifted).log_probs), atol=1e-9)


@pytest.mark.parametrize("combine", [mean_of_probabilities, mean_of_logits])
def test_absent_options_stay_absent_and_tiny_ones_keep_their_order(combine):
    """Log-probabilities of -900 and -1000 are 0 as numbers."""
    found = combine([scores([[-1.0, -900.0, -1000.0], [-2.0, -3.0, -np.inf]])] * 2)
    assert np.isneginf(found.log_probs[1, 2])
    assert np.isfinite(found.log_probs[0]).all()
    np.testing.assert_allclose(np.diff(found.log_probs[0]), [-899.0, -100.0], atol=1e-9)


def test_one_sample_comes_back_as_it_is():
    only = scores([[-1.0, -2.0]])
    assert mean_of_probabilities([only]) is only
    assert mean_of_logits([only]) is only


def test_router_confidence_is_averaged_where_all_have_it():
    with_flc = [scores([[-1.0, -2.0]], flc=np.array([value])) for value in (0.2, 0.6)]
    np.testing.assert_allclose(mean_of_probabilities(with_flc).flc, [0.4])
    assert mean_of_probabilities([with_flc[0], scores([[-1.0, -2.0]])]).flc is None


def test_samples_of_other_questions_are_refused():
    with pytest.raises(ValueError, match="not of the same questions"):
        mean_of_probabilities([scores([[-1.0, -2.0]]), scores([[-1.0, -2.0, -3.0]])])
    with pytest.raises(ValueError, match="no sample"):
        mean_of_logits([])
