"""Following a job to its end: its log as it is written, its state asked for all the while.

The state decides when a job has ended, never the end of the log's connection, which breaks for many reasons (E26).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from typing import Protocol

from components.errors import JobError
from ray_jobs.job_server import JobGoneError, ServerUnreachableError
from ray_jobs.job_states import CONTACT_LOST, INTERRUPTED, TIMED_OUT, Job

POLL_SECONDS, RECONNECT_SECONDS = 1.0, 2.0
PATIENCE_SECONDS = 120.0
"""How long a cluster may not answer before we give up on hearing how the job ends."""

Say = Callable[[str], None]


class Jobs(Protocol):
    """What following needs of a `JobServer`."""

    def job(self, job_id: str) -> Job: ...  # noqa: D102

    def log(self, job_id: str) -> str: ...  # noqa: D102

    def tail(self, job_id: str) -> AsyncIterator[str]: ...  # noqa: D102

    def command(self, *words: str) -> str: ...  # noqa: D102


def follow(server: Jobs, job_id: str, *, write: Say | None, say: Say, timeout: float | None = None) -> Job:
    """Waits until a job has ended.

    Args:
        server: The cluster.
        job_id: The job.
        write: Gets the log in pieces, each character once; None does without.
        say: Gets a line when contact is lost or found again.
        timeout: Seconds after which to stop waiting; the job goes on.

    Returns:
        The job in its final state.

    Raises:
        JobError: It took too long (4), contact was lost (5), or Ctrl-C was pressed (130).
    """
    deadline = None if timeout is None else time.monotonic() + timeout
    try:
        return asyncio.run(_follow(server, job_id, write, say, deadline))
    except KeyboardInterrupt:
        raise JobError(f"no longer following; {_goes_on(server, job_id)}", INTERRUPTED) from None


def _goes_on(server: Jobs, job_id: str) -> str:
    return (
        f"the job {job_id} goes on\n  see it end:  {server.command('logs', job_id, '--follow')}\n"
        f"  stop it:     {server.command('stop', job_id)}"
    )


async def _follow(server: Jobs, job_id: str, write: Say | None, say: Say, deadline: float | None) -> Job:
    log = LogFollower(server, job_id, write) if write else None
    reading = asyncio.create_task(log.read()) if log else None
    try:
        job = await _ended(server, job_id, say, deadline)
    finally:
        if reading:
            reading.cancel()
            await asyncio.gather(reading, return_exceptions=True)
    if log:
        await asyncio.to_thread(log.rest, say)
    return job


async def _ended(server: Jobs, job_id: str, say: Say, deadline: float | None) -> Job:
    patience = Patience(say)
    while True:
        try:
            job = await asyncio.to_thread(server.job, job_id)
            patience.answered()
            if job.has_ended:
                return job
        except JobGoneError:
            raise JobError(
                f"the cluster no longer knows the job {job_id}; was it restarted? What the run has saved is in its "
                "folder: submit it again with --resume",
                CONTACT_LOST,
            ) from None
        except ServerUnreachableError as problem:
            if patience.ends_with(problem):
                raise JobError(
                    f"no contact with the cluster for {PATIENCE_SECONDS:.0f} s; the job {job_id} may still be at work: "
                    f"{server.command('status', job_id)}",
                    CONTACT_LOST,
                ) from None
        if deadline is not None and time.monotonic() > deadline:
            raise JobError(f"timed out; {_goes_on(server, job_id)}", TIMED_OUT)
        await asyncio.sleep(POLL_SECONDS)


class Patience:
    """Bears with a cluster that does not answer, for `PATIENCE_SECONDS`.

    Args:
        say: Gets a line when contact is lost and when it is found again.
    """

    def __init__(self, say: Say) -> None:
        self._say = say
        self._lost_at: float | None = None

    def answered(self) -> None:
        """The cluster answers."""
        if self._lost_at is not None:
            self._say("the cluster answers again")
            self._lost_at = None

    def ends_with(self, problem: Exception) -> bool:
        """The cluster does not answer; whether it has been silent for too long."""
        now = time.monotonic()
        if self._lost_at is None:
            self._lost_at = now
            self._say(f"the cluster does not answer ({problem}); trying for {PATIENCE_SECONDS:.0f} s")
        return now - self._lost_at > PATIENCE_SECONDS


class LogFollower:
    """Hands over a log while it is written.

    A new connection starts at the log's beginning, so what has been shown already is skipped by its length.

    Args:
        server: The cluster.
        job_id: The job.
        write: Gets the pieces.
    """

    def __init__(self, server: Jobs, job_id: str, write: Say) -> None:
        self._server, self._job_id, self._write = server, job_id, write
        self._shown = 0

    async def read(self) -> None:
        """Reads, connecting again as often as needed, until cancelled."""
        while True:
            position = 0
            try:
                async for piece in self._server.tail(self._job_id):
                    self._show(piece[max(self._shown - position, 0) :])
                    position += len(piece)
            except ServerUnreachableError:
                pass
            await asyncio.sleep(RECONNECT_SECONDS)

    def rest(self, say: Say) -> None:
        """Hands over what is left of the log of a job that has ended."""
        try:
            self._show(self._server.log(self._job_id)[self._shown :])
        except (ServerUnreachableError, JobGoneError) as problem:
            say(f"the end of the log cannot be had: {problem}")

    def _show(self, text: str) -> None:
        if text:
            self._write(text)
            self._shown += len(text)
