"""Trials that are themselves several processes of Ray Train: they find room, and leave it when they are stopped."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from components.training.trace import read_trace
from pipelines.progress import Reporter
from pipelines.run_folder import open_run_folder
from pipelines.tune import tune
from ray_jobs.trial_table import Trial, TrialTable

pytestmark = [pytest.mark.distributed, pytest.mark.slow, pytest.mark.timeout(900)]

STEPS = 400


@pytest.mark.parametrize(
    "resources",
    [{"workers": 2, "cpus_per_worker": 1}, {"workers": 2, "cpus_per_worker": 1, "deepspeed": {"stage": 2}}],
    ids=["torch", "deepspeed"],
)
def test_a_stopped_trial_makes_room_for_the_next(tmp_path, small_run, monkeypatch, resources):
    """There is room for one trial of two workers: the third can only train when the second's workers have ended.

    Both are stopped by the course that the first is said to have taken, which none can keep up with (E1, E21).
    """
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    search = {
        "method": "sft",
        "trials": 3,
        "space": {"training.learning_rate": {"choice": [5e-4, 1e-3, 2e-3]}},
        "reference_accuracy": 0.0,
        "scheduler": {"grace_steps": 2, "reduction_factor": 2},
    }
    training = {"steps": STEPS, "batch_size": 4, "evaluate_every": 2, "checkpoint_every": 20}
    config = small_run(tmp_path, methods=["sft"], recalibrate={}, training=training, tune=search, resources=resources)
    with open_run_folder(config, "refuse"):
        pass  # from now on it is a run, to be gone on with
    folder = config.folder.resolve() / "tune"
    table = TrialTable(folder / "trials.jsonl")
    earlier = folder / "trials" / "001"
    earlier.mkdir(parents=True)
    row = {"validation/nll": 0.1, "validation/ece": 0.1, "validation/accuracy": 0.9}  # untrained it is some 14
    (earlier / "trace.jsonl").write_text("".join(json.dumps({"step": s, **row}) + "\n" for s in range(0, STEPS, 2)))
    table.put(Trial(1, "sft", {"training.learning_rate": 1e-3}, "finished", "", STEPS, row, str(earlier)))

    result = tune(config, Path(), "resume", Reporter(quiet=True))

    table = TrialTable(folder / "trials.jsonl")
    assert {t.number: t.state for t in table} == {1: "finished", 2: "stopped", 3: "stopped"}
    for number in (2, 3):
        trained = list(read_trace(Path(table[number].folder) / "trace.jsonl"))
        assert 2 <= table[number].step <= trained[-1]["step"] < STEPS, "its workers ended with it"
        assert not (Path(table[number].folder) / "training.json").exists()
    assert result["steps_saved"] > STEPS
    deadline = time.monotonic() + 60  # Ray Train looks every few seconds whether somebody has gone
    while (held := groups_held()) and time.monotonic() < deadline:
        time.sleep(0.5)
    assert held == []


def groups_held() -> list[str]:
    """States of the placement groups that are not given back."""
    import ray

    return [group["state"] for group in ray.util.placement_group_table().values() if group["state"] != "REMOVED"]
