"""A search as a job on a real Ray head: stopped in its midst, submitted again, and found in MLflow."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
from mlflow import MlflowClient

from components.models.adapter_files import verify_adapter
from components.run_file import load_run_file
from components.training.trace import read_trace
from tests.ray_jobs.test_submit import head, make_run

__all__ = ["head", "make_run"]
pytestmark = [pytest.mark.distributed, pytest.mark.slow, pytest.mark.timeout(900)]

STEPS = 120


def rows_of(table: Path) -> dict[int, dict[str, Any]]:
    rows = [json.loads(line) for line in table.read_text().splitlines()] if table.exists() else []
    return {row["number"]: row for row in rows}


def test_a_search_is_stopped_and_goes_on_without_repeating_finished_trials(head, make_run, tmp_path):
    uri = f"sqlite:///{tmp_path}/mlflow.db"
    run_file = make_run(
        "searched",
        output_dir=str(tmp_path),
        methods=["sft"],
        training={"steps": STEPS, "batch_size": 4, "evaluate_every": 10, "checkpoint_every": 10},
        tracking={"uri": uri},
        tune={
            "method": "sft",
            "trials": 3,
            "space": {"training.learning_rate": {"log_uniform": [1e-4, 1e-2]}},
            "reference_accuracy": 0.0,
            "scheduler": None,
        },
    )
    folder = tmp_path / "searched" / "tune"
    advice = json.loads(head.call("doctor", "--config", run_file, "--json").stdout)
    assert any("Ray has 2 CPU cores, which fits 2 at once" in finding["found"] for finding in advice), advice
    accepted = head.call("submit", "tune", "--config", run_file, "--no-wait")
    assert accepted.returncode == 0, accepted.stderr
    job = accepted.stdout.strip()
    deadline = time.monotonic() + 400
    while not any(row["number"] == 2 and row["step"] >= 20 for row in rows_of(folder / "trials.jsonl").values()):
        assert time.monotonic() < deadline, head.call("logs", job).stdout
        time.sleep(0.05)
    stopped = head.call("stop", job)
    assert (stopped.returncode, stopped.stdout) == (0, f"{job}: STOPPED\n"), stopped.stderr
    assert head.call("status", job).returncode == 130
    left = rows_of(folder / "trials.jsonl")
    assert {number: row["state"] for number, row in left.items()} == {1: "finished", 2: "interrupted"}
    weights = folder / "trials" / "001" / "adapter" / "adapter_model.safetensors"
    trained = weights.stat().st_mtime_ns

    again = head.start("submit", "tune", "--config", run_file, "--resume")
    _, log = again.communicate(timeout=600)
    assert again.returncode == 0, log
    rows = rows_of(folder / "trials.jsonl")
    assert {number: row["state"] for number, row in rows.items()} == {1: "finished", 2: "finished", 3: "finished"}
    assert rows[1] == left[1]
    assert weights.stat().st_mtime_ns == trained, "not trained again"
    assert rows[2]["parameters"] == left[2]["parameters"]
    trace = [row["step"] for row in read_trace(folder / "trials" / "002" / "trace.jsonl")]
    assert trace == list(range(STEPS + 1)), "each step once"
    starts = (folder / "trials" / "002" / "starts.jsonl").read_text().splitlines()
    assert json.loads(starts[-1])["from_step"] >= 20, "from its checkpoint"
    result = json.loads((folder / "search.json").read_text())
    best = load_run_file(folder / "best.yaml")
    assert best.training.learning_rate == rows[result["best"]["trial"]]["parameters"]["training.learning_rate"]
    assert verify_adapter(Path(result["best"]["adapter"]))["method"] == "sft"

    client = MlflowClient(uri)
    experiment = client.get_experiment_by_name("caltune")
    runs = client.search_runs([experiment.experiment_id])
    finished = {run.info.run_name for run in runs if run.info.status == "FINISHED"}
    assert {"searched", "trial-001", "trial-002", "trial-003"} <= finished
    parents = {run.info.run_id for run in runs if run.info.run_name == "searched"}
    assert {run.data.tags["mlflow.parentRunId"] for run in runs if run.info.run_name.startswith("trial-")} <= parents
