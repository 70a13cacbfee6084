"""What a worker does with a job, and what it tells Ray of it; no Ray here."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace

import pytest

from components.training.job import Process
from ray_jobs.worker import as_message, from_message, quiet_environment, run_session


def test_ray_is_told_of_evaluations_and_the_trace_of_every_step(make_job):
    """Ray takes one report every two seconds and makes a worker wait, so a report a step would set the pace."""
    job = make_job("reports", "sft", training={"steps": 7, "batch_size": 4, "evaluate_every": 3, "checkpoint_every": 4})
    reports: list[tuple] = []
    run_session(
        job, Process(), report=lambda step, values, checkpoint: reports.append((step, dict(values), checkpoint))
    )
    rows = [json.loads(line) for line in (job.folder / "trace.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == list(range(8))
    assert [step for step, _, _ in reports] == [0, 3, 4, 6, 7]
    assert [{"step": step, **values} for step, values, _ in reports if values] == [rows[i] for i in (0, 3, 6, 7)]
    written = {step: checkpoint.name for step, _, checkpoint in reports if checkpoint}
    assert written == {4: "step-00000004", 7: "step-00000007"}
    assert json.loads((job.folder / "training.json").read_text()) == {"kept_step": 7, "last_step": 7}


def test_a_job_travels_as_plain_data(make_job):
    job = make_job("message")
    job = replace(job, data=job.data.resolve(), varied=("calm.eta",), storage="s3://bucket/run/calm")
    assert from_message(json.loads(json.dumps(as_message(job)))) == job


def test_environment_that_was_chosen_is_left_alone(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("HF_HUB_DISABLE_PROGRESS_BARS", "0")
    monkeypatch.delenv("TOKENIZERS_PARALLELISM", raising=False)
    found = quiet_environment()
    assert found["HF_HUB_DISABLE_PROGRESS_BARS"] == "0"
    assert found["TOKENIZERS_PARALLELISM"] == "false"


def test_what_the_controller_imports_loads_no_model_library():
    """Ray Train's controller, before it starts a worker: seconds of every training."""
    heavy = "[name for name in ('torch', 'transformers', 'peft') if name in sys.modules]"
    done = subprocess.run(
        [sys.executable, "-c", f"import sys, ray_jobs.worker, ray_jobs.train; print({heavy})"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip() == "[]"
