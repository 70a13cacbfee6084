"""CALM's ablations: its two objectives without its solver (methods A.5).

Both move the calibration head alpha and the weights theta through the same optimiser and rates as CALM does, and only
differ in the direction.
"""

from __future__ import annotations

from components.config_baselines import IterateConfig, RegularizationConfig
from components.training.lower_losses import LowerLoss
from components.training.parameter_space import Block, BlockVector, Loss, ParameterSpace
from components.training.upper_loss import UpperLoss


class RegularizationStep:
    """One level: alpha and theta follow the gradient of g + beta * f.

    With beta 0 nothing asks for calibration: theta alone follows g, alpha stays the identity, and the step is plain
    fine-tuning's. (Under g alone alpha would be a few more weights of the model.)

    Args:
        space: alpha holds the head's parameters, theta the adapter's.
        lower: g; it applies the head.
        upper: f.
        config: The run file's `regularization` section.
    """

    def __init__(self, space: ParameterSpace, lower: LowerLoss, upper: UpperLoss, config: RegularizationConfig) -> None:
        self.space, self.lower, self.upper, self.beta = space, lower, upper, config.beta
        self._blocks: tuple[Block, ...] = ("alpha", "theta") if config.beta > 0 else ("theta",)

    def __call__(self, step: int) -> dict[str, float]:
        """See `TrainingStep`; `loss` is g + beta * f."""
        self.lower.begin(step)
        self.upper.begin(step)
        g, f, direction = self._direction()
        self.space.apply(direction)
        self.upper.head.clamp_()
        values = {"loss": g + self.beta * f, "g": g, "f": f}
        return values | self.upper.head.summary() | self.upper.seen() | self.lower.seen()

    def _direction(self) -> tuple[float, float, BlockVector]:
        g, of_g = self.space.gradient(self.lower, wrt=self._blocks)
        f, of_f = self.space.gradient(self.upper, wrt=self._blocks)
        return g, f, of_g.plus(of_f, self.beta)


class IterateStep:
    """In turn: theta takes a step on g with alpha held, then alpha and theta take steps on f; nothing couples the two.

    Theta's steps of both kinds share the optimiser's moments. Each step on f has an S_V batch of its own. With no step
    on f alpha stays the identity and the step is plain fine-tuning's.

    Args:
        space: alpha holds the head's parameters, theta the adapter's.
        lower: g; it applies the head.
        upper: f.
        config: The run file's `iterate` section.
    """

    def __init__(self, space: ParameterSpace, lower: LowerLoss, upper: UpperLoss, config: IterateConfig) -> None:
        self.space, self.lower, self.upper, self.times = space, lower, upper, config.calibration_steps

    def __call__(self, step: int) -> dict[str, float]:
        """See `TrainingStep`; `g` before the step on it, `f`, confidence and accuracy before the last step on it."""
        self.lower.begin(step)
        values = {"g": self._descend(self.lower, ("theta",)), **self.lower.seen()}
        for number in range(step * self.times, (step + 1) * self.times):
            self.upper.begin(number)
            values["f"] = self._descend(self.upper, ("alpha", "theta"))
            self.upper.head.clamp_()
            values |= self.upper.seen()
        return values | self.upper.head.summary()

    def _descend(self, loss: Loss, blocks: tuple[Block, ...]) -> float:
        value, gradient = self.space.gradient(loss, wrt=blocks)
        self.space.apply(gradient)
        return value
