"""One training step of each kind, side by side: supervised (one level) and CALM (two levels).

What the weights minimise is handed in (`lower_losses.py`); a step says how they get there. It is a function of its
number alone (`feed.py`), so a resumed run continues exactly.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from components.config_methods import CalmConfig
from components.data.batching import Batch
from components.models.calibration_head import CalibrationHead
from components.models.score_questions import LogitsAt
from components.models.scoring import apply_head, option_scores
from components.training.bilevel.bome import Bome
from components.training.feed import Feed
from components.training.lower_losses import LowerLoss
from components.training.objectives.entropy import option_entropy_sum, vocabulary_entropy_sum
from components.training.parameter_space import ParameterSpace, sum_over_ranks


class TrainingStep(Protocol):
    """Moves the space once and says what it saw."""

    def __call__(self, step: int) -> dict[str, float]:
        """Runs step number `step`, counted from 0; returns the trace's values, equal on every rank."""
        ...


class SupervisedStep:
    """Single-level training: theta follows the gradient of a loss."""

    def __init__(self, space: ParameterSpace, lower: LowerLoss) -> None:
        self.space, self.lower = space, lower

    def __call__(self, step: int) -> dict[str, float]:
        """See `TrainingStep`."""
        self.lower.begin(step)
        loss, gradient = self.space.gradient(self.lower, wrt=("theta",))
        self.space.apply(gradient)
        return {"loss": loss, **self.lower.seen()}


class CalmStep:
    """CALM (arXiv 2608.07419): BOME over the calibration head (upper) and the weights (lower).

    Lower level g: a loss on an S_T batch under the adjusted distribution softmax(z / tau + l); in the paper the mean
    cross-entropy of the answer tokens. Upper level f: minus the mean entropy of the same adjusted distribution on an
    S_V batch, of which only the inputs are used.

    Args:
        space: alpha holds the head's parameters, theta the adapter's.
        lower: g; it applies the head.
        logits_at: The model.
        head: The calibration head.
        upper_feed: S_V, options `all`.
        config: The run file's `calm` section.
    """

    def __init__(
        self,
        space: ParameterSpace,
        lower: LowerLoss,
        logits_at: LogitsAt,
        head: CalibrationHead,
        upper_feed: Feed,
        config: CalmConfig,
    ) -> None:
        self.lower, self.logits_at, self.head = lower, logits_at, head
        self.upper_feed, self.config = upper_feed, config
        self.bome = Bome(
            space,
            inner_steps=config.inner_steps,
            inner_rate=config.inner_learning_rate,
            eta=config.eta,
            phi=config.phi,
        )

    def __call__(self, step: int) -> dict[str, float]:
        """See `TrainingStep`."""
        self.lower.begin(step)
        upper_batch = self.upper_feed.share(step)
        watch = _ConfidenceWatch()

        def upper() -> Tensor:
            logits = apply_head(self.head, self.logits_at(upper_batch))
            watch.see(logits, upper_batch)
            return -self._entropy(logits, upper_batch)

        state = self.bome.step(upper, self.lower)
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
            **self.lower.seen(),
        }

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
