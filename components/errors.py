"""Errors that a person can act on. Each carries the exit code that the command line returns for it."""

from __future__ import annotations

from pathlib import Path


class CaltuneError(Exception):
    """The work failed for a reason worth one clear sentence, not a traceback. Exit code 1."""

    exit_code = 1


class RunFileError(CaltuneError):
    """A run file or an override is wrong: names file, line and field. Exit code 2."""

    exit_code = 2


class UsageError(CaltuneError):
    """A command was called in a way that cannot work (a folder in use, a missing option). Exit code 2."""

    exit_code = 2


class DataError(CaltuneError):
    """A data row is malformed: names file, line and field."""

    def __init__(self, path: Path | str, line: int | None, field: str | None, problem: str, remedy: str = "") -> None:
        where = str(path) if line is None else f"{path}:{line}"
        at = f" field '{field}':" if field else ""
        super().__init__(f"{where}:{at} {problem}" + (f" ({remedy})" if remedy else ""))
        self.path, self.line, self.field = str(path), line, field
        self._parts = (str(path), line, field, problem, remedy)

    def __reduce__(self) -> tuple[type[DataError], tuple[object, ...]]:
        """Made again from its parts, so that a worker's error reaches the driver."""
        return type(self), self._parts


class ModelError(CaltuneError):
    """A model or adapter cannot be found, read, or does not fit what was asked of it."""


class CheckpointError(CaltuneError):
    """A checkpoint is missing, damaged or belongs to another run."""


class StorageError(CaltuneError):
    """Shared storage cannot be opened, read or written."""


class TrackingError(CaltuneError):
    """A tracking server cannot be reached, or refuses what it is given."""


class GateError(CaltuneError):
    """A model did not pass the gate, so it was not promoted. Exit code 3."""

    exit_code = 3


class RegistryError(CaltuneError):
    """A model, version or alias is not in the registry, or does not allow what was asked of it."""


class PromotionConflictError(RegistryError):
    """Somebody else decided about the champion at the same time and was first; judge again."""


class Interrupted(BaseException):
    """The process was asked to end (SIGTERM); what was done stands and can be continued. Exit code 0.

    No `Exception`, so that nothing on the way mistakes it for a failure.
    """

    exit_code = 0


class JobError(CaltuneError):
    """A job on a cluster did not end well, or it cannot be said how it ended.

    Args:
        message: What happened and what can be done.
        exit_code: What the command line returns: the job's own code, 4 timed out, 5 contact lost, 130 interrupted.
    """

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code
