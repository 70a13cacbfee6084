"""CALM's upper objective f: minus the mean predictive entropy on inputs whose labels are never read."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from components.data.batching import Batch
from components.models.calibration_head import CalibrationHead
from components.models.score_questions import LogitsAt
from components.models.scoring import apply_head, option_scores
from components.training.feed import Feed
from components.training.objectives.entropy import option_entropy_sum, vocabulary_entropy_sum
from components.training.parameter_space import sum_over_ranks


class UpperLoss:
    """Minus the mean entropy of the adjusted distribution softmax(z / tau + l) on an S_V batch.

    Args:
        logits_at: The model.
        head: The calibration head.
        feed: S_V, options `all`.
        entropy_over: The outcomes that the entropy is taken over.
    """

    def __init__(
        self,
        logits_at: LogitsAt,
        head: CalibrationHead,
        feed: Feed,
        entropy_over: Literal["options", "vocabulary"],
    ) -> None:
        self.logits_at, self.head, self.feed, self.entropy_over = logits_at, head, feed, entropy_over
        self._watch = _ConfidenceWatch()

    def begin(self, number: int) -> None:
        """Takes up batch number `number`, counted from 0."""
        self._batch = self.feed.share(number)
        self._watch = _ConfidenceWatch()

    def __call__(self) -> Tensor:
        """This rank's share, see `components.training.parameter_space.Loss`."""
        logits = apply_head(self.head, self.logits_at(self._batch))
        self._watch.see(logits, self._batch)
        return -self._entropy(logits)

    def seen(self) -> dict[str, float]:
        """Mean confidence and accuracy on the batch, for the trace; equal on every rank (collective)."""
        return self._watch.means()

    def _entropy(self, logits: Tensor) -> Tensor:
        if self.entropy_over == "options":
            return option_entropy_sum(logits, self._batch) / self.feed.batch_size
        positions = sum_over_ranks(float(len(self._batch.positions)))
        return vocabulary_entropy_sum(logits, self._batch) / positions


class _ConfidenceWatch:
    """Mean confidence and accuracy on the S_V batch, for the trace only: training never sees S_V's labels."""

    def __init__(self) -> None:
        self.confidence = self.correct = self.count = 0.0

    @torch.no_grad()
    def see(self, logits: Tensor, batch: Batch) -> None:
        if batch.option_mask.shape[1] == 1:  # an open-ended question's right answer alone, nothing to choose from
            return
        confidence, answer = torch.softmax(option_scores(logits, batch).log_probs, dim=-1).max(dim=-1)
        self.confidence += float(confidence.sum())
        self.correct += float((answer == batch.answers).sum())
        self.count += len(answer)

    def means(self) -> dict[str, float]:
        if not self.count:
            return {}
        confidence, correct, count = (sum_over_ranks(v) for v in (self.confidence, self.correct, self.count))
        return {"mean_confidence": confidence / count, "accuracy": correct / count}
