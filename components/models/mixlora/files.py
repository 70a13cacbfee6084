"""What an adapter folder says about a mixture of LoRA experts: its `adapter_config.json`, and checks of its tensors.

The fields carry the names of the public MixLoRA format where that has them (TUDB-Labs/MixLoRA, `mixlora/config.py`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from torch import Tensor

from components.config import MixLoraConfig
from components.errors import ModelError

CONFIG_FILE = "adapter_config.json"
PEFT_TYPE = "MIXLORA"
ROUTING_STRATEGY = "mixlora"
# our field -> theirs
FIELDS = {
    "r": "r",
    "alpha": "lora_alpha",
    "dropout": "lora_dropout",
    "num_experts": "num_experts",
    "top_k": "top_k",
    "router_init_std": "router_init_range",
    "jitter": "jitter_noise",
    "attention": "attention",
    "flc_over": "flc_over",
}
ROUTER_KEY = re.compile(r"\.router\.weight$")
EXPERTS_KEY = re.compile(r"\.lora_[AB]_\w+$")  # all experts of a projection, stacked; PEFT's own keys end in .weight
PROJECTION = re.compile(r"\.(?:mlp\.lora_[AB]_(\w+)|self_attn\.(\w+)\.lora_[AB][._]weight)$")


def adapter_config(
    spec: MixLoraConfig,
    keys: Iterable[str],
    *,
    base_model: str,
    revision: str | None,
    activation: str,
    balance_weight: float | None,
) -> dict[str, Any]:
    """The content of `adapter_config.json`: everything needed to build the adapter again on its base model.

    Args:
        spec: What was attached.
        keys: Keys of the tensors; they say which projections are adapted.
        base_model: What others should write to get the base model.
        revision: Its commit on the hub, if it has one.
        activation: The base model's activation, from `activation_of`.
        balance_weight: Weight of the load-balance loss in training; None where unknown.
    """
    return {
        "base_model_name_or_path": base_model,
        "revision": revision,
        "peft_type": PEFT_TYPE,
        "task_type": "CAUSAL_LM",
        "bias": "none",
        "routing_strategy": ROUTING_STRATEGY,
        **{theirs: getattr(spec, ours) for ours, theirs in FIELDS.items()},
        "router_aux_loss_coef": balance_weight,
        "act_fn": activation,
        "target_modules": adapted_projections(keys),
    }


def read_json(path: Path) -> dict[str, Any]:
    """Reads a JSON object.

    Raises:
        ModelError: There is none.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as problem:
        raise ModelError(f"{path} cannot be read: {problem}") from problem
    if not isinstance(content, dict):
        raise ModelError(f"{path} holds no JSON object")
    return content


def read_spec(folder: Path) -> MixLoraConfig:
    """What must be attached to a base model to hold the tensors of this adapter folder.

    Raises:
        ModelError: `adapter_config.json` is damaged, of another kind, or a field is missing or out of range (named).
    """
    path = folder / CONFIG_FILE
    config = read_json(path)
    if config.get("peft_type") != PEFT_TYPE or config.get("routing_strategy") != ROUTING_STRATEGY:
        raise ModelError(
            f"{path}: peft_type {config.get('peft_type')!r} with routing_strategy {config.get('routing_strategy')!r} "
            f"is not {PEFT_TYPE!r} with {ROUTING_STRATEGY!r}"
        )
    if missing := [theirs for theirs in FIELDS.values() if theirs not in config]:
        raise ModelError(f"{path}: missing field '{missing[0]}'")
    return spec_from(config, path)


def spec_from(config: Mapping[str, Any], path: Path) -> MixLoraConfig:
    """Reads the fields that are there; the others take our defaults, which are the public format's.

    Args:
        config: Fields by the names of `adapter_config.json`.
        path: Where they come from, for the message.

    Raises:
        ModelError: A value is out of range; its field is named.
    """
    try:
        return MixLoraConfig.model_validate(
            {ours: config[theirs] for ours, theirs in FIELDS.items() if theirs in config}
        )
    except ValidationError as problem:
        first = problem.errors()[0]
        field = FIELDS.get(str(first["loc"][0]), "") if first["loc"] else ""
        raise ModelError(f"{path}: {f'field {field!r}: ' if field else ''}{first['msg']}") from problem


def activation_of(model: Any) -> str:
    """The name of a model's activation in transformers' table; Gemma's files have it under another name."""
    config = model.config.get_text_config()
    return str(getattr(config, "hidden_activation", None) or config.hidden_act)


def adapted_projections(keys: Iterable[str]) -> list[str]:
    """Names of the projections that have an adapter (`gate_proj`, `q_proj` ...), sorted."""
    found = (PROJECTION.search(key) for key in keys)
    return sorted({match[1] or match[2] for match in found if match})


def defect_of(key: str, value: Tensor, num_experts: int) -> str | None:
    """What is wrong with one tensor of a mixture of experts, whether trained or not.

    An expert's B may be all zero: it received no token. Its A and its router's row are random from the start.

    Args:
        key: Its key in the file.
        value: Router [N, d], experts' A [N, r, in] or B [N, out, r]; any other tensor has no defect here.
        num_experts: N.

    Returns:
        The defect in words, or None.
    """
    router = ROUTER_KEY.search(key) is not None
    if not router and not EXPERTS_KEY.search(key):
        return None
    if value.ndim != (2 if router else 3) or value.shape[0] != num_experts:
        return f"has shape {list(value.shape)}, but there are {num_experts} experts"
    if not router and ".lora_B" in key:
        return None
    empty = [expert for expert in range(num_experts) if not value[expert].any()]
    return f"is all zero for expert {empty[0]}, which it is not even before training" if empty else None


def lacking_routers(keys: Collection[str]) -> list[str]:
    """Keys of the routers that the experts among these keys need and that are not there, sorted."""
    modules = {EXPERTS_KEY.sub("", key) for key in keys if EXPERTS_KEY.search(key)}
    return sorted({f"{module}.router.weight" for module in modules} - set(keys))
