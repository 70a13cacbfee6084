"""Base models: from what a run file names to a frozen causal language model and its tokenizer."""

from __future__ import annotations

import logging
import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from components.config import ModelConfig
from components.errors import ModelError
from components.models import smollm2

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

log = logging.getLogger(__name__)

HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")


@dataclass(frozen=True)
class ResolvedModel:
    """A base model that has been found.

    Attributes:
        path_or_id: Local folder, or hub id.
        revision: Commit on the hub; None for a folder.
        origin: Where it came from, in words for logs and model cards.
        public_id: What others should write to get this model: a hub id where there is one.
        license: Licence identifier, where the model states one.
        offline: Take what is already on disk, ask no hub.
    """

    path_or_id: str
    revision: str | None
    origin: str
    public_id: str
    license: str | None = None
    offline: bool = True


def resolve_model(config: ModelConfig) -> ResolvedModel:
    """Finds the base model that a run file names, without loading its weights.

    `smollm2-135m-instruct` is looked for as `components/models/smollm2.py` says; an existing folder wins over a hub
    id of the same name. A hub id is pinned to the commit that its revision means today, so that every worker and every
    resumed run loads the same weights.

    Args:
        config: `name`, `revision` and `trust_remote_code` are used.

    Returns:
        Where to load from.

    Raises:
        ModelError: Nothing was found, or what was found is not a causal language model.
    """
    if config.name == smollm2.NAME:
        resolved = _resolve_smollm2(config)
    elif Path(config.name).expanduser().exists() or config.name.startswith((".", "/", "~")):
        resolved = _resolve_folder(config)
    else:
        resolved = _resolve_hub_id(config)
    _check_architecture(_load_config(resolved, config), config)
    at = f" at {resolved.revision}" if resolved.revision else ""
    log.info("base model %s: %s%s (%s)", config.name, resolved.path_or_id, at, resolved.origin)
    return resolved


def base_of_adapter(
    stated: Mapping[str, Any], base_model: str | None = None, trust_remote_code: bool = False
) -> ModelConfig:
    """How the base model of an adapter folder is loaded.

    Args:
        stated: `base_model` in the folder's `caltune.json`.
        base_model: Where the base model is, if not where the folder says: a folder or a hub id.
        trust_remote_code: Allow the base model's own Python code from the hub to run.
    """
    if base_model is not None:
        name, revision = base_model, None
    else:
        # A folder's name may be relative to wherever it was trained; its public id is the whole path.
        name = smollm2.NAME if stated["name"] == smollm2.NAME else str(stated["public_id"])
        revision = stated["revision"]
    return ModelConfig(name=name, revision=revision, dtype=stated["dtype"], trust_remote_code=trust_remote_code)


def load_model(resolved: ResolvedModel, config: ModelConfig) -> PreTrainedModel:
    """Loads the base model: every weight frozen, in `config.dtype`, in evaluation mode.

    Args:
        resolved: From `resolve_model`.
        config: `dtype` and `trust_remote_code` are used.

    Returns:
        The model, on the CPU.

    Raises:
        ModelError: The files are damaged, or leave some weight of the model without a value.
    """
    import torch
    from safetensors import SafetensorError
    from transformers import AutoModelForCausalLM

    try:
        with bars_on_terminals_only():
            loaded: Any = AutoModelForCausalLM.from_pretrained(
                resolved.path_or_id,
                dtype=getattr(torch, config.dtype),
                use_safetensors=True,  # the other format is pickle, which can run code
                output_loading_info=True,
                ignore_mismatched_sizes=True,  # they are refused below, by name
                **_source(resolved, config),
            )
    except SafetensorError as problem:
        raise ModelError(
            f"{resolved.path_or_id}: the weights cannot be read ({problem}); a file is damaged or cut short, "
            "fetch the model again"
        ) from problem
    except (OSError, ValueError, ImportError, RuntimeError) as problem:
        raise ModelError(f"{resolved.path_or_id}: the model cannot be loaded: {problem}") from problem
    model, info = loaded
    _check_loading(resolved, info)
    model.requires_grad_(False)
    return model.eval()


def load_tokenizer(resolved: ResolvedModel, config: ModelConfig) -> PreTrainedTokenizerBase:
    """Loads the tokenizer. One without a padding token pads with its end-of-sequence token; nothing is ever added.

    Args:
        resolved: From `resolve_model`.
        config: `trust_remote_code` is used.

    Returns:
        The tokenizer, with `pad_token_id` set.

    Raises:
        ModelError: No tokenizer can be read, it has no token to pad with, or it knows more tokens than the model.
    """
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(resolved.path_or_id, **_source(resolved, config))
    except Exception as problem:  # tokenizers raises bare Exception for a damaged tokenizer.json
        raise ModelError(f"{resolved.path_or_id}: the tokenizer cannot be loaded: {problem}") from problem
    if tokenizer.pad_token_id is None:
        if tokenizer.eos_token_id is None:
            raise ModelError(
                f"{resolved.path_or_id}: the tokenizer has neither a padding nor an end-of-sequence token; "
                "set pad_token in its tokenizer_config.json to a token it has"
            )
        tokenizer.pad_token = tokenizer.eos_token
        log.info("tokenizer of %s has no padding token: %s is used", config.name, tokenizer.eos_token)
    rows = _load_config(resolved, config).get_text_config().vocab_size
    largest = max(tokenizer.get_vocab().values(), default=0)
    if largest >= rows:
        raise ModelError(
            f"{resolved.path_or_id}: the tokenizer has token id {largest} but the model's vocabulary has {rows} rows; "
            "model and tokenizer do not belong together"
        )
    return tokenizer


def _source(resolved: ResolvedModel, config: ModelConfig) -> dict[str, Any]:
    return {
        "revision": resolved.revision or "main",
        "trust_remote_code": config.trust_remote_code,
        "local_files_only": resolved.offline,
    }


def _resolve_smollm2(config: ModelConfig) -> ResolvedModel:
    if config.revision is not None:
        raise ModelError(
            f"model.revision is '{config.revision}', but {smollm2.NAME} has no revisions; "
            f"set model.name to {smollm2.HUB_ID} to choose one"
        )
    found = smollm2.find_smollm2()
    return ResolvedModel(str(found.folder), None, found.origin, smollm2.HUB_ID, smollm2.LICENSE)


def _resolve_folder(config: ModelConfig) -> ResolvedModel:
    folder = Path(config.name).expanduser()
    has_config = (folder / "config.json").is_file()
    if folder.suffix == ".gguf" or (not has_config and any(folder.glob("*.gguf"))):
        raise ModelError(
            f"model.name '{config.name}' is a GGUF model: its quantised weights can be neither trained nor saved; "
            f"use the original safetensors model (only {smollm2.NAME} is converted)"
        )
    if not folder.is_dir():
        raise ModelError(f"model.name '{config.name}' is not a folder; give a model's folder or a hub id")
    if not has_config:
        what = "an adapter, not a base model" if (folder / "adapter_config.json").is_file() else "not a model"
        raise ModelError(f"model.name '{config.name}' has no config.json: the folder is {what}")
    if config.revision is not None:
        raise ModelError(f"model.revision is '{config.revision}', but '{config.name}' is a local folder")
    path = str(folder.resolve())
    return ResolvedModel(path, None, "local folder", path, _license_of(folder / "README.md"))


def _resolve_hub_id(config: ModelConfig) -> ResolvedModel:
    from huggingface_hub import errors, hf_hub_download

    name = config.name
    if not HUB_ID.fullmatch(name):
        raise ModelError(f"model.name '{name}' is neither an existing folder nor a hub id (owner/name)")
    offline = not smollm2.hub_answers(name)
    try:
        path = Path(hf_hub_download(name, "config.json", revision=config.revision, local_files_only=offline))
    except errors.LocalEntryNotFoundError as problem:
        raise ModelError(
            f"model.name '{name}' is not a folder here, not in the hub's cache, and the hub cannot be reached "
            f"(HF_HUB_OFFLINE, or no answer); use a local folder, or {smollm2.NAME}, which needs no hub"
        ) from problem
    except errors.GatedRepoError as problem:
        raise ModelError(f"model '{name}' needs its licence accepted on the hub, and HF_TOKEN set") from problem
    except errors.RepositoryNotFoundError as problem:
        raise ModelError(f"the hub has no model '{name}', or it is private and HF_TOKEN is not set") from problem
    except errors.RevisionNotFoundError as problem:
        raise ModelError(f"model '{name}' has no revision '{config.revision}' on the hub") from problem
    except errors.EntryNotFoundError as problem:
        raise ModelError(f"'{name}' on the hub has no config.json: it is not a transformers model") from problem
    except OSError as problem:
        raise ModelError(f"model '{name}' cannot be fetched from the hub: {problem}") from problem
    commit = path.parent.name  # the hub's cache keeps each commit in a folder of its name
    origin = "hub cache, hub not asked" if offline else "hub"
    return ResolvedModel(name, commit, origin, name, _license_of(path.parent / "README.md"), offline)


def _license_of(readme: Path) -> str | None:
    """The `license` in the YAML header of a model card, where there is one."""
    import yaml

    if not readme.is_file():
        return None
    header = re.match(r"---\s*\n(.*?)\n---", readme.read_text(encoding="utf-8", errors="replace"), re.DOTALL)
    if header is None:
        return None
    try:
        stated = yaml.safe_load(header.group(1))
    except yaml.YAMLError:
        return None
    value = stated.get("license") if isinstance(stated, dict) else None
    return value if isinstance(value, str) else None


def _load_config(resolved: ResolvedModel, config: ModelConfig) -> PretrainedConfig:
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(resolved.path_or_id, **_source(resolved, config))
    except (OSError, ValueError, KeyError) as problem:
        raise ModelError(f"{resolved.path_or_id}: config.json cannot be used: {problem}") from problem


def _check_architecture(found: PretrainedConfig, config: ModelConfig) -> None:
    """Refuses what would load with a random output layer, or not at all."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    if config.trust_remote_code and "AutoModelForCausalLM" in (getattr(found, "auto_map", None) or {}):
        return
    stated = found.architectures or []
    fitting = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(found.model_type)
    if fitting is None or (stated and fitting not in stated):
        raise ModelError(
            f"model '{config.name}' is {', '.join(stated) or found.model_type}, not a causal language model"
            + (f" ({fitting} is wanted)" if fitting else "")
        )


def _check_loading(resolved: ResolvedModel, info: dict[str, Any]) -> None:
    if misshapen := sorted(str(key) for key in info.get("mismatched_keys", ())):
        raise ModelError(f"{resolved.path_or_id}: weights of a wrong shape in the files: {', '.join(misshapen[:3])}")
    if lacking := sorted(info.get("missing_keys", ())):
        raise ModelError(
            f"{resolved.path_or_id}: no value in the files for {len(lacking)} weights ({', '.join(lacking[:3])} ...), "
            "which would be random"
        )
    if info.get("unexpected_keys"):
        log.warning("%s: weights not used: %s", resolved.path_or_id, sorted(info["unexpected_keys"])[:3])


@contextmanager
def bars_on_terminals_only() -> Iterator[None]:
    """Keeps transformers' bars of loading and saving out of log files."""
    from transformers.utils import logging as transformers_logging

    if sys.stderr.isatty() or not transformers_logging.is_progress_bar_enabled():
        yield
        return
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        transformers_logging.enable_progress_bar()
