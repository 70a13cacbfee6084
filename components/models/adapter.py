"""What is trained on top of a base model: LoRA matrices through PEFT, or every weight."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor, nn

from components.config import AdapterConfig
from components.errors import ModelError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

ADAPTER_NAME = "default"


def attach_adapter(model: PreTrainedModel, config: AdapterConfig, seed: int) -> nn.Module:
    """Makes the trainable part of a model: float32, whatever the precision of the frozen part.

    `all-linear` covers every linear layer but the output layer. A fresh LoRA changes nothing (B = 0), and the same seed
    gives the same A on every machine. Weights that are tied stay tied.

    Args:
        model: From `load_model`; it is changed in place.
        config: Kind and size.
        seed: Of the initial weights; the global random state is left as it was.

    Returns:
        The model to train: a `PeftModel` for `lora`, the model itself for `full`.

    Raises:
        ModelError: `target_modules` names nothing in this model.
    """
    if config.kind == "full":
        model.float()
        model.requires_grad_(True)
        return model

    from peft import LoraConfig, get_peft_model

    lora = LoraConfig(
        task_type="CAUSAL_LM",
        r=config.r,
        lora_alpha=int(config.alpha) if float(config.alpha).is_integer() else config.alpha,  # type: ignore[arg-type]
        lora_dropout=config.dropout,
        target_modules=config.target_modules,
        bias="none",
    )
    try:
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            return get_peft_model(model, lora, adapter_name=ADAPTER_NAME, autocast_adapter_dtype=True)
    except ValueError as problem:
        raise ModelError(
            f"model.adapter.target_modules {config.target_modules!r} cannot be used: {problem}"
        ) from problem


def trainable_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters that are trained, by name, in the order of the model's modules; tied ones once.

    Args:
        model: From `attach_adapter`, or a base model (then the result is empty).
    """
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


def adapter_parameters(model: nn.Module, kind: Literal["lora", "full"]) -> dict[str, nn.Parameter]:
    """The parameters that an adapter folder holds, trained at present or frozen, named as in `trainable_parameters`."""
    return {name: value for name, value in model.named_parameters() if kind == "full" or ".lora_" in name}


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
