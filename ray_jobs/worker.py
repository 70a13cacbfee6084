"""What each Ray Train worker runs. Importable by name, so Ray pickles it by reference.

Ray Train's controller imports it too, before there is any worker: whatever loads a model is imported where it is used.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from components.config import RunConfig
from components.models.base import ResolvedModel
from components.training.job import Process, Requests, StopRequested, TrainingJob, nothing_asked
from components.training.trace import TraceWriter
from ray_jobs.worker_files import DATA, RESULT, TRACE, WorkerFiles

if TYPE_CHECKING:
    from components.models.score_questions import SplitScores

Report = Callable[[int, Mapping[str, float], Path | None], None]
"""Told by every rank of every evaluation and checkpoint: step, metrics (empty without an evaluation), the checkpoint's
folder on the rank that wrote it."""


def as_message(job: TrainingJob) -> dict[str, Any]:
    """The job as plain data, for Ray to carry. Paths are made absolute: a worker has a current folder of its own."""
    return {
        "config": job.config.model_dump(mode="json"),
        "method": job.method,
        "data": str(job.data.resolve()),
        "folder": str(job.folder.resolve()),
        "resolved": asdict(job.resolved),
        "details": dict(job.details),
        "varied": list(job.varied),
        "storage": job.storage,
        "member": job.member,
    }


def from_message(message: Mapping[str, Any]) -> TrainingJob:
    """The job that `as_message` was given."""
    return TrainingJob(
        config=RunConfig.model_validate(message["config"]),
        method=message["method"],
        data=Path(message["data"]),
        folder=Path(message["folder"]),
        resolved=ResolvedModel(**message["resolved"]),
        details=message["details"],
        varied=tuple(message["varied"]),
        storage=message["storage"],
        member=message["member"],
    )


def train_worker(message: dict[str, Any]) -> None:
    """Trains a method as one rank of Ray Train's process group, from its newest checkpoint if there is one.

    A failure that another try cannot mend (wrong data, training that diverged, a full disk) is left in the job's
    folder, where the driver finds it; after any other Ray Train starts the workers again.
    """
    import ray.train
    import torch
    from ray.train.torch import get_device

    from ray_jobs.worker_requests import AgreedRequests

    context = ray.train.get_context()
    process = Process(context.get_world_rank(), context.get_world_size(), str(get_device()))
    torch.set_num_threads(int(message["threads"]))
    with _local_job(from_message(message), process.rank) as job:
        files = WorkerFiles(job)
        if files.failed():
            return  # on one rank before: Ray has started all of them again, and once is enough
        try:
            run_session(
                job,
                process,
                report=_report_to_ray,
                requests=AgreedRequests(files.stop_requested, process),
            )
        except StopRequested:
            return
        except Exception as problem:
            if not files.keep_final_failure(problem, process.rank, traceback.format_exc()) or process.world_size > 1:
                raise  # with several ranks: so that Ray ends those that wait for this one


def run_session(
    job: TrainingJob,
    process: Process,
    *,
    report: Report,
    requests: Requests = nothing_asked,
) -> None:
    """Trains from the newest checkpoint, if there is one, and keeps the trace, which rank 0 writes.

    Args:
        job: What to train.
        process: Which rank this is.
        report: Told of evaluations and checkpoints by every rank equally often (E3).
        requests: Asked after every step.

    Raises:
        StopRequested: It was asked to stop, and there is a checkpoint to go on from.
    """
    from components.evaluation.score_split import traced_metrics
    from components.files import write_json
    from components.training.session import Session

    trace: TraceWriter | None = None
    files = WorkerFiles(job)

    def on_step(steps_taken: int, values: Mapping[str, float]) -> None:
        if trace is not None:
            trace.add(steps_taken, values)

    def on_milestone(steps_taken: int, values: Mapping[str, float], checkpoint: Path | None) -> None:
        if process.rank == 0:
            files.share()
        report(steps_taken, values, checkpoint)

    def judge(scores: SplitScores) -> dict[str, float]:
        return traced_metrics(scores, job.config.evaluation.bins)

    session = Session(job, process, judge, on_step, on_milestone, requests)
    taken = session.resume()
    if process.rank == 0:
        trace = TraceWriter(job.folder / TRACE, resume_from=taken)
        files.note_start(taken, process.world_size, session.passed_over)
    try:
        result = session.train()
    finally:
        if trace is not None:
            trace.close()
    if process.rank == 0:
        write_json(job.folder / RESULT, {"kept_step": result.kept_step, "last_step": result.last_step})
        files.share_result()


def _report_to_ray(step: int, values: Mapping[str, float], checkpoint: Path | None) -> None:
    """Hands metrics and a pointer to the checkpoint to Ray Train.

    The checkpoint itself stays where it is: what Ray keeps of it would be lost to a run that is started anew, and Ray
    refuses to go on where one that it knows of is gone.
    """
    import ray.train

    if checkpoint is None:
        ray.train.report({"step": step, **values})
        return
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "checkpoint.txt").write_text(str(checkpoint), encoding="utf-8")
        pointer = ray.train.Checkpoint.from_directory(folder)
        ray.train.report({"step": step, **values}, pointer, checkpoint_dir_name=f"{checkpoint.name}-{os.getpid()}")


@contextmanager
def _local_job(job: TrainingJob, rank: int) -> Iterator[TrainingJob]:
    """The job with folders on this node: its own, or a scratch folder with the data from shared storage."""
    if job.storage is None:
        yield job
        return
    scratch = Path(tempfile.mkdtemp(prefix=f"caltune-{job.config.run}-{rank}-"))
    try:
        local = replace(job, data=scratch / DATA, folder=scratch / job.method)
        WorkerFiles(local).fetch(local.data)
        yield local
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def quiet_environment() -> dict[str, str]:
    """Environment of worker processes: no chatter, no telemetry, the accelerator DeepSpeed should see."""
    import torch

    quiet = {"TOKENIZERS_PARALLELISM": "false", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
    if not torch.cuda.is_available():
        quiet["DS_ACCELERATOR"] = "cpu"
    return {k: os.environ.get(k, v) for k, v in quiet.items()}
