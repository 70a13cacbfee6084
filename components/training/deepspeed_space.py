"""`ParameterSpace` on a DeepSpeed engine at ZeRO stage 0, 1, 2 or 3.

The engine owns theta, its float32 masters and its moments. The space asks three things of it: the working weights that
the forward pass reads (whole tensors at stages 0 to 2, this rank's shards at stage 3), one optimiser step along a given
direction, and whole tensors for a checkpoint. Gradients are taken by `torch.autograd.grad`, which runs past the
engine's gradient hooks: however often and at whatever point a loss is differentiated, the optimiser learns of nothing
until `apply`.

alpha stays outside the engine: it is small, equal on every rank, and has a PyTorch optimiser of its own.

Losses call the model that the engine was made from (`engine.module`), not the engine. At stage 3 the weights are
gathered by hooks on the module; `engine.forward` would only prepare a backward pass that never comes, and refuses any
other one at stage 0.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

from components.errors import CaltuneError, CheckpointError
from components.training.deepspeed_engine import link_moments
from components.training.parameter_space import (
    Block,
    BlockVector,
    Loss,
    Rate,
    TorchSpace,
    dot,
    sum_over_ranks,
    sum_tensors_over_ranks,
)

if TYPE_CHECKING:
    from deepspeed import DeepSpeedEngine

MOMENTS = ("exp_avg", "exp_avg_sq")


class DeepSpeedSpace:
    """The space on an engine of `make_engine`.

    Vectors are whole and equal on every rank at stages 0 to 2; at stage 3 their theta block is this rank's shards.

    Args:
        engine: Holds theta.
        alpha: Upper variables by name, on the engine's device, equal on every rank; empty for single-level training.
        theta: Lower variables by name, the same that `make_engine` was given.
        alpha_optimizer: Holds alpha, in groups of `block_groups`; None where alpha is empty.
    """

    def __init__(
        self,
        engine: DeepSpeedEngine,
        alpha: Mapping[str, Tensor],
        theta: Mapping[str, nn.Parameter],
        alpha_optimizer: torch.optim.Optimizer | None,
    ) -> None:
        if alpha and alpha_optimizer is None:
            raise ValueError(f"no optimizer for {list(alpha)}")
        self.engine, self._alpha, self._theta = engine, dict(alpha), dict(theta)
        self._upper = None if alpha_optimizer is None else TorchSpace(alpha, {}, alpha_optimizer)
        self._stage = int(engine.zero_optimization_stage())
        self._sharded = self._stage == 3

    def gradient(self, loss: Loss, wrt: Iterable[Block] = ("alpha", "theta")) -> tuple[float, BlockVector]:
        """See `ParameterSpace`. At stage 3 every rank must use the same parameters in the same order."""
        wanted = set(wrt)
        alpha = list(self._alpha.values()) if "alpha" in wanted else []
        theta = list(self._theta.values()) if "theta" in wanted else []
        for a in self._alpha.values():
            a.requires_grad_("alpha" in wanted)
        with _frozen(() if theta else self._theta.values()):
            value = loss()
        with _reduce_scattered(theta if self._sharded else ()) as shards:
            grads = torch.autograd.grad(value, [*alpha, *theta], allow_unused=True)
        whole = alpha if self._sharded else [*alpha, *theta]
        filled = [torch.zeros_like(p) if g is None else g for p, g in zip(whole, grads[: len(whole)], strict=True)]
        sum_tensors_over_ranks(filled)
        vector = BlockVector(tuple(filled[: len(alpha)]), tuple(shards if self._sharded else filled[len(alpha) :]))
        return sum_over_ranks(float(value.detach())), vector

    def inner(self, x: BlockVector, y: BlockVector) -> float:
        """See `ParameterSpace`."""
        theta = dot(x.theta, y.theta) if x.theta and y.theta else 0.0
        alpha = dot(x.alpha, y.alpha) if x.alpha and y.alpha else 0.0
        return alpha + (sum_over_ranks(theta) if self._sharded else theta)

    @torch.no_grad()
    def snapshot_theta(self) -> Sequence[Tensor]:
        """See `ParameterSpace`."""
        return [w.clone() for w in self._working_weights()]

    @torch.no_grad()
    def restore_theta(self, snapshot: Sequence[Tensor]) -> None:
        """See `ParameterSpace`."""
        torch._foreach_copy_(self._working_weights(), list(snapshot))
        self._settle()

    @torch.no_grad()
    def move_theta(self, step: float, direction: BlockVector) -> None:
        """See `ParameterSpace`."""
        torch._foreach_add_(self._working_weights(), list(direction.theta), alpha=step)
        self._settle()

    def apply(self, direction: BlockVector) -> None:
        """See `ParameterSpace`.

        Raises:
            CaltuneError: DeepSpeed refused the step, which it does where the direction is not finite.
        """
        if self._upper is not None:
            self._upper.apply(BlockVector(alpha=direction.alpha))
        if direction.theta:
            self._step_theta(direction.theta)

    def set_learning_rates(self, rates: Mapping[Rate, float]) -> None:
        """See `ParameterSpace`."""
        if self._upper is not None:
            self._upper.set_learning_rates(rates)
        for group in self.engine.optimizer.param_groups:
            group["lr"] = rates[group["rate"]]

    def state_dict(self) -> dict[str, Tensor]:
        """See `ParameterSpace`; keys and shapes are `TorchSpace`'s."""
        from deepspeed.utils import safe_get_full_fp32_param

        state = {} if self._upper is None else self._upper.state_dict()
        stepped = next(iter(self.engine.optimizer.state.values()), None)
        if stepped is not None:
            link_moments(self.engine)
        for name, p in self._theta.items():
            whole = safe_get_full_fp32_param(p) if self._sharded else p.detach()
            state[f"value/theta.{name}"] = whole.clone()
            if stepped is not None:
                state[f"step/theta.{name}"] = torch.as_tensor(stepped["step"]).clone()
                state |= {f"{key}/theta.{name}": self._whole_moment(p, key) for key in MOMENTS}
        return state

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """See `ParameterSpace`.

        Raises:
            CheckpointError: Parameters have taken different numbers of steps; DeepSpeed counts one for all.
        """
        steps = {float(state.get(f"step/theta.{name}", torch.zeros(()))) for name in self._theta}
        if len(steps) > 1:
            raise CheckpointError(f"the state holds different step counts for theta: {sorted(steps)}")
        if self._upper is not None:
            self._upper.load_state_dict(state)
        if not self.engine.optimizer.state:
            self._make_optimizer_state()
        link_moments(self.engine)
        self._drop_gathered()
        for name, p in self._theta.items():
            value = state[f"value/theta.{name}"]
            self._set_value(p, value)
            for key in MOMENTS:
                self._set_moment(p, key, state.get(f"{key}/theta.{name}", torch.zeros_like(value)))
        step = steps.pop()
        for entry in self.engine.optimizer.state.values():
            entry["step"].fill_(step)
        self._settle()

    def _working_weights(self) -> list[Tensor]:
        if not self._sharded:
            return [p.detach() for p in self._theta.values()]
        self._drop_gathered()
        return [_shard(p) for p in self._theta.values()]

    def _drop_gathered(self) -> None:
        # A gathered copy left over from a forward pass would hide from the next one that its shards have changed.
        if self._sharded:
            self.engine.optimizer.empty_partition_cache()

    def _settle(self) -> None:
        # At stage 3 DeepSpeed gathers on a stream of its own, which must not overtake a write to the shards.
        if self._sharded:
            from deepspeed.accelerator import get_accelerator

            get_accelerator().synchronize()

    def _step_theta(self, direction: Sequence[Tensor]) -> None:
        from deepspeed.utils import safe_set_local_grad

        if self._sharded:
            # A backward pass that reaches no parameter closes DeepSpeed's gradient shards; then they can be written.
            self.engine.backward(torch.zeros((), device=self.engine.device, requires_grad=True).clone())
            for p, d in zip(self._theta.values(), direction, strict=True):
                safe_set_local_grad(p, d)
        else:
            # <d, theta> has the gradient d on every rank, and so has the average that DeepSpeed takes.
            pairs = zip(self._theta.values(), direction, strict=True)
            self.engine.backward(cast(Tensor, sum((p * d).sum() for p, d in pairs)))
        self.engine.step()
        if not self.engine.was_step_applied():
            raise CaltuneError("DeepSpeed skipped the step: the direction has values that are not finite")

    def _make_optimizer_state(self) -> None:
        # DeepSpeed makes its optimiser state in the first step; at rate and gradient zero that step changes nothing.
        groups = self.engine.optimizer.param_groups
        rates = [group["lr"] for group in groups]
        for group in groups:
            group["lr"] = 0.0
        self._step_theta([torch.zeros_like(w) for w in self._working_weights()])
        for group, rate in zip(groups, rates, strict=True):
            group["lr"] = rate

    def _whole_moment(self, p: nn.Parameter, key: str) -> Tensor:
        from deepspeed.utils import safe_get_full_optimizer_state

        whole = self.engine.optimizer.state[p][key] if self._stage == 0 else safe_get_full_optimizer_state(p, key)
        return whole.detach().clone()

    @torch.no_grad()
    def _set_moment(self, p: nn.Parameter, key: str, whole: Tensor) -> None:
        from deepspeed.utils import safe_set_full_optimizer_state, safe_set_local_optimizer_state

        if self._stage == 0:
            self.engine.optimizer.state[p][key].copy_(whole)
        elif self._sharded:
            safe_set_local_optimizer_state(p, _own_part(p, whole), key)
        else:
            safe_set_full_optimizer_state(p, whole, key)

    @torch.no_grad()
    def _set_value(self, p: nn.Parameter, whole: Tensor) -> None:
        # The setters write the float32 masters; the working weights follow only in the next step.
        from deepspeed.utils import safe_set_full_fp32_param, safe_set_local_fp32_param

        if self._sharded:
            part = _own_part(p, whole)
            safe_set_local_fp32_param(p, part)
            _shard(p).copy_(part)
        else:
            safe_set_full_fp32_param(p, whole)
            p.copy_(whole)


def _shard(p: nn.Parameter) -> Tensor:
    """This rank's part of a parameter that ZeRO stage 3 has sharded, flat; equally long on every rank."""
    return cast(Tensor, p.ds_tensor)  # type: ignore[attr-defined]


def _padded(p: nn.Parameter, whole: Tensor) -> Tensor:
    """A tensor shaped like the parameter, flat, with zeros up to world size times the shard's length."""
    return functional.pad(whole.flatten(), (0, dist.get_world_size() * _shard(p).numel() - whole.numel()))


def _own_part(p: nn.Parameter, whole: Tensor) -> Tensor:
    length = _shard(p).numel()
    return _padded(p, whole).narrow(0, dist.get_rank() * length, length)


@contextmanager
def _frozen(parameters: Iterable[nn.Parameter]) -> Iterator[None]:
    """Within it the parameters are constants, so that a loss builds no graph through the model."""
    frozen = list(parameters)
    for p in frozen:
        p.requires_grad_(False)
    try:
        yield
    finally:
        for p in frozen:
            p.requires_grad_(True)


@contextmanager
def _reduce_scattered(parameters: Iterable[nn.Parameter]) -> Iterator[list[Tensor]]:
    """Within it, a sharded parameter's gradient is summed over ranks and cut to this rank's shard once it is known.

    So no more than one whole gradient exists at a time.

    Yields:
        The shards, filled during the backward pass; zero for parameters that it does not reach.
    """
    sharded = list(parameters)
    shards = [torch.zeros_like(_shard(p)) for p in sharded]

    def keep_shard(p: nn.Parameter, shard: Tensor) -> Callable[[Tensor], Tensor]:
        def hook(grad: Tensor) -> Tensor:
            dist.reduce_scatter_single(shard, _padded(p, grad))
            return grad.new_zeros(()).expand_as(grad)  # a stand-in that takes no memory

        return hook

    handles = [p.register_hook(keep_shard(p, shard)) for p, shard in zip(sharded, shards, strict=True)]
    try:
        yield shards
    finally:
        for handle in handles:
            handle.remove()
