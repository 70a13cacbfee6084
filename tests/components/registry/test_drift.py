"""Drift: found where data have changed, not where only the sample has."""

from __future__ import annotations

import json
import re

import numpy as np
import pytest

from components.config import EvaluationConfig
from components.config_gate import DriftConfig
from components.errors import CaltuneError, DataError
from components.evaluation.predictions import write_predictions
from components.registry.drift import confidences, labelled_drift, unlabelled_drift
from components.registry.prediction_log import read_confidences

EVALUATION = EvaluationConfig(bootstrap=200)
CONFIG = DriftConfig()


def test_fresh_data_like_the_test_data_are_no_drift(simulate):
    decision = labelled_drift(simulate(200, seed=1), simulate(1000, seed=2), CONFIG, EVALUATION, seed=0)
    assert not decision.drifted
    assert decision.reason.startswith("no drift on 200 labelled fresh questions: ece ")


def test_confidence_that_no_longer_holds_is_drift(simulate):
    """A third of the questions are answered wrongly with the same confidence: ECE and accuracy both fall off."""
    decision = labelled_drift(simulate(200, seed=1, wrong=0.33), simulate(1000, seed=2), CONFIG, EVALUATION, seed=0)
    assert decision.drifted
    by_name = {figure.name: figure for figure in decision.figures}
    assert by_name["ece"].ci_low > CONFIG.max_ece_increase
    assert by_name["accuracy"].ci_low > CONFIG.max_accuracy_drop
    assert by_name["accuracy"].worsening == pytest.approx(by_name["accuracy"].reference - by_name["accuracy"].fresh)
    assert json.loads(json.dumps(decision.as_dict()))["drifted"] is True


def test_few_questions_are_no_evidence(simulate):
    """The same damage, a fifth of the questions, is drift on 1,000 questions and may be chance on 20."""
    test = simulate(1000, seed=2)
    seen = [labelled_drift(simulate(n, seed=1, wrong=0.2), test, CONFIG, EVALUATION, seed=0) for n in (1000, 20)]
    assert [decision.drifted for decision in seen] == [True, False]


def test_better_than_expected_is_no_drift(simulate):
    decision = labelled_drift(simulate(300, seed=1), simulate(300, seed=2, wrong=0.5), CONFIG, EVALUATION, seed=0)
    assert not decision.drifted
    assert all(figure.worsening < 0 for figure in decision.figures)


def test_false_alarms_are_rare(simulate):
    test = simulate(1000, seed=1)
    alarms = [
        labelled_drift(simulate(100, seed=seed), test, CONFIG, EVALUATION, seed=0).drifted for seed in range(2, 22)
    ]
    assert np.mean(alarms) < 0.1


def test_a_moved_distribution_of_confidence_is_drift_without_labels(simulate):
    test, fresh = simulate(400, seed=1), simulate(400, seed=2, sharpening=3.0)
    decision = unlabelled_drift(confidences(fresh), confidences(test), CONFIG)
    assert decision.drifted
    assert not decision.labelled
    assert "shift of softmax: D " in decision.reason
    assert not unlabelled_drift(confidences(simulate(400, seed=3)), confidences(test), CONFIG).drifted


def test_a_shift_of_router_confidence_alone_is_drift(simulate):
    rng = np.random.default_rng(0)
    softmax = rng.beta(5, 2, 300)
    test = {"softmax": softmax, "flc": rng.beta(8, 4, 300)}
    decision = unlabelled_drift({"softmax": softmax, "flc": rng.beta(4, 8, 300)}, test, CONFIG)
    assert [figure.drifted for figure in decision.figures] == [False, True]
    assert decision.drifted


def test_size_and_evidence_must_both_be_there():
    """Many questions: p is tiny for a shift of .03. Few: D is large by chance. Neither is drift."""
    rng = np.random.default_rng(0)
    many = unlabelled_drift({"softmax": rng.beta(5.0, 2, 50_000)}, {"softmax": rng.beta(5.3, 2, 50_000)}, CONFIG)
    assert many.figures[0].p_value < 1e-6
    assert many.figures[0].worsening < CONFIG.max_shift
    assert not many.drifted
    few = unlabelled_drift({"softmax": rng.beta(5, 2, 8)}, {"softmax": rng.beta(3, 2, 500)}, CONFIG)
    assert few.figures[0].worsening > CONFIG.max_shift
    assert few.figures[0].p_value > CONFIG.significance
    assert not few.drifted


def test_other_sources_cannot_be_compared(simulate):
    with pytest.raises(CaltuneError, match="evaluate both with the champion"):
        unlabelled_drift(confidences(simulate(20)), confidences(simulate(20, flc=0.5)), CONFIG)


def test_a_prediction_log_is_read_from_either_format(simulate, tmp_path):
    found = simulate(20, seed=1, flc=0.6)
    write_predictions(tmp_path / "log.parquet", found)
    rows = zip(*(found.confidence(source) for source in ("softmax", "flc")), strict=True)
    lines = [json.dumps({"id": i, "confidence_softmax": a, "confidence_flc": b}) for i, (a, b) in enumerate(rows)]
    (tmp_path / "log.jsonl").write_text("\n".join(lines) + "\n")
    for name in ("log.parquet", "log.jsonl"):
        read = read_confidences(tmp_path / name, found.sources)
        assert {source: values.tolist() for source, values in read.items()} == {
            source: found.confidence(source).tolist() for source in found.sources
        }


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ('{"confidence_softmax": 0.5}\n{"confidence_softmax": NaN}', ":2: field 'confidence_softmax': is nan"),
        ('{"confidence_softmax": 1.5}', ":1: field 'confidence_softmax': is 1.5"),
        ('{"confidence_softmax": true}', ":1: field 'confidence_softmax': is True"),
        ('{"confidence": 0.5}', ":1: field 'confidence_softmax': is None"),
        ('{"confidence_softmax": 0.5}\n{"conf\n', ":2: is not JSON"),
        ("[0.5]", ":1: is not a JSON object"),
        ("", "has no rows"),
    ],
)
def test_a_bad_row_of_a_prediction_log_is_named(tmp_path, text, place):
    path = tmp_path / "log.jsonl"
    path.write_text(text)
    with pytest.raises(DataError, match=re.escape(place)):
        read_confidences(path, ["softmax"])


@pytest.mark.parametrize("name", ["log.parquet", "log.jsonl"])
def test_a_missing_prediction_log_is_an_error(tmp_path, name):
    with pytest.raises(DataError, match="cannot be read"):
        read_confidences(tmp_path / name, ["softmax"])


def test_a_parquet_log_without_the_routers_confidence_is_refused(simulate, tmp_path):
    write_predictions(tmp_path / "log.parquet", simulate(20))
    with pytest.raises(DataError, match=re.escape("'confidence_flc': column is missing")):
        read_confidences(tmp_path / "log.parquet", ["softmax", "flc"])
