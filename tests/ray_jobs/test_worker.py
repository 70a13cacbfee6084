"""What a worker does with a job, and what it tells Ray of it; no Ray here."""

from __future__ import annotations

import json

import pytest

from components.config import RunConfig
from components.training.session import Process
from ray_jobs.worker import as_message, quiet_environment, run_session


def test_ray_is_told_of_evaluations_and_the_trace_of_every_step(make_job):
    """Ray takes one report every two seconds and makes a worker wait, so a report a step would set the pace."""
    job = make_job("reports", "sft", training={"steps": 7, "batch_size": 4, "evaluate_every": 3})
    reports: list[dict] = []
    run_session(job, Process(), resume=False, report=reports.append)
    rows = [json.loads(line) for line in (job.folder / "trace.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == list(range(8))
    assert [report["step"] for report in reports] == [0, 3, 6, 7]
    assert reports == [row for row in rows if row["step"] in (0, 3, 6, 7)]
    assert json.loads((job.folder / "training.json").read_text()) == {"kept_step": 7, "last_step": 7}


def test_a_job_travels_as_plain_data(make_job):
    job = make_job("message")
    message = json.loads(json.dumps(as_message(job, resume=True)))
    assert RunConfig.model_validate(message["config"]) == job.config
    assert message["resume"] is True


def test_environment_that_was_chosen_is_left_alone(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("HF_HUB_DISABLE_PROGRESS_BARS", "0")
    monkeypatch.delenv("TOKENIZERS_PARALLELISM", raising=False)
    found = quiet_environment()
    assert found["HF_HUB_DISABLE_PROGRESS_BARS"] == "0"
    assert found["TOKENIZERS_PARALLELISM"] == "false"
