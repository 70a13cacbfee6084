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
from components.evaluation.summary import compare, summarise

Simulate = Callable[..., Predictions]
CONFIG = EvaluationConfig(bootstrap=100)


def test_every_value_is_the_public_functions(simulate: Simulate) -> None:
    predictions = simulate(200, sharpening=2.0, mass=0.25)
    pair = predictions.confidence(), predictions.correct
    expected = {
        "accuracy": scores.accuracy(predictions.correct),
        "nll": scores.negative_log_likelihood(predictions.log_probabilities, predictions.gold),
        "brier_score": scores.brier_score(predictions.probabilities, predictions.gold),
        "ece": calibration_error.expected_calibration_error(*pair, 15),
        "ece_adaptive": calibration_error.adaptive_calibration_error(*pair, 15),
        "mce": calibration_error.maximum_calibration_error(*pair, 15),
        "cw_ece": calibration_error.classwise_calibration_error(predictions.probabilities, predictions.gold, 15),
        "auroc": ranking.auroc(*pair),
        "aurc": ranking.aurc(*pair),
        "mean_confidence": scores.mean_confidence(predictions.confidence()),
        "option_mass": 0.25,
    }
    block = evaluate_predictions(predictions, CONFIG, 0)["sources"]["softmax"]
    assert {metric: figure["value"] for metric, figure in block.items()} == pytest.approx(expected, abs=1e-12)
    for figure in block.values():
        assert set(figure) == {"value", "ci_low", "ci_high"}


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


def test_summary_holds_the_primary_sources_blocks(simulate: Simulate) -> None:
    metrics = evaluate_predictions(simulate(20), CONFIG, 0)
    summary = summarise("quick", {"base": {"id": metrics}}, [])
    assert summary == {
        "run": "quick",
        "methods": {"base": {"id": metrics["sources"]["softmax"]}},
        "comparisons": [],
    }


def test_a_paired_difference_of_one_question_is_written(simulate: Simulate) -> None:
    one = simulate(1)
    rows = compare({"a": {"id": one}, "b": {"id": one.tempered(2.0)}}, [("a", "b")], CONFIG, 0)
    assert np.isfinite([row["difference"] for row in rows]).all()
