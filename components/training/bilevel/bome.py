"""BOME: first-order bilevel optimisation (Ye, Liu, Wright, Stone, Liu 2022, arXiv 2209.08709, Algorithm 1).

    min_v f(v, theta)   subject to   theta in argmin_theta g(v, theta)

with v = alpha here. One step from (alpha, theta):

    theta_T  = T gradient steps of size a on g(alpha, .) from theta        (held constant from here on)
    q        = g(alpha, theta) - g(alpha, theta_T)                         (how far theta is from the lower optimum)
    grad q   = (grad_alpha g(alpha, theta) - grad_alpha g(alpha, theta_T),  grad_theta g(alpha, theta))
    lambda   = max((phi - <grad f, grad q>) / (|grad q|^2 + epsilon), 0)
    (alpha, theta)  moves along  -(grad f + lambda grad q)

theta_T is thrown away: theta is put back before the move. Inner products run over both blocks together.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from components.training.parameter_space import BlockVector, Loss, ParameterSpace

Phi = Literal["grad_norm", "residual"]


@dataclass(frozen=True)
class BomeState:
    """What one step saw, before it moved.

    Attributes:
        f: Upper objective.
        g: Lower objective.
        residual: q, in the unit of g; about zero at the lower optimum.
        lam: lambda >= 0, the weight of the residual in the direction.
        inner_product: <grad f, grad q>.
        residual_norm_sq: |grad q|^2.
        phi: The descent asked of q.
    """

    f: float
    g: float
    residual: float
    lam: float
    inner_product: float
    residual_norm_sq: float
    phi: float


class Bome:
    """The solver.

    Args:
        space: Where (alpha, theta) live.
        inner_steps: T >= 0. Costs T gradients of g, one of f, and one forward pass.
        inner_rate: a > 0, size of the plain gradient steps.
        eta: > 0, strength of the descent condition on q.
        phi: `grad_norm`: phi = eta |grad q|^2. `residual`: phi = eta q. Both stand in the authors' code.
        epsilon: Added to |grad q|^2. It sets how close to the limit point the method comes.

    Raises:
        ValueError: A parameter out of range.
    """

    def __init__(
        self,
        space: ParameterSpace,
        *,
        inner_steps: int,
        inner_rate: float,
        eta: float = 0.5,
        phi: Phi = "grad_norm",
        epsilon: float = 1e-8,
    ) -> None:
        if inner_steps < 0 or inner_rate <= 0 or eta <= 0 or epsilon < 0:
            raise ValueError(
                f"need inner_steps >= 0, inner_rate > 0, eta > 0, epsilon >= 0; "
                f"got {inner_steps}, {inner_rate}, {eta}, {epsilon}"
            )
        self.space, self.inner_steps, self.inner_rate = space, inner_steps, inner_rate
        self.eta, self.phi, self.epsilon = eta, phi, epsilon

    def step(self, upper: Loss, lower: Loss) -> BomeState:
        """One step of the algorithm: computes the direction and applies it through the space's optimiser.

        Args:
            upper: f at the space's present point.
            lower: g at the space's present point; evaluated T + 1 times, on the same data each time.
        """
        direction, state = self.direction(upper, lower)
        self.space.apply(direction)
        return state

    def direction(self, upper: Loss, lower: Loss) -> tuple[BlockVector, BomeState]:
        """The step's direction grad f + lambda grad q, leaving (alpha, theta) as they were."""
        g, grad_g = self.space.gradient(lower)
        g_surrogate, grad_alpha_surrogate = self._at_surrogate(lower, grad_g)
        residual = g - g_surrogate
        grad_q = grad_g.plus(grad_alpha_surrogate, -1.0)

        f, grad_f = self.space.gradient(upper)
        inner_product = self.space.inner(grad_f, grad_q)
        norm_sq = self.space.inner(grad_q, grad_q)
        phi = self.eta * (norm_sq if self.phi == "grad_norm" else residual)
        lam = self._multiplier(phi, inner_product, norm_sq)
        state = BomeState(f, g, residual, lam, inner_product, norm_sq, phi)
        return grad_f.plus(grad_q, lam), state

    def _at_surrogate(self, lower: Loss, grad_g: BlockVector) -> tuple[float, BlockVector]:
        """G and its alpha-gradient at theta_T; theta itself is restored."""
        if self.inner_steps == 0:
            value, grad = self.space.gradient(lower, wrt=("alpha",))
            return value, grad
        theta = self.space.snapshot_theta()
        # The gradient at theta, needed for q anyway, is the first inner step's too.
        self.space.move_theta(-self.inner_rate, grad_g)
        for _ in range(self.inner_steps - 1):
            _, grad = self.space.gradient(lower, wrt=("theta",))
            self.space.move_theta(-self.inner_rate, grad)
        # theta_T is a constant of the outer problem, so only alpha is differentiated: a forward pass and the head's
        # backward.
        value, grad_alpha = self.space.gradient(lower, wrt=("alpha",))
        self.space.restore_theta(theta)
        return value, grad_alpha

    def _multiplier(self, phi: float, inner_product: float, norm_sq: float) -> float:
        denominator = norm_sq + self.epsilon
        if denominator == 0.0:  # grad q = 0: theta is at the lower optimum and f alone decides
            return 0.0
        return max((phi - inner_product) / denominator, 0.0)
