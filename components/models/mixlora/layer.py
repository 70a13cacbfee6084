"""MixLoRA modules: an FFN, or one linear layer, with a router and LoRA experts on top of frozen weights.

Parameters are named `lora_A_<projection>` [N, r, in] and `lora_B_<projection>` [N, out, r] and belong to the module
itself, all experts of a projection in one tensor: ZeRO stage 3 gathers them together, whichever experts a rank's tokens
choose, so ranks that choose differently stay in step (E13). Each module returns one tensor.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

from components.config import MixLoraConfig
from components.models.mixlora.dispatch import dispatch
from components.models.mixlora.experts import LoraPair, expert_ffn
from components.models.mixlora.routing import Router, RoutingRecorder, choose


class MixLoraModule(nn.Module):
    """What both kinds share: frozen base, router, experts, and the recorder that knows which tokens are padding.

    Args:
        base: The frozen module in whose place this one stands.
        projections: In and out widths of each projection that gets experts, by its name in `base`.
        width: d of the router's input.
        config: Ranks, experts, jitter.
        recorder: Shared by all routers of a model.
    """

    def __init__(
        self,
        base: nn.Module,
        projections: dict[str, tuple[int, int]],
        width: int,
        config: MixLoraConfig,
        recorder: RoutingRecorder,
    ) -> None:
        super().__init__()
        self.base, self.recorder, self.scale, self.dropout = base, recorder, config.alpha / config.r, config.dropout
        self.router = Router(
            width, config.num_experts, config.top_k, init_std=config.router_init_std, jitter=config.jitter
        )
        for name, (fan_in, fan_out) in projections.items():
            a = torch.empty(config.num_experts, config.r, fan_in)
            # What PEFT's kaiming_uniform(a=sqrt(5)) comes to.
            nn.init.uniform_(a, -1.0 / math.sqrt(fan_in), 1.0 / math.sqrt(fan_in))
            self.register_parameter(f"lora_A_{name}", nn.Parameter(a))
            self.register_parameter(f"lora_B_{name}", nn.Parameter(torch.zeros(config.num_experts, fan_out, config.r)))

    def pair(self, projection: str) -> LoraPair:
        """The adapters of a projection."""
        return LoraPair(getattr(self, f"lora_A_{projection}"), getattr(self, f"lora_B_{projection}"))

    @property
    def num_experts(self) -> int:
        """N."""
        return self.router.num_experts


class MixLoraFfn(MixLoraModule):
    """The FFN of a layer with experts on each of its projections; padding is neither routed nor computed.

    Understands three forms: `gate_proj`, `up_proj`, `down_proj` (Llama), `gate_up_proj`, `down_proj` (Phi-3), and
    `fc1`, `fc2` (Phi, without gate).

    Args:
        base: The model's own FFN.
        activation: Its activation function.
        config: Ranks, experts, jitter.
        recorder: Shared by all routers of a model.
    """

    def __init__(
        self,
        base: nn.Module,
        activation: Callable[[Tensor], Tensor],
        config: MixLoraConfig,
        recorder: RoutingRecorder,
    ) -> None:
        shapes = {
            name: (p.in_features, p.out_features) for name, p in base.named_children() if isinstance(p, nn.Linear)
        }
        super().__init__(base, shapes, next(iter(shapes.values()))[0], config, recorder)
        self.activation = activation

    def forward(self, hidden: Tensor) -> Tensor:
        """Output of the FFN, [R, T, d] like its input; zero for padding."""
        flat = hidden.reshape(-1, hidden.shape[-1])
        tokens = self.recorder.real_tokens(hidden)
        x = flat if tokens is None else flat.index_select(0, tokens)
        weights, experts = choose(self.router, x, self.recorder)
        gate, up, pairs = self._raise(x)
        summed, low = expert_ffn(
            gate,
            up,
            nn.functional.dropout(x.float(), self.dropout, self.training),
            weights,
            pairs,
            dispatch(experts, self.num_experts),
            scale=self.scale,
            activation=self.activation,
            dropout=self.dropout if self.training else 0.0,
        )
        down = self.base.fc2 if pairs[1] is None else self.base.down_proj
        out = down(summed.to(x.dtype)) + low.to(x.dtype)  # type: ignore[operator]
        if tokens is not None:
            out = torch.zeros_like(flat).index_copy(0, tokens, out)
        return out.view_as(hidden)

    def _raise(self, x: Tensor) -> tuple[Tensor, Tensor | None, tuple[LoraPair, LoraPair | None, LoraPair]]:
        """Outputs of the frozen gate and up projections, and the adapters of gate, up and down."""
        base = self.base
        if hasattr(base, "fc1"):
            return base.fc1(x), None, (self.pair("fc1"), None, self.pair("fc2"))  # type: ignore[operator]
        down = self.pair("down_proj")
        if hasattr(base, "gate_up_proj"):
            gate, up = base.gate_up_proj(x).chunk(2, dim=-1)  # type: ignore[operator]
            a, b = self.pair("gate_up_proj")
            b_gate, b_up = b.chunk(2, dim=1)
            return gate, up, (LoraPair(a, b_gate), LoraPair(a, b_up), down)
        gate, up = base.gate_proj(x), base.up_proj(x)  # type: ignore[operator]
        return gate, up, (self.pair("gate_proj"), self.pair("up_proj"), down)


class MixLoraLinear(MixLoraModule):
    """A linear layer with a router and experts of its own.

    Args:
        base: The frozen layer.
        config: Ranks, experts, jitter.
        recorder: Shared by all routers of a model.
    """

    def __init__(self, base: nn.Linear, config: MixLoraConfig, recorder: RoutingRecorder) -> None:
        super().__init__(base, {"weight": (base.in_features, base.out_features)}, base.in_features, config, recorder)

    def forward(self, hidden: Tensor) -> Tensor:
        """Base output plus the weighted sum of the experts', [R, T, out]; the base's alone for padding."""
        out = self.base(hidden)
        flat = hidden.reshape(-1, hidden.shape[-1])
        tokens = self.recorder.real_tokens(hidden)
        x = flat if tokens is None else flat.index_select(0, tokens)
        weights, experts = choose(self.router, x, self.recorder)
        with torch.autocast(x.device.type, enabled=False):
            added = self._experts(x.float(), weights, experts)
        if tokens is not None:
            added = added.new_zeros(len(flat), added.shape[-1]).index_copy(0, tokens, added)
        return out + added.to(out.dtype).view_as(out)

    def _experts(self, x: Tensor, weights: Tensor, experts: Tensor) -> Tensor:
        """Weighted sum of the experts' low-rank outputs, float32 [M, out]."""
        where, (a, b) = dispatch(experts, self.num_experts), self.pair("weight")
        low = torch.bmm(where.gather(nn.functional.dropout(x, self.dropout, self.training)), a[where.expert].mT)
        raised = torch.bmm(low, b[where.expert].mT).flatten(0, 1)
        # [M, k, out]: slots back to their tokens; filler is left behind.
        return (raised[where.place] * weights.unsqueeze(-1)).sum(dim=1) * self.scale
