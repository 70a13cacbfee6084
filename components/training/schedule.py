"""Learning rates as pure functions of the step, so that a resumed run needs no scheduler state."""

from __future__ import annotations

import math

from components.config import RunConfig, TrainingConfig
from components.training.parameter_space import Rate


def learning_rates(step: int, config: RunConfig) -> dict[Rate, float]:
    """Every rate of a run at a step.

    Args:
        step: Counted from 0, below `training.steps`.
        config: The run.
    """
    training, uq4ct = config.training, config.uq4ct
    return {
        "theta": training.learning_rate * rate_factor(step, training),
        "router": uq4ct.router_learning_rate * rate_factor(step, training, uq4ct.router_warmup_fraction),
        "alpha": config.calm.alpha_learning_rate * head_rate_factor(step, training),
    }


def head_rate_factor(step: int, config: TrainingConfig) -> float:
    """Share of the calibration head's peak rate: rising with the square of the run's progress (ours).

    The head moves when the weights hardly do any more. At an even rate the weights sharpen the logits as fast as the
    head flattens them (the lower level is fitted under the adjusted distribution), and lose accuracy on the way.

    Args:
        step: Counted from 0, below `config.steps`.
        config: Steps.

    Returns:
        In (0, 1].
    """
    return ((step + 1) / config.steps) ** 2


def rate_factor(step: int, config: TrainingConfig, warmup_fraction: float | None = None) -> float:
    """Share of the peak rate at a step.

    Args:
        step: Counted from 0, below `config.steps`.
        config: Steps, warm-up and course.
        warmup_fraction: In the place of the configured one.

    Returns:
        In (0, 1]: rising linearly during warm-up, then constant, or falling to almost 0 by the last step.
    """
    fraction = config.warmup_fraction if warmup_fraction is None else warmup_fraction
    warmup = math.ceil(fraction * config.steps)
    if step < warmup:
        return (step + 1) / warmup
    if config.schedule == "constant":
        return 1.0
    progress = (step - warmup) / max(config.steps - warmup, 1)
    if config.schedule == "linear":
        return 1.0 - progress
    return 0.5 * (1.0 + math.cos(math.pi * progress))
