"""Training a method through Ray Train: one TorchTrainer, one CPU worker or many sharded ones.

The trainer runs in a thread of its own while this one follows the trace that rank 0 writes, so that progress is shown
as it happens and Ctrl-C reaches us at once.
"""

from __future__ import annotations

import json
import os
import shutil
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from components.errors import CaltuneError, Interrupted
from components.files import read_json
from components.storage import joined
from components.training.job import CHECKPOINTS, TrainingJob
from components.training.trace import read_trace
from ray_jobs.cluster import connect, cpus_per_worker
from ray_jobs.worker import as_message, train_worker
from ray_jobs.worker_files import ERROR_LOG, RESULT, TRACE, DriverFiles, Start

OnRow = Callable[[Mapping[str, float]], None]
OnStart = Callable[[Start], None]

POLL_SECONDS = 0.2
STOP_SECONDS = 120.0
"""For a step, an evaluation and a checkpoint to end. Whoever sends SIGTERM usually sends SIGKILL after 30 s."""


def train(job: TrainingJob, *, resume: bool, on_row: OnRow, on_start: OnStart = lambda start: None) -> dict[str, Any]:
    """Trains a method and leaves `adapter/`, `checkpoints/`, `trace.jsonl` and `training.json` in its folder.

    Workers that are lost are replaced up to `resources.max_failures` times and go on from the newest checkpoint.

    Args:
        job: What to train.
        resume: Continue from the newest checkpoint, if there is one; else what is there is removed.
        on_row: Called in this thread with each row of the trace, in order.
        on_start: Called when workers have started: once, and again whenever some were lost or their number changed.

    Returns:
        Content of `training.json`: `kept_step` and `last_step`.

    Raises:
        CaltuneError: A worker failed; the message has its last words, `error.log` all of them.
        Interrupted: This process was asked to end (SIGTERM); the workers have left a checkpoint first.
        UsageError: More was asked for than Ray has.
    """
    connect()
    files = DriverFiles(job)
    trainer = _trainer(job)
    if not resume:
        shutil.rmtree(job.folder / CHECKPOINTS, ignore_errors=True)
    files.begin(resume)
    fit = _Fit(trainer)
    follower = TraceFollower(job.folder / TRACE, on_row)
    seen = 0

    def follow() -> None:
        nonlocal seen
        files.poll()
        follower.read()
        starts = files.starts()
        for start in starts[seen:]:
            on_start(start)
        seen = len(starts)

    try:
        while fit.running(POLL_SECONDS):
            follow()
    except Interrupted:
        raise Interrupted(_stopped(job, files, fit)) from None
    files.fetch_result()
    follow()
    final = files.failure()
    if final is not None:
        log = job.folder / ERROR_LOG
        raise CaltuneError(f"training failed on rank {final['rank']}: {final['message']} (all of it: {log})")
    if fit.failure is not None:
        raise _explained(fit.failure, job.folder)
    return read_json(job.folder / RESULT, remedy="train again")


class _Fit:
    """Ray Train at work in a thread of its own."""

    def __init__(self, trainer: Any) -> None:
        self.failure: BaseException | None = None
        self._trainer = trainer
        self._ended = threading.Event()
        threading.Thread(target=self._run, name="ray-train", daemon=True).start()

    def _run(self) -> None:
        try:
            self._trainer.fit()
        except BaseException as problem:  # handed over to the thread that waits
            self.failure = problem
        finally:
            self._ended.set()

    def running(self, seconds: float) -> bool:
        """Whether it still is after so long, or earlier if it has ended."""
        # An event, not the thread's end: a join that a signal interrupts takes the thread for ended (bpo-45274).
        return not self._ended.wait(seconds)


def _stopped(job: TrainingJob, files: DriverFiles, fit: _Fit) -> str:
    """Has the workers leave a checkpoint and end; says how it went. Another signal ends the wait."""
    files.request_stop()
    deadline = time.monotonic() + STOP_SECONDS
    while fit.running(POLL_SECONDS):
        if time.monotonic() > deadline:
            return f"{job.method} did not stop within {STOP_SECONDS:.0f} s; --resume goes on from its newest checkpoint"
    files.fetch_result()
    steps = [row["step"] for row in read_trace(job.folder / TRACE)] if (job.folder / TRACE).exists() else []
    where = f"at step {int(steps[-1])}, in a checkpoint" if steps else "before its first step"
    return f"stopped on request: {job.method} stands {where}; go on with --resume"


def _trainer(job: TrainingJob) -> Any:
    import ray.train
    from ray.train.torch import TorchTrainer

    # How often Ray looks at its workers; a report waits until it has.
    os.environ.setdefault("RAY_TRAIN_HEALTH_CHECK_INTERVAL_S", "0.5")
    resources = job.config.resources
    cpus = cpus_per_worker(resources)
    # A name of its own for every attempt: what is resumed is our checkpoint, never Ray's earlier state (E2).
    name = f"{job.method}-{time.strftime('%Y%m%d-%H%M%S')}"
    storage = str((job.folder / "ray").resolve()) if job.storage is None else joined(job.storage, "ray")
    elastic = (resources.min_workers, resources.workers) if resources.min_workers is not None else resources.workers
    return TorchTrainer(
        train_worker,
        train_loop_config={**as_message(job), "threads": cpus},
        scaling_config=ray.train.ScalingConfig(
            num_workers=elastic,  # type: ignore[arg-type]  # the annotation is that of the class it replaces
            use_gpu=resources.use_gpu,
            resources_per_worker={"CPU": cpus} | ({"GPU": 1} if resources.use_gpu else {}),
        ),
        run_config=ray.train.RunConfig(
            name=name,
            storage_path=storage,
            failure_config=ray.train.FailureConfig(max_failures=resources.max_failures),
            checkpoint_config=ray.train.CheckpointConfig(num_to_keep=job.config.training.keep_checkpoints),
        ),
    )


def _explained(problem: BaseException, folder: Path) -> BaseException:
    """The worker's own error in one sentence, its traceback in a file."""
    import ray.train

    if isinstance(problem, ray.train.ControllerError):
        said = str(problem).strip().splitlines()[1:2] or [str(problem)]  # the first line says that it failed
        return CaltuneError(f"Ray Train's own process failed: {said[0]}; mend that and go on with --resume")
    workers = getattr(problem, "worker_failures", None)
    if not workers:
        return problem
    rank, first = sorted(workers.items())[0]
    first = getattr(first, "_base_exc", first)
    log = folder / ERROR_LOG
    # The errors themselves arrive without their tracebacks; Ray's own message holds those of all ranks as text.
    with suppress(OSError):  # on a full disk the sentence below is all there is
        log.write_text(str(problem), encoding="utf-8")
    cause = getattr(first, "cause", None) or first
    words = (str(cause).strip().splitlines() or [type(cause).__name__])[-1]
    return CaltuneError(f"training failed on rank {rank}: {words} (all of it: {log})")


class TraceFollower:
    """Reads a trace while it is written.

    A resumed run first rewrites its trace without the steps it will take again, as a new file in the old one's place;
    each step is handed over once all the same.

    Args:
        path: The trace; need not exist yet.
        on_row: Called with each row, in order.
    """

    def __init__(self, path: Path, on_row: OnRow) -> None:
        self.path, self.on_row = path, on_row
        self._inode, self._offset, self._last_step = 0, 0, -1

    def read(self) -> None:
        """Hands over the complete rows that have come since the last call."""
        if not self.path.exists():
            return
        with self.path.open("rb") as file:
            inode = os.fstat(file.fileno()).st_ino
            if inode != self._inode:
                self._inode, self._offset = inode, 0
            file.seek(self._offset)
            for line in file:
                if not line.endswith(b"\n"):
                    break
                self._offset += len(line)
                row = json.loads(line)
                if row["step"] > self._last_step:
                    self._last_step = row["step"]
                    self.on_row(row)
