"""Population based training for real: bad trials go on from good ones' checkpoints, also after a kill."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
from mlflow.tracking import MlflowClient

from components.config import RunConfig
from components.models.adapter_files import verify_adapter
from components.run_file import load_run_file, to_yaml
from components.training.trace import read_trace
from pipelines.progress import Reporter
from pipelines.run_folder import open_run_folder
from pipelines.tune import tune
from ray_jobs.trial_table import Trial, TrialTable

pytestmark = [pytest.mark.distributed, pytest.mark.slow, pytest.mark.timeout(1200)]

RATE = "calm.alpha_learning_rate"


def population_of(build, folder: Path) -> RunConfig:
    """Three trials, two at a time, compared at steps 2 and 4 of 5."""
    return build(
        folder,
        methods=["calm"],
        recalibrate={},
        training={"steps": 5, "batch_size": 4, "evaluate_every": 1, "checkpoint_every": 1},
        calm={"inner_steps": 1, "alpha_learning_rate": 0.5, "stop": {"rule": "keep_best", "split": "both"}},
        resources={"cpus_per_worker": 1},
        tune={
            "method": "calm",
            "trials": 3,
            "reference_accuracy": 0.0,
            "space": {RATE: {"log_uniform": [1e-6, 1.0]}},
            "scheduler": {"kind": "pbt", "keys": [RATE], "interval_steps": 2},
        },
    )


def rows_of(config: RunConfig) -> dict[int, dict[str, Any]]:
    table = config.folder / "tune" / "trials.jsonl"
    return {row["number"]: row for row in map(json.loads, table.read_text().splitlines())} if table.exists() else {}


@pytest.fixture(scope="module")
def searched(tmp_path_factory, small_run) -> tuple[RunConfig, dict[str, Any]]:
    """A search that nothing disturbs."""
    os.environ.pop("MLFLOW_TRACKING_URI", None)
    config = population_of(small_run, tmp_path_factory.mktemp("population"))
    return config, tune(config, Path(), "refuse", Reporter(quiet=True))


def test_the_worst_go_on_from_the_best_with_values_near_theirs(searched):
    config, result = searched
    rows = rows_of(config)
    assert {row["state"] for row in rows.values()} == {"finished"}
    assert [exchange["step"] for exchange in sorted(result["exchanges"], key=lambda e: e["step"])] == [2, 4]
    for exchange in result["exchanges"]:
        trial, donor = rows[exchange["trial"]], rows[exchange["from"]]
        assert exchange["nll"] > exchange["from_nll"]
        assert f"took over trial {donor['number']} at step {exchange['step']}" in trial["reason"]
        traces = [list(read_trace(Path(row["folder"]) / "trace.jsonl")) for row in (trial, donor)]
        assert [row["step"] for row in traces[0]] == list(range(6))
        if trial["perturbations"][-1]["step"] == exchange["step"]:
            last = trial["perturbations"][-1]
            assert trial["parameters"] == last["after"], "what it ends with"
            if not any(event["step"] > exchange["step"] for event in donor["perturbations"]):
                shared = exchange["step"] + 1
                assert traces[0][:shared] == traces[1][:shared], "the donor's course up to there"
                assert traces[0][shared:] != traces[1][shared:], "a course of its own from there on"
    for row in rows.values():
        assert verify_adapter(Path(row["folder"]) / "adapter")["method"] == "calm"


def test_the_best_run_file_says_how_its_weights_came_about(searched):
    config, result = searched
    best = rows_of(config)[result["best"]["trial"]]
    text = Path(result["best_run_file"]).read_text()
    assert load_run_file(result["best_run_file"]).calm.alpha_learning_rate == best["parameters"][RATE]
    course = result["best"].get("course", [])
    assert (len(course) > 1) == bool(best["perturbations"])
    for entry in course:
        assert f"from step {entry['step']} on, in trial {entry['trial']}: {RATE} {entry['values'][RATE]:.3g}" in text


def test_the_values_are_seen_in_mlflow_as_they_change(searched):
    config, result = searched
    client = MlflowClient(f"sqlite:///{config.output_dir.resolve() / 'mlflow.db'}")
    experiment = client.get_experiment_by_name("caltune")
    runs = {run.info.run_name: run for run in client.search_runs([experiment.experiment_id])}
    exchange = result["exchanges"][0]
    run = runs[f"trial-{exchange['trial']:03d}"]
    history = client.get_metric_history(run.info.run_id, f"tune/{RATE}")
    assert {exchange["before"][RATE], exchange["after"][RATE]} <= {metric.value for metric in history}


@pytest.mark.parametrize("moment", ["one waits", "after an exchange"])
def test_a_search_that_is_killed_ends_as_if_it_had_not_been(searched, tmp_path, small_run, start, moment):
    """Killed while a trial waits for the others at step 2, or once one has gone on from another's checkpoint."""
    config = population_of(small_run, tmp_path / "outputs")
    run_file = tmp_path / "small.yaml"
    run_file.write_text(to_yaml(config))

    def reached() -> bool:
        rows = rows_of(config).values()
        if moment == "one waits":
            return any(row["step"] == 2 for row in rows)
        return any(row["perturbations"] and row["step"] > 2 for row in rows)

    process = start(tmp_path, "tune", "--config", run_file, name="killed")
    deadline = time.monotonic() + 600
    while not reached():
        assert time.monotonic() < deadline
        assert process.poll() is None, (tmp_path / "killed.err").read_text()
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    process.wait(60)
    assert {row["state"] for row in rows_of(config).values()} == {"running"}
    code = start(tmp_path, "tune", "--config", run_file, "--resume", "--json", name="resumed").wait(600)
    assert code == 0, (tmp_path / "resumed.err").read_text()
    undisturbed = rows_of(searched[0])
    for number, row in rows_of(config).items():
        expected = undisturbed[number]
        assert row["state"] == "finished"
        assert row["parameters"] == pytest.approx(expected["parameters"])
        assert row["metrics"] == pytest.approx(expected["metrics"], abs=1e-5)
        assert [(e["step"], e["from"]) for e in row["perturbations"]] == [
            (e["step"], e["from"]) for e in expected["perturbations"]
        ]


def test_the_others_go_on_without_a_trial_that_fails(tmp_path, small_run, monkeypatch):
    """Two trials wait for a third, which diverges before it reaches them: they are compared without it."""
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    config = small_run(
        tmp_path,
        methods=["sft"],
        recalibrate={},
        training={"steps": 3, "batch_size": 4, "evaluate_every": 2, "checkpoint_every": 2},
        resources={"cpus_per_worker": 1},
        tune={
            "method": "sft",
            "trials": 3,
            "reference_accuracy": 0.0,
            "space": {"training.learning_rate": {"choice": [5e-4, 1e-2, 1e30]}},
            "scheduler": {"kind": "pbt", "keys": ["training.learning_rate"], "interval_steps": 2, "fraction": 0.5},
        },
    )
    with open_run_folder(config, "refuse"):
        pass  # from now on it is a run, to be gone on with
    table = TrialTable(config.folder / "tune" / "trials.jsonl")
    for number, rate in ((1, 5e-4), (2, 1e-2), (3, 1e30)):
        folder = config.folder.resolve() / "tune" / "trials" / f"{number:03d}"
        table.put(Trial(number, "sft", {"training.learning_rate": rate}, folder=str(folder)))
    result = tune(config, Path(), "resume", Reporter(quiet=True))
    assert {number: row["state"] for number, row in rows_of(config).items()} == {
        1: "finished",
        2: "finished",
        3: "failed",
    }
    assert [exchange["step"] for exchange in result["exchanges"]] == [2]
