"""Stop rules on sequences made by hand."""

from __future__ import annotations

import math

import pytest

from components.config_methods import StopConfig
from components.training.stopping import StopRule, StopState


def metrics(nll: float = 1.0, ece: float = 0.1, accuracy: float = 0.5, mean_confidence: float = 0.9) -> dict:
    return {"nll": nll, "ece": ece, "accuracy": accuracy, "mean_confidence": mean_confidence}


def judge_all(rule: StopRule, sequence: list[dict]) -> list[bool]:
    """Evaluations after 0, 10, 20 ... steps."""
    return [rule.judge(10 * i, of) for i, of in enumerate(sequence)]


def test_budget_keeps_the_last_step_and_never_ends():
    rule = StopRule(StopConfig(rule="budget"))
    assert judge_all(rule, [{"validation": metrics(nll)} for nll in (1.0, math.nan, 3.0)]) == [False] * 3
    assert rule.state == StopState()


@pytest.mark.parametrize("metric", ["nll", "ece"])
def test_keep_best_keeps_the_first_of_equally_low_values(metric):
    values = [0.9, 0.7, 0.8, 0.7, 0.6, 0.65]
    rule = StopRule(StopConfig(rule="keep_best", metric=metric))
    assert judge_all(rule, [{"validation": metrics(**{metric: v})} for v in values]) == [1, 1, 0, 0, 1, 0]
    assert rule.state == StopState(kept_step=40, best=0.6, ended=False)


def test_match_ends_where_confidence_first_meets_accuracy():
    confidences = [0.9, 0.7, 0.5, 0.4]
    rule = StopRule(StopConfig(rule="match"))
    kept = judge_all(rule, [{"validation": metrics(accuracy=0.5, mean_confidence=c)} for c in confidences[:3]])
    assert kept == [False, False, True]
    assert rule.state == StopState(kept_step=20, ended=True)


def test_match_that_is_never_met_keeps_the_last_step():
    rule = StopRule(StopConfig(rule="match"))
    judge_all(rule, [{"validation": metrics()}] * 3)
    assert rule.state == StopState()


def test_both_splits_count_alike():
    """Means of nll: (1.0 + 2.0) / 2 = 1.5, then (0.2 + 2.9) / 2 = 1.55: worse, though `validation` alone is better."""
    first = {"validation": metrics(1.0), "validation_shift": metrics(2.0)}
    second = {"validation": metrics(0.2), "validation_shift": metrics(2.9)}
    assert judge_all(StopRule(StopConfig(rule="keep_best", split="both")), [first, second]) == [True, False]
    assert judge_all(StopRule(StopConfig(rule="keep_best", split="validation")), [first, second]) == [True, True]
    shift = StopRule(StopConfig(rule="keep_best", split="validation_shift"))
    assert judge_all(shift, [first, second]) == [True, False]


def test_match_on_both_splits_compares_the_means():
    """Confidence .3 and .8, accuracy .7 and .5: .55 <= .6, although the second split alone is over-confident."""
    both = {
        "validation": metrics(accuracy=0.7, mean_confidence=0.3),
        "validation_shift": metrics(accuracy=0.5, mean_confidence=0.8),
    }
    assert StopRule(StopConfig(rule="match", split="both")).judge(5, both)
    assert not StopRule(StopConfig(rule="match", split="validation_shift")).judge(5, both)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("rule", ["keep_best", "match"])
def test_a_metric_that_is_no_number_is_an_error(rule, bad):
    spoilt = metrics(nll=bad, mean_confidence=bad)
    with pytest.raises(FloatingPointError, match=r"validation (nll|mean_confidence) is (nan|inf).*lower"):
        StopRule(StopConfig(rule=rule)).judge(0, {"validation": spoilt})


def test_the_state_goes_through_a_checkpoint():
    rule = StopRule(StopConfig())
    rule.judge(10, {"validation": metrics(0.5)})
    again = StopRule(StopConfig(), StopState(**rule.as_dict()))
    assert again.state == rule.state
    assert not again.judge(20, {"validation": metrics(0.6)})
