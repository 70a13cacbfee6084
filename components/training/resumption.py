"""What a checkpoint records beside its tensors, so that a run that goes on from it can be checked.

Three things go wrong silently otherwise: weights that load without error and start from scratch (E6), data that go on
elsewhere, and noise that another number of workers would draw otherwise (E5).
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from components.errors import CheckpointError
from components.training.feed import Feed

FLOAT32_TOLERANCE, HALF_TOLERANCE = 1e-3, 5e-2
"""Relative difference of the probe's loss that another machine, another number of workers or a newer library may make;
weights that were not read are off by far more."""


class Estimates(Protocol):
    """A loss with figures that were estimated before the first step; a run that goes on must not estimate them anew."""

    def estimates(self) -> dict[str, Any]:
        """The figures as plain data."""
        ...

    def take_over(self, estimates: Mapping[str, Any]) -> None:
        """Takes them back."""
        ...


@dataclass(frozen=True)
class Resumption:
    """Describes where a run stands and checks that it goes on from there.

    Attributes:
        feed: S_T; a function of (seed, step), so the step is its position.
        probe: Loss in nats of the present weights on a fixed batch of validation questions; collective, equal on every
            rank.
        noise: The run file's key of what every worker draws at random for itself; None where nothing is.
        zero_stage: ZeRO stage; None without DeepSpeed. For people: what is saved is whole at every stage.
        tolerance: Largest relative difference of the probe's loss.
        before: The loss, where it estimates something before the first step.
    """

    feed: Feed
    probe: Callable[[], float]
    noise: str | None
    zero_stage: int | None
    tolerance: float
    before: Estimates | None = None

    def describe(self, step: int) -> dict[str, Any]:
        """What goes into the manifest of a checkpoint (collective).

        Args:
            step: Steps taken.
        """
        return {
            "world_size": self.feed.world_size,
            "zero_stage": self.zero_stage,
            "data": {"seed": self.feed.seed, "questions_seen": step * self.feed.batch_size, "next": self._next(step)},
            "random": "dropout and jitter are functions of (seed, step, rank)",
            "probe_loss": self.probe(),
            **({"estimates": self.before.estimates()} if self.before is not None else {}),
        }

    def check_before_loading(self, step: int, written: Mapping[str, Any]) -> None:
        """Refuses a checkpoint that cannot be continued exactly.

        Raises:
            CheckpointError: Says why.
        """
        before, now = int(written["world_size"]), self.feed.world_size
        if self.noise and before != now:
            raise CheckpointError(
                f"the checkpoint at step {step} was written by {before} worker(s) and {now} would go on: with "
                f"{self.noise} above 0 every worker draws its own noise, so the result would be another; resume with "
                f"resources.workers={before}"
            )
        if written["data"]["next"] != self._next(step):
            raise CheckpointError(
                f"the checkpoint at step {step} would go on with other questions than its run was about to see: the "
                "way batches are dealt out has changed; resume with the version that wrote it, or use --overwrite"
            )

    def check_loaded(self, step: int, written: Mapping[str, Any]) -> None:
        """Compares the loss of the weights as loaded with that at the time they were saved (collective).

        Takes over what was estimated before the first step, too.

        Raises:
            CheckpointError: They differ by more than rounding.
        """
        if self.before is not None:
            self.before.take_over(written["estimates"])
        then, now = float(written["probe_loss"]), self.probe()
        if not abs(now - then) <= self.tolerance * max(abs(then), 1.0):
            raise CheckpointError(
                f"the checkpoint at step {step} was saved with a loss of {then:.5f} on the first validation questions "
                f"and gives {now:.5f} as loaded: the base model or the code is another one; --overwrite starts anew"
            )

    def _next(self, step: int) -> str:
        ids = [self.feed.questions[i].id for i in self.feed.indices(step)]
        return hashlib.sha256("\n".join(ids).encode()).hexdigest()[:16]
