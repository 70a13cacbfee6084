"""Reading the public MixLoRA format: which fields caltune can honour, and older files' names. No base model needed.

`components/models/mixlora/public_format.py` says where the format is defined and puts what is read here on a model.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from components.config import MixLoraConfig
from components.errors import ModelError
from components.models.mixlora.files import CONFIG_FILE, PEFT_TYPE, ROUTING_STRATEGY, read_json, spec_from
from components.models.mixlora.inject import FAMILIES

WEIGHTS_FILE = "adapter_model.bin"
LEGACY_STRATEGY = "mixtral"
LEGACY_PROJECTIONS = {"w1_proj": "gate_proj", "w2_proj": "down_proj", "w3_proj": "up_proj"}
FFN = frozenset(name for ffn, _ in FAMILIES.values() for name in ffn)
ATTENTION = frozenset(name for _, attention in FAMILIES.values() for name in attention)
LEGACY_ROUTER = re.compile(r"mixlora\.layers\.(\d+)\.gate\.weight")
LEGACY_EXPERT = re.compile(r"mixlora\.layers\.(\d+)\.experts\.(\d+)\.(\w+)\.lora_([AB])\.weight")


@dataclass(frozen=True)
class PublicAdapter:
    """What a public folder holds.

    Attributes:
        spec: What to attach for it.
        projections: Names of the projections it adapts, by their current names.
        activation: Activation that it asks for; None for the base model's own.
        tensors: By the current public names, float32.
        path: The file of the tensors, for messages.
    """

    spec: MixLoraConfig
    projections: frozenset[str]
    activation: str | None
    tensors: Mapping[str, Tensor]
    path: Path


def read_public(folder: Path) -> PublicAdapter:
    """Reads a folder of the public format, by current or legacy names, without its base model.

    Raises:
        ModelError: A file is missing or damaged, a tensor is not finite, or a field asks for what caltune does not
            compute.
    """
    path, weights = folder / CONFIG_FILE, folder / WEIGHTS_FILE
    config = read_json(path)
    strategy = config.get("routing_strategy")
    if config.get("peft_type") != PEFT_TYPE or strategy not in (ROUTING_STRATEGY, LEGACY_STRATEGY):
        raise ModelError(
            f"{path}: peft_type {config.get('peft_type')!r} with routing_strategy {strategy!r} is not supported; top-k "
            f"routing ({PEFT_TYPE!r} with {ROUTING_STRATEGY!r}, in older files {LEGACY_STRATEGY!r}) is"
        )
    for field in ("r", "lora_alpha", "num_experts"):
        if field not in config:
            raise ModelError(f"{path}: missing field '{field}'")
    _refuse_unsupported(config, path)
    projections = _projections(config, path)
    attention: dict[str, Any] = {"attention": "lora" if projections & ATTENTION else "none"}
    spec = spec_from({k: v for k, v in config.items() if k != "flc_over"} | attention, path)
    tensors = read_tensors(weights)
    if strategy == LEGACY_STRATEGY:
        tensors = _with_current_names(tensors, weights)
    return PublicAdapter(spec, projections, config.get("act_fn"), tensors, weights)


def _refuse_unsupported(config: Mapping[str, Any], path: Path) -> None:
    experts = config.get("expert_lora") or {}
    if not isinstance(experts, dict):
        raise ModelError(f"{path}: field 'expert_lora' must be a mapping")
    for field in ("use_dora", "use_rslora"):
        if config.get(field) or experts.get(field):
            raise ModelError(f"{path}: {field} is not supported; caltune's updates are B A x times alpha / r")
    if config.get("bias", "none") != "none":
        raise ModelError(f"{path}: bias {config['bias']!r} is not supported, only 'none'")
    if not isinstance(config.get("act_fn"), str | None):
        raise ModelError(f"{path}: field 'act_fn' must be a name or null")
    for field in ("r", "lora_alpha"):
        if field in experts and experts[field] != config[field]:
            raise ModelError(
                f"{path}: expert_lora.{field} is {experts[field]} but {field} is {config[field]}; caltune has one for "
                "attention and experts, as has the package 'mixlora', which ignores expert_lora; MoE-PEFT follows it"
            )


def _projections(config: Mapping[str, Any], path: Path) -> frozenset[str]:
    """The targets, a list or a mapping to true and false, by their current names."""
    targets = config.get("target_modules")
    if isinstance(targets, dict):
        targets = [name for name, wanted in targets.items() if wanted]
    if not isinstance(targets, list) or not all(isinstance(name, str) for name in targets):
        raise ModelError(
            f"{path}: field 'target_modules' must be a list of names or a mapping of names to true or false"
        )
    projections = frozenset(LEGACY_PROJECTIONS.get(name, name) for name in targets)
    if unknown := sorted(projections - ATTENTION - FFN):
        raise ModelError(f"{path}: target_modules names '{unknown[0]}'; known are {', '.join(sorted(ATTENTION | FFN))}")
    return projections


def read_tensors(path: Path) -> dict[str, Tensor]:
    """Reads `adapter_model.bin`, running no code from it.

    Returns:
        Tensors by the file's own names, float32.

    Raises:
        ModelError: The file is missing, damaged or holds something else; or a tensor is empty or not finite.
    """
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as problem:  # a damaged pickle may raise nearly anything
        raise ModelError(f"{path} cannot be read as tensors: {problem}") from problem
    if not isinstance(content, dict) or not content:
        raise ModelError(f"{path} holds no tensors by name")
    tensors = {}
    for key, value in content.items():
        if not isinstance(key, str) or not isinstance(value, Tensor) or not value.is_floating_point():
            raise ModelError(f"{path}: key {key!r} holds {type(value).__name__}, not a tensor of real numbers")
        tensors[key] = value.float()
        if value.numel() == 0 or not torch.isfinite(tensors[key]).all():
            raise ModelError(f"{path}: key '{key}' is empty or has values that are not finite")
    return tensors


def _with_current_names(tensors: Mapping[str, Tensor], path: Path) -> dict[str, Tensor]:
    renamed: dict[str, Tensor] = {}
    for key, value in tensors.items():
        name = key
        if router := LEGACY_ROUTER.fullmatch(key):
            name = f"mixlora.layers.{router[1]}.mlp.moe_gate.weight"
        elif expert := LEGACY_EXPERT.fullmatch(key):
            layer, number, projection, half = expert.groups()
            projection = LEGACY_PROJECTIONS.get(projection, projection)
            name = f"mixlora.layers.{layer}.mlp.{projection}.experts.{number}.lora_{half}.weight"
        if name in renamed:
            raise ModelError(f"{path}: key '{key}' holds a second value of '{name}'")
        renamed[name] = value
    return renamed
