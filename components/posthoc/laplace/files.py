"""The posterior in its adapter's folder: `posterior.safetensors`, listed with its checksum, read back strictly."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from components.errors import ModelError
from components.models.adapter_checks import verify_adapter
from components.models.adapter_extras import add_file
from components.posthoc.laplace.layers import LoraLayer
from components.posthoc.laplace.posterior import Block, Posterior

FILE_NAME = "posterior.safetensors"
_KEY, _VERSION = "caltune_posterior", 1
_PARTS = ("wide_vectors", "wide_values", "narrow_vectors", "narrow_values")
_FIGURES = ("prior_variance", "samples", "n", "log_likelihood", "squared_norm")


def save_posterior(folder: Path, posterior: Posterior) -> None:
    """Puts a posterior into the folder of the adapter it belongs to.

    Raises:
        ModelError: The folder is not a whole adapter folder.
    """
    tensors = {f"{name}.{part}": getattr(of, part) for name, of in posterior.blocks.items() for part in _PARTS}
    figures = {"version": _VERSION, **{name: getattr(posterior, name) for name in _FIGURES}}
    # One entry, since safetensors writes several in an order that differs from run to run.
    add_file(folder, FILE_NAME, lambda path: save_file(tensors, path, metadata={_KEY: json.dumps(figures)}))


def load_posterior(folder: Path, layers: Sequence[LoraLayer]) -> Posterior:
    """Reads a posterior back.

    Args:
        folder: The adapter folder.
        layers: The LoRA matrices of the model with that adapter.

    Raises:
        ModelError: There is none, it is damaged, or it does not fit the matrices.
    """
    path = folder / FILE_NAME
    if FILE_NAME not in verify_adapter(folder)["files"]:
        raise ModelError(
            f"{folder} has no {FILE_NAME}: its posterior was never fitted, or not to the end; go on with the run that "
            "trained it (--resume)"
        )
    try:
        with safe_open(path, framework="pt") as file:
            described = json.loads((file.metadata() or {})[_KEY])
            tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 - not a mapping
        version = described.pop("version")
    except (OSError, SafetensorError, ValueError, KeyError) as problem:
        raise ModelError(f"{path}: the posterior cannot be read: {problem!r}") from problem
    if version != _VERSION:
        raise ModelError(f"{path}: file version {version!r}, but {_VERSION} is known")
    blocks = {layer.name: _block(path, layer, tensors) for layer in layers}
    if unexpected := sorted(tensors.keys() - {f"{name}.{part}" for name in blocks for part in _PARTS}):
        raise ModelError(f"{path}: unexpected key '{unexpected[0]}'")
    return Posterior(blocks, **_figures(path, described))


def _block(path: Path, layer: LoraLayer, tensors: Mapping[str, Tensor]) -> Block:
    found = {}
    for part in _PARTS:
        key = f"{layer.name}.{part}"
        if key not in tensors:
            raise ModelError(f"{path}: missing key '{key}'")
        found[part] = tensors[key]
    kept = found["wide_values"].numel()
    shapes = {
        "wide_vectors": (layer.wide, kept),
        "wide_values": (kept,),
        "narrow_vectors": (layer.narrow, layer.narrow),
        "narrow_values": (layer.narrow,),
    }
    for part, shape in shapes.items():
        key, value = f"{layer.name}.{part}", found[part]
        if tuple(value.shape) != shape or value.dtype != torch.float32:
            raise ModelError(f"{path}: key '{key}' is {value.dtype} {list(value.shape)}, expected {list(shape)}")
        if not torch.isfinite(value).all() or (part.endswith("_values") and bool((value < 0).any())):
            raise ModelError(f"{path}: key '{key}' has values that a posterior cannot have")
    return Block(**found)


def _figures(path: Path, described: Mapping[str, Any]) -> dict[str, Any]:
    numbers: dict[str, Any] = {name: described.get(name) for name in _FIGURES}
    for name, value in numbers.items():
        if not isinstance(value, (int, float)) or not math.isfinite(value):
            raise ModelError(f"{path}: '{name}' is {value!r}, which a posterior cannot have")
    if not (numbers["prior_variance"] > 0 and numbers["samples"] >= 1):
        raise ModelError(f"{path}: prior variance {numbers['prior_variance']}, samples {numbers['samples']}")
    return numbers
