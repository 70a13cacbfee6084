"""Checks on an adapter folder and on tensors that are to become one."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from components.errors import ModelError
from components.models.adapter import ADAPTER_NAME, AdapterKind, adapter_parameters
from components.models.calibration_head import FILE_NAME as HEAD_FILE
from components.models.calibration_head import CalibrationHead
from components.models.mixlora.files import defect_of, lacking_routers, read_spec
from components.models.smollm2 import sha256_of

METADATA_FILE = "caltune.json"
FORMAT = 1
TENSOR_FILES = {
    "lora": "adapter_model.safetensors",
    "full": "model.safetensors",
    "mixlora": "adapter_model.safetensors",
    "blob": "adapter_model.safetensors",
}
CONFIG_FILES = {
    "lora": "adapter_config.json",
    "full": "config.json",
    "mixlora": "adapter_config.json",
    "blob": "adapter_config.json",
}
CARD_FILE = "README.md"
ENSEMBLE: Final = "ensemble"
"""Stands for the adapter's kind in a folder whose members are adapter folders."""
ALIKE = ("adapter", "base_model", "prompt")
"""What the members of an ensemble have in common."""


def file_key(name: str) -> str:
    """A parameter's key in the file; PEFT leaves the adapter's own name out."""
    return re.sub(rf"(\.lora_\w+)\.{ADAPTER_NAME}(?=\.|$)", r"\1", name)


def expected_shapes(model: nn.Module, kind: AdapterKind) -> dict[str, torch.Size]:
    """Shape by file key; `ds_shape` is the full shape of a parameter that ZeRO stage 3 has sharded."""
    return {
        file_key(name): torch.Size(getattr(value, "ds_shape", value.shape))
        for name, value in adapter_parameters(model, kind).items()
    }


def require_same_keys(found: Mapping[str, Tensor], expected: Mapping[str, torch.Size], where: str) -> None:
    """Refuses tensors whose keys or shapes differ from what the model needs.

    Args:
        found: Tensors by file key.
        expected: From `expected_shapes`.
        where: What `found` is, for the message.

    Raises:
        ModelError: Names the first missing, unexpected or misshapen key.
    """
    if not expected:
        raise ModelError(f"{where}: the model has no adapter to hold it")
    if missing := sorted(expected.keys() - found.keys()):
        raise ModelError(f"{where}: missing key '{missing[0]}' ({len(missing)} missing in all)")
    if unexpected := sorted(found.keys() - expected.keys()):
        raise ModelError(f"{where}: unexpected key '{unexpected[0]}' ({len(unexpected)} unexpected in all)")
    for key, shape in expected.items():
        if found[key].shape != shape:
            raise ModelError(f"{where}: key '{key}' has shape {list(found[key].shape)}, expected {list(shape)}")


def read_metadata(folder: Path) -> dict[str, Any]:
    """The content of an adapter folder's `caltune.json`, without a look at the files that it lists.

    Raises:
        ModelError: It is missing, or is not what `save_adapter` writes.
    """
    path = folder / METADATA_FILE
    try:
        metadata: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        _ = metadata["format"], metadata["adapter"]["kind"], int(metadata["steps"]), metadata["head"]
        _ = str(metadata["method"]), dict(metadata["files"])
    except (OSError, ValueError, KeyError, TypeError) as problem:
        raise ModelError(f"{path} cannot be read ({problem!r}): {folder} is not a complete adapter folder") from problem
    return metadata


def verify_adapter(folder: Path) -> dict[str, Any]:
    """Re-opens a folder and checks files, checksums and tensors. The card is not held to its checksum: people edit it.

    Args:
        folder: Written by `save_adapter`, or by `save_ensemble`, whose members are checked too.

    Returns:
        The content of `caltune.json`.

    Raises:
        ModelError: Something is missing, changed, not finite, or zero where it cannot be.
    """
    path, metadata = folder / METADATA_FILE, read_metadata(folder)
    form, kind, steps = metadata["format"], metadata["adapter"]["kind"], int(metadata["steps"])
    files, with_head = dict(metadata["files"]), metadata["head"] is not None
    if form == FORMAT and kind == ENSEMBLE:
        _verify_members(folder, metadata)
        return metadata
    if form != FORMAT or kind not in TENSOR_FILES:
        raise ModelError(f"{path}: format {form!r} with adapter {kind!r} is not known to this version of caltune")
    needed = {TENSOR_FILES[kind], CONFIG_FILES[kind]} | ({HEAD_FILE} if with_head else set())
    if unlisted := sorted(needed - files.keys()):
        raise ModelError(f"{path} lists no checksum of {unlisted[0]}: {folder} is not a complete adapter folder")
    for name, expected in files.items():
        _verify_file(folder / name, expected)
    num_experts = read_spec(folder).num_experts if kind == "mixlora" else None
    _verify_tensors(
        folder / TENSOR_FILES[kind],
        pairs=kind != "full",
        num_experts=num_experts,
        with_noise=kind == "blob",
        trained=steps > 0,
    )
    if with_head:
        CalibrationHead.load(folder)
    return metadata


def _verify_members(folder: Path, metadata: Mapping[str, Any]) -> None:
    """Checks an ensemble: its files, each member, and that the members have one shape, base model and prompt."""
    path = folder / METADATA_FILE
    names, files = metadata.get("members"), metadata["files"]
    if not isinstance(names, list) or len(names) < 2:
        raise ModelError(f"{path} names fewer than two members: {folder} is not a complete ensemble")
    if unlisted := [name for name in names if f"{name}/{METADATA_FILE}" not in files]:
        raise ModelError(f"{path} lists no checksum of {unlisted[0]}/{METADATA_FILE}: {folder} is not complete")
    for name, expected in files.items():
        _verify_file(folder / name, expected)
    members = [verify_adapter(folder / name) for name in names]
    for name, member in zip(names, members, strict=True):
        if member["adapter"]["kind"] == ENSEMBLE or member["head"] is not None:
            raise ModelError(f"{folder / name}: a member must be a single adapter without a calibration head")
        if different := [key for key in ALIKE if member[key] != members[0][key]]:
            raise ModelError(f"{folder / name}: its {different[0]} is not that of {names[0]}; these are no ensemble")


def _verify_file(path: Path, expected: Mapping[str, Any]) -> None:
    if not path.is_file():
        raise ModelError(f"{path} is missing")
    if path.name == CARD_FILE:
        return
    if path.stat().st_size != expected["bytes"]:
        raise ModelError(f"{path} has {path.stat().st_size} bytes, {METADATA_FILE} says {expected['bytes']}")
    if sha256_of(path) != expected["sha256"]:
        raise ModelError(f"{path}: its content is not what {METADATA_FILE} has the checksum of")


def _verify_tensors(path: Path, *, pairs: bool, num_experts: int | None, with_noise: bool, trained: bool) -> None:
    """Finds what a failed gathering leaves behind: empty, non-finite or zero tensors, half a LoRA pair, no router.

    Args:
        path: The tensors.
        pairs: They are LoRA pairs, of which some B has moved where the adapter is trained.
        num_experts: For a mixture of experts.
        with_noise: Every A has a G beside it, which says how far it varies.
        trained: Whether a step was taken.
    """
    some_b_moved = False
    try:
        with safe_open(path, framework="pt") as file:
            keys = set(file.keys())
            for key in sorted(keys):
                value = file.get_tensor(key)
                if defect := _defect_of(key, value, num_experts):
                    raise ModelError(f"{path}: key '{key}' {defect}")
                for partner in _partners(key, with_noise):
                    if partner not in keys:
                        raise ModelError(f"{path}: missing key '{partner}'")
                some_b_moved |= ".lora_B" in key and bool(value.any())
    except (OSError, SafetensorError) as problem:
        raise ModelError(f"{path}: the tensors cannot be read: {problem}") from problem
    if not keys:
        raise ModelError(f"{path} holds no tensor")
    if num_experts is not None and (missing := lacking_routers(keys)):
        raise ModelError(f"{path}: missing key '{missing[0]}'")
    if pairs and trained and not some_b_moved:
        raise ModelError(
            f"{path}: every lora_B is zero although the adapter was trained; the weights were not gathered"
        )


def _defect_of(key: str, value: Tensor, num_experts: int | None) -> str | None:
    if value.numel() == 0 or not torch.isfinite(value).all():
        return "is empty or has values that are not finite"
    if (".lora_A" in key or ".lora_G" in key) and not value.any():
        return "is all zero, which it is not even before training"
    return None if num_experts is None else defect_of(key, value, num_experts)


def _partners(key: str, with_noise: bool) -> tuple[str, ...]:
    """The other half of a LoRA pair, and A's noise; a tensor that is not half of one has none."""
    if ".lora_A" in key:
        noise = (key.replace(".lora_A", ".lora_G"),) if with_noise else ()
        return (key.replace(".lora_A", ".lora_B"), *noise)
    return (key.replace(".lora_B", ".lora_A"),) if ".lora_B" in key else ()
