"""What is exported: an adapter folder, its base model, and whether one plain model can stand for the two."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from components.config import ModelConfig
from components.config_data import PromptConfig
from components.errors import ModelError
from components.models.adapter_checks import ENSEMBLE, verify_adapter
from components.models.base import ResolvedModel, base_of_adapter, load_model, load_tokenizer, resolve_model
from components.training.methods import prediction_of

if TYPE_CHECKING:
    from torch import nn
    from transformers import PreTrainedTokenizerBase

    from components.models.calibration_head import CalibrationHead


@dataclass(frozen=True)
class Source:
    """An adapter folder and the base model it belongs to.

    Attributes:
        folder: The adapter folder, checked.
        metadata: Its `caltune.json`.
        config: How the base model is loaded.
        resolved: Where the base model is.
    """

    folder: Path
    metadata: dict[str, Any]
    config: ModelConfig
    resolved: ResolvedModel

    @property
    def kind(self) -> str:
        """Of the adapter: `lora`, `full`, `mixlora`, `blob` or `ensemble`."""
        return str(self.metadata["adapter"]["kind"])

    @property
    def method(self) -> str:
        """Name of the method."""
        return str(self.metadata["method"])

    @property
    def prompt(self) -> PromptConfig:
        """How questions were put to the model in training."""
        return PromptConfig.model_validate(self.metadata["prompt"])

    def load(self) -> tuple[nn.Module, CalibrationHead | None]:
        """The model with its adapter, frozen and in evaluation mode, and the head or None; on the CPU."""
        from components.models.adapter_files import load_adapter

        return load_adapter(self.folder, load_model(self.resolved, self.config))

    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The base model's tokenizer."""
        return load_tokenizer(self.resolved, self.config)


def open_source(folder: Path, base_model: str | None = None) -> Source:
    """Checks an adapter folder and finds its base model.

    Args:
        folder: Written by `save_adapter` or `save_ensemble`.
        base_model: Where the base model is, if not where the folder says: a folder or a hub id.

    Raises:
        ModelError: The folder is damaged, or the base model is not found.
    """
    metadata = verify_adapter(folder)
    config = base_of_adapter(metadata["base_model"], base_model)
    try:
        resolved = resolve_model(config)
    except ModelError as problem:
        raise ModelError(f"{folder}: its base model: {problem} (--base-model names another place)") from problem
    return Source(folder, metadata, config, resolved)


def require_one_pass(source: Source, doing: str) -> None:
    """Refuses adapters whose probabilities are the mean of several passes, which a single pass does not give.

    Args:
        source: The adapter.
        doing: What is asked for, for the message.

    Raises:
        ModelError: Says which method, and what to do instead.
    """
    instead = f"have it answer as it is: caltune evaluate --adapter {source.folder}"
    if source.kind == ENSEMBLE:
        first = source.folder / source.metadata["members"][0]
        raise ModelError(
            f"{source.folder} is an ensemble, whose confidence is the mean over {len(source.metadata['members'])} "
            f"models; {doing} takes one model. Take a member, {first}, which is less calibrated, or {instead}"
        )
    passes = prediction_of(source.method)
    if source.kind == "blob" or passes != "point":
        raise ModelError(
            f"{source.folder} is of the method '{source.method}', whose confidence is made from a posterior or from "
            f"several passes; {doing} takes one pass and would give another, less calibrated confidence; {instead}"
        )


def require_mergeable(source: Source) -> None:
    """Refuses adapters that no plain model stands for.

    Raises:
        ModelError: Says why, and what to do instead.
    """
    if source.kind == "mixlora":
        raise ModelError(
            f"{source.folder} is a mixture of LoRA experts (MixLoRA): which experts act depends on the token, so it "
            "cannot be merged into a plain model. For programs that read the public MixLoRA format: caltune export "
            f"mixlora {source.folder} OUT. With caltune it answers as it is: caltune evaluate --adapter {source.folder}"
        )
    require_one_pass(source, "a merged model")
