"""How a job stands, in our words, and the exit code that each state becomes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from components.errors import UsageError

FAILED, TIMED_OUT, CONTACT_LOST, INTERRUPTED = 1, 4, 5, 130
EXIT_CODES = {
    "SUCCEEDED": 0,
    "FAILED": FAILED,
    "STOPPED": INTERRUPTED,  # somebody broke it off: never taken for success
    "PENDING": TIMED_OUT,  # not ended by the time somebody has to say something
    "RUNNING": TIMED_OUT,
}
"""Exit code by Ray's job status."""
ENDED = ("SUCCEEDED", "FAILED", "STOPPED")
PASSED_ON = (2, 3, TIMED_OUT, INTERRUPTED)
"""Exit codes of caltune itself that a job's command ended with and that mean something: handed on as they are."""

# Tags of a job, kept by Ray as its metadata.
RUN, COMMAND, FOLDER, HASH = "caltune_run", "caltune_command", "caltune_folder", "caltune_config_hash"
COMMIT, DIRTY = "git_commit", "git_dirty"


@dataclass(frozen=True)
class Job:
    """A job of ours on a cluster.

    Attributes:
        id: Ray's submission id.
        status: Ray's status, e.g. `RUNNING`.
        tags: Its metadata.
        started: When it was accepted, seconds since 1970; None if not known.
        ended: When it ended.
        driver_exit_code: What its command ended with; None while it runs, and where it never ran.
        message: Ray's words on the status.
    """

    id: str
    status: str
    tags: dict[str, str]
    started: float | None = None
    ended: float | None = None
    driver_exit_code: int | None = None
    message: str = ""

    @classmethod
    def of(cls, details: Any) -> Job:
        """From Ray's `JobDetails`."""
        seconds = [None if moment is None else moment / 1000 for moment in (details.start_time, details.end_time)]
        return cls(
            id=details.submission_id or details.job_id,
            status=str(details.status),
            tags=dict(details.metadata or {}),
            started=seconds[0],
            ended=seconds[1],
            driver_exit_code=details.driver_exit_code,
            message=(details.message or "").strip(),
        )

    @property
    def run(self) -> str:
        """The run's name."""
        return self.tags.get(RUN, "")

    @property
    def has_ended(self) -> bool:
        """Whether the state is final."""
        return self.status in ENDED

    @property
    def exit_code(self) -> int:
        """What a command that waited for this job returns."""
        if self.status == "FAILED" and self.driver_exit_code in PASSED_ON:
            return int(self.driver_exit_code or 0)
        return EXIT_CODES[self.status]

    def as_dict(self) -> dict[str, Any]:
        """For `--json`; `exit_code` is null until the job has ended."""
        return {
            "job": self.id,
            "run": self.run,
            "command": self.tags.get(COMMAND),
            "status": self.status,
            "exit_code": self.exit_code if self.has_ended else None,
            "driver_exit_code": self.driver_exit_code,
            "started": _moment(self.started),
            "ended": _moment(self.ended),
            "folder": self.tags.get(FOLDER),
            "config_hash": self.tags.get(HASH),
            "git_commit": self.tags.get(COMMIT),
            "git_dirty": self.tags.get(DIRTY),
            "message": self.message,
        }

    def ending(self) -> str:
        """How it ended, in a sentence."""
        if self.status == "SUCCEEDED":
            return f"job {self.id} succeeded"
        if self.status == "STOPPED":
            return f"job {self.id} was stopped"
        code = self.driver_exit_code
        if code is None:  # it never ran, or what ran it is gone
            return f"job {self.id} failed: {self.message or 'Ray does not say why'}"
        killed = code in (-9, 137)
        return f"job {self.id} failed with exit code {code}" + (" (killed: out of memory?)" if killed else "")


def find_job(jobs: Sequence[Job], name: str | None) -> Job:
    """A job by its id, else the newest one of the run of that name, else, without a name, the newest of all.

    Raises:
        UsageError: There is none.
    """
    newest = sorted(jobs, key=lambda job: job.started or 0.0, reverse=True)
    if not newest:
        raise UsageError("the cluster knows no job of caltune")
    if name is None:
        return newest[0]
    for job in [j for j in newest if j.id == name] + [j for j in newest if j.run == name]:
        return job
    known = ", ".join(job.id for job in newest[:5])
    raise UsageError(f"no job and no run is called '{name}'; the newest jobs are {known}")


def find_twin(jobs: Sequence[Job], tags: dict[str, str]) -> Job | None:
    """The active job that works on the same run: in the same folder, or the same command on the same settings."""
    for job in jobs:
        same = [job.tags.get(name) == tags[name] for name in (FOLDER, HASH, COMMAND)]
        if not job.has_ended and (same[0] or (same[1] and same[2])):
            return job
    return None


def _moment(seconds: float | None) -> str | None:
    return None if seconds is None else datetime.fromtimestamp(seconds).astimezone().isoformat(timespec="seconds")
