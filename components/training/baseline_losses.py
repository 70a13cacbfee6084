"""What the weights minimise in the baselines: label smoothing, and calibration-aware fine-tuning (CFT and RCFT)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor

from components.config_baselines import CftConfig, LabelSmoothingConfig
from components.models.score_questions import LogitsAt
from components.models.scoring import option_scores
from components.training.feed import Feed, seed_dropout
from components.training.objectives.cft import BinAccuracy, bin_calibration_loss_sum
from components.training.objectives.cross_entropy import cross_entropy_sum, gold_cross_entropy_sum
from components.training.objectives.label_smoothing import uniform_cross_entropy_sum
from components.training.objectives.question_text import question_cross_entropy_sum, with_question_positions
from components.training.parameter_space import sum_tensors_over_ranks

CALIBRATION_SCALE = 1e-3
"""Factor of CFT's calibration loss beside its weight (found)."""


class LabelSmoothingLoss:
    """Mean over the answers' tokens of the cross-entropy against (1 - s) * onehot + s / K.

    Args:
        logits_at: The model.
        feed: S_T, options `gold`.
        config: The run file's `label_smoothing` section.
    """

    def __init__(self, logits_at: LogitsAt, feed: Feed, config: LabelSmoothingConfig) -> None:
        self.logits_at, self.feed, self.config = logits_at, feed, config

    def begin(self, step: int) -> None:
        """See `LowerLoss`."""
        self._step, self._batch, self._tokens = step, self.feed.share(step), self.feed.global_answer_tokens(step)
        self._parts: dict[str, Tensor] = {}

    def __call__(self) -> Tensor:
        """See `LowerLoss`."""
        seed_dropout(self.feed.seed, self._step, self.feed.rank)
        logits = self.logits_at(self._batch)
        answer = cross_entropy_sum(logits, self._batch) / self._tokens
        uniform = uniform_cross_entropy_sum(logits, self._batch) / self._tokens
        self._parts = self._parts or {"cross_entropy": answer.detach(), "uniform_cross_entropy": uniform.detach()}
        s = self.config.smoothing
        return (1.0 - s) * answer + s * uniform

    def seen(self) -> dict[str, float]:
        """See `LowerLoss`."""
        return _over_ranks(self._parts)


class CftLoss:
    """(1 - a) * fine-tuning loss + a * 1e-3 * calibration loss, see `objectives/cft.py`.

    The fine-tuning loss is the mean cross-entropy of the answers' tokens (CFT), or of the questions' and the answers'
    tokens together (RCFT). The calibration loss is defined over all training questions; a step sees its batch's part
    times their number over the batch size, so that neither changes what a means (the public code leaves that factor
    out).

    Args:
        logits_at: The model.
        feed: S_T, options `all`.
        config: The run file's `cft` section.
        learns_questions: RCFT.

    Attributes:
        bins: The E-step's result, the same on every rank; to be set before the first step.

    Raises:
        ValueError: The feed leaves options out.
    """

    def __init__(self, logits_at: LogitsAt, feed: Feed, config: CftConfig, learns_questions: bool) -> None:
        if feed.options != "all":
            raise ValueError("a confidence over the options needs options 'all' in the feed")
        self.logits_at, self.feed, self.config, self.learns_questions = logits_at, feed, config, learns_questions
        self.bins: BinAccuracy | None = None

    def begin(self, step: int) -> None:
        """See `LowerLoss`."""
        self._step, self._batch = step, self.feed.share(step)
        self._answer_tokens = self.feed.global_answer_tokens(step)
        self._question_tokens = self.feed.global_question_tokens(step)
        self._parts: dict[str, Tensor] = {}

    def __call__(self) -> Tensor:
        """See `LowerLoss`.

        Raises:
            ValueError: The E-step has not been done.
        """
        if self.bins is None:
            raise ValueError("the accuracy of the confidence bins must be measured before the first step")
        seed_dropout(self.feed.seed, self._step, self.feed.rank)
        batch = self._batch
        wanted, questions = with_question_positions(batch) if self.learns_questions else (batch, None)
        logits = self.logits_at(wanted)
        at_options = logits[: len(batch.positions)]
        scores = option_scores(at_options, batch).log_probs
        answer = gold_cross_entropy_sum(at_options, batch)
        calibration = bin_calibration_loss_sum(scores, batch.option_mask, self.bins)
        parts = {
            "cross_entropy": answer / self._answer_tokens,
            "calibration_loss": calibration * (sum(self.bins.count) / self.feed.batch_size),
        }
        tuning = parts["cross_entropy"]
        if questions is not None:
            question = question_cross_entropy_sum(logits[len(batch.positions) :], questions)
            parts["question_cross_entropy"] = question / self._question_tokens
            tuning = (answer + question) / (self._answer_tokens + self._question_tokens)
        if not self._parts:
            self._parts = {name: part.detach() for name, part in (parts | self._shares(scores)).items()}
        a = self.config.weight
        return (1.0 - a) * tuning + a * CALIBRATION_SCALE * parts["calibration_loss"]

    def seen(self) -> dict[str, float]:
        """See `LowerLoss`."""
        return _over_ranks(self._parts)

    def estimates(self) -> dict[str, Any]:
        """See `components.training.resumption.Estimates`."""
        assert self.bins is not None
        return asdict(self.bins)

    def take_over(self, estimates: Mapping[str, Any]) -> None:
        """See `components.training.resumption.Estimates`."""
        self.bins = BinAccuracy.from_dict(estimates)

    def _shares(self, scores: Tensor) -> dict[str, Tensor]:
        """This rank's shares of the batch's mean confidence and accuracy."""
        confidence, said = scores.detach().softmax(dim=-1).max(dim=-1)
        right = (said == self._batch.answers).to(confidence.dtype)
        rows = self.feed.batch_size
        return {"mean_confidence": confidence.sum() / rows, "accuracy": right.sum() / rows}


def _over_ranks(parts: Mapping[str, Tensor]) -> dict[str, float]:
    """Sums every rank's shares (collective)."""
    sums = torch.stack([part.double() for part in parts.values()])
    sum_tensors_over_ranks([sums])
    return dict(zip(parts, sums.tolist(), strict=True))
