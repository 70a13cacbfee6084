"""Ranking metrics against scikit-learn, by hand, and against their definitions."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sklearn.metrics import roc_auc_score

from components.evaluation.ranking import (
    aurc,
    aurc_draws,
    auroc,
    auroc_draws,
    coverage_at_risk,
    risk_at_coverage,
    risk_coverage_curve,
)

# Few distinct confidences, so that ties are the rule.
TIED_PAIRS = st.lists(st.tuples(st.integers(0, 8).map(lambda k: k / 8), st.booleans()), min_size=1, max_size=60)


@given(pairs=TIED_PAIRS)
def test_auroc_agrees_with_scikit_learn(pairs: list[tuple[float, bool]]) -> None:
    confidence, correct = (np.array(column) for column in zip(*pairs, strict=True))
    if correct.all() or not correct.any():
        assert math.isnan(auroc(confidence, correct))
    else:
        assert auroc(confidence, correct) == pytest.approx(roc_auc_score(correct, confidence), abs=1e-12)


def test_auroc_of_a_constant_is_a_half() -> None:
    assert auroc([0.7] * 4, [1, 0, 1, 0]) == 0.5


def test_aurc_by_hand() -> None:
    """Most confident first: right, wrong, right. Risks 0, 1/2, 1/3; their mean is 5/18."""
    assert aurc([0.9, 0.8, 0.7], [1, 0, 1]) == pytest.approx(5 / 18)


def test_aurc_of_a_constant_is_the_error_rate() -> None:
    assert aurc([0.7] * 8, [1, 0, 0, 0, 1, 1, 1, 1]) == pytest.approx(3 / 8)


@given(pairs=st.lists(st.tuples(st.sampled_from([0.2, 0.5, 0.9]), st.booleans()), min_size=1, max_size=12))
def test_aurc_is_the_expectation_over_orders_of_ties(pairs: list[tuple[float, bool]]) -> None:
    """The expected number of wrong answers grows linearly through a tied group; summed step by step here."""
    confidence, correct = (np.array(column) for column in zip(*pairs, strict=True))
    risks, answered, wrong = [], 0, 0.0
    for value in sorted(set(confidence), reverse=True):
        group = ~correct[confidence == value]
        risks += [(wrong + group.mean() * j) / (answered + j) for j in range(1, len(group) + 1)]
        answered, wrong = answered + len(group), wrong + group.sum()
    assert aurc(confidence, correct) == pytest.approx(np.mean(risks), abs=1e-12)


@given(pairs=TIED_PAIRS, seed=st.integers(0, 2**32 - 1))
def test_draws_equal_the_metric_on_repeated_questions(pairs: list[tuple[float, bool]], seed: int) -> None:
    confidence, correct = (np.array(column, dtype=float) for column in zip(*pairs, strict=True))
    drawn = np.random.default_rng(seed).integers(0, len(pairs), size=(3, len(pairs)))
    counts = np.stack([np.bincount(row, minlength=len(pairs)) for row in drawn]).astype(float)
    for draws, metric in ((auroc_draws, auroc), (aurc_draws, aurc)):
        expected = [metric(confidence[row], correct[row]) for row in drawn]
        np.testing.assert_allclose(draws(confidence, correct, counts), expected, atol=1e-12)


def test_curve_by_hand() -> None:
    """Thresholds .9 (one right), .5 (two more, one wrong): a third at risk 0, all at 1/3."""
    thresholds, coverage, risk = risk_coverage_curve([0.5, 0.9, 0.5], [1, 1, 0])
    assert thresholds.tolist() == [0.9, 0.5]
    np.testing.assert_allclose(coverage, [1 / 3, 1])
    np.testing.assert_allclose(risk, [0, 1 / 3])


def test_coverage_at_risk_and_back() -> None:
    """Risks by coverage: 1/4: 0, 2/4: 1/2, 3/4: 1/3, 4/4: 1/4."""
    confidence, correct = [0.9, 0.8, 0.7, 0.6], [1, 0, 1, 1]
    assert coverage_at_risk(confidence, correct, 0.0) == 0.25
    assert coverage_at_risk(confidence, correct, 0.3) == 1.0
    assert risk_at_coverage(confidence, correct, 0.5) == 0.5
    assert risk_at_coverage(confidence, correct, 0.6) == pytest.approx(1 / 3)
    assert coverage_at_risk([0.9], [0], 0.5) == 0.0


@pytest.mark.parametrize("bad", [-0.1, 1.1, math.nan])
def test_bad_levels_are_named(bad: float) -> None:
    with pytest.raises(ValueError, match="risk"):
        coverage_at_risk([0.5], [1], bad)
    with pytest.raises(ValueError, match="coverage"):
        risk_at_coverage([0.5], [1], bad)


@pytest.mark.parametrize("metric", [auroc, aurc, risk_coverage_curve])
def test_bad_input_is_named(metric: object) -> None:
    with pytest.raises(ValueError, match=r"confidence\[0\] is nan"):
        metric([math.nan], [1])  # type: ignore[operator]
