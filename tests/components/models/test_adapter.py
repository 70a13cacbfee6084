"""What is trained: names, precision, starting point."""

from __future__ import annotations

import pytest
import torch
from transformers import LlamaForCausalLM

from components.config import AdapterConfig
from components.errors import ModelError
from components.models.adapter import adapter_state, attach_adapter, trainable_parameters

LORA = AdapterConfig(r=4, alpha=8)
FULL = AdapterConfig(kind="full")
TOKENS = torch.arange(3, 23)[None]


def test_fresh_lora_leaves_the_logits_exactly_as_they_were(tiny_model: LlamaForCausalLM) -> None:
    before = tiny_model(TOKENS).logits
    assert torch.equal(attach_adapter(tiny_model, LORA, seed=1)(TOKENS).logits, before)


def test_all_linear_covers_every_projection_but_the_output_layer(tiny_model: LlamaForCausalLM) -> None:
    """7 projections in each of 2 layers, an A [r, in] and a B [out, r] each."""
    named = trainable_parameters(attach_adapter(tiny_model, LORA, seed=1))
    assert len(named) == 2 * 7 * 2
    assert not any("lm_head" in name or "embed_tokens" in name for name in named)
    assert {tuple(value.shape) for name, value in named.items() if "q_proj" in name} == {(4, 32), (32, 4)}


def test_the_seed_alone_decides_the_start(tiny_model: LlamaForCausalLM) -> None:
    import copy

    copies = [copy.deepcopy(tiny_model) for _ in range(3)]
    torch.manual_seed(1)
    before = torch.random.get_rng_state()
    first = adapter_state(attach_adapter(copies[0], LORA, seed=5))
    assert torch.equal(torch.random.get_rng_state(), before)
    torch.manual_seed(99)
    second = adapter_state(attach_adapter(copies[1], LORA, seed=5))
    other = adapter_state(attach_adapter(copies[2], LORA, seed=6))
    assert list(first) == list(second)
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert not any(torch.equal(first[name], other[name]) for name in first if "lora_A" in name)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_lora_is_float32_on_a_frozen_half_precision_base(tiny_model: LlamaForCausalLM, dtype: torch.dtype) -> None:
    model = attach_adapter(tiny_model.to(dtype), LORA, seed=1)
    trained = trainable_parameters(model)
    assert {value.dtype for value in trained.values()} == {torch.float32}
    frozen = [value for name, value in model.named_parameters() if name not in trained]
    assert {value.dtype for value in frozen} == {dtype}
    model(TOKENS).logits.float().sum().backward()
    assert all(value.grad is not None and value.grad.dtype == torch.float32 for value in trained.values())
    assert all(value.grad is None for value in frozen)


def test_a_step_moves_the_adapter_and_nothing_else(tiny_model: LlamaForCausalLM) -> None:
    model = attach_adapter(tiny_model, LORA, seed=1)
    before = {name: value.detach().clone() for name, value in model.named_parameters()}
    optimiser = torch.optim.SGD(trainable_parameters(model).values(), lr=0.1)
    model(TOKENS, labels=TOKENS).loss.backward()
    optimiser.step()
    moved = {name for name, value in model.named_parameters() if not torch.equal(value, before[name])}
    assert moved == {name for name in before if "lora_B" in name}  # A has no gradient while B is zero


def test_full_fine_tuning_trains_every_weight_in_float32_and_keeps_ties(tiny_model: LlamaForCausalLM) -> None:
    model = attach_adapter(tiny_model.to(torch.bfloat16).requires_grad_(False), FULL, seed=1)
    named = trainable_parameters(model)
    assert list(named) == [name for name, _ in model.named_parameters()]
    assert {value.dtype for value in named.values()} == {torch.float32}
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert "lm_head.weight" not in named


def test_target_modules_that_fit_nothing_are_an_error(tiny_model: LlamaForCausalLM) -> None:
    with pytest.raises(ModelError, match="query_key_value"):
        attach_adapter(tiny_model, AdapterConfig(target_modules=["query_key_value"]), seed=1)


def test_chosen_target_modules(tiny_model: LlamaForCausalLM) -> None:
    named = trainable_parameters(attach_adapter(tiny_model, AdapterConfig(target_modules=["q_proj", "v_proj"]), seed=1))
    assert len(named) == 2 * 2 * 2
    assert all("q_proj" in name or "v_proj" in name for name in named)


def test_state_of_sharded_parameters_is_refused(tiny_model: LlamaForCausalLM) -> None:
    model = attach_adapter(tiny_model, LORA, seed=1)
    name, parameter = next(iter(trainable_parameters(model).items()))
    parameter.ds_shape = parameter.shape
    with pytest.raises(ModelError, match=name.replace(".", r"\.")):
        adapter_state(model)
