"""A method's loss, calibration head and step, put together from its row in the table of methods."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

from components.config import RunConfig
from components.models.calibration_head import CalibrationHead
from components.models.scoring import ScoringModel
from components.training.ablation_steps import IterateStep, RegularizationStep
from components.training.baseline_losses import CftLoss, LabelSmoothingLoss
from components.training.blob_step import BlobStep
from components.training.feed import Feed
from components.training.lower_losses import AnswerLoss, LowerLoss, Uq4ctLoss, options_needed
from components.training.methods import Method
from components.training.parameter_space import ParameterSpace
from components.training.steps import CalmStep, SupervisedStep, TrainingStep
from components.training.upper_loss import UpperLoss

FeedOf = Callable[[Literal["train", "calibration"], Literal["gold", "all"]], Feed]
"""Deals a split out with the options that are asked for."""


def make_head(method: Method, config: RunConfig, base: Any) -> CalibrationHead | None:
    """The calibration head, at the identity; None for a method without one.

    Args:
        method: One that trains.
        config: The run.
        base: The causal language model, which says how many logits there are.
    """
    if not method.trains_head:
        return None
    vocabulary = int(base.config.get_text_config().vocab_size)
    return CalibrationHead(vocabulary, method.head_form(config.calm), config.calm.max_temperature)


def make_lower(
    method: Method, config: RunConfig, model: ScoringModel, head: CalibrationHead | None, feed: FeedOf
) -> LowerLoss:
    """What the weights minimise.

    Args:
        method: One that trains.
        config: The run.
        model: With the method's adapter.
        head: From `make_head`.
        feed: Deals S_T out.
    """
    if method.lower == "uq4ct":
        return Uq4ctLoss(model, feed("train", options_needed(config.uq4ct)), config.uq4ct, head)
    if method.lower == "label_smoothing":
        return LabelSmoothingLoss(model, feed("train", "gold"), config.label_smoothing)
    if method.lower in ("cft", "rcft"):
        return CftLoss(model, feed("train", "all"), config.cft, learns_questions=method.lower == "rcft")
    return AnswerLoss(model, feed("train", "gold"), head)


def make_step(
    method: Method,
    config: RunConfig,
    space: ParameterSpace,
    lower: LowerLoss,
    model: ScoringModel,
    head: CalibrationHead | None,
    feed: FeedOf,
) -> TrainingStep:
    """What one step does.

    Args:
        method: One that trains.
        config: The run.
        space: Holds the head's and the adapter's parameters.
        lower: From `make_lower`.
        model: With the method's adapter.
        head: From `make_head`.
        feed: Deals S_V out.
    """
    if head is None:
        if method.adapter == "blob":
            return BlobStep(space, lower, model.model, config)
        return SupervisedStep(space, lower)
    held_out = feed("calibration", "all")
    if method.bilevel:
        return CalmStep(space, lower, model, head, held_out, config.calm)
    upper = UpperLoss(model, head, held_out, config.calm.entropy_over)
    if method.levels == "sum":
        return RegularizationStep(space, lower, upper, config.regularization)
    return IterateStep(space, lower, upper, config.iterate)
