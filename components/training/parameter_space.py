"""The space that the bilevel solver moves in: u = (alpha, theta), upper and lower variables side by side.

The solver needs eight operations and knows nothing of models, devices or sharding. `TorchSpace` offers them on plain
tensors (replicated on every rank of a process group, if there is one); `components/training/deepspeed_space.py` offers
the same eight on a DeepSpeed engine.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from components.models.adapter import is_router

Loss = Callable[[], Tensor]
"""Evaluates a scalar at the space's present point. On several ranks: this rank's share, so that the sum over ranks is
the loss of the global batch."""

Block = Literal["alpha", "theta"]

Rate = Literal["alpha", "theta", "router"]
"""A learning rate. Routers are a part of theta with a rate of their own."""


@dataclass(frozen=True)
class BlockVector:
    """A vector of the space: a direction, a gradient. An absent block is an empty tuple and counts as zero.

    Attributes:
        alpha: One tensor per upper variable, shaped like it.
        theta: One tensor per lower variable, shaped like it (under sharding: like this rank's shard).
    """

    alpha: tuple[Tensor, ...] = ()
    theta: tuple[Tensor, ...] = ()

    def plus(self, other: BlockVector, scale: float = 1.0) -> BlockVector:
        """Self + scale * other, blockwise; a block absent on one side is taken from the other."""
        return BlockVector(_axpy(scale, other.alpha, self.alpha), _axpy(scale, other.theta, self.theta))


def _axpy(scale: float, x: Sequence[Tensor], y: Sequence[Tensor]) -> tuple[Tensor, ...]:
    if not x:
        return tuple(y)
    if not y:
        return tuple(torch._foreach_mul(list(x), scale))
    return tuple(torch._foreach_add(list(y), list(x), alpha=scale))


def dot(x: Sequence[Tensor], y: Sequence[Tensor]) -> float:
    """Inner product of two equally shaped lists of tensors."""
    # float64 sums: lambda divides by a squared norm that goes to zero.
    return sum(float(torch.dot(a.flatten().double(), b.flatten().double())) for a, b in zip(x, y, strict=True))


class ParameterSpace(Protocol):
    """What a solver asks of the space it works in."""

    def gradient(self, loss: Loss, wrt: Iterable[Block] = ("alpha", "theta")) -> tuple[float, BlockVector]:
        """Value and gradient of a loss at the present point, summed over ranks.

        Args:
            loss: Evaluated once. Only the blocks in `wrt` require gradients meanwhile: with alpha alone the model
                runs forward only.
            wrt: Blocks to differentiate by.
        """
        ...

    def inner(self, x: BlockVector, y: BlockVector) -> float:
        """Inner product over the concatenated blocks, summed over shards."""
        ...

    def snapshot_theta(self) -> Sequence[Tensor]:
        """A copy of theta as the forward pass sees it."""
        ...

    def restore_theta(self, snapshot: Sequence[Tensor]) -> None:
        """Puts theta back, bit for bit."""
        ...

    def move_theta(self, step: float, direction: BlockVector) -> None:
        """Theta += step * direction.theta in place, past the optimiser and leaving no trace in it."""
        ...

    def apply(self, direction: BlockVector) -> None:
        """Takes one optimiser step with `direction` in the place of the gradient.

        A block that the direction lacks stays as it is, and so do its moments.
        """
        ...

    def set_learning_rates(self, rates: Mapping[Rate, float]) -> None:
        """Sets the optimiser's rates for the steps that follow."""
        ...

    def state_dict(self) -> dict[str, Tensor]:
        """Variables and optimiser state, whole tensors by name, the same whatever the number of ranks (collective)."""
        ...

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Takes over a state written by any space with the same variables (collective)."""
        ...


def sum_over_ranks(value: float) -> float:
    """Sum of a number over the process group; the number itself without one."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return value
    total = torch.tensor(value, dtype=torch.float64, device=_communication_device())
    dist.all_reduce(total)
    return float(total)


def sum_tensors_over_ranks(tensors: Sequence[Tensor]) -> None:
    """Sums tensors over the process group in place: one collective for all of them."""
    if not dist.is_initialized() or dist.get_world_size() == 1 or not tensors:
        return
    flat = torch.cat([t.flatten() for t in tensors])
    dist.all_reduce(flat)
    torch._foreach_copy_(
        list(tensors),
        [part.view_as(t) for part, t in zip(flat.split([t.numel() for t in tensors]), tensors, strict=True)],
    )


def _communication_device() -> torch.device:
    return torch.device("cuda" if dist.get_backend() == "nccl" else "cpu")


class TorchSpace:
    """The space on plain tensors with one PyTorch optimiser.

    On several ranks every rank holds all of u, and gradients are summed over the process group, so the ranks stay
    equal.

    Args:
        alpha: Upper variables by name; empty for single-level training.
        theta: Lower variables by name.
        optimizer: Holds every variable of both blocks, in parameter groups that carry a key `rate`; see
            `block_groups`.
    """

    def __init__(
        self, alpha: Mapping[str, Tensor], theta: Mapping[str, Tensor], optimizer: torch.optim.Optimizer
    ) -> None:
        self._alpha, self._theta, self.optimizer = dict(alpha), dict(theta), optimizer
        held = {id(p) for group in optimizer.param_groups for p in group["params"]}
        missing = [name for name, p in (self._alpha | self._theta).items() if id(p) not in held]
        if missing:
            raise ValueError(f"the optimizer does not hold {missing}")

    def gradient(self, loss: Loss, wrt: Iterable[Block] = ("alpha", "theta")) -> tuple[float, BlockVector]:
        """See `ParameterSpace`."""
        wanted = set(wrt)
        alpha = list(self._alpha.values()) if "alpha" in wanted else []
        theta = list(self._theta.values()) if "theta" in wanted else []
        for p in self._alpha.values():
            p.requires_grad_("alpha" in wanted)
        for p in self._theta.values():
            p.requires_grad_("theta" in wanted)
        value = loss()
        grads = torch.autograd.grad(value, alpha + theta, allow_unused=True)
        filled = [torch.zeros_like(p) if g is None else g for p, g in zip(alpha + theta, grads, strict=True)]
        sum_tensors_over_ranks(filled)
        vector = BlockVector(tuple(filled[: len(alpha)]), tuple(filled[len(alpha) :]))
        return sum_over_ranks(float(value.detach())), vector

    def inner(self, x: BlockVector, y: BlockVector) -> float:
        """See `ParameterSpace`."""
        return (dot(x.alpha, y.alpha) if x.alpha and y.alpha else 0.0) + (
            dot(x.theta, y.theta) if x.theta and y.theta else 0.0
        )

    @torch.no_grad()
    def snapshot_theta(self) -> Sequence[Tensor]:
        """See `ParameterSpace`."""
        return [p.detach().clone() for p in self._theta.values()]

    @torch.no_grad()
    def restore_theta(self, snapshot: Sequence[Tensor]) -> None:
        """See `ParameterSpace`."""
        torch._foreach_copy_(list(self._theta.values()), list(snapshot))

    @torch.no_grad()
    def move_theta(self, step: float, direction: BlockVector) -> None:
        """See `ParameterSpace`."""
        torch._foreach_add_(list(self._theta.values()), list(direction.theta), alpha=step)

    def apply(self, direction: BlockVector) -> None:
        """See `ParameterSpace`."""
        for variables, block in ((self._alpha, direction.alpha), (self._theta, direction.theta)):
            for p, d in zip(variables.values() if block else (), block, strict=True):
                p.grad = d.to(p.dtype)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def set_learning_rates(self, rates: Mapping[Rate, float]) -> None:
        """See `ParameterSpace`."""
        for group in self.optimizer.param_groups:
            group["lr"] = rates[group["rate"]]

    def state_dict(self) -> dict[str, Tensor]:
        """See `ParameterSpace`."""
        state = {f"value/{name}": p.detach().clone() for name, p in self._named()}
        for name, p in self._named():
            for key, value in self.optimizer.state.get(p, {}).items():
                state[f"{key}/{name}"] = torch.as_tensor(value).detach().clone()
        return state

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """See `ParameterSpace`."""
        for name, p in self._named():
            p.copy_(state[f"value/{name}"])
            moments = {key.rpartition(f"/{name}")[0]: v for key, v in state.items() if key.endswith(f"/{name}")}
            moments.pop("value", None)
            self.optimizer.state[p] = {k: v.clone() for k, v in moments.items()} if moments else {}

    def _named(self) -> list[tuple[str, Tensor]]:
        return [(f"alpha.{n}", p) for n, p in self._alpha.items()] + [(f"theta.{n}", p) for n, p in self._theta.items()]


ALPHA_EPSILON = 0.1
"""Epsilon of AdamW on alpha (ours). Most of a vocabulary has a gradient that is all but zero; at the usual 1e-8 AdamW
would blow it up to the size of everybody else's and move every offset and temperature by the same amount a step, which
costs accuracy wherever other tokens are scored. Gradients on alpha are in nats per unit, so 0.1 keeps them in
proportion: tokens that carry no signal stay."""


def block_groups(
    alpha: Mapping[str, Tensor], theta: Mapping[str, Tensor], weight_decay: float = 0.0
) -> list[dict[str, object]]:
    """Parameter groups by learning rate, as the spaces expect them: each names its `rate`.

    Args:
        alpha: Upper variables by name.
        theta: Lower variables by name; the name says which are routers'.
        weight_decay: Of theta without its routers, which it would pull towards indifference (inferred, methods A.3).
    """
    routers = [p for name, p in theta.items() if is_router(name)]
    others = [p for name, p in theta.items() if not is_router(name)]
    groups: list[dict[str, object]] = [
        {"params": others, "rate": "theta", "weight_decay": weight_decay},
        {"params": routers, "rate": "router", "weight_decay": 0.0},
        {"params": list(alpha.values()), "rate": "alpha", "weight_decay": 0.0, "eps": ALPHA_EPSILON},
    ]
    return [group for group in groups if group["params"]]
