"""Thresholds for a target risk or coverage: exact tests, the guarantee on known populations, MAPIE's own parts."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mapie.risk_control.fwer_control import control_fwer
from mapie.risk_control.methods import compute_hoeffding_bentkus_p_value

from components.evaluation.ranking import coverage_at_risk
from components.evaluation.selective import (
    achieved,
    answered_at,
    counts_tested,
    naive_threshold,
    p_value,
    threshold_for_coverage,
    threshold_for_risk,
)

Draw = Callable[[np.random.Generator, int], tuple[np.ndarray, np.ndarray]]


def test_counts_are_where_one_error_more_passes() -> None:
    """0.9^22 = 0.098 is the first power of 0.9 below 0.1; the rest by adding up the tail."""

    def tail(errors: int, count: int) -> float:
        return sum(math.comb(count, i) * 0.1**i * 0.9 ** (count - i) for i in range(errors + 1))

    expected = [next(k for k in range(1, 101) if tail(errors, k) <= 0.1) for errors in range(6)]
    assert expected[0] == 22
    assert counts_tested(100, 0.1, 0.1) == [*expected, 100]
    assert counts_tested(300, 0.1, 0.1)[0] == next(k for k in range(60, 301) if tail(3, k) <= 0.1)
    assert counts_tested(21, 0.1, 0.1) == []


@pytest.mark.parametrize(("wrong", "answered", "risk"), [(0, 1, 0.5), (3, 40, 0.2), (7, 8, 0.9)])
def test_the_p_value_is_the_binomial_tail(wrong, answered, risk) -> None:
    terms = [math.comb(answered, i) * risk**i * (1 - risk) ** (answered - i) for i in range(wrong + 1)]
    assert p_value(wrong, answered, risk) == pytest.approx(sum(terms), abs=1e-12)


@pytest.mark.parametrize("seed", range(20))
def test_the_parts_are_those_of_mapie(seed) -> None:
    """Its p-values of binary losses and its fixed-sequence procedure, over the same thresholds, choose the same one."""
    generator = np.random.default_rng(seed)
    confidence = generator.beta(4, 1.5, 150)
    correct = generator.random(150) < confidence
    risk, delta = 0.25, 0.1
    counts = np.array(counts_tested(150, risk, delta))
    wrong = np.cumsum(~correct[np.argsort(-confidence)])[counts - 1]
    rates = wrong / counts * (1 - 1e-12)  # MAPIE multiplies by the count again and rounds up: an ulp would be an error
    p_values = compute_hoeffding_bentkus_p_value(rates, counts.astype(float), risk, binary=True)[:, 0]
    exact = [p_value(int(w), int(k), risk) for w, k in zip(wrong, counts, strict=True)]
    np.testing.assert_allclose(p_values, exact, atol=1e-12)
    passed = control_fwer(p_values, delta, "fixed_sequence")
    answered = answered_at(confidence, threshold_for_risk(confidence, correct, risk, delta)).sum()
    assert answered == (counts[passed[-1]] if len(passed) else 0)


def _calibrated(generator: np.random.Generator, n: int) -> tuple[np.ndarray, np.ndarray]:
    confidence = generator.beta(4, 1.5, n)
    return confidence, generator.random(n) < confidence


def _worst_at_the_top(generator: np.random.Generator, n: int) -> tuple[np.ndarray, np.ndarray]:
    """Right in 60 % of the most confident fifth, in 95 % below that, in 40 % of the lower half."""
    confidence = generator.random(n)
    accuracy = np.select([confidence > 0.8, confidence > 0.5], [0.6, 0.95], 0.4)
    return confidence, generator.random(n) < accuracy


def _nowhere_good_enough(generator: np.random.Generator, n: int) -> tuple[np.ndarray, np.ndarray]:
    """Wrong somewhat more often than the 0.2 allowed, at every confidence: each choice is an error; few are made."""
    return generator.random(n), generator.random(n) > 0.21


def _tied(generator: np.random.Generator, n: int) -> tuple[np.ndarray, np.ndarray]:
    """Seven confidences, as many samples that agree would give; a third of all at the highest."""
    confidence = np.minimum(generator.integers(1, 11, n), 7) / 7
    return confidence, generator.random(n) < 0.25 + 0.65 * confidence


@pytest.mark.parametrize("draw", [_calibrated, _worst_at_the_top, _nowhere_good_enough, _tied])
def test_the_guarantee_holds_on_known_populations(draw: Draw) -> None:
    """300 draws of 150 labelled questions: R(threshold) > 0.2 in at most delta of them, but for chance (3 s.e.)."""
    risk, delta, draws = 0.2, 0.1, 300
    population, right = draw(np.random.default_rng(1), 200_000)
    ascending = np.argsort(population, kind="stable")
    ordered, wrong_from = population[ascending], np.cumsum(~right[ascending][::-1])[::-1]

    def exceeds(threshold: float | None) -> bool:
        at = len(ordered) if threshold is None else int(np.searchsorted(ordered, threshold))
        return at < len(ordered) and wrong_from[at] / (len(ordered) - at) > risk

    generator = np.random.default_rng(2)
    samples = [draw(generator, 150) for _ in range(draws)]
    broken = np.mean([exceeds(threshold_for_risk(*sample, risk, delta)) for sample in samples])
    naive = np.mean([exceeds(naive_threshold(*sample, risk)) for sample in samples])
    assert broken <= delta + 3 * math.sqrt(delta * (1 - delta) / draws)
    assert naive > 2 * delta


def test_the_guarantee_holds_over_random_halves_of_a_finite_set() -> None:
    """200 halves of the same 1,000 answers; a calibration half is hypergeometric, which is on the safe side."""
    generator = np.random.default_rng(0)
    confidence, correct = _calibrated(generator, 1000)
    choosers = {
        "guaranteed": lambda half: threshold_for_risk(confidence[half], correct[half], 0.15, 0.1),
        "naive": lambda half: naive_threshold(confidence[half], correct[half], 0.15),
    }
    exceeded = dict.fromkeys(choosers, 0)
    for _ in range(200):
        half = generator.permutation(1000)[:500]
        for name, choose in choosers.items():
            answered = answered_at(confidence, choose(half))
            exceeded[name] += bool(answered.any()) and 1 - correct[answered].mean() > 0.15
    assert exceeded["guaranteed"] <= 20
    assert exceeded["naive"] > 60


PAIRS = st.lists(st.tuples(st.floats(0, 1), st.booleans()), min_size=1, max_size=120)


@settings(max_examples=60, deadline=None)
@given(pairs=PAIRS, risk=st.sampled_from([0.1, 0.3, 0.6]), delta=st.sampled_from([0.05, 0.1, 0.5]))
def test_what_is_chosen_passes_its_own_test(pairs, risk, delta) -> None:
    confidence, correct = (np.array(column) for column in zip(*pairs, strict=True))
    threshold = threshold_for_risk(confidence, correct, risk, delta)
    found = achieved(confidence, correct, threshold)
    if threshold is None:
        assert found.answered == 0
        return
    assert p_value(found.wrong, found.answered, risk) <= delta
    assert found.risk is not None
    assert found.risk <= risk or delta == 0.5
    # Only the order of confidences matters.
    ranks = np.searchsorted(np.unique(confidence), confidence) / len(confidence)
    again = threshold_for_risk(ranks, correct, risk, delta)
    np.testing.assert_array_equal(answered_at(ranks, again), answered_at(confidence, threshold))


@settings(max_examples=60, deadline=None)
@given(values=st.lists(st.floats(0, 1), min_size=2, max_size=60), coverage=st.floats(0.01, 1.0))
def test_a_coverage_is_kept_to_by_exchangeable_questions(values, coverage) -> None:
    """Each of n + 1 questions in turn is the new one: that is what exchangeability averages over."""
    reached = [
        value >= threshold_for_coverage(values[:i] + values[i + 1 :], coverage) for i, value in enumerate(values)
    ]
    assert np.mean(reached) >= coverage - 1e-9


def test_a_coverage_leaves_out_as_much_as_it_may() -> None:
    """Of 99 distinct confidences, floor(100 * 0.2) = 20 lie at or below the threshold for 0.8, the 20th being it."""
    values = np.arange(1, 100) / 100
    assert threshold_for_coverage(values, 0.8) == 0.2
    assert threshold_for_coverage(values, 1.0) == 0.0
    assert threshold_for_coverage([0.4], 0.8) == 0.0


@settings(max_examples=50, deadline=None)
@given(pairs=PAIRS, risk=st.floats(0.01, 0.99))
def test_the_naive_threshold_answers_the_most_that_looks_good_enough(pairs, risk) -> None:
    confidence, correct = (np.array(column) for column in zip(*pairs, strict=True))
    found = achieved(confidence, correct, naive_threshold(confidence, correct, risk))
    assert found.coverage == pytest.approx(coverage_at_risk(confidence, correct, risk))
    assert found.risk is None or found.risk <= risk


def test_all_answers_equally_certain() -> None:
    """Nothing tells them apart: all or none are answered."""
    ones = np.ones(100)
    assert threshold_for_risk(ones, ones, 0.1, 0.1) == 0.0
    assert threshold_for_risk(ones, np.arange(100) % 2, 0.1, 0.1) is None


def test_achieved_figures() -> None:
    """No error among 10: the upper end solves (1 - p)^10 = 0.025."""
    found = achieved([0.9] * 10 + [0.1] * 10, [1] * 10 + [0] * 10, 0.5)
    assert (found.n, found.answered, found.wrong, found.coverage, found.risk) == (20, 10, 0, 0.5, 0.0)
    assert found.risk_low == 0
    assert found.risk_high == pytest.approx(1 - 0.025**0.1)
    assert achieved([0.5], [1], None).risk is None


@pytest.mark.parametrize(("risk", "delta"), [(0.0, 0.1), (1.0, 0.1), (0.1, 0.0), (float("nan"), 0.1)])
def test_impossible_targets_are_refused(risk, delta) -> None:
    with pytest.raises(ValueError, match="between 0 and 1"):
        threshold_for_risk([0.5], [1], risk, delta)
    with pytest.raises(ValueError, match="coverage is 0"):
        threshold_for_coverage([0.5], 0.0)
