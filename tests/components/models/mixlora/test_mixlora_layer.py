"""The factored, batched layer against the plain computation expert by expert, and what must hold for any mixture."""

from __future__ import annotations

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.checkpoint import checkpoint

from components.config import MixLoraConfig
from components.errors import ModelError
from components.models.mixlora.layer import MixLoraLinear
from components.models.mixlora.routing import RoutingRecorder

FORMS = ("gated", "fused", "plain")


def parameters(module):
    return [p for p in module.parameters() if p.requires_grad]


@st.composite
def sizes(draw):
    experts = draw(st.integers(1, 9))
    return {
        "d": draw(st.integers(2, 17)),
        "h": draw(st.integers(2, 23)),
        "num_experts": experts,
        "top_k": draw(st.integers(1, experts)),
        "r": draw(st.integers(1, 5)),
    }


@pytest.mark.parametrize("form", FORMS)
@settings(max_examples=25, deadline=None)
@example(size={"d": 3, "h": 18, "num_experts": 4, "top_k": 3, "r": 1}, tokens=15, seed=354)
@given(size=sizes(), tokens=st.integers(1, 60), seed=st.integers(0, 10**6))
def test_output_and_gradients_equal_the_naive_computation(form, size, tokens, seed, make_ffn, naive):
    torch.manual_seed(seed)
    module = make_ffn(form, **size)
    x = torch.randn(tokens, size["d"], requires_grad=True)
    direction = torch.randn(tokens, size["d"])
    ours, plain = module(x[None])[0], naive(module, x)
    # 1e-5 for outputs near 1; sums of terms near 70 are rounded at 70's last bits, as seed 354 shows with d = 3.
    torch.testing.assert_close(ours, plain, atol=2e-6 * float(plain.detach().abs().max() + 4), rtol=1e-5)
    wanted = [x, *parameters(module)]
    one = torch.autograd.grad((ours * direction).sum(), wanted)
    other = torch.autograd.grad((plain * direction).sum(), wanted)
    for mine, theirs in zip(one, other, strict=True):
        torch.testing.assert_close(mine, theirs, atol=2e-5 * float(theirs.abs().max() + 1), rtol=1e-4)


@pytest.mark.parametrize("form", FORMS)
def test_a_fresh_adapter_is_the_base(form, make_ffn):
    module = make_ffn(form, trained=False)
    x = torch.randn(3, 11, 12)
    # The activation is computed on other rows than the base's: torch's vector and scalar paths may differ in the last
    # bit, as they do for Phi-3's halves, which are views, and for GELU.
    torch.testing.assert_close(module(x), module.base(x), atol=0 if form == "gated" else 1e-7, rtol=0)


@pytest.mark.parametrize("form", FORMS)
def test_identical_experts_are_one_lora(form, make_ffn, run_expert):
    module = make_ffn(form, num_experts=5, top_k=3)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if name.startswith("lora_"):
                parameter.copy_(parameter[:1].expand_as(parameter))
    x = torch.randn(1, 9, 12)
    torch.testing.assert_close(module(x)[0], run_expert(module, x[0], 0), atol=1e-5, rtol=1e-5)


def test_an_expert_without_tokens_gets_a_zero_gradient(make_ffn):
    """The router's rows for experts 2 and 3 point against every token, so top-2 of 4 never takes them."""
    module = make_ffn(num_experts=4, top_k=2)
    x = torch.rand(1, 8, 12) + 0.1
    with torch.no_grad():
        module.router.weight.copy_(torch.tensor([1.0, 0.5, -1.0, -2.0])[:, None].expand(4, 12))
    module(x).square().sum().backward()
    for name, parameter in module.named_parameters():
        if name.startswith("lora_"):
            assert parameter.grad[2:].eq(0).all(), name
            assert parameter.grad[:2].abs().sum(dim=(1, 2)).gt(0).all(), name
    assert torch.isfinite(module.router.weight.grad).all()


def test_routing_weights_add_up_to_one_and_are_recorded(make_ffn):
    module = make_ffn(num_experts=6, top_k=2)
    x = torch.randn(2, 5, 12)
    with module.recorder.recording(torch.ones(2, 5, dtype=torch.bool)) as records:
        module(x)
    (record,) = records
    torch.testing.assert_close(record.probs, torch.softmax(x.view(10, 12) @ module.router.weight.T, dim=-1))
    torch.testing.assert_close(record.probs.sum(dim=1), torch.ones(10))
    assert record.experts.equal(record.probs.topk(2, dim=-1).indices)


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_is_neither_routed_nor_counted_nor_computed(side, make_ffn):
    module = make_ffn()
    x, mask = torch.randn(2, 6, 12), torch.ones(2, 6, dtype=torch.bool)
    mask[0, slice(0, 2) if side == "left" else slice(4, 6)] = False
    x[~mask] = torch.nan
    with module.recorder.recording(mask) as records:
        out = module(x)
    assert len(records[0].probs) == 10
    assert out[~mask].eq(0).all()
    torch.testing.assert_close(out[1], module(x[1:])[0], atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(out[0][mask[0]], module(x[:1, mask[0]])[0], atol=1e-6, rtol=1e-5)


def test_a_mask_of_another_batch_is_refused(make_ffn):
    module = make_ffn()
    with module.recorder.recording(torch.ones(2, 3, dtype=torch.bool)), pytest.raises(ModelError, match=r"\[2, 3\]"):
        module(torch.randn(2, 4, 12))


def test_checkpointing_replays_the_same_routing(make_ffn):
    """With jitter and dropout on and padding in the batch: the repeated pass must draw and skip the same (E14)."""
    module = make_ffn(jitter=0.5, dropout=0.3).train()
    x, mask = torch.randn(2, 6, 12), torch.ones(2, 6, dtype=torch.bool)
    mask[1, 4:] = False
    gradients, probabilities = [], []
    contexts = module.recorder.checkpoint_contexts
    for wrap in (lambda f, z: f(z), lambda f, z: checkpoint(f, z, use_reentrant=False, context_fn=contexts)):
        torch.manual_seed(3)
        z = x.clone().requires_grad_()
        with module.recorder.recording(mask) as records:
            out = wrap(module, z)
        assert len(records) == 1
        # The records take part in the loss, as FLC and balance do.
        loss = out.square().sum() + records[0].probs.square().sum()
        gradients.append(torch.autograd.grad(loss, [z, *parameters(module)]))
        assert len(records) == 1, "the repetition must not be recorded"
        probabilities.append(records[0].probs)
    assert probabilities[0].equal(probabilities[1])
    for plain, replayed in zip(*gradients, strict=True):
        assert plain.equal(replayed)


def test_routers_stay_in_float32_under_bfloat16(make_ffn):
    """And the outputs stay near those of float32 weights."""
    module = make_ffn(d=32, h=48)
    x = torch.randn(1, 20, 32)
    exact = module(x)
    module.base.bfloat16()
    with module.recorder.recording(torch.ones(1, 20, dtype=torch.bool)) as records, torch.autocast("cpu"):
        rounded = module(x.bfloat16())
    assert rounded.dtype == torch.bfloat16
    assert records[0].logits.dtype == records[0].probs.dtype == torch.float32
    torch.testing.assert_close(records[0].logits, x.bfloat16().float()[0] @ module.router.weight.T)
    torch.testing.assert_close(rounded.float(), exact, atol=0.03 * float(exact.detach().abs().max()), rtol=0.03)
    rounded.float().sum().backward()
    assert all(p.grad.dtype == torch.float32 for p in parameters(module))


def test_jitter_and_dropout_act_in_training_only(make_ffn):
    module = make_ffn(jitter=0.5, dropout=0.5)
    x = torch.randn(1, 30, 12)
    module.eval()
    assert module(x).equal(module(x))
    module.train()
    assert not module(x).equal(module(x))


@pytest.mark.parametrize("form", FORMS)
def test_dropout_gradients(form, make_ffn):
    """Finite differences along a random direction, the same masks drawn each time."""
    module = make_ffn(form, dropout=0.4, num_experts=3).train()
    x = torch.randn(1, 10, 12)
    p = module.pair("fc2" if form == "plain" else "down_proj").a
    start, direction = p.detach().clone(), torch.randn_like(p)

    def loss(step):
        torch.manual_seed(5)
        with torch.no_grad():
            p.copy_(start + step * direction)
        return module(x).double().square().sum()

    analytic = (torch.autograd.grad(loss(0.0), p)[0] * direction).sum()
    numeric = (loss(1e-2) - loss(-1e-2)) / 2e-2
    torch.testing.assert_close(numeric.float().detach(), analytic, rtol=1e-2, atol=1e-3)


def test_experts_on_a_linear_layer():
    """Against the sum written out; padding gets the base's output."""
    base = nn.Linear(7, 5).requires_grad_(False)
    module = MixLoraLinear(base, MixLoraConfig(r=2, num_experts=4, top_k=2), RoutingRecorder())
    nn.init.normal_(module.lora_B_weight)
    nn.init.normal_(module.router.weight)
    x = torch.randn(2, 3, 7)
    mask = torch.tensor([[True, True, True], [True, False, True]])
    with module.recorder.recording(mask):
        out = module(x)
    probs = torch.softmax(x @ module.router.weight.T, dim=-1)
    for row in range(2):
        for token in range(3):
            expected = base(x[row, token])
            if mask[row, token]:
                weights, experts = probs[row, token].topk(2)
                for w, e in zip(weights / weights.sum(), experts, strict=True):
                    low = module.lora_A_weight[e] @ x[row, token]
                    expected = expected + w * module.scale * module.lora_B_weight[e] @ low
            torch.testing.assert_close(out[row, token], expected, atol=1e-5, rtol=1e-5)
