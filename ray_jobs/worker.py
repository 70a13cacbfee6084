"""What each Ray Train worker runs. Importable by name, so Ray pickles it by reference."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from components.config import RunConfig
from components.models.base import ResolvedModel
from components.models.score_questions import SplitScores
from components.training.session import Process, Session, TrainingJob
from components.training.trace import TraceWriter

TRACE = "trace.jsonl"
RESULT = "training.json"


def as_message(job: TrainingJob, resume: bool) -> dict[str, Any]:
    """The job as plain data, for Ray to carry. Paths are made absolute: a worker has a current folder of its own."""
    return {
        "config": job.config.model_dump(mode="json"),
        "method": job.method,
        "data": str(job.data.resolve()),
        "folder": str(job.folder.resolve()),
        "resolved": asdict(job.resolved),
        "details": dict(job.details),
        "resume": resume,
    }


def train_worker(message: dict[str, Any]) -> None:
    """Trains a method as one rank of Ray Train's process group."""
    import ray.train
    import torch
    from ray.train.torch import get_device

    context = ray.train.get_context()
    rank, world_size = context.get_world_rank(), context.get_world_size()
    torch.set_num_threads(int(message["threads"]))
    job = TrainingJob(
        config=RunConfig.model_validate(message["config"]),
        method=message["method"],
        data=Path(message["data"]),
        folder=Path(message["folder"]),
        resolved=ResolvedModel(**message["resolved"]),
        details=message["details"],
    )
    device = str(get_device())
    run_session(job, Process(rank, world_size, device), resume=message["resume"], report=ray.train.report)


def run_session(job: TrainingJob, process: Process, *, resume: bool, report: Any) -> None:
    """Trains and keeps the trace; rank 0 writes it, every rank reports equally often (E3).

    Ray Train hands a report on every two seconds and holds a worker up that has another one before, so steps go into
    the trace alone and evaluations to Ray too.

    Args:
        job: What to train.
        process: Which rank this is.
        resume: Continue from the newest checkpoint.
        report: Called with the metrics of every evaluation by every rank.
    """
    from components.evaluation.score_split import traced_metrics
    from components.files import write_json

    trace: TraceWriter | None = None

    def on_step(steps_taken: int, values: Mapping[str, float]) -> None:
        if trace is not None:
            trace.add(steps_taken, values)
        if any("/" in name for name in values):  # <split>/<metric>: there was an evaluation
            report({"step": steps_taken, **values})

    def judge(scores: SplitScores) -> dict[str, float]:
        return traced_metrics(scores, job.config.evaluation.bins)

    session = Session(job, process, judge, on_step)
    taken = session.resume() if resume else 0
    if process.rank == 0:
        trace = TraceWriter(job.folder / TRACE, resume_from=taken)
    try:
        result = session.train()
    finally:
        if trace is not None:
            trace.close()
    if process.rank == 0:
        write_json(job.folder / RESULT, {"kept_step": result.kept_step, "last_step": result.last_step})


def quiet_environment() -> dict[str, str]:
    """Environment of worker processes: no chatter, no telemetry, the accelerator DeepSpeed should see."""
    import torch

    quiet = {"TOKENIZERS_PARALLELISM": "false", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
    if not torch.cuda.is_available():
        quiet["DS_ACCELERATOR"] = "cpu"
    return {k: os.environ.get(k, v) for k, v in quiet.items()}
