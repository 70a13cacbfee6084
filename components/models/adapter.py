"""What is trained on top of a base model: LoRA (through PEFT, or BLoB's Gaussian), LoRA experts, or every weight."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor, nn

from components.config import AdapterConfig, AdapterSpec, MixLoraConfig
from components.config_bayes import BlobAdapterConfig
from components.errors import ModelError
from components.models.blob import inject_blob
from components.models.mixlora.inject import attention_projections, inject_mixlora

if TYPE_CHECKING:
    from transformers import PreTrainedModel

ADAPTER_NAME = "default"
AdapterKind = Literal["lora", "mixlora", "blob", "full"]


def attach_adapter(model: PreTrainedModel, spec: AdapterSpec, seed: int) -> nn.Module:
    """Makes the trainable part of a model: float32, whatever the precision of the frozen part.

    A fresh adapter changes nothing (B = 0), and the same seed gives the same initial weights on every machine.
    Weights that are tied stay tied.

    Args:
        model: From `load_model`; it is changed in place.
        spec: Kind and size. For `lora`, `all-linear` covers every linear layer but the output layer.
        seed: Of the initial weights; the global random state is left as it was.

    Returns:
        The model to train: a `PeftModel` where PEFT holds a part of the adapter, else the model itself.

    Raises:
        ModelError: `target_modules` names nothing in this model or nothing that can be adapted, or MixLoRA does not
            know the model's family.
    """
    if spec.kind == "full":
        model.float()
        model.requires_grad_(True)
        return model
    model.requires_grad_(False)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        if isinstance(spec, BlobAdapterConfig):
            inject_blob(model, spec)
            for parameter in adapter_parameters(model, "blob").values():
                parameter.requires_grad_(True)
            return model
        return _attach_lora(model, spec) if isinstance(spec, AdapterConfig) else _attach_mixlora(model, spec)


def _attach_lora(model: PreTrainedModel, spec: AdapterConfig) -> nn.Module:
    try:
        return _with_peft(model, spec, spec.target_modules)
    except ValueError as problem:
        raise ModelError(f"model.adapter.target_modules {spec.target_modules!r} cannot be used: {problem}") from problem


def _attach_mixlora(model: PreTrainedModel, spec: MixLoraConfig) -> nn.Module:
    inject_mixlora(model, spec)
    adapted = _with_peft(model, spec, list(attention_projections(model))) if spec.attention == "lora" else model
    for parameter in adapter_parameters(adapted, "mixlora").values():
        parameter.requires_grad_(True)
    return adapted


def _with_peft(model: PreTrainedModel, spec: AdapterSpec, target_modules: str | list[str]) -> nn.Module:
    from peft import LoraConfig, get_peft_model

    lora = LoraConfig(
        task_type="CAUSAL_LM",
        r=spec.r,
        lora_alpha=int(spec.alpha) if float(spec.alpha).is_integer() else spec.alpha,  # type: ignore[arg-type]
        lora_dropout=spec.dropout,
        target_modules=target_modules,
        bias="none",
    )
    return get_peft_model(model, lora, adapter_name=ADAPTER_NAME, autocast_adapter_dtype=True)


def merge_adapter(model: nn.Module) -> None:
    """Adds PEFT's LoRA matrices to the weights they adapt, which saves a forward pass two products a layer.

    In place, for a model that only answers. Weights below float32 would lose the update's last digits, so they are left
    as they are.

    Args:
        model: With or without an adapter; one without LoRA layers of PEFT is left as it is.
    """
    from peft import PeftModel

    if isinstance(model, PeftModel) and all(p.dtype == torch.float32 for p in model.parameters()):
        model.merge_adapter()


def trainable_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters that are trained, by name, in the order of the model's modules; tied ones once.

    Args:
        model: From `attach_adapter`, or a base model (then the result is empty).
    """
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


def adapter_parameters(model: nn.Module, kind: AdapterKind) -> dict[str, nn.Parameter]:
    """The parameters that an adapter folder holds, trained at present or frozen, named as in `trainable_parameters`."""
    return {
        name: value
        for name, value in model.named_parameters()
        if kind == "full" or ".lora_" in name or (kind == "mixlora" and is_router(name))
    }


def is_router(name: str) -> bool:
    """Whether a parameter of an adapter is a router's, by its name."""
    return ".router." in name


def adapter_state(model: nn.Module) -> dict[str, Tensor]:
    """Copies of the trained parameters on the CPU, by the names of `trainable_parameters`.

    Raises:
        ModelError: The parameters are sharded (ZeRO stage 3); they must be gathered by whoever runs the engine.
    """
    state = {}
    for name, parameter in trainable_parameters(model).items():
        if hasattr(parameter, "ds_shape"):
            raise ModelError(f"parameter '{name}' is sharded (ZeRO stage 3): gather it before its state is taken")
        state[name] = parameter.detach().cpu().clone()
    return state
