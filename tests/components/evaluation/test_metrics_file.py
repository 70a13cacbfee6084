"""`metrics.json` and `summary.json`: contract, strict JSON, comparisons."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from components.config import EvaluationConfig
from components.errors import CaltuneError
from components.evaluation import calibration_error, ranking, scores
from components.evaluation.metrics_file import evaluate_predictions, read_metrics, write_metrics
from components.evaluation.predictions import Predictions
from components.evaluation.summary import choose_sources, compare, summarise

Simulate = Callable[..., Predictions]
CONFIG = EvaluationConfig(bootstrap=100)


def test_every_value_is_the_public_functions(simulate: Simulate) -> None:
    predictions = simulate(200, sharpening=2.0, mass=0.25)
    pair = predictions.confidence(), predictions.correct
    expected = {
        "accuracy": scores.accuracy(predictions.correct),
        "nll": scores.negative_log_likelihood(predictions.log_probabilities, predictions.gold),
        "brier_score": scores.brier_score(predictions.probabilities, predictions.gold),
        "top_label_brier_score": scores.top_label_brier_score(*pair),
        "ece": calibration_error.expected_calibration_error(*pair, 15),
        "ece_adaptive": calibration_error.adaptive_calibration_error(*pair, 15),
        "mce": calibration_error.maximum_calibration_error(*pair, 15),
        "cw_ece": calibration_error.classwise_calibration_error(predictions.probabilities, predictions.gold, 15),
        "auroc": ranking.auroc(*pair),
        "aurc": ranking.aurc(*pair),
        "mean_confidence": scores.mean_confidence(predictions.confidence()),
        "confidence_std": predictions.confidence().std(),
        "option_mass": 0.25,
    }
    block = evaluate_predictions(predictions, CONFIG, 0)["sources"]["softmax"]
    assert {metric: figure["value"] for metric, figure in block.items()} == pytest.approx(expected, abs=1e-12)
    for figure in block.values():
        assert set(figure) == {"value", "ci_low", "ci_high"}


def test_router_confidence_has_a_block_of_its_own(simulate: Simulate) -> None:
    """Two questions by hand: both answered with FLC .8 and .4, the first rightly, the second wrongly.

    Brier (.2^2 + .4^2) / 2 = .1, ECE (.2 + .4) / 2 = .3, AUROC 1, mean .6, standard deviation .2.
    """
    gold = np.array([0, 1])
    two = Predictions(("a", "b"), gold, np.log([[0.9, 0.1], [0.9, 0.1]]), np.ones(2), (None,) * 2, np.array([0.8, 0.4]))
    metrics = evaluate_predictions(two, CONFIG, 0)
    assert list(metrics["sources"]) == ["softmax", "flc"]
    block = {metric: figure["value"] for metric, figure in metrics["sources"]["flc"].items()}
    assert block.keys() == metrics["sources"]["softmax"].keys()
    expected = {"top_label_brier_score": 0.1, "ece": 0.3, "auroc": 1, "mean_confidence": 0.6, "confidence_std": 0.2}
    assert {metric: block[metric] for metric in expected} == pytest.approx(expected)
    assert (block["accuracy"], block["option_mass"]) == (0.5, 1.0)


def test_what_only_a_distribution_has_is_null_for_router_confidence(simulate: Simulate) -> None:
    block = evaluate_predictions(simulate(30, flc=0.7), CONFIG, 0)["sources"]["flc"]
    undefined = {metric for metric, figure in block.items() if figure["value"] is None}
    assert undefined == {"nll", "brier_score", "cw_ece"}
    assert all(block[metric]["ci_low"] is None for metric in undefined)


def test_a_constant_near_the_accuracy_has_a_low_ece_and_no_spread(simulate: Simulate) -> None:
    """Why the spread is in the file: ECE is 0, but AUROC .5 and spread 0 say that nothing is known."""
    predictions = simulate(200)
    constant = replace(predictions, flc=np.full(200, predictions.correct.mean()))
    block = evaluate_predictions(constant, CONFIG, 0)["sources"]["flc"]
    assert block["ece"]["value"] == pytest.approx(0, abs=1e-12)
    assert block["auroc"]["value"] == 0.5
    assert block["confidence_std"]["ci_high"] == pytest.approx(0, abs=1e-12)


def test_the_file_says_how_it_was_computed(simulate: Simulate) -> None:
    metrics = evaluate_predictions(simulate(20), CONFIG, 7, data_hash="abc")
    assert metrics["n"] == 20
    computed = metrics["computed"]
    assert (computed["bins"], computed["norm"], computed["seed"]) == (15, "l1", 7)
    assert (computed["bootstrap"], computed["level"], computed["data_hash"]) == (100, 0.95, "abc")
    assert computed["edge_rule"] == "[lo, hi); last bin [lo, hi]"


def test_undefined_is_null_and_the_file_reads_back_equal(simulate: Simulate, tmp_path: Path) -> None:
    predictions = simulate(20)
    metrics = evaluate_predictions(replace(predictions, gold=predictions.answer), CONFIG, 0)
    path = tmp_path / "evaluation" / "id" / "metrics.json"
    write_metrics(path, metrics)
    assert '"auroc": {\n        "value": null' in path.read_text()
    assert read_metrics(path) == metrics
    assert list(path.parent.iterdir()) == [path]


def test_next_to_no_option_mass_is_flagged(simulate: Simulate) -> None:
    assert evaluate_predictions(simulate(20, mass=0.009), CONFIG, 0)["low_option_mass"] is True
    assert evaluate_predictions(simulate(20, mass=0.011), CONFIG, 0)["low_option_mass"] is False


@pytest.mark.parametrize("content", ["{", "[1]", "\xff"])
def test_damaged_files_are_named(tmp_path: Path, content: str) -> None:
    path = tmp_path / "metrics.json"
    with pytest.raises(CaltuneError, match="does not exist"):
        read_metrics(path)
    path.write_text(content, encoding="latin-1")
    with pytest.raises(CaltuneError, match=r"metrics\.json.*evaluate again"):
        read_metrics(path)


def test_comparisons_pair_what_both_have(simulate: Simulate) -> None:
    named = {
        "sft": {"id": simulate(100, sharpening=3.0), "ood": simulate(100, sharpening=4.0, seed=1)},
        "calm": {"id": simulate(100)},
    }
    rows = compare(named, [("calm", "sft")], CONFIG, 0)
    assert [(row["split"], row["metric"]) for row in rows] == [("id", "ece"), ("id", "accuracy"), ("id", "nll")]
    assert set(rows[0]) == {"split", "metric", "a", "b", "difference", "ci_low", "ci_high", "p_value"}
    assert rows[0]["difference"] < 0
    assert rows[1]["difference"] == 0
    json.dumps(rows, allow_nan=False)


def test_an_unknown_method_is_named(simulate: Simulate) -> None:
    with pytest.raises(CaltuneError, match="cannot compare 'sft'"):
        compare({"calm": {"id": simulate(5)}}, [("calm", "sft")], CONFIG, 0)


def test_summary_holds_the_softmaxs_blocks(simulate: Simulate) -> None:
    metrics = evaluate_predictions(simulate(20), CONFIG, 0)
    summary = summarise("quick", {"base": {"id": metrics}}, [])
    assert summary == {
        "run": "quick",
        "methods": {"base": {"id": metrics["sources"]["softmax"]}},
        "sources": {},
        "chosen_sources": {},
        "comparisons": [],
    }


def test_summary_holds_every_source_of_methods_with_several(simulate: Simulate) -> None:
    metrics = {
        "sft": {"id": evaluate_predictions(simulate(20), CONFIG, 0)},
        "uq4ct": {s: evaluate_predictions(simulate(20, flc=0.5), CONFIG, 0) for s in ("id", "ood")},
    }
    summary = summarise("quick", metrics, [], {"uq4ct": "flc"})
    assert list(summary["sources"]) == ["uq4ct"]
    assert list(summary["sources"]["uq4ct"]) == ["softmax", "flc"]
    assert summary["sources"]["uq4ct"]["flc"]["ood"] == metrics["uq4ct"]["ood"]["sources"]["flc"]
    assert summary["methods"]["uq4ct"]["id"] == metrics["uq4ct"]["id"]["sources"]["softmax"]
    assert summary["chosen_sources"] == {"uq4ct": "flc"}


def test_the_source_with_the_lowest_mean_brier_score_on_validation_is_chosen() -> None:
    """softmax .10 and .24, mean .17; flc .25 and .05, mean .15. On `validation` alone it would be softmax."""

    def content(softmax: float, flc: float) -> dict[str, object]:
        values = (("softmax", softmax), ("flc", flc))
        return {"sources": {source: {"top_label_brier_score": {"value": value}} for source, value in values}}

    both = {"validation": content(0.10, 0.25), "validation_shift": content(0.24, 0.05)}
    assert choose_sources({"uq4ct": both}) == {"uq4ct": "flc"}
    assert choose_sources({"uq4ct": {"validation": both["validation"]}}) == {"uq4ct": "softmax"}
    assert choose_sources({"uq4ct": {"validation": content(0.1, 0.1)}}) == {"uq4ct": "softmax"}


def test_a_constant_near_the_accuracy_is_not_chosen_for_its_ece(simulate: Simulate) -> None:
    """The softmax knows which answers are right and is a little too sure; the routers say the accuracy of them all."""
    found = simulate(400, sharpening=1.5)
    metrics = evaluate_predictions(replace(found, flc=np.full(400, found.correct.mean())), CONFIG, 0)
    softmax, flc = metrics["sources"]["softmax"], metrics["sources"]["flc"]
    assert flc["ece"]["value"] < softmax["ece"]["value"]
    assert choose_sources({"uq4ct": {"validation": metrics}}) == {"uq4ct": "softmax"}


def test_nothing_is_chosen_where_there_is_one_source(simulate: Simulate) -> None:
    metrics = evaluate_predictions(simulate(20), CONFIG, 0)
    assert choose_sources({"sft": {"validation": metrics}}) == {}


def test_comparisons_take_a_source_for_each_side(simulate: Simulate) -> None:
    named = {"sft": {"id": simulate(100, sharpening=3.0)}, "uq4ct": {"id": simulate(100, sharpening=2.0, flc=0.7)}}
    sft, uq4ct = named["sft"]["id"], named["uq4ct"]["id"]
    rows = compare(named, [("uq4ct (flc)", "sft"), ("uq4ct (flc)", "uq4ct"), ("uq4ct", "sft")], CONFIG, 0)
    mirrored = compare(named, [("sft", "uq4ct (flc)")], CONFIG, 0)[0]
    found = {(row["a"], row["b"], row["metric"]): row["difference"] for row in rows}
    assert mirrored["difference"] == -found["uq4ct (flc)", "sft", "ece"]
    assert [key[2] for key in found] == [*["ece", "top_label_brier_score", "auroc"] * 2, "ece", "accuracy", "nll"]
    flc = calibration_error.expected_calibration_error(np.full(100, 0.7), uq4ct.correct, 15)
    assert found["uq4ct (flc)", "sft", "ece"] == pytest.approx(
        flc - calibration_error.expected_calibration_error(sft.confidence(), sft.correct, 15)
    )
    assert found["uq4ct (flc)", "uq4ct", "auroc"] == pytest.approx(
        0.5 - ranking.auroc(uq4ct.confidence(), uq4ct.correct)
    )


def test_a_row_that_a_method_lacks_is_named(simulate: Simulate) -> None:
    with pytest.raises(CaltuneError, match=r"cannot compare 'sft \(flc\)'.*of sft only"):
        compare({"sft": {"id": simulate(5)}}, [("sft (flc)", "sft")], CONFIG, 0)


def test_a_paired_difference_of_one_question_is_written(simulate: Simulate) -> None:
    one = simulate(1)
    rows = compare({"a": {"id": one}, "b": {"id": one.tempered(2.0)}}, [("a", "b")], CONFIG, 0)
    assert np.isfinite([row["difference"] for row in rows]).all()
