"""Steps on their own: what they refuse, and what training elsewhere is given."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from components.config_gate import DriftConfig
from components.errors import CaltuneError, UsageError
from components.evaluation.predictions import Predictions
from components.posthoc.temperature import FittedTemperature
from components.run_file import load_run_file, save_resolved
from pipelines.k8s_job import Placement
from pipelines.k8s_rules import refuse_problems
from pipelines.kubeflow.champion import decisions_on, recalibrated
from pipelines.kubeflow.remote import job_name, ray_job
from pipelines.kubeflow.steps import check_data, config_of, prepare_run, run_name, show

SCORES = np.log(np.array([[0.7, 0.2, 0.1], [0.1, 0.3, 0.6]]))


def predictions(flc=None):
    return Predictions(("a", "b"), np.array([0, 1]), SCORES, np.full(2, 0.5), (None, None), flc=flc)


@pytest.fixture
def prepared(towns_run, artifact, tmp_path):
    """The folder that a first step leaves, and its artifact."""
    source = tmp_path / "run.yaml"
    save_resolved(towns_run("Paris"), source)
    data = artifact("data")
    return prepare_run(source.read_text(), "0123456789abcdef", data), data


def test_the_first_step_makes_a_folder_of_its_own(prepared):
    folder, data = prepared
    config = config_of(folder)
    assert config.run == "towns-01234567"
    assert str(config.folder) == folder
    assert data.metadata["n_id"] == 40
    assert {"hash_train", "hash_id", "hash_ood"} <= data.metadata.keys()
    assert json.loads((Path(data.path) / "manifest.json").read_text())["splits"]["id"]["n"] == 40
    check_data(folder, data)


def test_other_data_than_the_pipeline_shows_are_refused(prepared):
    folder, data = prepared
    data.metadata["hash_id"] = "0" * 64
    with pytest.raises(UsageError, match="other splits"):
        check_data(folder, data)


def test_a_volume_mounted_elsewhere_is_noticed(prepared, tmp_path):
    folder, _ = prepared
    moved = tmp_path / "moved"
    moved.mkdir()
    save_resolved(load_run_file(f"{folder}/config.resolved.yaml"), moved / "config.resolved.yaml")
    with pytest.raises(UsageError, match="same place everywhere"):
        config_of(str(moved))


def test_a_retried_first_step_gives_the_same_folder():
    assert run_name("towns", "0123456789") == run_name("towns", "01234567ff")


def test_undefined_figures_are_left_out(artifact):
    metrics = artifact("metrics")
    block = {"accuracy": {"value": 0.5}, "ece": {"value": None}, "other": {"value": 1.0}}
    show(metrics, {"sft": {"id": {"sources": {"softmax": block}}}})
    assert metrics.metadata == {"sft_id_softmax_accuracy": 0.5}


def test_the_prediction_log_decides_beside_the_labels(towns_run, tmp_path):
    """Labelled answers as ever, but the log states 0.2 throughout where the test data had 0.6 and 0.7: D = 1."""
    many = replace(
        predictions(),
        ids=tuple(f"{i}" for i in range(60)),
        gold=np.tile([0, 2], 30),
        option_log_probs=np.tile(SCORES, (30, 1)),
        option_mass=np.full(60, 0.5),
        groups=(None,) * 60,
    )
    log = tmp_path / "log.jsonl"
    log.write_text('{"confidence_softmax": 0.2}\n' * 60)
    config = towns_run("Paris")
    drift = DriftConfig(prediction_log=log)
    labelled, unlabelled = decisions_on(many, many, config, drift)
    assert not labelled.drifted
    assert unlabelled.drifted
    assert unlabelled.values()["shift_of_softmax_worsening"] == 1.0
    assert [one.labelled for one in decisions_on(many, many, config, DriftConfig())] == [True]


def test_a_champions_temperature_is_applied(tmp_path):
    """At temperature 2 the odds of two options become their square root: 0.7 / 0.2 = 3.5 becomes 1.871."""
    fitted = tmp_path / "temperature.json"
    found = FittedTemperature(2.0, nll_before=0.9, nll_after=0.8, n=4, iterations=3, converged=True)
    fitted.write_text(json.dumps({**vars(found), "fitted_on": ["validation"]}))
    found = recalibrated({"id": predictions()}, "temperature", fitted)["id"]
    odds = np.exp(found.option_log_probs[0, 0] - found.option_log_probs[0, 1])
    assert odds == pytest.approx(np.sqrt(3.5))


def test_a_champions_step_function_is_applied(tmp_path):
    """Confidence .7 and .6 lie at the corners, which say .9 and .5."""
    fitted = tmp_path / "isotonic.json"
    fitted.write_text(json.dumps({"confidences": [0.6, 0.7], "accuracies": [0.5, 0.9], "n": 4, "fitted_on": ["a"]}))
    found = recalibrated({"id": predictions()}, "isotonic", fitted)["id"]
    np.testing.assert_allclose(found.confidence(), [0.9, 0.5])
    fitted.write_text(json.dumps({"n": 4}))
    with pytest.raises(CaltuneError, match=r"isotonic\.json.*'confidences'.*register"):
        recalibrated({"id": predictions()}, "isotonic", fitted)


def test_a_champions_temperature_by_router_is_each_questions_own(tmp_path):
    """The function is T = 1 at level 0.9 and T = e at level 0.5, so that is what the two questions get."""
    fitted = tmp_path / "flc_temperature.json"
    fitted.write_text(json.dumps({"log_temperatures": [0.0, 1.0], "levels": [0.9, 0.5], "n": 4}))
    found = recalibrated({"id": predictions(np.array([0.9, 0.5]))}, "flc_temperature", fitted)["id"]
    before, after = SCORES[:, 0] - SCORES[:, 1], found.option_log_probs[:, 0] - found.option_log_probs[:, 1]
    assert after == pytest.approx(before / np.array([1.0, np.e]))
    with pytest.raises(CaltuneError, match="no routers"):
        recalibrated({"id": predictions()}, "flc_temperature", fitted)


def test_a_rayjob_reads_the_run_folders_own_run_file(run_file):
    config = run_file(run="quick-01234567")
    name = job_name(config.run, "calm_uq4ct")
    job = ray_job(config, "calm_uq4ct", Placement("registry/trainer:1", "caltune", name, None, "16Gi", 2.0))
    assert job["metadata"]["name"] == "quick-01234567-calm-uq4ct"
    assert job["spec"]["entrypoint"] == (
        "caltune train --config /data/runs/quick-01234567/config.resolved.yaml --resume --method calm_uq4ct"
    )
    assert job["spec"]["activeDeadlineSeconds"] == 7200
    assert "configMap" not in json.dumps(job)
    refuse_problems([job])
