"""Every large run of the papers on the meta device: model class, adapter, trained weights, ZeRO, without weights.

`models/` has each model's public `config.json`; counts are worked out from its dimensions alone.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from components.config import RunConfig
from components.models.base import resolve_model
from components.planning.shapes import build
from components.run_file import load_run_file
from components.training.deepspeed_engine import zero_config
from components.training.methods import METHODS

HERE = Path(__file__).parent
PROTOCOLS = HERE.parents[2] / "ray_jobs" / "configs" / "protocols"
LLAMA, TULU = HERE / "llama-3.1-8b", HERE / "models" / "llama-3.1-tulu-3-8b-dpo"
VICUNA, OLMO, MISTRAL = (HERE / "models" / name for name in ("vicuna-7b", "olmo-2-7b", "mistral-7b"))
PUBLISHED = {
    LLAMA: ("LlamaForCausalLM", 8_030_261_248),
    TULU: ("LlamaForCausalLM", 8_030_326_784),
    VICUNA: ("LlamaForCausalLM", 6_738_415_616),
    OLMO: ("Olmo2ForCausalLM", 7_298_617_344),
    MISTRAL: ("MistralForCausalLM", 7_241_732_096),
}
SHORT = 2  # Decoder layers that are really laid out where a count of one layer tells that of all.

CALM = [(file, model) for file in sorted(PROTOCOLS.glob("calm_*.yaml")) for model in (TULU, VICUNA, OLMO, MISTRAL)]
UQ4CT = [(file, model) for file in sorted(PROTOCOLS.glob("uq4ct_*.yaml")) for model in (LLAMA, MISTRAL)]
RUNS = [
    pytest.param(file, model, id=f"{file.stem}-{model.name}", marks=[] if i in (0, len(CALM)) else pytest.mark.slow)
    for i, (file, model) in enumerate(CALM + UQ4CT)
]


def load(file: Path, model: Path) -> RunConfig:
    return load_run_file(file, [f"model.name={model}"])


def widths(model: Path) -> dict[str, tuple[int, int]]:
    """(in, out) of the seven projections of a decoder layer."""
    d = json.loads((model / "config.json").read_text())
    hidden, inner = d["hidden_size"], d["intermediate_size"]
    keys = hidden // d["num_attention_heads"] * d["num_key_value_heads"]
    return {
        **{"q_proj": (hidden, hidden), "k_proj": (hidden, keys), "v_proj": (hidden, keys), "o_proj": (hidden, hidden)},
        **{"gate_proj": (hidden, inner), "up_proj": (hidden, inner), "down_proj": (inner, hidden)},
    }


def lora_count(model: Path, names: Any, r: int) -> int:
    """r (in + out) a projection, in every one of 32 layers."""
    return 32 * sum(r * (into + out) for name, (into, out) in widths(model).items() if name in names)


@pytest.mark.parametrize(("file", "model"), RUNS)
def test_a_large_run_can_be_built(file: Path, model: Path) -> None:
    config = load(file, model)
    resolved = resolve_model(config.model)
    for method in (METHODS[name] for name in config.methods if METHODS[name].trains_adapter):
        built = build(resolved, config, method, layers=SHORT)
        whole = built.model.get_base_model() if hasattr(built.model, "get_base_model") else built.model
        assert type(whole).__name__ == PUBLISHED[model][0]
        assert built.sizes.layers == 32
        names = {name for name, p in built.model.named_parameters() if p.requires_grad}
        assert names, "an adapter was injected"
        assert all(p.device.type == "meta" for p in built.model.parameters())
        # A layer's weights stand for those of all 32.
        assert built.sizes.theta_count * 32 // SHORT == expected(model, config, method.adapter)
        assert (built.sizes.alpha_count > 0) == method.bilevel


def expected(model: Path, config: RunConfig, adapter: str) -> int:
    """LoRA on the projections named; or LoRA on attention, N on the FFN, and N times the width for a router."""
    if adapter == "lora":
        spec = config.model.adapter
        names = widths(model) if spec.target_modules == "all-linear" else spec.target_modules
        return lora_count(model, names, spec.r)
    mix = config.model.mixlora
    hidden = json.loads((model / "config.json").read_text())["hidden_size"]
    attention = lora_count(model, ("q_proj", "k_proj", "v_proj", "o_proj"), mix.r)
    experts = mix.num_experts * lora_count(model, ("gate_proj", "up_proj", "down_proj"), mix.r)
    return attention + experts + 32 * mix.num_experts * hidden


@pytest.mark.slow
@pytest.mark.parametrize("model", PUBLISHED, ids=lambda model: model.name)
def test_models_have_the_published_number_of_weights(model: Path) -> None:
    config = load(PROTOCOLS / "calm_in_domain.yaml", model)
    assert build(resolve_model(config.model), config, METHODS["sft"]).sizes.frozen_count == PUBLISHED[model][1]


@pytest.mark.parametrize(
    "file",
    [file for file in sorted(PROTOCOLS.glob("*.yaml")) if not file.name.startswith("cpu_")],
    ids=lambda file: file.stem,
)
def test_the_zero_configuration_is_one_that_deepspeed_takes(file: Path) -> None:
    from deepspeed.runtime.config import DeepSpeedConfig

    config = load_run_file(file)
    sharding, resources = config.resources.deepspeed, config.resources
    assert sharding is not None
    micro_batch = config.training.batch_size // resources.workers
    assert micro_batch * resources.workers == config.training.batch_size
    taken = DeepSpeedConfig(zero_config(sharding.stage, micro_batch))
    assert taken.zero_config.stage == sharding.stage
