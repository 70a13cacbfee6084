"""What the rest of the code knows of experiment tracking: a protocol, and the logger that keeps nothing."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Literal, Protocol

Status = Literal["FINISHED", "FAILED", "KILLED"]


class Logger(Protocol):
    """One tracked run. Children are runs of their own, shown nested: one for each stage or method.

    No call waits for a server and none fails because of one.
    """

    def log_params(self, params: Mapping[str, object]) -> None:
        """Log parameters, once and at the start; values become text."""

    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        """Log metrics of one step; NaN and infinities are kept."""

    def log_artifact(self, path: Path, name: str | None = None) -> None:
        """Log a file or folder under `name`, by default its own name."""

    def log_dict(self, content: Mapping[str, object], name: str) -> None:
        """Log a dictionary as the file `name`, which ends in `.json` or `.yaml`."""

    def set_tags(self, tags: Mapping[str, str]) -> None:
        """Set tags; a later value replaces an earlier one."""

    def child(self, name: str, tags: Mapping[str, str] | None = None) -> Logger:
        """The nested run called `name`, created on first use and continued afterwards."""

    def close(self, status: Status = "FINISHED") -> None:
        """End the run. Nothing may be logged to it afterwards."""


@contextmanager
def ending(logger: Logger) -> Iterator[Logger]:
    """Close the logger on the way out: FINISHED, after an exception FAILED, after Ctrl-C or a signal KILLED."""
    try:
        yield logger
    except Exception:
        logger.close("FAILED")
        raise
    except BaseException:
        logger.close("KILLED")
        raise
    logger.close("FINISHED")


class NullLogger:
    """Keeps nothing; what `tracking.enabled: false` gives."""

    def log_params(self, params: Mapping[str, object]) -> None:
        """Do nothing."""

    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        """Do nothing."""

    def log_artifact(self, path: Path, name: str | None = None) -> None:
        """Do nothing."""

    def log_dict(self, content: Mapping[str, object], name: str) -> None:
        """Do nothing."""

    def set_tags(self, tags: Mapping[str, str]) -> None:
        """Do nothing."""

    def child(self, name: str, tags: Mapping[str, str] | None = None) -> NullLogger:
        """Itself: nothing is kept of a child either."""
        return self

    def close(self, status: Status = "FINISHED") -> None:
        """Do nothing."""
