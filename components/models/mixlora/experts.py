"""The experts of one FFN, computed exactly and without computing the base FFN once per expert.

Expert e of a gated FFN is W_d (act(g_e) * u_e) + c B_d A_d (act(g_e) * u_e) with g_e = W_g x + c B_g A_g x and likewise
u_e. W_g x and W_u x do not depend on the expert, and the down-projection is linear, so for a token with weights w

    sum_e w_e expert_e(x) = W_d (sum_e w_e h_e) + c sum_e w_e B_d A_d h_e,    h_e = act(g_e) * u_e:

each frozen matrix is applied once a token, and only the low-rank parts once a chosen expert. Weights that add up to 1
leave a bias of the down-projection as it is.

For the backward pass g_e and u_e of each chosen expert are kept, 2 k values of width h a token: as much as plain LoRA
keeps at k = 2. The hidden states are computed again from them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from components.models.mixlora.dispatch import Dispatch

Activation = Callable[[Tensor], Tensor]


class LoraPair(NamedTuple):
    """The adapters of one projection for all experts: A [N, r, in] and B [N, out, r]."""

    a: Tensor
    b: Tensor


def expert_ffn(
    gate: Tensor,
    up: Tensor | None,
    x: Tensor,
    weights: Tensor,
    pairs: tuple[LoraPair, LoraPair | None, LoraPair],
    where: Dispatch,
    *,
    scale: float,
    activation: Activation,
    dropout: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """Weighted sums over each token's experts of their hidden states and of the down-projection's low-rank part.

    Args:
        gate: [M, h], W_g x, any precision.
        up: [M, h], W_u x; None for an FFN without gate (then h_e = act(g_e)).
        x: float32 [M, d], the adapters' input.
        weights: float32 [M, k].
        pairs: Adapters of gate, up (None without) and down, float32.
        where: From `dispatch`.
        scale: c.
        activation: act, elementwise.
        dropout: Probability with which an element of the down adapter's input is dropped.

    Returns:
        float32 [M, h], sum_e w_e h_e, to be put through the down-projection; and float32 [M, d], to be added to that.
    """
    keep = None
    if dropout > 0:
        keep = torch.rand(where.blocks, len(where.token) // where.blocks, gate.shape[-1], device=gate.device) >= dropout
    ups: tuple[Tensor | None, Tensor | None] = (None, None) if pairs[1] is None else (pairs[1].a, pairs[1].b)
    settings = _Settings(where, scale, activation, keep, 1.0 / (1.0 - dropout))
    with torch.autocast(gate.device.type, enabled=False):  # the adapters are float32 whatever surrounds them
        return _ExpertFfn.apply(settings, gate, up, x, weights, *pairs[0], *ups, *pairs[2])  # type: ignore[no-any-return]


class _Settings(NamedTuple):
    where: Dispatch
    scale: float
    activation: Activation
    keep: Tensor | None
    keep_scale: float

    def dropped(self, slots: Tensor) -> Tensor:
        return slots if self.keep is None else slots * self.keep * self.keep_scale


class _ExpertFfn(torch.autograd.Function):
    """Shapes: [B, b, c] for c values of every slot. Names as in the module's docstring; `_e` marks a block's matrix."""

    @staticmethod
    def forward(ctx: Any, settings: _Settings, *tensors: Any) -> tuple[Tensor, Tensor]:
        gate, up, x, weights, a_g, b_g, a_u, b_u, a_d, b_d = tensors
        where, scale = settings.where, settings.scale
        xs = where.gather(x)
        low_g = _low(xs, a_g, where, scale)
        g, low_u, u = _raised(gate, low_g, b_g, where), None, None
        hidden = settings.activation(g)
        if up is not None:
            low_u = _low(xs, a_u, where, scale)
            u = _raised(up, low_u, b_u, where)
            hidden = hidden.mul_(u)
        low_d = torch.bmm(settings.dropped(hidden), a_d[where.expert].mT)
        out = torch.bmm(low_d, b_d[where.expert].mT).mul_(scale)
        ctx.settings, ctx.base_dtype = settings, gate.dtype
        ctx.save_for_backward(x, weights, a_g, b_g, a_u, b_u, a_d, b_d, g, u, low_g, low_u, low_d)
        return where.average(hidden, weights), where.combine(out, weights)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        d_hidden, d_out = grads
        x, weights, a_g, b_g, a_u, b_u, a_d, b_d, g, u, low_g, low_u, low_d = ctx.saved_tensors
        settings: _Settings = ctx.settings
        where, scale = settings.where, settings.scale
        w = where.spread(weights)

        with torch.enable_grad():
            g = g.detach().requires_grad_()
            activated = settings.activation(g)
        acted = hidden = activated.detach()
        if u is not None:
            hidden = acted * u

        d_out_s = where.gather(d_out)
        d_low = torch.bmm(d_out_s, b_d[where.expert]).mul_(scale)
        d_b_d = torch.bmm(d_out_s.mT, low_d * w).mul_(scale)
        d_w = (d_low * low_d).sum(dim=-1)
        d_low.mul_(w)
        d_a_d = torch.bmm(d_low.mT, settings.dropped(hidden))
        d_h = where.gather(d_hidden)
        d_w += torch.linalg.vecdot(d_h, hidden)
        d_h.mul_(w)
        if settings.keep is None:
            d_h.baddbmm_(d_low, a_d[where.expert])
        else:
            d_h += settings.dropped(torch.bmm(d_low, a_d[where.expert]))

        xs = where.gather(x)
        d_up = d_a_u = d_b_u = d_xs = None
        if u is not None:
            d_u = torch.mul(acted, d_h, out=hidden)
            d_h.mul_(u)
            d_up, d_a_u, d_b_u, d_xs = _projection_backward(d_u, xs, low_u, a_u, b_u, settings)
            d_up = d_up.to(ctx.base_dtype)
        (d_g,) = torch.autograd.grad(activated, g, d_h)
        d_gate, d_a_g, d_b_g, d_xs_g = _projection_backward(d_g, xs, low_g, a_g, b_g, settings)
        d_xs = d_xs_g if d_xs is None else d_xs.add_(d_xs_g)
        n = len(a_d)
        return (
            None,
            d_gate.to(ctx.base_dtype),
            d_up,
            where.combine(d_xs),
            d_w.flatten()[where.place],
            d_a_g,
            d_b_g,
            d_a_u,
            d_b_u,
            where.sum_by_expert(d_a_d, n),
            where.sum_by_expert(d_b_d, n),
        )


def _low(xs: Tensor, a: Tensor, where: Dispatch, scale: float) -> Tensor:
    """C A_e x of every slot, [B, b, r]."""
    return torch.bmm(xs, a[where.expert].mT).mul_(scale)


def _raised(base: Tensor, low: Tensor, b: Tensor, where: Dispatch) -> Tensor:
    """W x + B_e (c A_e x) of every slot, float32 [B, b, h], freshly made."""
    return where.gather(base).float().baddbmm_(low, b[where.expert].mT)


def _projection_backward(
    d: Tensor, xs: Tensor, low: Tensor, a: Tensor, b: Tensor, settings: _Settings
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of the base's output [M, h], of A, of B, and of the slots' input [B, b, d], given the slots' d."""
    where = settings.where
    d_low = torch.bmm(d, b[where.expert]).mul_(settings.scale)
    d_a, d_b = torch.bmm(d_low.mT, xs), torch.bmm(d.mT, low)
    d_xs = torch.bmm(d_low, a[where.expert])
    return where.combine(d), where.sum_by_expert(d_a, len(a)), where.sum_by_expert(d_b, len(b)), d_xs
