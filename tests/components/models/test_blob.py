"""BLoB's layer against closed forms, against PEFT's LoRA, and through the adapter folder."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from torch import Tensor, nn
from torch.distributions import Normal
from torch.distributions import kl_divergence as torch_kl
from transformers import LlamaForCausalLM

from components.config import AdapterConfig
from components.config_bayes import BlobAdapterConfig
from components.errors import ModelError
from components.models.adapter import attach_adapter, trainable_parameters
from components.models.adapter_checks import verify_adapter
from components.models.adapter_files import load_adapter
from components.models.blob import BlobLinear, blob_layers, kl_divergence

Rewrite = Callable[[Path, Callable[[dict[str, Tensor]], object]], None]
TOKENS = torch.arange(3, 23)[None]
DRAWS = 4000


def spec(**fields: object) -> BlobAdapterConfig:
    usual = {
        "r": 4, "alpha": 8, "dropout": 0.0, "target_modules": "all-linear", "init_scale": 0.05, "prior_std": 0.2,
    }  # fmt: skip
    return BlobAdapterConfig.model_validate(usual | fields)


@pytest.fixture
def blob(tiny_model: LlamaForCausalLM) -> LlamaForCausalLM:
    """The tiny model with an adapter whose weights have moved; G stays as large as it starts, times ten."""
    model = attach_adapter(tiny_model, spec(), seed=1).eval()
    with torch.no_grad():
        for layer in blob_layers(model):
            layer.lora_G.mul_(10)
            layer.lora_B.normal_(0, 0.1)
            layer.lora_A.add_(0.1 * torch.randn_like(layer.lora_A))
    return model


def test_kl_is_that_of_torch_distributions(blob):
    prior = Normal(torch.tensor(0.0, dtype=torch.float64), torch.tensor(0.2, dtype=torch.float64))
    expected = sum(
        torch_kl(Normal(layer.lora_A.double(), layer.lora_G.double() ** 2), prior).sum() for layer in blob_layers(blob)
    )
    assert kl_divergence(blob, 0.2).item() == pytest.approx(expected.item(), rel=1e-9)
    assert kl_divergence(blob, 0.3).item() != pytest.approx(expected.item(), rel=1e-3)


def test_kl_of_one_entry_by_hand():
    """M = 0.1, G = 0.4, so sigma = 0.16, beta = 0.2: ln 1.25 + (0.0256 + 0.01) / 0.08 - 1/2 = 0.1681436."""
    layer = BlobLinear(nn.Linear(1, 1), spec(r=1))
    with torch.no_grad():
        layer.lora_A.fill_(0.1)
        layer.lora_G.fill_(0.4)
    assert layer.kl(0.2).item() == pytest.approx(0.2231436 + 0.445 - 0.5, abs=1e-6)


def test_a_model_without_a_posterior_has_no_kl(tiny_model):
    with pytest.raises(ValueError, match="no layer with a Gaussian posterior"):
        kl_divergence(tiny_model, 0.2)


def test_flipout_has_the_moments_of_the_posterior():
    """y = W x + c B A x with A ~ N(M, sigma^2) entrywise and c = alpha / r.

    Mean W x + c B M x; variance of y_o c^2 sum_j B_oj^2 sum_k sigma_jk^2 x_k^2; and no covariance between two tokens of
    a pass, though both see one E: without the signs that of two equal tokens would be the variance itself. y is
    Gaussian, so in N draws the mean is off by sqrt(v / N), the variance by v sqrt(2 / N), and the covariance by at most
    v sqrt(3 / N) (Cauchy-Schwarz on the fourth moments, 3 v^2), each taken five times.
    """
    layer = BlobLinear(nn.Linear(6, 3, bias=False), spec(r=2, alpha=3)).train()
    with torch.no_grad():
        layer.lora_G.uniform_(0.3, 0.9)
        layer.lora_B.normal_()
        x = torch.randn(1, 6).expand(2, 6)
        y = torch.stack([layer(x) for _ in range(DRAWS)])  # [N, 2 tokens, 3]
        b, variances = layer.lora_B, layer.lora_G**4
        mean = x @ layer.base_layer.weight.T + 1.5 * x @ layer.lora_A.T @ b.T
        var = (1.5**2 * x**2 @ variances.T @ (b.T**2))[0]
    off = y - mean
    assert (off.mean(dim=0).abs() < 5 * (var / DRAWS).sqrt()).all()
    assert ((off.square().mean(dim=0) - var).abs() < 5 * var * (2 / DRAWS) ** 0.5).all()
    assert ((off[:, 0] * off[:, 1]).mean(dim=0).abs() < 5 * var * (3 / DRAWS) ** 0.5).all()


def test_noise_is_drawn_in_training_and_where_it_is_asked_for(blob):
    plain = blob(TOKENS).logits
    assert torch.equal(blob(TOKENS).logits, plain)
    for layer in blob_layers(blob):
        layer.sampling = True
    torch.manual_seed(3)
    drawn = blob(TOKENS).logits
    assert (drawn - plain).abs().max() > 1e-3
    assert not torch.equal(blob(TOKENS).logits, drawn)
    for layer in blob_layers(blob):
        layer.sampling = False
    torch.manual_seed(3)
    assert torch.equal(blob.train()(TOKENS).logits, drawn)


@pytest.mark.parametrize("training", [True, False])
def test_without_noise_it_is_lora(tiny_model_original, blob, training):
    """G = 0 in training, or A at its posterior mean: PEFT's own layer, to the last bit."""
    lora = attach_adapter(copy.deepcopy(tiny_model_original), AdapterConfig(r=4, alpha=8), seed=9)
    theirs = dict(lora.named_parameters())
    with torch.no_grad():
        for name, layer in blob.named_modules():
            if isinstance(layer, BlobLinear):
                theirs[f"base_model.model.{name}.lora_A.default.weight"].copy_(layer.lora_A)
                theirs[f"base_model.model.{name}.lora_B.default.weight"].copy_(layer.lora_B)
                layer.lora_G.mul_(0.0 if training else 1.0)
    assert sum(".lora_A" in name for name in theirs) == len(list(blob_layers(blob))) == 14
    assert torch.equal(blob.train(training)(TOKENS).logits, lora(TOKENS).logits)


def test_a_fresh_adapter_changes_nothing_and_starts_as_it_says(tiny_model):
    before = tiny_model(TOKENS).logits
    model = attach_adapter(tiny_model, spec(r=16), seed=1)
    assert torch.equal(model.eval()(TOKENS).logits, before)
    assert {name.rpartition(".")[2] for name in trainable_parameters(model)} == {"lora_A", "lora_G", "lora_B"}
    g = torch.cat([layer.lora_G.flatten() for layer in blob_layers(model)])
    low = 0.05 / 2**0.5
    assert (float(g.min()) > low, float(g.max()) < 0.05) == (True, True)
    # U(a, b) of n entries: mean (a + b) / 2, off by (b - a) / sqrt(12 n)
    assert float(g.mean()) == pytest.approx((low + 0.05) / 2, abs=5 * (0.05 - low) / (12 * len(g)) ** 0.5)


@pytest.mark.parametrize(
    ("targets", "found"),
    [(["q_proj", "v_proj"], 4), (r"model\.layers\.0\..*_proj", 7), ("all-linear", 14), (["lm_head"], 1)],
)
def test_target_modules_are_read_as_peft_reads_them(tiny_model, targets, found):
    assert len(list(blob_layers(attach_adapter(tiny_model, spec(target_modules=targets), seed=1)))) == found


@pytest.mark.parametrize(
    ("targets", "message"), [(["proj"], "names nothing in LlamaForCausalLM"), (["mlp"], "a LlamaMLP; 'blob' adapts")]
)
def test_targets_that_cannot_be_adapted_are_refused(tiny_model, targets, message):
    with pytest.raises(ModelError, match=message):
        attach_adapter(tiny_model, spec(target_modules=targets), seed=1)


def test_it_reads_back_bit_for_bit(
    blob, save: Callable[..., Path], base: Callable[[], LlamaForCausalLM], tmp_path: Path
):
    folder = save(blob, adapter=spec())
    again, head = load_adapter(folder, base())
    assert head is None
    assert not trainable_parameters(again)
    ours, theirs = ({n: p for n, p in m.named_parameters() if ".lora_" in n} for m in (blob, again))
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(value, theirs[name]) for name, value in ours.items())
    assert torch.equal(again(TOKENS).logits, blob(TOKENS).logits)
    written = json.loads((folder / "adapter_config.json").read_text())
    assert (written["peft_type"], written["r"], written["init_scale"], written["prior_std"]) == ("BLOB", 4, 0.05, 0.2)
    assert "library_name: caltune" in (folder / "README.md").read_text()
    with pytest.raises((KeyError, ValueError)):
        PeftModel.from_pretrained(base(), folder)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop("model.layers.1.mlp.up_proj.lora_G"), r"missing key 'model\.layers\.1\.mlp\.up_proj\.lora_G'"),
        (lambda t: t["model.layers.0.mlp.up_proj.lora_G"].zero_(), "lora_G' is all zero"),
        (lambda t: [t[k].zero_() for k in t if "lora_B" in k], "every lora_B is zero although"),
    ],
)
def test_a_damaged_folder_is_refused(blob, save: Callable[..., Path], rewrite: Rewrite, change, message):
    folder = save(blob, adapter=spec())
    rewrite(folder, change)
    with pytest.raises(ModelError, match=message):
        verify_adapter(folder)
