"""What a training is told, and asked from outside. Light: driver and controller read it, who never load a model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from components.config import MethodName, RunConfig
from components.models.base import ResolvedModel

CHECKPOINTS = "checkpoints"

Request = Literal["stop", "checkpoint"]
Requests = Callable[[], Request | None]
"""What was asked of the run from outside since the last call; the same answer on every rank at every step."""


class StopRequested(Exception):  # noqa: N818  # a wish, no error
    """The run was asked to stop and has left a checkpoint. `step`: steps taken."""

    def __init__(self, step: int) -> None:
        super().__init__(f"stopped at step {step}")
        self.step = step


def nothing_asked() -> Request | None:
    """For a run that nobody interrupts."""
    return None


@dataclass(frozen=True)
class TrainingJob:
    """What every process of a method's training is told; fixed by the driver (E4).

    Attributes:
        config: The run.
        method: Which of its methods.
        data: Folder of the prepared data.
        folder: The method's folder: `checkpoints/` and `adapter/` go here.
        resolved: The base model.
        details: Anything to keep with the adapter (run id, git commit).
        varied: Dotted keys of the run file that may differ between a checkpoint and what goes on from it.
        storage: Shared storage's folder of the method, as a URI; None where all workers share `folder`.
        member: Which of an ensemble, from 0; it decides the initial weights and nothing else. None for one adapter.
    """

    config: RunConfig
    method: MethodName
    data: Path
    folder: Path
    resolved: ResolvedModel
    details: Mapping[str, Any] = field(default_factory=dict)
    varied: tuple[str, ...] = ()
    storage: str | None = None
    member: int | None = None


@dataclass(frozen=True)
class Process:
    """One process of the training."""

    rank: int = 0
    world_size: int = 1
    device: str = "cpu"
