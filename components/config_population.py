"""The run file's `tune.scheduler` of kind `pbt`: population based training, and the check that a search can do it."""

from __future__ import annotations

from collections.abc import Collection
from typing import Annotated, Any, Literal

from pydantic import Field

from components.config_base import Strict

CHANGEABLE = (
    "calm.alpha_learning_rate",
    "calm.inner_learning_rate",
    "calm.inner_steps",
    "calm.eta",
    "training.learning_rate",
    "uq4ct.balance_weight",
    "uq4ct.calibration_weight",
    "uq4ct.z_loss_weight",
    "uq4ct.router_learning_rate",
)
"""Keys that a step reads anew, so that training can go on from a checkpoint with another value."""


class PbtConfig(Strict):
    """Population based training (arXiv 1711.09846): bad trials take over a good trial's weights and vary its values.

    All trials train side by side. Every `interval_steps` they wait for each other; then each of the worst, by the NLL
    of the data in `tune.split`, goes on from the checkpoint of one of the best, with that one's values of `keys` times
    0.8 or 1.2 (a choice: the next one in the list), or, one time in four, drawn anew. Values stay within the space.
    """

    kind: Literal["pbt"]
    """Tells this scheduler from `asha`."""
    keys: Annotated[list[str], Field(min_length=1)]
    """Keys of `tune.space` that change while a trial trains, e.g. `calm.alpha_learning_rate`; the others stay."""
    interval_steps: int = Field(ge=1)
    """Steps between two such exchanges; a multiple of `training.evaluate_every` and `training.checkpoint_every`."""
    fraction: Annotated[float, Field(gt=0, le=0.5)] = 0.25
    """Share of the trials that take over, and share that they take over from; at least one each."""


def check_population(config: Any, pbt: PbtConfig, space: Collection[str], trials: int) -> None:
    """Checks that population based training can be done with a run.

    Args:
        config: The whole run, a `RunConfig`, whose module imports this one.
        pbt: The scheduler.
        space: Keys that the search varies.
        trials: Trials of the search.

    Raises:
        ValueError: Says what is in the way.
    """
    for key in pbt.keys:
        if key not in space:
            raise ValueError(f"tune.scheduler.keys: '{key}' is not in tune.space")
        if key not in CHANGEABLE:
            raise ValueError(
                f"tune.scheduler.keys: '{key}' cannot change while a trial trains; those that can: "
                f"{', '.join(CHANGEABLE)}"
            )
    if trials < 2:
        raise ValueError("tune.trials: 'pbt' needs at least 2 trials, since bad ones take over from good ones")
    training = config.training
    for name in ("evaluate_every", "checkpoint_every"):
        every = getattr(training, name)
        if pbt.interval_steps % every:
            raise ValueError(
                f"tune.scheduler.interval_steps {pbt.interval_steps} is no multiple of training.{name} {every}: "
                "trials are compared, and copied, at these steps"
            )
    if pbt.interval_steps >= training.steps:
        raise ValueError(
            f"tune.scheduler.interval_steps {pbt.interval_steps} leaves no exchange before the end at "
            f"training.steps {training.steps}"
        )
    if config.resources.workers > 1 or config.resources.deepspeed is not None:
        raise ValueError(
            "tune.scheduler: 'pbt' pauses each trial at an exact step, which one of several processes "
            "(resources.workers above 1, or resources.deepspeed) does not do: its workers are Ray Train's and go on; "
            "use kind asha"
        )
    if config.calm.stop.rule == "match":
        raise ValueError(
            "tune.scheduler: 'pbt' compares trials at equal steps, but calm.stop.rule 'match' ends each at a step of "
            "its own; use keep_best or budget"
        )
