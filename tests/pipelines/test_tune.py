"""A real search on the tiny model: through Ray Tune and Optuna, stopped early, broken off, continued."""

from __future__ import annotations

import json
import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from mlflow.tracking import MlflowClient

from components.config import RunConfig
from components.models.adapter_files import verify_adapter
from components.run_file import load_run_file, to_yaml
from components.training.trace import read_trace
from pipelines.progress import Reporter
from pipelines.tune import tune
from ray_jobs.trial_table import Trial, TrialTable

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(600)]

SEARCH = {
    "method": "sft",
    "trials": 1,
    "space": {"training.learning_rate": {"choice": [5e-4, 30.0, 1e30]}},
    "reference_accuracy": 0.0,
    "scheduler": {"grace_steps": 2, "reduction_factor": 2},
}
TRAINING = {"steps": 5, "batch_size": 4, "evaluate_every": 1, "checkpoint_every": 2}


@dataclass(frozen=True)
class Searched:
    """A search of one trial, continued with two that had been interrupted: one bound to be stopped, one to fail."""

    config: RunConfig
    first: dict[str, Any]
    adapters_before: dict[int, int]
    result: dict[str, Any]
    table: TrialTable


@pytest.fixture(scope="module")
def searched(tmp_path_factory, small_run) -> Searched:
    os.environ.pop("MLFLOW_TRACKING_URI", None)
    config = small_run(
        tmp_path_factory.mktemp("searched"), methods=["sft"], recalibrate={}, training=TRAINING, tune=SEARCH
    )
    quiet = Reporter(quiet=True)
    first = tune(config, Path(), "refuse", quiet)
    path = config.folder / "tune" / "trials.jsonl"
    table = TrialTable(path)
    before = {t.number: (t.adapter / "adapter_model.safetensors").stat().st_mtime_ns for t in table if t.adapter}
    for number, rate in ((2, 30.0), (3, 1e30)):
        folder = config.folder.resolve() / "tune" / "trials" / f"{number:03d}"
        table.put(Trial(number, "sft", {"training.learning_rate": rate}, folder=str(folder)))
    result = tune(config, Path(), "resume", quiet, trials=3)
    return Searched(config, first, before, result, TrialTable(path))


def test_every_trial_stands_in_the_table_with_its_end(searched):
    states = {t.number: t.state for t in searched.table}
    assert states == {1: "finished", 2: "stopped", 3: "failed"}
    assert searched.table[1].parameters == {"training.learning_rate": 5e-4}  # the run file's own
    assert searched.result["trials"] == {"finished": 1, "stopped": 1, "failed": 1}


def test_a_continued_search_repeats_no_finished_trial(searched):
    assert searched.adapters_before.keys() == {1}
    for number, modified in searched.adapters_before.items():
        adapter = searched.table[number].adapter
        assert adapter is not None
        assert (adapter / "adapter_model.safetensors").stat().st_mtime_ns == modified
        assert verify_adapter(adapter)["method"] == "sft"


def test_asha_stops_a_bad_trial_after_fewer_steps_by_what_earlier_trials_reached(searched):
    stopped = searched.table[2]
    trace = list(read_trace(Path(stopped.folder) / "trace.jsonl"))
    assert trace[-1]["step"] == stopped.step < TRAINING["steps"]
    assert stopped.reason.startswith(f"stopped by asha at step {stopped.step}: validation NLL ")
    assert not (Path(stopped.folder) / "adapter").exists()
    assert searched.result["steps_saved"] == TRAINING["steps"] - stopped.step > 0


def test_a_failed_trial_says_why_and_ends_nothing(searched):
    failed = searched.table[3]
    log = Path(failed.folder) / "error.log"
    assert failed.reason.endswith(f"(all of it: {log})")
    assert "FloatingPointError" in failed.reason
    assert "Traceback" in log.read_text()


def test_the_best_is_a_complete_run_file_with_its_values(searched):
    best = searched.result["best"]
    assert best["trial"] == searched.first["best"]["trial"] == 1
    assert best["ece"] == searched.table[1].metrics["validation/ece"]
    config = load_run_file(searched.result["best_run_file"])
    assert config.run == "small-best"
    assert config.tune is None
    assert config.training.learning_rate == searched.table[best["trial"]].parameters["training.learning_rate"]
    assert config.data == searched.config.data
    written = json.loads((searched.config.folder / "tune" / "search.json").read_text())
    assert written == searched.result


def test_figures_are_drawn(searched):
    folder = searched.config.folder / "tune"
    for name in ("pareto_front.png", "parallel_coordinates.png"):
        assert (folder / name).read_bytes().startswith(b"\x89PNG")


def test_trials_are_nested_runs_with_parameters_evaluations_and_ends(searched):
    client = MlflowClient(f"sqlite:///{searched.config.output_dir.resolve() / 'mlflow.db'}")
    experiment = client.get_experiment_by_name("caltune")
    runs = {r.info.run_name: r for r in client.search_runs([experiment.experiment_id])}
    parent = runs.pop("small")
    assert {f"trial-{n:03d}" for n in (1, 2, 3)} <= runs.keys()
    assert {r.data.tags["mlflow.parentRunId"] for r in runs.values()} == {parent.info.run_id}
    first, stopped, failed = runs["trial-001"], runs["trial-002"], runs["trial-003"]
    assert first.data.params["training.learning_rate"] == "0.0005"
    assert first.data.metrics["tune/ece"] == pytest.approx(searched.table[1].metrics["validation/ece"])
    history = client.get_metric_history(first.info.run_id, "validation/nll")
    assert {m.step for m in history} == set(range(TRAINING["steps"] + 1))
    assert stopped.data.tags["caltune.trial_state"] == "stopped"
    assert (first.info.status, failed.info.status) == ("FINISHED", "FAILED")


@pytest.mark.slow
@pytest.mark.parametrize("blow", [signal.SIGINT, signal.SIGKILL])
def test_a_search_that_is_broken_off_in_a_trial_goes_on_where_it_was(tmp_path, small_run, start, blow):
    """Against the reference it also trains; the trial that ran continues from its checkpoint under its number."""
    search = SEARCH | {
        "method": "calm",
        "trials": 2,
        "reference_accuracy": None,
        "space": {"calm.alpha_learning_rate": {"log_uniform": [1e-3, 1e-1]}},
        "scheduler": None,
    }
    training = TRAINING | {"steps": 60, "evaluate_every": 5, "checkpoint_every": 5}
    config = small_run(tmp_path / "outputs", methods=["sft", "calm"], recalibrate={}, training=training, tune=search)
    run_file = tmp_path / "small.yaml"
    run_file.write_text(to_yaml(config))
    table = config.folder / "tune" / "trials.jsonl"
    process = start(tmp_path, "tune", "--config", run_file, name="broken")
    deadline = time.monotonic() + 300
    while not (table.exists() and any(t["number"] == 1 and t["step"] >= 10 for t in _rows(table))):
        assert time.monotonic() < deadline
        assert process.poll() is None, (tmp_path / "broken.err").read_text()
        time.sleep(0.05)
    process.send_signal(blow)
    code = process.wait(60)
    assert code == (130 if blow == signal.SIGINT else -blow)
    left = {row["number"]: row for row in _rows(table)}
    assert left[0]["state"] == "finished"
    assert left[1]["state"] == ("interrupted" if blow == signal.SIGINT else "running")
    code = start(tmp_path, "tune", "--config", run_file, "--resume", "--json", name="resumed").wait(300)
    assert code == 0, (tmp_path / "resumed.err").read_text()
    rows = {row["number"]: row for row in _rows(table)}
    assert {number: row["state"] for number, row in rows.items()} == {0: "finished", 1: "finished", 2: "finished"}
    assert rows[0] == left[0]
    assert rows[1]["parameters"] == left[1]["parameters"]
    steps = [row["step"] for row in read_trace(Path(rows[1]["folder"]) / "trace.jsonl")]
    assert steps == list(range(61))
    result = json.loads((tmp_path / "resumed.out").read_text())
    assert result["reference_accuracy"] == rows[0]["metrics"]["validation/accuracy"]


def _rows(table: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in table.read_text().splitlines()]
