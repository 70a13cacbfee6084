"""Minimising a smooth function of a few numbers: L-BFGS with strong Wolfe line search, as torch has it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

MAX_ITERATIONS = 200


def minimise(parameters: torch.Tensor, loss: Callable[[], torch.Tensor], tolerance_grad: float) -> int:
    """Moves `parameters` to a minimum of `loss`, in place.

    Args:
        parameters: The start; a leaf with `requires_grad`.
        loss: Scalar at the parameters' present values; the gradient flows to them.
        tolerance_grad: Ends where no entry of the gradient is larger.

    Returns:
        Number of iterations, at most `MAX_ITERATIONS`.
    """
    import torch

    optimiser = torch.optim.LBFGS(
        [parameters],
        lr=1.0,
        max_iter=MAX_ITERATIONS,
        tolerance_grad=tolerance_grad,
        tolerance_change=1e-14,
        line_search_fn="strong_wolfe",
    )

    def closure() -> torch.Tensor:
        optimiser.zero_grad()
        found = loss()
        found.backward()
        return found

    # torch types step's result and closure loosely; the gradient flows through `closure` as it stands.
    optimiser.step(closure)  # type: ignore[arg-type]
    return int(optimiser.state[parameters]["n_iter"])
