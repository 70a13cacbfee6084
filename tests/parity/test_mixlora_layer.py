"""Our MixLoRA FFN against the block of the public `mixlora` package, with equal weights, in float32."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from components.config import MixLoraConfig
from components.models.mixlora.layer import MixLoraFfn
from components.models.mixlora.routing import RoutingRecorder

pytest.importorskip("mixlora", reason="the public MixLoRA package is not installed: pip install -e '.[dev]'")

RANK_SCALE = 2.0
FORMS = {"llama": ("gate_proj", "up_proj", "down_proj"), "phi3": ("gate_up_proj", "down_proj"), "phi": ("fc1", "fc2")}


def base_ffn(kind, d, h):
    from transformers import LlamaConfig, Phi3Config, PhiConfig
    from transformers.models.llama.modeling_llama import LlamaMLP
    from transformers.models.phi.modeling_phi import PhiMLP
    from transformers.models.phi3.modeling_phi3 import Phi3MLP

    config, module = {"llama": (LlamaConfig, LlamaMLP), "phi3": (Phi3Config, Phi3MLP), "phi": (PhiConfig, PhiMLP)}[kind]
    return module(config(hidden_size=d, intermediate_size=h, num_attention_heads=1, pad_token_id=0))


def public_block(kind, ffn, r):
    """The package's block around the same FFN, its experts' matrices shared with ours."""
    from mixlora.config import MixLoraConfig as PublicConfig
    from mixlora.lora_linear import LoraLinear
    from mixlora.model import MixLoraSparseMoe

    config = PublicConfig.from_config(
        {
            "base_model_name_or_path": "none",
            "task_type": "CAUSAL_LM",
            "peft_type": "MIXLORA",
            "r": r,
            "lora_alpha": int(r * RANK_SCALE),
            "lora_dropout": 1e-9,
            "target_modules": list(FORMS[kind]),
            "routing_strategy": "mixlora",
            "num_experts": ffn.num_experts,
            "top_k": ffn.router.top_k,
        }
    )
    config.model_type_, config.dtype_ = kind, torch.float32
    config.act_fn_ = ffn.activation
    block = MixLoraSparseMoe(ffn.base, config)
    block.gate_ = ffn.router.weight
    for name in FORMS[kind]:
        a, b = ffn.pair(name)
        for e in range(ffn.num_experts):
            linear = LoraLinear(getattr(ffn.base, name), config, (a[e], b[e]))
            block.experts_[f"experts.{e}.{name}"] = linear.eval()
    return block


@st.composite
def sizes(draw):
    experts = draw(st.integers(1, 8))
    return {
        "d": 2 * draw(st.integers(1, 12)),  # Llama's configuration wants an even width
        "h": draw(st.integers(2, 32)),
        "experts": experts,
        "top_k": draw(st.integers(1, experts)),
        "r": draw(st.integers(1, 6)),
        "rows": draw(st.integers(1, 4)),
        "tokens": draw(st.integers(1, 20)),
    }


@pytest.mark.parametrize("kind", FORMS)
@settings(max_examples=30, deadline=None)
@given(size=sizes(), seed=st.integers(0, 10**6))
def test_output_equals_the_package_s_block(kind, size, seed):
    torch.manual_seed(seed)
    spec = MixLoraConfig(r=size["r"], alpha=RANK_SCALE * size["r"], num_experts=size["experts"], top_k=size["top_k"])
    base = base_ffn(kind, size["d"], size["h"])
    activation = base.act_fn if kind == "llama" else base.activation_fn
    ours = MixLoraFfn(base, activation, spec, RoutingRecorder()).eval()
    for name, parameter in ours.named_parameters():
        if name.startswith("lora_B") or name == "router.weight":
            nn.init.normal_(parameter, std=0.5)
    x = torch.randn(size["rows"], size["tokens"], size["d"])
    with torch.no_grad():
        theirs = public_block(kind, ours, size["r"])(x.clone())
        torch.testing.assert_close(ours(x), theirs, atol=1e-5, rtol=1e-5)
