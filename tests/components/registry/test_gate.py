"""The gate: what it refuses, what it lets through, and that the interval decides rather than the figure."""

from __future__ import annotations

import copy
import json
import math
from dataclasses import replace

import pytest
from rich.console import Console

from components.config import EvaluationConfig
from components.config_gate import GREATER_IS_BETTER, GateConfig
from components.registry.gate import judge
from components.registry.verdict import Verdict

EVALUATION = EvaluationConfig(bootstrap=200)


def rules(*given):
    return GateConfig.model_validate({"method": "calm", "rules": list(given)})


def outcome(gate, candidate, **references):
    verdict = judge(gate, candidate, references, EVALUATION, seed=0)
    return verdict, [rule.outcome for rule in verdict.rules]


@pytest.fixture
def calibrated(simulate, evaluated):
    return evaluated("calm", "2", id=simulate(300))


@pytest.fixture
def overconfident(simulate, evaluated):
    """The same questions and answers, with confidence three times as sharp."""
    return evaluated("champion (version 1)", "1", id=simulate(300, sharpening=3.0))


def test_a_better_model_passes_every_kind_of_rule(calibrated, overconfident):
    gate = rules(
        {"metric": "ece", "threshold": 0.14},
        {"metric": "accuracy", "threshold": 0.5},
        {"metric": "ece", "min_absolute_change": 0.0},
        {"metric": "ece", "min_relative_change": 0.2},
        {"metric": "accuracy", "non_inferiority_margin": 0.0},
    )
    verdict, outcomes = outcome(gate, calibrated, champion=overconfident)
    assert outcomes == ["pass"] * 5
    assert [rule.limit for rule in verdict.rules] == [
        "at most 0.14",
        "at least 0.5",
        "below 0",
        "below 0",
        "at least 0",
    ]
    assert verdict.passed
    assert (verdict.version, verdict.champion) == ("2", "1")


def test_a_worse_model_is_refused(calibrated, overconfident):
    """Accuracy is equal, ECE is worse by about .15: only what speaks of ECE fails."""
    gate = rules(
        {"metric": "ece", "threshold": 0.14},
        {"metric": "ece", "non_inferiority_margin": 0.02},
        {"metric": "ece", "min_absolute_change": 0.0},
        {"metric": "ece", "min_relative_change": 0.1},
        {"metric": "accuracy", "non_inferiority_margin": 0.0},
    )
    verdict, outcomes = outcome(gate, overconfident, champion=calibrated)
    assert outcomes == ["fail", "fail", "fail", "fail", "pass"]
    assert not verdict.passed
    assert "4 of 5 rules failed" in verdict.sentence


def test_a_model_worse_in_accuracy_is_refused(simulate, evaluated, calibrated):
    worse = evaluated("calm", id=simulate(300, wrong=0.2))
    gate = rules(
        {"metric": "accuracy", "non_inferiority_margin": 0.02}, {"metric": "accuracy", "min_relative_change": 0.01}
    )
    assert outcome(gate, worse, champion=calibrated)[1] == ["fail", "fail"]


def test_equal_models_whose_interval_crosses_the_margin_are_refused(simulate, evaluated):
    """Two models equally calibrated on 60 other questions each: the difference is near zero, its interval is wide."""
    gate = rules({"metric": "ece", "non_inferiority_margin": 0.03}, {"metric": "ece", "min_absolute_change": 0.0})
    one, other = evaluated("calm", id=simulate(60, seed=2)), evaluated("champion", id=simulate(60, seed=1))
    verdict, outcomes = outcome(gate, one, champion=other)
    assert outcomes == ["fail", "fail"]
    (rule, _) = verdict.rules
    assert rule.value < 0.03 < rule.ci_high
    assert "its interval reaches" in rule.reason
    wide = rules({"metric": "ece", "non_inferiority_margin": 0.3})
    assert outcome(wide, one, champion=other)[1] == ["pass"]


def test_the_very_same_model_is_not_worse_and_not_better(calibrated):
    gate = rules(
        {"metric": "ece", "non_inferiority_margin": 0.0},
        {"metric": "ece", "non_inferiority_margin": 0.02},
        {"metric": "accuracy", "non_inferiority_margin": 0.02},
        {"metric": "ece", "min_absolute_change": 0.0},
        {"metric": "accuracy", "min_absolute_change": 0.01},
    )
    verdict, outcomes = outcome(gate, calibrated, champion=calibrated)
    assert outcomes == ["pass", "pass", "pass", "fail", "fail"]
    assert [rule.limit for rule in verdict.rules] == [
        "at most 0",
        "at most 0.02",
        "at least -0.02",
        "below 0",
        "above 0.01",
    ]


def test_the_interval_decides_not_the_figure(calibrated):
    block = calibrated.metrics["id"]["sources"]["softmax"]
    block["ece"] = {"value": 0.05, "ci_low": 0.04, "ci_high": 0.10}
    block["accuracy"] = {"value": 0.80, "ci_low": 0.75, "ci_high": 0.85}
    gate = rules(
        {"metric": "ece", "threshold": 0.09},
        {"metric": "ece", "threshold": 0.10},
        {"metric": "accuracy", "threshold": 0.78},
        {"metric": "accuracy", "threshold": 0.75},
    )
    verdict, outcomes = outcome(gate, calibrated)
    assert outcomes == ["fail", "pass", "fail", "pass"]
    assert verdict.rules[0].reason == "the figure itself is at most 0.09, but its interval reaches 0.1000"


@pytest.mark.parametrize("bad", [None, math.nan, math.inf, 1.8e308, -math.inf])
@pytest.mark.parametrize("end", ["value", "ci_low", "ci_high"])
def test_what_is_undefined_fails(calibrated, bad, end):
    """1.8e308 is how MLflow keeps an infinity."""
    broken = copy.deepcopy(calibrated.metrics)
    broken["id"]["sources"]["softmax"]["auroc"][end] = bad
    candidate = replace(calibrated, metrics=broken)
    gate = rules({"metric": "auroc", "threshold": 0.0}, {"metric": "auroc", "non_inferiority_margin": 1.0})
    verdict, outcomes = outcome(gate, candidate, champion=calibrated)
    assert outcomes == ["fail", "fail"]
    assert "undefined" in verdict.sentence


def test_a_figure_that_its_own_interval_leaves_out_fails_too(calibrated):
    """Binned errors are biased upwards in draws, so an interval may lie on one side of its figure."""
    calibrated.metrics["id"]["sources"]["softmax"]["accuracy"] = {"value": 0.70, "ci_low": 0.72, "ci_high": 0.80}
    verdict, outcomes = outcome(rules({"metric": "accuracy", "threshold": 0.71}), calibrated)
    assert outcomes == ["fail"]
    assert verdict.rules[0].reason == "0.7000 is not at least 0.71"


def test_what_is_missing_fails(calibrated, simulate, evaluated):
    broken = copy.deepcopy(calibrated.metrics)
    del broken["id"]["sources"]["softmax"]["nll"]
    candidate = replace(calibrated, metrics=broken)
    gate = rules(
        {"metric": "nll", "threshold": 100.0},
        {"metric": "ece", "split": "ood", "threshold": 1.0},
        {"metric": "ece", "source": "flc", "threshold": 1.0},
        {"metric": "ece", "against": "sft", "non_inferiority_margin": 1.0},
        {"metric": "ece", "non_inferiority_margin": 1.0},
    )
    no_predictions = replace(evaluated("champion", id=simulate(300)), predictions={})
    verdict, outcomes = outcome(gate, candidate, champion=no_predictions)
    assert outcomes == ["fail"] * 5
    assert [rule.reason for rule in verdict.rules] == [
        "metrics of calm on 'id' lack nll",
        "there are no metrics of calm on 'ood'",
        "metrics of calm on 'id' have no confidence 'flc'",
        "there are no results of 'sft'",
        "no predictions of champion on 'id'",
    ]


def test_a_difference_that_is_undefined_fails(simulate, evaluated, calibrated):
    """The other model is right everywhere, so its AUROC has one class only."""
    perfect = simulate(300)
    perfect = replace(perfect, gold=perfect.answer)
    gate = rules({"metric": "auroc", "non_inferiority_margin": 1.0})
    verdict, outcomes = outcome(gate, calibrated, champion=evaluated("champion", id=perfect))
    assert outcomes == ["fail"]
    assert "difference is undefined" in verdict.rules[0].reason


def test_without_a_champion_comparisons_with_it_are_skipped_and_shown(calibrated):
    gate = rules({"metric": "ece", "threshold": 0.14}, {"metric": "ece", "min_absolute_change": 0.0})
    verdict, outcomes = outcome(gate, calibrated, champion=None)
    assert outcomes == ["pass", "skipped"]
    assert verdict.passed
    assert verdict.champion is None
    assert "no champion yet" in verdict.as_markdown()
    assert outcome(rules({"metric": "ece", "threshold": 0.01}), calibrated, champion=None)[1] == ["fail"]


def test_router_confidence_is_judged_by_itself(simulate, evaluated):
    """The same answers; one model's routers state the accuracy, the other's state certainty."""
    honest = simulate(300)
    honest = replace(honest, flc=honest.correct.mean().repeat(300))
    gate = rules({"metric": "ece", "source": "flc", "min_absolute_change": 0.1})
    champion = evaluated("champion", id=simulate(300, flc=1.0))
    assert outcome(gate, evaluated("uq4ct", id=honest), champion=champion)[1] == ["pass"]


def test_relative_change_is_a_share_of_the_others_figure(simulate, evaluated):
    """Accuracy a against b = 1.1 b exactly, drawn together: more than 9 % better, not more than 11 %."""
    base = simulate(400)
    order = base.correct.argsort()  # wrong ones first
    wrong = int((~base.correct).sum())
    right = 400 - wrong
    worse_scores = base.option_log_probs.copy()
    lost = order[wrong : wrong + round(right / 11)]
    worse_scores[lost] = -worse_scores[lost]
    worse_scores[lost, base.gold[lost]] -= 100
    other = replace(base, option_log_probs=worse_scores)
    candidate, champion = evaluated("calm", id=base), evaluated("champion", id=other)
    ratio = base.correct.mean() / other.correct.mean()
    assert ratio == pytest.approx(1.1, abs=0.005)
    gate = rules(
        {"metric": "accuracy", "min_relative_change": 0.05}, {"metric": "accuracy", "min_relative_change": 0.2}
    )
    verdict, outcomes = outcome(gate, candidate, champion=champion)
    assert outcomes == ["pass", "fail"]
    expected = base.correct.mean() - 1.05 * other.correct.mean()
    assert verdict.rules[0].value == pytest.approx(expected, abs=1e-12)


def test_the_verdict_reads_back_and_shows_itself(calibrated, overconfident):
    gate = rules({"metric": "ece", "threshold": 0.01}, {"metric": "ece", "non_inferiority_margin": 0.02})
    verdict, _ = outcome(gate, calibrated, champion=overconfident)
    content = json.loads(json.dumps(verdict.as_dict(), allow_nan=False))
    assert content["passed"] is False
    assert Verdict.from_dict(content) == verdict
    console = Console(width=110)
    with console.capture() as captured:
        console.print(verdict.as_table())
    for shown in (captured.get(), verdict.as_markdown()):
        assert "ece on id minus champion" in shown
        assert "at most 0.01" in shown
        assert "fail" in shown
        assert "pass" in shown
    assert verdict.notes[0].startswith("ece on id: 0.0")
    assert verdict.notes[1:] == ["calm did not pass the gate"]


def test_an_empty_verdict_is_no_pass():
    assert not Verdict("calm", None, None, ()).passed


def test_every_metric_of_a_report_is_judged_or_only_describes():
    from components.evaluation.metrics import METRICS

    assert METRICS.keys() - GREATER_IS_BETTER.keys() == {"mean_confidence", "confidence_std"}
    assert GREATER_IS_BETTER.keys() <= METRICS.keys()
