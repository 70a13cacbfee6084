"""BLoB's layer (Wang et al. 2024, Bayesian Low-Rank Adaptation by Backpropagation): LoRA with a Gaussian for its A.

A = M + G^2 * eps entrywise, eps standard normal, so A's posterior is N(M, G^4); B is an ordinary matrix. M, G and B are
called `lora_A`, `lora_G` and `lora_B` here (lora_A, lora_A_rho and lora_B in the public code).

Noise is drawn with Flipout (Wen et al. 2018): one E = G^2 * eps for the whole pass, turned for every token by random
signs on both sides, s_out * (E (s_in * x)). Each token then sees a draw from A's distribution, and the draws of two
tokens are uncorrelated though E is shared.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from pydantic import ValidationError
from torch import Tensor, nn
from torch.nn import functional

from components.config_bayes import BlobAdapterConfig
from components.errors import ModelError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

CONFIG_FILE = "adapter_config.json"
PEFT_TYPE = "BLOB"
# our field -> theirs, with PEFT's names where it has them
FIELDS = {
    "r": "r",
    "alpha": "lora_alpha",
    "dropout": "lora_dropout",
    "target_modules": "target_modules",
    "init_scale": "init_scale",
    "prior_std": "prior_std",
}


class BlobLinear(nn.Module):
    """A frozen linear layer W with BLoB's adapter: W x + (alpha / r) B A x.

    In training every pass draws noise; in evaluation only while `sampling` is set, else A is its mean and the layer is
    LoRA's. The noise comes from torch's global generator.

    Args:
        base_layer: W.
        spec: Size and initial values.

    Attributes:
        lora_A: M, float32 [r, in].
        lora_G: Square root of the standard deviations, float32 [r, in].
        lora_B: float32 [out, r].
        sampling: Whether noise is drawn in evaluation mode.
    """

    def __init__(self, base_layer: nn.Linear, spec: BlobAdapterConfig) -> None:
        super().__init__()
        self.base_layer, self.scaling, self.sampling = base_layer, spec.alpha / spec.r, False
        device = base_layer.weight.device
        self.dropout = nn.Dropout(spec.dropout)
        self.lora_A = nn.Parameter(torch.empty(spec.r, base_layer.in_features, device=device))
        self.lora_G = nn.Parameter(torch.empty(spec.r, base_layer.in_features, device=device))
        self.lora_B = nn.Parameter(torch.zeros(base_layer.out_features, spec.r, device=device))
        nn.init.kaiming_uniform_(self.lora_A, a=math.sqrt(5))  # as PEFT's LoRA
        nn.init.uniform_(self.lora_G, spec.init_scale / math.sqrt(2), spec.init_scale)

    def forward(self, x: Tensor) -> Tensor:
        """Any leading dimensions, [..., in] to [..., out], in the precision of W's output."""
        result = self.base_layer(x)
        x = self.dropout(x.to(self.lora_A.dtype))
        low = functional.linear(x, self.lora_A)
        if self.training or self.sampling:
            low = low + self._noise(x)
        return (result + functional.linear(low, self.lora_B) * self.scaling).to(result.dtype)

    def _noise(self, x: Tensor) -> Tensor:
        """s_out * (E (s_in * x)), [..., r]."""
        e = self.lora_G.square() * torch.randn_like(self.lora_G)
        s_in = _signs(x.shape, x)
        s_out = _signs((*x.shape[:-1], len(e)), x)
        return functional.linear(x * s_in, e) * s_out

    def kl(self, prior_std: float) -> Tensor:
        """KL divergence in nats of A's posterior from the prior N(0, prior_std^2), summed over entries.

        Per entry log(beta / sigma) + (sigma^2 + mu^2) / (2 beta^2) - 1/2 with mu = M, sigma = G^2, beta = prior_std.
        """
        mean, std = self.lora_A.double(), self.lora_G.double().square()
        quadratic = (std.square() + mean.square()) / (2 * prior_std**2)
        return (math.log(prior_std) - std.log() + quadratic - 0.5).sum()


def _signs(shape: tuple[int, ...], like: Tensor) -> Tensor:
    return torch.empty(shape, dtype=like.dtype, device=like.device).bernoulli_(0.5).mul_(2).sub_(1)


def inject_blob(model: PreTrainedModel, spec: BlobAdapterConfig) -> None:
    """Puts a fresh adapter on every linear layer that the spec names; it changes nothing as yet (B = 0).

    Args:
        model: Changed in place.
        spec: Where and how large. `all-linear` covers every linear layer but the output layer.

    Raises:
        ModelError: `target_modules` names nothing, or something that is not a linear layer.
    """
    output = model.get_output_embeddings()
    found = [(name, module) for name, module in model.named_modules() if name and _is_named(name, module, spec, output)]
    if not found:
        raise ModelError(f"model.adapter.target_modules {spec.target_modules!r} names nothing in {_kind(model)}")
    for name, module in found:
        if not isinstance(module, nn.Linear):
            raise ModelError(
                f"model.adapter.target_modules {spec.target_modules!r} names '{name}' of {_kind(model)}, a "
                f"{_kind(module)}; 'blob' adapts linear layers only"
            )
        parent, _, child = name.rpartition(".")
        setattr(model.get_submodule(parent), child, BlobLinear(module, spec))


def _is_named(name: str, module: nn.Module, spec: BlobAdapterConfig, output: nn.Module | None) -> bool:
    """As PEFT reads `target_modules`."""
    if isinstance(spec.target_modules, list):
        return any(name == wanted or name.endswith(f".{wanted}") for wanted in spec.target_modules)
    if spec.target_modules == "all-linear":
        return isinstance(module, nn.Linear) and module is not output
    return re.fullmatch(spec.target_modules, name) is not None


def _kind(module: nn.Module) -> str:
    return type(module).__name__


def blob_layers(model: nn.Module) -> Iterator[BlobLinear]:
    """The adapted layers, in the order of the model's modules."""
    return (module for module in model.modules() if isinstance(module, BlobLinear))


def kl_divergence(model: nn.Module, prior_std: float) -> Tensor:
    """KL divergence in nats of the posterior over all layers' A from the prior; float64 scalar, differentiable.

    Raises:
        ValueError: The model has no such layer.
    """
    parts = [layer.kl(prior_std) for layer in blob_layers(model)]
    if not parts:
        raise ValueError("the model has no layer with a Gaussian posterior")
    return torch.stack(parts).sum()


def adapter_config(spec: BlobAdapterConfig, *, base_model: str, revision: str | None) -> dict[str, Any]:
    """The content of `adapter_config.json`: everything needed to build the adapter again on its base model.

    Args:
        spec: What was attached.
        base_model: What others should write to get the base model.
        revision: Its commit on the hub, if it has one.
    """
    return {
        "base_model_name_or_path": base_model,
        "revision": revision,
        "peft_type": PEFT_TYPE,
        "task_type": "CAUSAL_LM",
        "bias": "none",
        **{theirs: getattr(spec, ours) for ours, theirs in FIELDS.items()},
    }


def read_spec(folder: Path) -> BlobAdapterConfig:
    """What must be attached to a base model to hold the tensors of this adapter folder.

    Raises:
        ModelError: `adapter_config.json` is damaged, of another kind, or a field is missing or out of range (named).
    """
    path = folder / CONFIG_FILE
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
        kind = config.get("peft_type")
    except (OSError, ValueError, AttributeError) as problem:
        raise ModelError(f"{path} cannot be read: {problem}") from problem
    if kind != PEFT_TYPE:
        raise ModelError(f"{path}: peft_type {kind!r} is not {PEFT_TYPE!r}")
    if missing := [theirs for theirs in FIELDS.values() if theirs not in config]:
        raise ModelError(f"{path}: missing field '{missing[0]}'")
    try:
        return BlobAdapterConfig.model_validate({ours: config[theirs] for ours, theirs in FIELDS.items()})
    except ValidationError as problem:
        first = problem.errors()[0]
        field = FIELDS.get(str(first["loc"][0]), first["loc"][0]) if first["loc"] else ""
        raise ModelError(f"{path}: field {field!r}: {first['msg']}") from problem
