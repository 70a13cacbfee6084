"""Sem1, Sem2, semantic entropy and Sem-ECE against figures worked out by hand."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from scipy.stats import entropy

from components.evaluation.calibration_error import expected_calibration_error
from components.evaluation.semantic.confidence import (
    exponential_certainty,
    likelihood_entropy,
    miller_madow_entropy,
    modal_class,
    relative_certainty,
    sem1,
    sem2,
    semantic_calibration_error,
    semantic_entropy,
)

FEW = settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.too_slow])

SCORES = (sem1, sem2, semantic_entropy, miller_madow_entropy, relative_certainty)


def numbered(values: list[int]) -> list[int]:
    """Without gaps."""
    known = sorted(set(values))
    return [known.index(value) for value in values]


SAMPLES = st.lists(st.integers(0, 4), min_size=2, max_size=12).map(numbered)


def test_known_values() -> None:
    """[0, 0, 1, 2]: shares 1/2, 1/4, 1/4; SE = ln 2 / 2 + 2 ln 4 / 4 = 1.5 ln 2; Miller-Madow adds 2 / 8."""
    classes = [0, 0, 1, 2]
    assert sem1(classes) == 0.5
    assert semantic_entropy(classes) == pytest.approx(1.5 * math.log(2))
    assert miller_madow_entropy(classes) == pytest.approx(1.5 * math.log(2) + 0.25)
    assert exponential_certainty(semantic_entropy(classes)) == pytest.approx(2**-1.5)
    assert relative_certainty(classes) == pytest.approx(1 - 1.5 * math.log(2) / math.log(3))


def test_one_class_and_all_different() -> None:
    """All different: whatever one half shows is not in the other, so Sem2 is 0 where Sem1 says 1 / n."""
    assert (sem1([0] * 6), sem2([0] * 6), semantic_entropy([0] * 6), relative_certainty([0] * 6)) == (1, 1, 0, 1)
    assert sem1(range(6)) == pytest.approx(1 / 6)
    assert sem2(range(6)) == 0
    assert semantic_entropy(range(6)) == pytest.approx(math.log(6))
    assert relative_certainty(range(6)) == pytest.approx(0)


def test_sem2_is_unbiased_for_two_even_classes() -> None:
    """Of 50 + 50 samples a half is about even, and the mode of one half has a little under half of the other."""
    assert sem1([0] * 50 + [1] * 50) == 0.5
    assert 0.38 < sem2([0] * 50 + [1] * 50) < 0.5


def test_sem2_measures_on_the_other_half() -> None:
    """[0, 0, 0, 1]: halves {0,0|0,1} or {0,1|0,0}: mode 0 (a tie goes to the lowest) and its share 1/2 or 1.

    Each half of two holds the 1 with probability 1/2, so every one of the ten values is 1/2 or 1.
    """
    value = sem2([0, 0, 0, 1]) * 10
    assert value == pytest.approx(round(value * 2) / 2)
    assert 5 <= value <= 10
    assert sem2([0, 0]) == 1.0
    assert sem2([0, 1]) == 0.0


def test_ties_go_to_the_lowest_class() -> None:
    assert modal_class([2, 2, 1, 1, 0]) == 1


def test_rao_entropy() -> None:
    """Likelihoods 1/2, 1/4, 1/4 of classes 0, 1, 1: two halves, ln 2. Equal likelihoods give the discrete entropy."""
    assert likelihood_entropy([0, 1, 1], np.log([0.5, 0.25, 0.25])) == pytest.approx(math.log(2))
    assert likelihood_entropy([0, 1, 1], np.log([0.2, 0.1, 0.1])) == pytest.approx(math.log(2))
    assert likelihood_entropy([0, 0, 1, 2], [-3.0] * 4) == pytest.approx(semantic_entropy([0, 0, 1, 2]))


def test_sem_ece_of_synthetic_samples() -> None:
    """Three questions with Sem1 1.0 (right), 0.5 (wrong) and 0.5 (right): bins hold |1 - 1| / 3 and
    2/3 * |0.5 - 0.5|, so 0. With the two of 0.5 wrong: 2/3 * 0.5 = 1/3."""
    classes = [[0, 0, 0, 0], [0, 0, 1, 2], [0, 1, 1, 0]]
    assert semantic_calibration_error(classes, [1, 0, 1]) == pytest.approx(0)
    assert semantic_calibration_error(classes, [1, 0, 0]) == pytest.approx(1 / 3)


def test_sem_ece_of_a_calibrated_sampler_tends_to_zero() -> None:
    """Right with the probability of the answers' class: Sem1 of many samples is calibrated; always right is not."""
    generator = np.random.default_rng(1)
    p = generator.uniform(0.55, 1, 4000)
    draws = (generator.random((4000, 200)) >= p[:, None]).astype(int)
    right = generator.random(4000) < p
    classes = [numbered(row.tolist()) for row in draws]
    assert semantic_calibration_error(classes, right) < 0.03
    assert semantic_calibration_error(classes, np.ones(4000)) > 0.15


@FEW
@given(st.lists(SAMPLES, min_size=1, max_size=6), st.randoms())
def test_sem_ece_is_the_ece_of_each_estimator(samples: list[list[int]], chooser: random.Random) -> None:
    correct = [chooser.random() < 0.5 for _ in samples]
    for name, estimate in (("sem1", sem1), ("sem2", sem2)):
        plain = expected_calibration_error([estimate(s) for s in samples], correct, 10)
        assert semantic_calibration_error(samples, correct, estimator=name) == plain


@FEW
@given(SAMPLES, st.randoms())
def test_order_has_no_say(classes: list[int], shuffler: random.Random) -> None:
    shuffled = classes.copy()
    shuffler.shuffle(shuffled)
    assert [score(shuffled) for score in SCORES] == [score(classes) for score in SCORES]


@FEW
@given(SAMPLES)
def test_against_scipy_and_in_range(classes: list[int]) -> None:
    shares = np.bincount(classes) / len(classes)
    assert semantic_entropy(classes) == pytest.approx(entropy(shares))
    assert 0 <= sem2(classes) <= 1
    assert 1 / len(classes) <= sem1(classes) <= 1
    assert 0 <= relative_certainty(classes) <= 1


@pytest.mark.parametrize("wrong", [[], [0, 2], [-1, 0], [0.5, 1.0], [[0, 1]]])
def test_what_are_no_classes(wrong: list) -> None:
    with pytest.raises(ValueError, match="classes"):
        sem1(wrong)


def test_too_few_samples_for_halves() -> None:
    with pytest.raises(ValueError, match="two samples"):
        sem2([0])
