"""The public MixLoRA format against the package that defines it: its own loader, its own forward pass, the same logits.

The package runs whole batches without a mask, so rows are not padded here.
"""

from __future__ import annotations

import copy
import json
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from transformers import (
    LlamaForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    PhiConfig,
    PhiForCausalLM,
    PreTrainedTokenizerFast,
)

from components.config import MixLoraConfig, ModelConfig
from components.config_data import PromptConfig
from components.models.adapter import adapter_state, attach_adapter, trainable_parameters
from components.models.adapter_files import AdapterRecord, save_adapter
from components.models.base import ResolvedModel
from components.models.mixlora.public_format import export_public, import_public

pytest.importorskip("mixlora", reason="the public MixLoRA package is not installed: pip install -e '.[dev]'")
from mixlora.config import MixLoraConfig as PackageConfig
from mixlora.model import inject_adapter_in_model, load_adapter_weights

TOKENS = torch.randint(3, 320, (3, 17), generator=torch.Generator().manual_seed(5))
TOLERANCE = 1e-5
SIZES = {
    "vocab_size": 320,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "initializer_range": 0.2,
    "attn_implementation": "sdpa",
}
MIXTURES = [
    MixLoraConfig(r=3, alpha=6, num_experts=4, top_k=2),
    MixLoraConfig(r=4, alpha=3, num_experts=5, top_k=3, attention="none"),
    MixLoraConfig(r=2, alpha=8, num_experts=3, top_k=1, dropout=0.5, jitter=0.3),
]


@pytest.fixture(params=["llama", "phi3", "phi"])
def base(request: pytest.FixtureRequest, tiny_model: LlamaForCausalLM) -> nn.Module:
    """One tiny model of each form of FFN: three projections, two with gate and up fused, two without a gate."""
    if request.param == "llama":
        return tiny_model
    if request.param == "phi3":
        return Phi3ForCausalLM(Phi3Config(**SIZES)).eval()
    return PhiForCausalLM(PhiConfig(**SIZES)).eval()


def by_package(folder: Path, model: nn.Module) -> Tensor:
    """Logits of the package with a folder's adapter on a copy of a model."""
    config, weights = load_adapter_weights(str(folder), device="cpu")
    copied = copy.deepcopy(model)
    inject_adapter_in_model(copied, config, weights)
    with torch.no_grad():
        return copied.eval()(TOKENS).logits


@pytest.mark.parametrize("spec", MIXTURES, ids=["usual", "no attention", "dropout and jitter"])
def test_the_package_reads_what_we_export(
    base: nn.Module, spec: MixLoraConfig, tiny_tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    """Trained with dropout and jitter too, which the package would apply to every question if it were told of them."""
    model = attach_adapter(copy.deepcopy(base), spec, seed=1)
    with torch.no_grad():
        for value in trainable_parameters(model).values():
            value.add_(0.2 * torch.randn_like(value))
    folder = save_adapter(
        tmp_path / "ours",
        model=model,
        state=adapter_state(model),
        head=None,
        tokenizer=tiny_tokenizer,
        config=ModelConfig(name="tiny", mixlora=spec),
        adapter=spec,
        resolved=ResolvedModel("tiny", None, "made in a test", "tiny"),
        record=AdapterRecord("uq4ct", 1, PromptConfig(), balance_weight=0.01),
    )
    with torch.no_grad():
        logits, plain = model.eval()(TOKENS).logits, base(TOKENS).logits
    assert (logits - plain).abs().max() > 0.1
    theirs = by_package(export_public(folder, tmp_path / "public"), base)
    torch.testing.assert_close(theirs, logits, atol=TOLERANCE, rtol=TOLERANCE)


TARGETS = {
    "llama": ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
    "phi3": ["qkv_proj", "o_proj", "gate_up_proj", "down_proj"],
    "phi": ["q_proj", "k_proj", "v_proj", "dense", "fc1", "fc2"],
}


@pytest.mark.parametrize("every", [1, 2], ids=["all targets", "every other target"])
def test_we_read_what_the_package_writes(base: nn.Module, every: int, tmp_path: Path) -> None:
    """Its configuration's own export, and tensors by the names that its loader asks for."""
    targets = TARGETS[base.config.model_type][::every]
    config = PackageConfig.from_config(
        {
            "base_model_name_or_path": "tiny",
            "task_type": "CAUSAL_LM",
            "peft_type": "MIXLORA",
            "routing_strategy": "mixlora",
            "r": 3,
            "lora_alpha": 9,
            "lora_dropout": 1e-9,
            "target_modules": targets,
            "num_experts": 4,
            "top_k": 2,
            "act_fn": base.config.hidden_act,
        }
    ).check()
    (tmp_path / "adapter_config.json").write_text(json.dumps(config.export()), encoding="utf-8")
    torch.save(wanted_by_package(base, config), tmp_path / "adapter_model.bin")
    theirs = by_package(tmp_path, base)
    assert (theirs - base(TOKENS).logits).abs().max() > 0.1
    model, spec = import_public(tmp_path, copy.deepcopy(base))
    assert (spec.r, spec.alpha, spec.num_experts, spec.top_k) == (3, 9, 4, 2)
    torch.testing.assert_close(model(TOKENS).logits, theirs, atol=TOLERANCE, rtol=TOLERANCE)


def wanted_by_package(model: nn.Module, config: PackageConfig) -> dict[str, Tensor]:
    """Random tensors, made as the package's loader asks for them: it alone decides the names."""

    class Made(dict[str, Tensor]):
        def __missing__(self, key: str) -> Tensor:
            self[key] = 0.3 * torch.randn(*shape_of(key))
            return self[key]

    def shape_of(key: str) -> tuple[int, int]:
        if key.endswith("moe_gate.weight"):
            return config.num_experts_, model.config.hidden_size
        *_, module, projection = key.split(".experts.")[0].split(".lora_")[0].split(".")
        base = getattr(getattr(model.model.layers[0], module), projection)
        return (config.lora_r_, base.in_features) if ".lora_A." in key else (base.out_features, config.lora_r_)

    made = Made()
    config.dtype_, config.adapter_name_ = torch.float32, "default"
    inject_adapter_in_model(copy.deepcopy(model), config, made)
    return dict(made)


def test_the_package_drops_out_and_jitters_at_inference(tiny_model: LlamaForCausalLM, tmp_path: Path) -> None:
    """The reason why an export holds neither: a later package that does not may be told of both again."""
    config = {
        "base_model_name_or_path": "tiny",
        "task_type": "CAUSAL_LM",
        "peft_type": "MIXLORA",
        "routing_strategy": "mixlora",
        "r": 3,
        "lora_alpha": 9,
        "lora_dropout": 1e-9,
        "target_modules": ["gate_proj", "up_proj", "down_proj"],
        "num_experts": 4,
        "top_k": 2,
        "act_fn": "silu",
    }
    torch.save(wanted_by_package(tiny_model, PackageConfig.from_config(config)), tmp_path / "adapter_model.bin")
    for fields, steady in (({}, True), ({"lora_dropout": 0.5}, False), ({"jitter_noise": 0.5}, False)):
        (tmp_path / "adapter_config.json").write_text(json.dumps(config | fields), encoding="utf-8")
        assert torch.equal(by_package(tmp_path, tiny_model), by_package(tmp_path, tiny_model)) == steady
