"""Counts the bytes that are alive and the products that are computed while code runs on the meta device.

Tensors on the meta device have a shape, a type and a lifetime but no values. What a training step allocates there, and
when it lets go of it, is what it allocates on a GPU, autograd's saved tensors included, for any architecture.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

aten = torch.ops.aten


@dataclass(frozen=True)
class Usage:
    """What code holds and computes, beside the model itself.

    Attributes:
        activations: Bytes kept for the backward pass and being worked on.
        logits: Bytes of tensors as wide as the vocabulary, in whatever number of copies.
        gradients: Bytes of gradients by parameters that are complete.
        before_logits: Most bytes of activations before there are any logits, in the forward pass.
        without_logits: Most bytes of activations at any moment without logits.
        flops: Floating-point operations of matrix products, a multiplication and an addition counting as two.
    """

    activations: float = 0.0
    logits: float = 0.0
    gradients: float = 0.0
    before_logits: float = 0.0
    without_logits: float = 0.0
    flops: float = 0.0

    @property
    def temporary(self) -> float:
        """Bytes beside gradients."""
        return self.activations + self.logits

    def plus(self, other: Usage, scale: float) -> Usage:
        """Self + scale * other, figure by figure."""
        return Usage(*(getattr(self, f.name) + scale * getattr(other, f.name) for f in fields(self)))


NOTHING = Usage()


class Tally(TorchDispatchMode):
    """Within it, new storages are counted for as long as they live, and questions about values get an answer.

    Asked for a truth value a meta tensor says no, asked for a number it says one; a count of unknown size takes its
    upper bound. So batches count as padded, which they are in training.

    Args:
        existing: Tensors that are there before, not to be counted.
        vocabulary: Width by which logits are recognised.
    """

    def __init__(self, existing: Iterable[Tensor], vocabulary: int) -> None:
        super().__init__()
        self.vocabulary = vocabulary
        self.flops = 0
        self._known = {t.untyped_storage()._cdata for t in existing}
        self._alive: dict[int, tuple[str, int]] = {}
        self._references: dict[int, Any] = {}
        self._sums = {"activations": 0, "logits": 0, "gradients": 0}
        self._peak = dict(self._sums)
        self._before_logits = self._without_logits = 0
        self._logits_seen = False

    def mark_gradient(self, gradient: Tensor) -> None:
        """From now on a storage counts as a gradient."""
        key = gradient.untyped_storage()._cdata
        if key in self._alive:
            kind, size = self._alive[key]
            self._alive[key] = ("gradients", size)
            self._sums[kind] -= size
            self._sums["gradients"] += size

    def usage(self) -> Usage:
        """What was seen, at the moment when activations and logits took most."""
        return Usage(
            **self._peak, before_logits=self._before_logits, without_logits=self._without_logits, flops=self.flops
        )

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Runs an operator, or answers in its place, and counts what it made."""
        kwargs = kwargs or {}
        answered, out = _answer(func, args, kwargs)
        if not answered:
            out = func(*args, **kwargs)
        self.flops += _flops(func, args, kwargs, out)
        for tensor in tree_leaves(out):
            if isinstance(tensor, Tensor):
                self._count(tensor)
        return out

    def _count(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._alive or key in self._known:
            return
        wide = tensor.dim() > 1 and tensor.shape[-1] == self.vocabulary
        kind = "logits" if wide else "activations"
        self._alive[key] = (kind, storage.nbytes())
        self._sums[kind] += storage.nbytes()
        self._references[key] = weakref.ref(storage, lambda _, key=key: self._forget(key))  # type: ignore[misc]
        if self._temporary(self._sums) > self._temporary(self._peak):
            self._peak = dict(self._sums)
        self._logits_seen |= wide
        if not self._logits_seen:
            self._before_logits = max(self._before_logits, self._sums["activations"])
        if self._sums["logits"] == 0:
            self._without_logits = max(self._without_logits, self._sums["activations"])

    def _forget(self, key: int) -> None:
        kind, size = self._alive.pop(key)
        self._sums[kind] -= size
        del self._references[key]

    @staticmethod
    def _temporary(sums: dict[str, int]) -> int:
        return sums["activations"] + sums["logits"]


def _answer(func: Any, args: Any, kwargs: Any) -> tuple[bool, Any]:
    """What depends on values, which there are none of."""
    if func is aten._local_scalar_dense.default and args[0].is_meta:
        return True, False if args[0].dtype == torch.bool else 1
    if func is aten.bincount.default and args[0].is_meta:
        bins = kwargs["minlength"] if "minlength" in kwargs else args[2]
        return True, torch.empty(bins, dtype=torch.int64, device="meta")
    if func is aten.nonzero.default and args[0].is_meta:
        return True, torch.empty(args[0].numel(), args[0].dim(), dtype=torch.int64, device="meta")
    if func is aten.index.Tensor and args[0].is_meta and args[1][0] is not None and args[1][0].dtype == torch.bool:
        mask = args[1][0]
        return True, args[0].new_empty(mask.numel(), *args[0].shape[mask.dim() :])
    return False, None


def _flops(func: Any, args: Any, kwargs: Any, out: Any) -> int:
    if func is aten._scaled_dot_product_flash_attention_for_cpu.default:
        return int(sdpa_flop_count(args[0].shape, args[1].shape, args[2].shape))
    if func is aten._scaled_dot_product_flash_attention_for_cpu_backward.default:
        return int(sdpa_backward_flop_count(args[0].shape, args[1].shape, args[2].shape, args[3].shape))
    counter = flop_registry.get(func._overloadpacket)
    return int(counter(*args, **kwargs, out_val=out)) if counter is not None else 0
