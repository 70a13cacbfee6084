"""Differences between models: the paired interval is the evaluation's own, the independent one knows sample sizes."""

from __future__ import annotations

import numpy as np
import pytest

from components.config import EvaluationConfig
from components.evaluation.intervals import paired_bootstrap
from components.registry.comparison import INDEPENDENT, PAIRED, difference

CONFIG = EvaluationConfig(bootstrap=200)


@pytest.mark.parametrize("metric", ["ece", "accuracy", "nll"])
def test_on_the_same_questions_it_is_the_paired_bootstrap(simulate, metric):
    a, b = simulate(120), simulate(120, sharpening=2.0)
    expected = paired_bootstrap(metric, a, b, CONFIG, seed=3)
    found = difference(metric, a, b, CONFIG, seed=3)
    assert found.kind == PAIRED
    assert (found.value, found.ci_low, found.ci_high) == (expected.difference, expected.ci_low, expected.ci_high)


def test_other_right_answers_are_other_questions(simulate):
    from dataclasses import replace

    a = simulate(50)
    b = replace(a, gold=(a.gold + 1) % 4)
    assert difference("accuracy", a, b, CONFIG, seed=0).kind == INDEPENDENT


def test_independent_accuracies_have_the_textbook_spread(simulate):
    """Var = p(1-p)/n + q(1-q)/m, which the width of a 95 % interval shows as 2 * 1.96 standard errors."""
    a, b = simulate(400, seed=1), simulate(900, seed=2)
    found = difference("accuracy", a, b, EvaluationConfig(bootstrap=4000), seed=0)
    p, q = a.correct.mean(), b.correct.mean()
    error = np.sqrt(p * (1 - p) / 400 + q * (1 - q) / 900)
    assert found.ci_high - found.ci_low == pytest.approx(2 * 1.96 * error, rel=0.05)
    assert found.value == pytest.approx(p - q, abs=1e-12)


def test_fewer_questions_do_not_look_worse_calibrated(simulate):
    """Both are perfectly calibrated. ECE on 100 questions is about .04 above that on 2,000, without any difference."""
    large = simulate(2000, seed=1)
    plain, set_right, covered, off_centre = [], [], [], []
    for seed in range(2, 22):
        small = simulate(100, seed=seed)
        found = difference("ece", small, large, CONFIG, seed=0)
        plain.append(difference("ece", small, small, CONFIG, seed=0).a - difference("ece", large, large, CONFIG, 0).a)
        set_right.append(found.value)
        covered.append(found.ci_low <= 0 <= found.ci_high)
        off_centre.append((found.ci_low + found.ci_high) / 2 - found.value)
    assert np.mean(plain) > 0.03
    assert abs(np.mean(set_right)) < 0.01
    assert np.mean(covered) > 0.85
    assert abs(np.mean(off_centre)) < 0.01
