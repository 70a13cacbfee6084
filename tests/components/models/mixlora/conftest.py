"""Small MixLoRA modules with random weights, and the plain way to compute them, expert by expert."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from components.config import MixLoraConfig
from components.models.mixlora.layer import MixLoraFfn
from components.models.mixlora.routing import RoutingRecorder


class GatedFfn(nn.Module):
    """Llama's FFN."""

    def __init__(self, d: int, h: int) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = nn.Linear(d, h, bias=False), nn.Linear(d, h, bias=False)
        self.down_proj, self.act_fn = nn.Linear(h, d, bias=False), nn.SiLU()

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


class FusedFfn(nn.Module):
    """Phi-3's FFN."""

    def __init__(self, d: int, h: int) -> None:
        super().__init__()
        self.gate_up_proj, self.down_proj = nn.Linear(d, 2 * h, bias=False), nn.Linear(h, d, bias=False)
        self.act_fn = nn.SiLU()

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up_proj(x).chunk(2, dim=-1)
        return self.down_proj(up * self.act_fn(gate))


class PlainFfn(nn.Module):
    """Phi's FFN: no gate, with biases."""

    def __init__(self, d: int, h: int) -> None:
        super().__init__()
        self.fc1, self.fc2, self.act_fn = nn.Linear(d, h), nn.Linear(h, d), nn.GELU(approximate="tanh")

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(self.act_fn(self.fc1(x)))


FORMS = {"gated": GatedFfn, "fused": FusedFfn, "plain": PlainFfn}


@pytest.fixture(scope="session")
def make_ffn() -> Callable[..., MixLoraFfn]:
    """Builds a module; `trained` moves B and the router away from their start."""

    def make(form: str = "gated", d: int = 12, h: int = 20, *, trained: bool = True, **config: Any) -> MixLoraFfn:
        base = FORMS[form](d, h).requires_grad_(False)
        module = MixLoraFfn(base, base.act_fn, MixLoraConfig(**config), RoutingRecorder())
        if trained:
            for name, parameter in module.named_parameters():
                if name.startswith("lora_B"):
                    nn.init.normal_(parameter, std=0.3)
                if name == "router.weight":
                    nn.init.normal_(parameter, std=1.0)
        return module

    return make


def expert(module: MixLoraFfn, x: Tensor, e: int) -> Tensor:
    """Expert e on tokens [M, d], its whole FFN computed for itself."""
    base = module.base

    def adapted(name: str, z: Tensor) -> Tensor:
        a, b = module.pair(name)
        return getattr(base, name)(z) + module.scale * (z @ a[e].T) @ b[e].T

    if hasattr(base, "fc1"):
        return adapted("fc2", base.act_fn(adapted("fc1", x)))
    if hasattr(base, "gate_up_proj"):
        gate, up = adapted("gate_up_proj", x).chunk(2, dim=-1)
        return adapted("down_proj", base.act_fn(gate) * up)
    return adapted("down_proj", base.act_fn(adapted("gate_proj", x)) * adapted("up_proj", x))


@pytest.fixture(scope="session")
def naive() -> Callable[[MixLoraFfn, Tensor], Tensor]:
    """The layer's output for [M, d], one expert after another."""

    def compute(module: MixLoraFfn, x: Tensor) -> Tensor:
        probs = torch.softmax(module.router(x), dim=-1)
        weights, experts = probs.topk(module.router.top_k, dim=-1)
        weights = weights / weights.sum(dim=-1, keepdim=True)
        out = torch.zeros_like(x)
        for e in range(module.num_experts):
            token, choice = torch.where(experts == e)
            out = out.index_add(0, token, weights[token, choice, None] * expert(module, x[token], e))
        return out

    return compute


@pytest.fixture(scope="session")
def run_expert() -> Callable[[MixLoraFfn, Tensor, int], Tensor]:
    return expert
