"""The public MixLoRA format, written and read: `adapter_config.json` and a pickled `adapter_model.bin`.

Source: TUDB-Labs/MixLoRA (`mixlora/config.py`, `mixlora/model.py`, and `misc/legacy_weights_convertor.py` for the names
of older files). Pickle is read by `torch.load(weights_only=True)` alone, which runs no code.

What the package `mixlora` 0.2.3 does differently from what its files say, and what follows from it here:

- It builds experts with the outer r and alpha and ignores an `expert_lora` block, which MoE-PEFT follows. A block that
  differs is refused: what such an adapter computes depends on who reads it.
- Its experts are in no module tree, so their dropout stays on after `model.eval()`, and it refuses a dropout of 0.
  Files are written with a dropout that drops nothing.
- It jitters whenever `jitter_noise` is above 0, at inference too. The field is left out of what is written.
- It cannot call a missing `act_fn`, so that is always written.
"""

from __future__ import annotations

import json
import re
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from components.config import MixLoraConfig, ModelConfig
from components.config_data import PromptConfig
from components.errors import ModelError
from components.models.adapter import adapter_parameters, attach_adapter
from components.models.adapter_checks import TENSOR_FILES, file_key, verify_adapter
from components.models.adapter_files import AdapterRecord, save_adapter
from components.models.base import ResolvedModel, load_model
from components.models.mixlora.files import CONFIG_FILE, activation_of, adapted_projections, read_json, read_spec
from components.models.mixlora.public_files import WEIGHTS_FILE, PublicAdapter, read_public, read_tensors

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

NO_DROPOUT = 1e-9  # 1 - 1e-9 is 1 in float32

ATTENTION_KEY = re.compile(r"layers\.(\d+)\.self_attn\.(\w+)\.lora_([AB])\.weight$")
ROUTER_KEY = re.compile(r"layers\.(\d+)\.mlp\.router\.weight$")
EXPERTS_KEY = re.compile(r"layers\.(\d+)\.mlp\.lora_([AB])_(\w+)$")


def import_public(folder: Path, base_model: PreTrainedModel) -> tuple[nn.Module, MixLoraConfig]:
    """Puts an adapter of the public format on its base model, strictly.

    A projection that the adapter leaves out (`q_proj` and `v_proj` alone are common) gets one that changes nothing.

    Args:
        folder: With `adapter_config.json` and `adapter_model.bin`, by current or legacy names.
        base_model: From `load_model`; it is changed in place.

    Returns:
        The model, frozen and in evaluation mode, and what was attached.

    Raises:
        ModelError: The folder is damaged or asks for what caltune does not compute (the field is named); or a key is
            missing, unexpected or misshapen (named).
    """
    public = read_public(folder)
    own = activation_of(base_model)
    if public.activation is not None and not _same_activation(public.activation, own):
        raise ModelError(
            f"{folder / CONFIG_FILE}: act_fn is {public.activation!r} but the base model's is {own!r}; an adapter that "
            "changes the activation is not supported"
        )
    model = attach_adapter(base_model, public.spec, seed=0)
    _fill(model, public)
    model.requires_grad_(False)
    return model.eval(), public.spec


def convert_public(
    folder: Path,
    target: Path,
    *,
    config: ModelConfig,
    resolved: ResolvedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompt: PromptConfig,
) -> Path:
    """Makes an adapter folder of ours from one of the public format.

    Args:
        folder: As for `import_public`.
        target: As `folder` of `save_adapter`.
        config: Model section of a run file that names the base model.
        resolved: The base model.
        tokenizer: Its tokenizer.
        prompt: How questions are to be put to it.

    Returns:
        `target`.

    Raises:
        ModelError: As for `import_public` and `save_adapter`.
    """
    model, spec = import_public(folder, load_model(resolved, config))
    # How long it was trained is not known: 0 steps leave out the check that it was.
    record = AdapterRecord("mixlora", 0, prompt, {"imported_from": folder.name})
    return save_adapter(
        target,
        model=model,
        state=adapter_parameters(model, "mixlora"),
        head=None,
        tokenizer=tokenizer,
        config=config,
        adapter=spec,
        resolved=resolved,
        record=record,
    )


def export_public(folder: Path, target: Path) -> Path:
    """Writes an adapter folder of ours in the public format. The tensors stay what they are, bit for bit.

    Args:
        folder: Written by `save_adapter`.
        target: A folder that does not exist yet.

    Returns:
        `target`.

    Raises:
        ModelError: The format cannot hold the adapter (the message says what of it), or `target` exists.
    """
    metadata = verify_adapter(folder)
    _require_expressible(folder, metadata)
    if target.exists():
        raise ModelError(f"{target} exists; name a folder that does not")
    spec = read_spec(folder)
    tensors: dict[str, Tensor] = {}
    for key, value in load_file(folder / TENSOR_FILES["mixlora"]).items():
        names = public_names(key, spec.num_experts)
        parts = value.unbind() if EXPERTS_KEY.search(key) else (value,)
        tensors |= {name: part.clone() for name, part in zip(names, parts, strict=True)}
    target.parent.mkdir(parents=True, exist_ok=True)
    draft = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
    try:
        _write(draft, _public_config(read_json(folder / CONFIG_FILE)), tensors)
        draft.rename(target)
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    return target


def public_names(key: str, num_experts: int) -> list[str]:
    """What one of our tensors is called in the public format: one name, or one for each expert of a stack.

    Args:
        key: Our key in the file.
        num_experts: N.

    Raises:
        ModelError: The format has no name for it.
    """
    if match := ROUTER_KEY.search(key):
        return [f"mixlora.layers.{match[1]}.mlp.moe_gate.weight"]
    if match := ATTENTION_KEY.search(key):
        return [f"mixlora.layers.{match[1]}.self_attn.{match[2]}.lora_{match[3]}.weight"]
    if match := EXPERTS_KEY.search(key):
        layer, half, projection = match.groups()
        prefix = f"mixlora.layers.{layer}.mlp.{projection}.experts"
        return [f"{prefix}.{expert}.lora_{half}.weight" for expert in range(num_experts)]
    raise ModelError(f"the public MixLoRA format has no name for the tensor '{key}'")


def _fill(model: nn.Module, public: PublicAdapter) -> None:
    left = dict(public.tensors)
    for name, parameter in adapter_parameters(model, "mixlora").items():
        key = file_key(name)
        if not public.projections.issuperset(adapted_projections([key])):
            continue
        stacked = EXPERTS_KEY.search(key) is not None
        wanted = parameter.shape[1:] if stacked else parameter.shape
        parts = []
        for theirs in public_names(key, public.spec.num_experts):
            if theirs not in left:
                raise ModelError(f"{public.path}: missing key '{theirs}'")
            part = left.pop(theirs)
            if part.shape != wanted:
                raise ModelError(f"{public.path}: key '{theirs}' has shape {list(part.shape)}, expected {list(wanted)}")
            parts.append(part)
        with torch.no_grad():
            parameter.copy_(torch.stack(parts) if stacked else parts[0])
    if left:
        raise ModelError(f"{public.path}: unexpected key '{min(left)}' ({len(left)} unexpected in all)")


def _same_activation(one: str, other: str) -> bool:
    """Whether two names of transformers' table mean the same function (`silu` and `swish` do)."""
    from transformers.activations import ACT2FN

    x = torch.linspace(-6, 6, 97)
    return one == other or (one in ACT2FN and torch.equal(ACT2FN[one](x), ACT2FN[other](x)))


def _require_expressible(folder: Path, metadata: Mapping[str, Any]) -> None:
    adapter = metadata["adapter"]
    if adapter["kind"] != "mixlora":
        raise ModelError(f"{folder} holds a '{adapter['kind']}' adapter, no mixture of experts; use it as it is")
    if metadata["head"] is not None:
        raise ModelError(
            f"{folder}: the public MixLoRA format has no place for the calibration head of '{metadata['method']}', and "
            "without it the confidence is not calibrated; use the folder as it is, or export a 'uq4ct' adapter"
        )
    if adapter["attention"] == "mixlora":
        raise ModelError(f"{folder}: the public MixLoRA format has no experts on attention (attention: mixlora)")
    if not float(adapter["alpha"]).is_integer():
        raise ModelError(
            f"{folder}: the public MixLoRA format wants a whole alpha, this adapter's is {adapter['alpha']}"
        )


def _public_config(config: dict[str, Any]) -> dict[str, Any]:
    """Our `adapter_config.json` as the public format has it; see the module's text for what is changed and why."""
    ours = {"revision", "attention", "flc_over", "jitter_noise"}
    public = {field: value for field, value in config.items() if field not in ours and value is not None}
    return public | {"lora_alpha": int(config["lora_alpha"]), "lora_dropout": NO_DROPOUT}


def _write(draft: Path, config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
    draft.chmod(0o755)
    (draft / CONFIG_FILE).write_text(json.dumps(config, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    path = draft / WEIGHTS_FILE
    torch.save(dict(tensors), path)
    again = read_tensors(path)
    if again.keys() != tensors.keys() or any(not torch.equal(again[key], tensors[key]) for key in tensors):
        raise ModelError(f"{path} reads back differently from what was written")
