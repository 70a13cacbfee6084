"""The adapter folder: written, re-opened and checked, then put in place in one step; read back strictly.

The tensors are in PEFT's own format (or transformers', for full fine-tuning), so other tools read the folder; what
only we know is in `caltune.json` and `calibration_head.safetensors`. A mixture of LoRA experts has no such format:
its tensors bear our module names, and `components/models/mixlora/public_format.py` writes and reads the one that the
MixLoRA packages use. Nothing is pickled.
"""

from __future__ import annotations

import copy
import importlib.metadata
import json
import shutil
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from components.config import AdapterSpec, MixLoraConfig, ModelConfig
from components.config_bayes import BlobAdapterConfig
from components.config_data import PromptConfig
from components.errors import ModelError
from components.models import blob
from components.models.adapter import ADAPTER_NAME, AdapterKind, adapter_parameters, attach_adapter
from components.models.adapter_checks import (
    CARD_FILE,
    ENSEMBLE,
    FORMAT,
    METADATA_FILE,
    TENSOR_FILES,
    expected_shapes,
    file_key,
    require_same_keys,
    verify_adapter,
)
from components.models.base import ResolvedModel
from components.models.calibration_head import FILE_NAME as HEAD_FILE
from components.models.calibration_head import CalibrationHead
from components.models.mixlora import files as mixlora_files
from components.models.model_card import model_card
from components.models.smollm2 import sha256_of

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

PACKAGES = ("caltune", "torch", "transformers", "peft", "safetensors")


@dataclass(frozen=True)
class AdapterRecord:
    """What a folder says about its tensors.

    Attributes:
        method: Name of the method.
        steps: Optimiser steps taken; 0 for an untrained adapter.
        prompt: How questions were put; whoever uses the adapter must put them the same way.
        details: Anything more to keep in `caltune.json` (run, seed, data hashes); must be JSON.
        results: Markdown with measured figures for the model card.
        balance_weight: Weight of the load-balance loss; for a mixture of experts.
    """

    method: str
    steps: int
    prompt: PromptConfig
    details: Mapping[str, Any] = field(default_factory=dict)
    results: str = ""
    balance_weight: float | None = None


def save_adapter(
    folder: Path,
    *,
    model: nn.Module,
    state: Mapping[str, Tensor],
    head: CalibrationHead | None,
    tokenizer: PreTrainedTokenizerBase,
    config: ModelConfig,
    adapter: AdapterSpec,
    resolved: ResolvedModel,
    record: AdapterRecord,
) -> Path:
    """Writes an adapter folder, checks it, and only then puts it in the place of an earlier one.

    In a distributed run one rank calls this, after the tensors have been gathered.

    Args:
        folder: Where it goes. An earlier adapter folder there is replaced; anything else there is left alone.
        model: From `attach_adapter`, unwrapped. It says which tensors there must be and of which shape; its own values
            are not read, since under ZeRO stage 3 they are not here.
        state: Full values of the trained parameters, by the names of `trainable_parameters`.
        head: The calibration head, or None for a method without one.
        tokenizer: Saved alongside.
        config: Model section of the run file.
        adapter: What was attached: one of the adapters in `config`, or one that was imported.
        resolved: The base model.
        record: What belongs to these tensors.

    Returns:
        The folder.

    Raises:
        ModelError: A tensor is missing, unexpected, misshapen, not finite or zero where it cannot be; or `folder` holds
            something else.
    """
    if folder.exists() and not (folder / METADATA_FILE).is_file() and (folder.is_file() or any(folder.iterdir())):
        raise ModelError(f"{folder} exists and is not an adapter folder; it is left as it is, choose another place")
    tensors = {file_key(name): value.detach().float().cpu().contiguous() for name, value in state.items()}
    require_same_keys(tensors, expected_shapes(model, adapter.kind), "the state to be saved")
    folder.parent.mkdir(parents=True, exist_ok=True)
    draft = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        save_file(tensors, draft / TENSOR_FILES[adapter.kind], metadata={"format": "pt"})
        if isinstance(adapter, MixLoraConfig):
            _write_mixlora_config(draft, model, adapter, tensors, resolved, record)
        elif isinstance(adapter, BlobAdapterConfig):
            _write_blob_config(draft, adapter, resolved)
        else:
            _write_model_config(draft, model, adapter.kind, resolved)
        if head is not None:
            head.save(draft)
        tokenizer.save_pretrained(draft)
        card = model_card(
            kind=adapter.kind,
            resolved=resolved,
            method=record.method,
            with_head=head is not None,
            results=record.results,
        )
        (draft / CARD_FILE).write_text(card, encoding="utf-8")
        _write_metadata(draft, head, config, adapter, resolved, record)
        verify_adapter(draft)
        _require_equal(tensors, draft / TENSOR_FILES[adapter.kind])
        publish(draft, folder)
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    return folder


def load_adapter(folder: Path, base_model: PreTrainedModel) -> tuple[nn.Module, CalibrationHead | None]:
    """Puts a saved adapter on a base model, strictly.

    Args:
        folder: Written by `save_adapter`.
        base_model: The model it was trained on, from `load_model`; it is changed in place.

    Returns:
        The model with the adapter, frozen and in evaluation mode, and the head or None.

    Raises:
        ModelError: The folder is damaged or an ensemble, or a key is missing, unexpected or misshapen for this model
            (named).
    """
    metadata = verify_adapter(folder)
    if metadata["adapter"]["kind"] == ENSEMBLE:
        raise ModelError(
            f"{folder} is an ensemble of {len(metadata['members'])} adapters, not one; load one of its members, "
            f"{folder / metadata['members'][0]}, or have all of them answer: caltune evaluate --adapter {folder}"
        )
    kind: AdapterKind = metadata["adapter"]["kind"]
    model = _attach_saved(folder, kind, base_model)
    stored = load_file(folder / TENSOR_FILES[kind])
    require_same_keys(stored, expected_shapes(model, kind), str(folder / TENSOR_FILES[kind]))
    with torch.no_grad():
        for name, parameter in adapter_parameters(model, kind).items():
            parameter.copy_(stored[file_key(name)])
    model.requires_grad_(False)
    head = CalibrationHead.load(folder) if metadata["head"] is not None else None
    columns = base_model.config.get_text_config().vocab_size
    if head is not None and head.vocabulary_size != columns:
        raise ModelError(
            f"{folder / HEAD_FILE}: made for {head.vocabulary_size} logits, the base model has {columns}; "
            "it is not the model the adapter was trained on"
        )
    return model.eval(), head


def _write_mixlora_config(
    draft: Path,
    model: Any,
    adapter: MixLoraConfig,
    keys: Iterable[str],
    resolved: ResolvedModel,
    record: AdapterRecord,
) -> None:
    content = mixlora_files.adapter_config(
        adapter,
        keys,
        base_model=resolved.public_id,
        revision=resolved.revision,
        activation=mixlora_files.activation_of(model),
        balance_weight=record.balance_weight,
    )
    text = json.dumps(content, indent=2, ensure_ascii=False, allow_nan=False)
    (draft / mixlora_files.CONFIG_FILE).write_text(text + "\n", encoding="utf-8")


def _write_blob_config(draft: Path, adapter: BlobAdapterConfig, resolved: ResolvedModel) -> None:
    content = blob.adapter_config(adapter, base_model=resolved.public_id, revision=resolved.revision)
    text = json.dumps(content, indent=2, ensure_ascii=False, allow_nan=False)
    (draft / blob.CONFIG_FILE).write_text(text + "\n", encoding="utf-8")


def _write_model_config(draft: Path, model: Any, kind: AdapterKind, resolved: ResolvedModel) -> None:
    if kind == "full":
        model.config.save_pretrained(draft)
        if model.generation_config is not None:
            model.generation_config.save_pretrained(draft)
        return
    lora = copy.deepcopy(model.peft_config[ADAPTER_NAME])
    lora.base_model_name_or_path = resolved.public_id
    lora.revision = resolved.revision
    lora.inference_mode = True
    if not isinstance(lora.target_modules, str):
        lora.target_modules = sorted(lora.target_modules)  # a set, whose order differs from run to run
    lora.save_pretrained(draft)


def _write_metadata(
    draft: Path,
    head: CalibrationHead | None,
    config: ModelConfig,
    adapter: AdapterSpec,
    resolved: ResolvedModel,
    record: AdapterRecord,
) -> None:
    draft.chmod(0o755)
    for path in draft.iterdir():
        path.chmod(0o644)  # safetensors are written for the owner alone
    metadata = {
        "format": FORMAT,
        "method": record.method,
        "steps": record.steps,
        "adapter": adapter.model_dump(mode="json"),
        "head": None if head is None else {"form": head.form, "vocabulary_size": head.vocabulary_size},
        "base_model": {
            "name": config.name,
            "public_id": resolved.public_id,
            "revision": resolved.revision,
            "origin": resolved.origin,
            "dtype": config.dtype,
        },
        "prompt": record.prompt.model_dump(mode="json"),
        "versions": {package: _version(package) for package in PACKAGES},
        "details": dict(record.details),
        "files": {
            path.name: {"bytes": path.stat().st_size, "sha256": sha256_of(path)} for path in sorted(draft.iterdir())
        },
    }
    text = json.dumps(metadata, indent=2, ensure_ascii=False, allow_nan=False)
    (draft / METADATA_FILE).write_text(text + "\n", encoding="utf-8")


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _require_equal(tensors: Mapping[str, Tensor], path: Path) -> None:
    stored = load_file(path)
    for key, value in tensors.items():
        if key not in stored or not torch.equal(stored[key], value):
            raise ModelError(f"{path}: key '{key}' reads back differently from what was written")


def publish(draft: Path, folder: Path) -> None:
    """Renames the checked draft into place. Killed in between, the earlier folder survives beside it, hidden."""
    if not folder.exists():
        draft.rename(folder)
        return
    earlier = draft.with_name(draft.name + "-earlier")
    folder.rename(earlier)
    draft.rename(folder)
    shutil.rmtree(earlier)


def _attach_saved(folder: Path, kind: AdapterKind, base_model: PreTrainedModel) -> nn.Module:
    if kind == "full":
        return base_model.float()
    if kind == "lora":
        return _attach_saved_lora(folder, base_model)
    if kind == "blob":
        return attach_adapter(base_model, blob.read_spec(folder), seed=0)
    return attach_adapter(base_model, mixlora_files.read_spec(folder), seed=0)


def _attach_saved_lora(folder: Path, base_model: PreTrainedModel) -> nn.Module:
    from peft import LoraConfig, get_peft_model

    try:
        lora = LoraConfig.from_pretrained(str(folder))
        lora.base_model_name_or_path = None  # PEFT puts in the copy in use, and would warn that it is another path
        return get_peft_model(base_model, lora, adapter_name=ADAPTER_NAME)
    except (ValueError, TypeError, KeyError) as problem:
        raise ModelError(f"{folder}: the adapter does not fit this base model: {problem}") from problem
