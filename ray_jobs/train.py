"""Training a method through Ray Train: one TorchTrainer, one CPU worker or many sharded ones.

The trainer runs in a thread of its own while this one follows the trace that rank 0 writes, so that progress is shown
as it happens and Ctrl-C reaches us at once.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from components.errors import CaltuneError
from components.files import read_json
from components.training.session import TrainingJob
from ray_jobs.cluster import connect, cpus_per_worker
from ray_jobs.worker import RESULT, TRACE, as_message, train_worker

OnRow = Callable[[Mapping[str, float]], None]

POLL_SECONDS = 0.2


def train(job: TrainingJob, *, resume: bool, on_row: OnRow) -> dict[str, Any]:
    """Trains a method and leaves `adapter/`, `checkpoints/`, `trace.jsonl` and `training.json` in its folder.

    Args:
        job: What to train.
        resume: Continue from the newest checkpoint, if there is one.
        on_row: Called in this thread with each row of the trace, in order.

    Returns:
        Content of `training.json`: `kept_step` and `last_step`.

    Raises:
        CaltuneError: A worker failed; the message has its last words, `error.log` all of them.
        UsageError: More was asked for than Ray has.
    """
    connect()
    trainer = _trainer(job, resume)
    job.folder.mkdir(parents=True, exist_ok=True)
    failure: list[BaseException] = []

    def fit() -> None:
        try:
            trainer.fit()
        except BaseException as problem:  # handed over to the thread that waits
            failure.append(problem)

    if not resume:
        (job.folder / TRACE).unlink(missing_ok=True)
    follower = TraceFollower(job.folder / TRACE, on_row)
    thread = threading.Thread(target=fit, name="ray-train", daemon=True)
    thread.start()
    while thread.is_alive():
        thread.join(POLL_SECONDS)
        follower.read()
    follower.read()
    if failure:
        raise _explained(failure[0], job.folder)
    return read_json(job.folder / RESULT, remedy="train again")


def _trainer(job: TrainingJob, resume: bool) -> Any:
    import ray.train
    from ray.train.torch import TorchTrainer

    resources = job.config.resources
    cpus = cpus_per_worker(resources)
    # A name of its own for every attempt: what is resumed is our checkpoint, never Ray's earlier state (E2).
    name = f"{job.method}-{time.strftime('%Y%m%d-%H%M%S')}"
    return TorchTrainer(
        train_worker,
        train_loop_config={**as_message(job, resume), "threads": cpus},
        scaling_config=ray.train.ScalingConfig(
            num_workers=resources.workers,
            use_gpu=resources.use_gpu,
            resources_per_worker={"CPU": cpus} | ({"GPU": 1} if resources.use_gpu else {}),
        ),
        run_config=ray.train.RunConfig(name=name, storage_path=str((job.folder / "ray").resolve())),
    )


def _explained(problem: BaseException, folder: Path) -> BaseException:
    """The worker's own error in one sentence, its traceback in a file."""
    workers = getattr(problem, "worker_failures", None)
    if not workers:
        return problem
    rank, first = sorted(workers.items())[0]
    first = getattr(first, "_base_exc", first)
    log = folder / "error.log"
    # The errors themselves arrive without their tracebacks; Ray's own message holds those of all ranks as text.
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
