"""Averages and proper scores against scikit-learn and by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest
from sklearn.metrics import brier_score_loss, log_loss

from components.evaluation import scores


@pytest.fixture
def distribution() -> tuple[np.ndarray, np.ndarray]:
    generator = np.random.default_rng(0)
    return generator.dirichlet(np.ones(4), size=200), generator.integers(0, 4, size=200)


def test_nll_agrees_with_scikit_learn(distribution: tuple[np.ndarray, np.ndarray]) -> None:
    p, gold = distribution
    assert scores.negative_log_likelihood(np.log(p), gold) == pytest.approx(
        log_loss(gold, p, labels=range(4)), abs=1e-8
    )


def test_brier_is_twice_scikit_learns_scaled_one(distribution: tuple[np.ndarray, np.ndarray]) -> None:
    p, gold = distribution
    theirs = brier_score_loss(gold, p, labels=range(4), scale_by_half=False)
    assert scores.brier_score(p, gold) == pytest.approx(theirs, abs=1e-8)


def test_top_label_brier_agrees_with_scikit_learn() -> None:
    generator = np.random.default_rng(0)
    confidence = generator.random(100)
    correct = generator.random(100) < confidence
    assert scores.top_label_brier_score(confidence, correct) == pytest.approx(brier_score_loss(correct, confidence))


def test_by_hand() -> None:
    """Gold has .8 of two options: NLL -ln .8, Brier .2^2 + .2^2 = .08; top label (.8 - 1)^2 = .04."""
    assert scores.negative_log_likelihood(np.log([[0.8, 0.2]]), [0]) == pytest.approx(-math.log(0.8))
    assert scores.brier_score([[0.8, 0.2]], [0]) == pytest.approx(0.08)
    assert scores.top_label_brier_score([0.8], [1]) == pytest.approx(0.04)
    assert scores.accuracy([1, 1, 0, 1]) == 0.75
    assert scores.mean_confidence([0.5, 0.75]) == 0.625
    assert scores.mean_option_mass([0.5, 0.25]) == 0.375


def test_an_absent_option_costs_nothing_and_cannot_be_gold() -> None:
    log_p = np.log([[0.8, 0.2], [0.5, 0.5]])
    padded = np.column_stack([log_p, [-np.inf, -np.inf]])
    assert scores.negative_log_likelihood(padded, [0, 1]) == scores.negative_log_likelihood(log_p, [0, 1])
    with pytest.raises(ValueError, match="an option without probability"):
        scores.negative_log_likelihood(padded, [0, 2])


def test_bad_input_is_named() -> None:
    with pytest.raises(ValueError, match="log_probabilities holds NaN"):
        scores.negative_log_likelihood([[math.nan, 0.0]], [0])
    with pytest.raises(ValueError, match="add up to"):
        scores.negative_log_likelihood(np.log([[0.8, 0.1]]), [0])
    with pytest.raises(ValueError, match="option_mass"):
        scores.mean_option_mass([1.5])
    with pytest.raises(ValueError, match="correct must hold only"):
        scores.accuracy([0.5])
