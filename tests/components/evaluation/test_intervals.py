"""Bootstrap: determinism, coverage on simulated data, degenerate samples, paired differences."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from components.config import EvaluationConfig
from components.errors import CaltuneError
from components.evaluation.intervals import (
    bootstrap_counts,
    bootstrap_intervals,
    paired_bootstrap,
    percentile_interval,
)
from components.evaluation.metrics import METRICS, metric_value
from components.evaluation.predictions import Predictions

Simulate = Callable[..., Predictions]
CONFIG = EvaluationConfig()


def test_counts_add_up_and_repeat() -> None:
    blocks = list(bootstrap_counts(7, 50, seed=3))
    counts = np.concatenate(blocks)
    assert counts.shape == (50, 7)
    assert (counts.sum(axis=1) == 7).all()
    np.testing.assert_array_equal(counts, np.concatenate(list(bootstrap_counts(7, 50, seed=3))))
    assert (counts != np.concatenate(list(bootstrap_counts(7, 50, seed=4)))).any()


def test_large_samples_come_in_blocks() -> None:
    blocks = list(bootstrap_counts(500_000, 9, seed=0))
    assert [len(block) for block in blocks] == [4, 4, 1]


def test_counts_are_uniform_draws_with_replacement() -> None:
    """A question's count is Binomial(n, 1/n): mean 1, variance 1 - 1/n; 40 000 draws know both to about a percent."""
    counts = np.concatenate(list(bootstrap_counts(4, 40_000, seed=0)))
    np.testing.assert_allclose(counts.mean(axis=0), 1.0, atol=0.03)
    np.testing.assert_allclose(counts.var(axis=0), 0.75, atol=0.03)


def test_same_seed_same_intervals(simulate: Simulate) -> None:
    predictions = simulate(50)
    assert bootstrap_intervals(predictions, CONFIG, 1) == bootstrap_intervals(predictions, CONFIG, 1)
    assert bootstrap_intervals(predictions, CONFIG, 1) != bootstrap_intervals(predictions, CONFIG, 2)


def test_accuracy_interval_matches_the_binomial(simulate: Simulate) -> None:
    """The bootstrap of a share is Binomial(n, share) / n, so its interval is that distribution's."""
    from scipy.stats import binom

    predictions = simulate(400)
    found = bootstrap_intervals(predictions, EvaluationConfig(bootstrap=5000), 0, metrics=["accuracy"])["accuracy"]
    expected = binom.ppf([0.025, 0.975], 400, found.value) / 400
    np.testing.assert_allclose([found.ci_low, found.ci_high], expected, atol=0.0051)


@pytest.mark.parametrize("metric", ["accuracy", "nll", "brier_score", "auroc", "mean_confidence"])
def test_intervals_cover_the_truth(simulate: Simulate, metric: str) -> None:
    """95 % intervals of 200 samples: between 89 % and 99 % hold the truth (more than 3 standard errors of .015)."""
    truth = metric_value(metric, simulate(200_000, seed=999_999), bins=15)
    config = EvaluationConfig(bootstrap=300)
    held = 0
    for seed in range(200):
        found = bootstrap_intervals(simulate(300, seed=seed), config, seed, metrics=[metric])[metric]
        held += found.ci_low <= truth <= found.ci_high
    assert 0.89 <= held / 200 <= 0.99


def test_ece_interval_covers_where_miscalibration_is_plain(simulate: Simulate) -> None:
    """Far from zero the upward bias of ECE is small beside its spread; near zero no interval of it can cover."""
    truth = metric_value("ece", simulate(200_000, sharpening=4.0, seed=999_999), bins=15)
    config = EvaluationConfig(bootstrap=300)
    held = 0
    for seed in range(200):
        found = bootstrap_intervals(simulate(300, sharpening=4.0, seed=seed), config, seed, metrics=["ece"])["ece"]
        held += found.ci_low <= truth <= found.ci_high
    assert truth > 0.15
    assert 0.89 <= held / 200 <= 0.99


def test_all_metrics_are_fast_enough(simulate: Simulate) -> None:
    """1000 draws of everything on 1000 questions take about half a second; two leave room for a busy machine."""
    predictions = simulate(1000)
    started = time.thread_time()
    found = bootstrap_intervals(predictions, CONFIG, 0)
    assert set(found) == set(METRICS)
    assert time.thread_time() - started < 2


def test_one_question_gives_no_width(simulate: Simulate) -> None:
    for metric, found in bootstrap_intervals(simulate(1), CONFIG, 0).items():
        if metric == "auroc":
            assert math.isnan(found.value)
            assert math.isnan(found.ci_low)
        else:
            assert found.ci_low == found.value == found.ci_high


def test_all_correct_does_not_crash(simulate: Simulate) -> None:
    predictions = simulate(40)
    right = replace(predictions, gold=predictions.answer)
    found = bootstrap_intervals(right, CONFIG, 0)
    assert (found["accuracy"].ci_low, found["accuracy"].ci_high) == (1.0, 1.0)
    assert found["aurc"].value == 0.0
    assert math.isnan(found["auroc"].ci_high)


def test_undefined_draws_are_left_out() -> None:
    assert percentile_interval(np.array([np.nan, 2.0, 2.0]), 0.9) == (2.0, 2.0)


def test_a_method_against_itself_differs_by_nothing(simulate: Simulate) -> None:
    predictions = simulate(100)
    for metric in METRICS:
        found = paired_bootstrap(metric, predictions, predictions, CONFIG, 0)
        if metric != "auroc":
            assert (found.difference, found.ci_low, found.ci_high, found.p_value) == (0.0, 0.0, 0.0, 1.0)


def test_a_plain_difference_is_found_and_signed(simulate: Simulate) -> None:
    calibrated, overconfident = simulate(500), simulate(500, sharpening=4.0)
    found = paired_bootstrap("ece", calibrated, overconfident, CONFIG, 0)
    assert found.ci_low <= found.difference <= found.ci_high < 0
    assert found.p_value == pytest.approx(2 / 1001)
    mirrored = paired_bootstrap("ece", overconfident, calibrated, CONFIG, 0)
    assert mirrored.difference == -found.difference
    assert mirrored.ci_low == pytest.approx(-found.ci_high)


def test_pairing_is_tighter_than_two_samples(simulate: Simulate) -> None:
    """The same questions make NLL of two near-equal methods move together; ignoring that would widen the interval."""
    a, b = simulate(300), simulate(300, sharpening=1.1)
    paired = paired_bootstrap("nll", a, b, CONFIG, 0)
    alone = bootstrap_intervals(a, CONFIG, 0, metrics=["nll"])["nll"]
    assert paired.ci_high - paired.ci_low < 0.5 * (alone.ci_high - alone.ci_low)


def test_p_values_are_uniform_enough_without_a_difference(simulate: Simulate) -> None:
    """Two methods that are each right with probability 1/2, independently: p < .05 in about 5 % of 200 samples."""
    rejected = 0
    config = EvaluationConfig(bootstrap=200)
    for seed in range(200):
        a = simulate(200, options=2, seed=seed)
        other = np.random.default_rng(seed + 10_000).permutation(200)
        b = replace(a, option_log_probs=a.option_log_probs[other])
        c = replace(a, option_log_probs=a.option_log_probs[np.roll(other, 1)])
        rejected += paired_bootstrap("accuracy", b, c, config, seed).p_value < 0.05
    assert 0.005 <= rejected / 200 <= 0.1


def test_different_questions_are_refused(simulate: Simulate) -> None:
    with pytest.raises(CaltuneError, match="same questions"):
        paired_bootstrap("ece", simulate(10), simulate(11), CONFIG, 0)
    with pytest.raises(CaltuneError, match="same questions"):
        paired_bootstrap("ece", simulate(10, seed=1), simulate(10, seed=2), CONFIG, 0)


def test_unknown_metric_is_refused(simulate: Simulate) -> None:
    with pytest.raises(ValueError, match="no metric 'f1'"):
        metric_value("f1", simulate(3), bins=15)


def test_unknown_source_is_refused_by_every_metric(simulate: Simulate) -> None:
    for metric in set(METRICS) - {"accuracy", "option_mass"}:  # the same whatever the source
        with pytest.raises(ValueError, match="no confidence source 'flc'"):
            metric_value(metric, simulate(3), bins=15, source="flc")


def test_spread_of_draws_is_that_of_the_repeated_questions(simulate: Simulate) -> None:
    predictions = simulate(6)
    counts = np.array([[3.0, 0, 1, 2, 0, 0], [1, 1, 1, 1, 1, 1]])
    found = METRICS["confidence_std"](predictions, None, counts, 15)
    expected = [np.repeat(predictions.confidence(), row.astype(int)).std() for row in counts]
    np.testing.assert_allclose(found, expected, atol=1e-12)
