"""The run file's sections of the training baselines and of CALM's ablations."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from components.config_base import Fraction, Strict


class LabelSmoothingConfig(Strict):
    """Label smoothing: cross-entropy against (1 - s) * onehot + s / K, K the size of the vocabulary."""

    smoothing: Annotated[float, Field(ge=0, lt=1)] = 0.1
    """s (unknown; 0.1 is the usual choice). 0 is plain fine-tuning."""


class CftConfig(Strict):
    """`cft` and `rcft`: (1 - a) * fine-tuning loss + a * 1e-3 * calibration loss, after one look at the base model."""

    weight: Fraction = 0.5
    """a (0.5: found, the public trainer's default; its script runs 0 and 1). 0 is plain fine-tuning, for `rcft`
    on the questions too. The factor 1e-3 is found as well, so the two losses weigh the same near a = 0.999."""


class RegularizationConfig(Strict):
    """`regularization`, CALM's ablation on one level: task loss g + beta * calibration loss f."""

    beta: Annotated[float, Field(ge=0)] = 0.1
    """Fixed weight of f (unknown; grid to try: 0.01, 0.05, 0.1, 0.5). 0 is plain fine-tuning: without f there is
    nothing to calibrate, and the head is left alone."""


class IterateConfig(Strict):
    """`iterate`, CALM's ablation without a coupling: a step on the task loss g, then one on the calibration loss f."""

    calibration_steps: int = Field(1, ge=0)
    """Optimiser steps on f after each one on g (unknown; 1:1). `training.steps` counts those on g. 0 is plain
    fine-tuning."""
