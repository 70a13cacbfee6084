"""One training step of each kind, side by side: supervised (one level) and CALM (two levels).

A step is a function of its number alone: which questions it sees and which dropout masks it draws follow from
(seed, step), so a resumed run continues exactly and a rank needs no word from the others about the data.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

import torch
from torch import Tensor

from components.config import CalmConfig
from components.data.batching import Batch, StepSampler, collate
from components.data.prompts import EncodedQuestion
from components.models.calibration_head import CalibrationHead
from components.models.score_questions import LogitsAt
from components.models.scoring import apply_head, option_scores
from components.training.bilevel.bome import Bome
from components.training.objectives.cross_entropy import cross_entropy_sum
from components.training.objectives.entropy import option_entropy_sum, vocabulary_entropy_sum
from components.training.parameter_space import ParameterSpace, sum_over_ranks


@dataclass(frozen=True)
class Feed:
    """Deals one split out to steps and ranks.

    Attributes:
        questions: The encoded split, the same on every rank.
        batch_size: Questions a step over all ranks.
        options: `gold` for answers to learn, `all` for options to compare.
        seed: Seeds the order.
        pad_id: Token id that fills rows up.
        rank, world_size: This process and how many there are.
        device: Where batches belong.
    """

    questions: Sequence[EncodedQuestion]
    batch_size: int
    options: Literal["gold", "all"]
    seed: int
    pad_id: int
    rank: int = 0
    world_size: int = 1
    device: torch.device | str = "cpu"
    _sampler: StepSampler = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_sampler", StepSampler(len(self.questions), self.batch_size, self.seed))

    def share(self, step: int) -> Batch:
        """This rank's part of a step's batch."""
        mine = self._sampler.indices(step)[self.rank :: self.world_size]
        return collate([self.questions[i] for i in mine], self.pad_id, self.options).to(self.device)

    def global_answer_tokens(self, step: int) -> int:
        """Answer tokens in the step's whole batch, known to every rank without asking."""
        return sum(len(q.options[q.answer]) for q in (self.questions[i] for i in self._sampler.indices(step)))


class TrainingStep(Protocol):
    """Moves the space once and says what it saw."""

    def __call__(self, step: int) -> dict[str, float]:
        """Runs step number `step`, counted from 0; returns the trace's values, equal on every rank."""
        ...


class SupervisedStep:
    """Single-level training: theta follows the gradient of the answer's mean cross-entropy."""

    def __init__(self, space: ParameterSpace, logits_at: LogitsAt, feed: Feed) -> None:
        self.space, self.logits_at, self.feed = space, logits_at, feed

    def __call__(self, step: int) -> dict[str, float]:
        """See `TrainingStep`."""
        batch, count = self.feed.share(step), self.feed.global_answer_tokens(step)
        seed_dropout(self.feed.seed, step, self.feed.rank)
        loss, gradient = self.space.gradient(
            lambda: cross_entropy_sum(self.logits_at(batch), batch) / count, wrt=("theta",)
        )
        self.space.apply(gradient)
        return {"loss": loss}


class CalmStep:
    """CALM (arXiv 2608.07419): BOME over the calibration head (upper) and the weights (lower).

    Lower level g: mean cross-entropy of the answer tokens of an S_T batch under the adjusted distribution
    softmax(z / tau + l). Upper level f: minus the mean entropy of the same adjusted distribution on an S_V batch, of
    which only the inputs are used.

    Args:
        space: alpha holds the head's parameters, theta the adapter's.
        logits_at: The model.
        head: The calibration head.
        lower_feed: S_T, options `gold`.
        upper_feed: S_V, options `all`.
        config: The run file's `calm` section.
    """

    def __init__(
        self,
        space: ParameterSpace,
        logits_at: LogitsAt,
        head: CalibrationHead,
        lower_feed: Feed,
        upper_feed: Feed,
        config: CalmConfig,
    ) -> None:
        self.logits_at, self.head = logits_at, head
        self.lower_feed, self.upper_feed, self.config = lower_feed, upper_feed, config
        self.bome = Bome(
            space,
            inner_steps=config.inner_steps,
            inner_rate=config.inner_learning_rate,
            eta=config.eta,
            phi=config.phi,
        )

    def __call__(self, step: int) -> dict[str, float]:
        """See `TrainingStep`."""
        lower_batch, count = self.lower_feed.share(step), self.lower_feed.global_answer_tokens(step)
        upper_batch = self.upper_feed.share(step)
        watch = _ConfidenceWatch()

        def lower() -> Tensor:
            # The same dropout masks at theta and on the way to theta_T: the residual compares weights, not noise.
            seed_dropout(self.lower_feed.seed, step, self.lower_feed.rank)
            return cross_entropy_sum(self._adjusted(lower_batch), lower_batch) / count

        def upper() -> Tensor:
            logits = self._adjusted(upper_batch)
            watch.see(logits, upper_batch)
            return -self._entropy(logits, upper_batch)

        state = self.bome.step(upper, lower)
        self.head.clamp_()
        return {
            "f": state.f,
            "g": state.g,
            "residual": state.residual,
            "lambda": state.lam,
            "inner_product": state.inner_product,
            "residual_norm_sq": state.residual_norm_sq,
            **self.head.summary(),
            **watch.means(),
        }

    def _adjusted(self, batch: Batch) -> Tensor:
        return apply_head(self.head, self.logits_at(batch))

    def _entropy(self, logits: Tensor, batch: Batch) -> Tensor:
        if self.config.entropy_over == "options":
            return option_entropy_sum(logits, batch) / self.upper_feed.batch_size
        positions = sum_over_ranks(float(len(batch.positions)))
        return vocabulary_entropy_sum(logits, batch) / positions


class _ConfidenceWatch:
    """Mean confidence and accuracy on the S_V batch, for the trace only: training never sees S_V's labels."""

    def __init__(self) -> None:
        self.confidence = self.correct = self.count = 0.0

    @torch.no_grad()
    def see(self, logits: Tensor, batch: Batch) -> None:
        confidence, answer = torch.softmax(option_scores(logits, batch).log_probs, dim=-1).max(dim=-1)
        self.confidence += float(confidence.sum())
        self.correct += float((answer == batch.answers).sum())
        self.count += len(answer)

    def means(self) -> dict[str, float]:
        confidence, correct, count = (sum_over_ranks(v) for v in (self.confidence, self.correct, self.count))
        return {"mean_confidence": confidence / count, "accuracy": correct / count}


def seed_dropout(seed: int, step: int, rank: int) -> None:
    """Makes dropout a function of (seed, step, rank)."""
    torch.manual_seed((seed * 1_000_003 + step) * 1_009 + rank)
