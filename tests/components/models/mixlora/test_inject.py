"""MixLoRA in whole models: every known family, the attention options, checkpointing, and what is refused."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from components.config import MixLoraConfig
from components.data.batching import collate
from components.data.prompts import EncodedQuestion
from components.errors import ModelError
from components.models.adapter import attach_adapter, is_router, trainable_parameters
from components.models.mixlora.inject import FAMILIES
from components.models.mixlora.layer import MixLoraFfn, MixLoraLinear
from components.models.scoring import ScoringModel
from components.training.recompute import recompute_activations

IDS = torch.tensor([[5, 6, 7, 8], [9, 10, 11, 12]])
QUESTIONS = [EncodedQuestion("a", (5, 6, 7, 8, 9), ((10,),), 0), EncodedQuestion("b", (20, 21), ((22, 23),), 0)]


def family(kind):
    config = AutoConfig.for_model(
        kind,
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        head_dim=8,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        initializer_range=0.1,
    )
    return AutoModelForCausalLM.from_config(config).eval()


def moved(model):
    with torch.no_grad():
        for name, parameter in trainable_parameters(model).items():
            if "lora_B" in name or is_router(name):
                parameter.normal_(0, 0.2)
    return model


@pytest.mark.parametrize("attention", ["lora", "mixlora", "none"])
@pytest.mark.parametrize("kind", FAMILIES)
def test_a_fresh_mixture_changes_nothing_and_a_trained_one_does(kind, attention):
    model = family(kind)
    with torch.no_grad():
        before = model(IDS).logits
        adapted = attach_adapter(model, MixLoraConfig(r=2, attention=attention), seed=1)
        # A layer's FFN sees all tokens in one matrix: float32 sums may run in another order.
        torch.testing.assert_close(adapted(IDS).logits, before, atol=1e-6, rtol=1e-5)
        assert not torch.allclose(moved(adapted)(IDS).logits, before, atol=1e-3)
    routers = [name for name in trainable_parameters(adapted) if is_router(name)]
    projections = len(FAMILIES[kind][1]) if attention == "mixlora" else 0
    assert len(routers) == 2 * (1 + projections)
    assert all(p.dtype == torch.float32 for p in trainable_parameters(adapted).values())


def test_a_fresh_mixture_on_llama_is_the_base_bit_for_bit(tiny_model):
    before = tiny_model(IDS).logits
    assert attach_adapter(tiny_model, MixLoraConfig(), seed=1)(IDS).logits.equal(before)


def test_only_the_adapter_trains_and_the_seed_decides_its_start(tiny_model_original):
    import copy

    def attached(seed):
        return attach_adapter(copy.deepcopy(tiny_model_original), MixLoraConfig(r=2), seed=seed)

    one, same, other = (trainable_parameters(attached(seed)) for seed in (3, 3, 4))
    kinds = {"lora_A", "lora_B", "router"}
    assert all(any(kind in name for kind in kinds) for name in one)
    # 2 layers: 3 projections of the FFN with 8 experts, 4 of attention with one LoRA, 1 router.
    assert len(one) == 2 * (3 * 2 + 4 * 2 + 1)
    assert all(one[name].equal(same[name]) for name in one)
    assert any(not one[name].equal(other[name]) for name in one)


def test_attaching_leaves_the_global_random_state_alone(tiny_model):
    torch.manual_seed(1)
    expected = torch.rand(3)
    torch.manual_seed(1)
    attach_adapter(tiny_model, MixLoraConfig(), seed=9)
    assert torch.rand(3).equal(expected)


def test_a_family_without_a_gated_ffn_is_refused_by_name():
    model = AutoModelForCausalLM.from_config(
        AutoConfig.for_model("gpt_neox", vocab_size=64, hidden_size=32, num_hidden_layers=1, num_attention_heads=4)
    )
    with pytest.raises(ModelError, match=r"'gpt_neox'.*gate_proj/up_proj/down_proj"):
        attach_adapter(model, MixLoraConfig(), seed=0)


def test_a_layer_without_its_family_s_modules_is_refused_by_name(tiny_model):
    del tiny_model.model.layers[1].mlp.up_proj
    with pytest.raises(ModelError, match=r"'up_proj' in layers\[1\].mlp, found nothing"):
        attach_adapter(tiny_model, MixLoraConfig(), seed=0)


@pytest.mark.parametrize("attention", ["lora", "mixlora"])
def test_checkpointing_a_whole_model_changes_no_gradient(attention, tiny_model):
    """Padded rows, jitter on: the repetition must see the same mask and draw the same noise."""
    model = moved(attach_adapter(tiny_model, MixLoraConfig(r=2, jitter=0.3, attention=attention), seed=1))
    scoring = ScoringModel(model).train()
    batch = collate(QUESTIONS, 0)
    wanted = list(trainable_parameters(scoring).values())

    def gradients():
        torch.manual_seed(4)
        logits = scoring(batch)
        return torch.autograd.grad(logits.square().mean() + scoring.flc(batch).sum(), wanted)

    plain = gradients()
    recompute_activations(model)
    assert all(layer.gradient_checkpointing for layer in tiny_model.model.layers)
    for before, after in zip(plain, gradients(), strict=True):
        torch.testing.assert_close(after, before, atol=1e-6, rtol=1e-5)


def test_modules_are_where_they_are_said_to_be(tiny_model):
    attach_adapter(tiny_model, MixLoraConfig(attention="mixlora"), seed=0)
    for layer in tiny_model.model.layers:
        assert isinstance(layer.mlp, MixLoraFfn)
        assert all(isinstance(getattr(layer.self_attn, n), MixLoraLinear) for n in ("q_proj", "o_proj"))
