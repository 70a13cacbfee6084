"""One training step of each kind, side by side: supervised (one level) and CALM (two levels).

CALM's ablations stand in `ablation_steps.py`.

What the weights minimise is handed in (`lower_losses.py`); a step says how they get there. It is a function of its
number alone (`feed.py`), so a resumed run continues exactly.
"""

from __future__ import annotations

from typing import Protocol

from components.config_methods import CalmConfig
from components.models.calibration_head import CalibrationHead
from components.models.score_questions import LogitsAt
from components.training.bilevel.bome import Bome
from components.training.feed import Feed
from components.training.lower_losses import LowerLoss
from components.training.parameter_space import ParameterSpace
from components.training.upper_loss import UpperLoss


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
        self.lower, self.head = lower, head
        self.upper = UpperLoss(logits_at, head, upper_feed, config.entropy_over)
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
        self.upper.begin(step)
        state = self.bome.step(self.upper, self.lower)
        self.head.clamp_()
        return {
            "f": state.f,
            "g": state.g,
            "residual": state.residual,
            "lambda": state.lam,
            "inner_product": state.inner_product,
            "residual_norm_sq": state.residual_norm_sq,
            **self.head.summary(),
            **self.upper.seen(),
            **self.lower.seen(),
        }
