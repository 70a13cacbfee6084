"""The files through which a method's workers and their driver speak, in the job's folder or through shared storage.

Trace, result and adapter are what a run is about; beside them lie word of each start, of a failure that is final, and
the driver's wish that training stop.
"""

from __future__ import annotations

import errno
import json
import shutil
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from components.errors import CaltuneError, ModelError, StorageError
from components.files import read_json, write_json
from components.storage import Storage
from components.training.expert_load import LOAD_FILE
from components.training.job import TrainingJob

TRACE, RESULT, ADAPTER, DATA = "trace.jsonl", "training.json", "adapter", "data"
STARTS, FAILURE, STOP, ERROR_LOG = "starts.jsonl", "failure.json", "stop", "error.log"

REMOTE_POLL_SECONDS = 2.0
_FULL = (errno.ENOSPC, errno.EDQUOT)
_PASSING = (ModelError, StorageError)  # a hub or a store that cannot be reached may be there the next time


@dataclass(frozen=True)
class Start:
    """A start of a method's workers.

    Attributes:
        number: Counted from 1 in a run of the driver.
        at: When, ISO 8601 in UTC.
        from_step: Steps taken before.
        workers: How many there are.
        passed_over: Checkpoints that could not be read, a sentence each.
    """

    number: int
    at: str
    from_step: int
    workers: int
    passed_over: tuple[str, ...] = ()


class WorkerFiles:
    """The files of a job, as one of its workers sees them.

    Args:
        job: Its folder is this worker's; its storage, if any, is everybody's.
    """

    def __init__(self, job: TrainingJob) -> None:
        self.folder, self.method = job.folder, job.method
        self.storage = Storage(job.storage) if job.storage else None
        self._next_poll = 0.0

    def fetch(self, data: Path) -> None:
        """Copies from shared storage what a worker begins with: prepared data, and the trace so far.

        Raises:
            CaltuneError: The data are not there.
        """
        assert self.storage is not None
        self.folder.mkdir(parents=True, exist_ok=True)
        if not self.storage.get(DATA, data):
            raise CaltuneError(f"{self.storage.uri} has no prepared data; start the run again")
        for name in (TRACE, LOAD_FILE, STARTS, FAILURE):
            self.storage.get(name, self.folder / name)

    def share(self) -> None:
        """Lets the driver see how far training is."""
        self._put(TRACE, LOAD_FILE)

    def share_result(self) -> None:
        """Lets the driver have what training made; the result's file comes last."""
        self._put(TRACE, LOAD_FILE, ADAPTER, RESULT)

    def note_start(self, from_step: int, workers: int, passed_over: Sequence[str]) -> None:
        """Says that workers have started, see `Start`."""
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self.folder / STARTS
        number = 1 + (path.read_text(encoding="utf-8").count("\n") if path.exists() else 0)
        start = Start(number, datetime.now(UTC).isoformat(timespec="seconds"), from_step, workers, tuple(passed_over))
        with path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(asdict(start)) + "\n")
        self._put(STARTS)

    def failed(self) -> bool:
        """Whether a rank has left a failure that another try cannot mend."""
        return (self.folder / FAILURE).exists()

    def keep_final_failure(self, problem: Exception, rank: int, trace: str) -> bool:
        """Leaves a failure for the driver if another try cannot mend it; says whether it is of that kind."""
        words = _final(problem)
        if words is None:
            return False
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            (self.folder / ERROR_LOG).write_text(trace, encoding="utf-8")
            write_json(self.folder / FAILURE, {"rank": rank, "message": words})
            self._put(ERROR_LOG, FAILURE)
        except OSError:
            return False  # a disk without room for these lines: Ray carries the error itself
        return True

    def stop_requested(self) -> bool:
        """Whether the driver wants training to stop. Shared storage is asked every other second."""
        if self.storage is None:
            return (self.folder / STOP).exists()
        if time.monotonic() < self._next_poll:
            return False
        self._next_poll = time.monotonic() + REMOTE_POLL_SECONDS
        return STOP in self.storage.names()

    def _put(self, *names: str) -> None:
        if self.storage is not None:
            for name in names:
                if (self.folder / name).exists():
                    self.storage.put(self.folder / name, name)


class DriverFiles:
    """The files of a job, as its driver sees them.

    Args:
        job: Its folder is the driver's; its storage, if any, is everybody's.
    """

    def __init__(self, job: TrainingJob) -> None:
        self.job = job
        self.storage = Storage(job.storage) if job.storage else None
        self._next_poll = 0.0

    def begin(self, resume: bool) -> None:
        """Clears what an earlier attempt has left: all of it, or with `resume` all but what training goes on from."""
        folder = self.job.folder
        folder.mkdir(parents=True, exist_ok=True)
        for name in (STOP, FAILURE, RESULT, STARTS) + (() if resume else (TRACE,)):
            (folder / name).unlink(missing_ok=True)
        if self.storage is None:
            return
        if not resume:
            self.storage.remove("")
        for name in (STOP, FAILURE, RESULT, STARTS):
            self.storage.remove_file(name)
        self.storage.put(self.job.data, DATA)

    def poll(self) -> None:
        """Brings the trace up to date; shared storage is asked every other second."""
        if self.storage is not None and time.monotonic() >= self._next_poll:
            self._next_poll = time.monotonic() + REMOTE_POLL_SECONDS
            self._get(TRACE, STARTS)

    def fetch_result(self) -> None:
        """Brings here what training has made."""
        self._get(TRACE, STARTS, FAILURE, ERROR_LOG, LOAD_FILE, ADAPTER, RESULT)

    def starts(self) -> list[Start]:
        """The starts of workers so far."""
        path = self.job.folder / STARTS
        text = path.read_text(encoding="utf-8") if path.exists() else ""
        return [Start(**json.loads(line)) for line in text.splitlines(keepends=True) if line.endswith("\n")]

    def failure(self) -> dict[str, Any] | None:
        """A failure that another try cannot mend."""
        path = self.job.folder / FAILURE
        return read_json(path, remedy="train again") if path.exists() else None

    def request_stop(self) -> None:
        """Asks the workers to stop at the end of their step, after a checkpoint."""
        (self.job.folder / STOP).touch()
        if self.storage is not None:
            self.storage.put(self.job.folder / STOP, STOP)

    def _get(self, *names: str) -> None:
        if self.storage is None:
            return
        for name in names:
            draft = self.job.folder / f".{name}.fetched"
            if self.storage.get(name, draft):
                if draft.is_dir():
                    _replace_folder(draft, self.job.folder / name)
                else:
                    draft.replace(self.job.folder / name)


def _replace_folder(draft: Path, target: Path) -> None:
    shutil.rmtree(target, ignore_errors=True)
    draft.rename(target)


def _final(problem: Exception) -> str | None:
    """What to say of a failure that would come again; None of one that may not."""
    if isinstance(problem, OSError) and problem.errno in _FULL:
        return f"{problem}: make room and go on with --resume"
    if isinstance(problem, (CaltuneError, FloatingPointError)) and not isinstance(problem, _PASSING):
        return str(problem)
    return None
