"""Floating-point operations of training, counted in the dry run, and the GPU-hours that they come to.

A gradient of the lower level's loss runs the model forward and backward; recomputation counts where it is switched on.
CALM takes T of them, one gradient of f, and one forward pass at theta_T (`bome.py`); its ablations one of each
objective, or as many of f as the run file says. Only matrix products count, an
addition and a multiplication as two. Evaluations and checkpoints between steps do not count.
"""

from __future__ import annotations

from components.planning.dry_run import LossUsage
from components.training.methods import Method

SECONDS_PER_HOUR = 3600.0


def step_flops(usage: LossUsage, method: Method, inner_steps: int, calibration_steps: int = 1) -> float:
    """Operations of one step on one GPU.

    Args:
        usage: What the losses take on that GPU.
        method: One that trains.
        inner_steps: T, for a bilevel method.
        calibration_steps: Steps on f after each on g, for a method that alternates.
    """
    if not method.trains_head:
        return usage.lower.flops
    if not method.bilevel:
        return usage.lower.flops + usage.upper.flops * (calibration_steps if method.levels == "alternate" else 1)
    return inner_steps * usage.lower.flops + usage.lower_forward.flops + usage.upper.flops


def gpu_hours(flops: float, tflops: float) -> float:
    """Hours of one GPU.

    Args:
        flops: Operations of the whole training.
        tflops: 1e12 operations a second that a GPU gets through, not what its data sheet promises.
    """
    return flops / (tflops * 1e12) / SECONDS_PER_HOUR
