"""What an adapter folder says about how its model answers: all that a run file says elsewhere."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from components.config import DataConfig, EvaluationConfig, ModelConfig
from components.config_bayes import BlobConfig, EnsembleConfig, McDropoutConfig
from components.config_data import PromptConfig
from components.errors import CaltuneError, ModelError
from components.files import read_json

if TYPE_CHECKING:
    from components.evaluation.recalibrate import Fitted
    from components.evaluation.scorer_passes import PassSettings


@dataclass(frozen=True)
class FolderSpec:
    """An adapter folder's own account.

    Attributes:
        method: That trained it.
        model: The base model.
        prompt: How questions are put.
        max_length: Longest row in tokens that its run allowed.
        batch_tokens: Token budget of its run's evaluation batches.
        passes: Of a method that answers by several passes, with the seed of its run.
    """

    method: str
    model: ModelConfig
    prompt: PromptConfig
    max_length: int
    batch_tokens: int
    passes: PassSettings


def read_spec(folder: Path, base_model: str | None, trust_remote_code: bool) -> FolderSpec:
    """Reads `caltune.json`.

    A folder written before these were kept, or imported, takes the run file's defaults for what its `details` do not
    say: `data.max_length`, `evaluation.batch_tokens`, seed 0 and the sections `mc_dropout`, `ensemble` and `blob`.

    Args:
        folder: An adapter folder.
        base_model: Where the base model is, if not where the folder says: a folder or a hub id.
        trust_remote_code: Allow the base model's own Python code from the hub to run.

    Raises:
        ModelError: The folder is not a complete adapter folder.
    """
    from components.evaluation.scorer_passes import PassSettings
    from components.models.adapter_checks import METADATA_FILE, read_metadata
    from components.models.base import base_of_adapter
    from components.training.result import EVALUATION

    metadata = read_metadata(folder)
    try:
        details: Mapping[str, Any] = metadata.get("details", {})
        kept: Mapping[str, Any] = details.get(EVALUATION, {})
        return FolderSpec(
            str(metadata["method"]),
            base_of_adapter(metadata["base_model"], base_model, trust_remote_code),
            PromptConfig.model_validate(metadata["prompt"]),
            int(kept.get("max_length", DataConfig.model_fields["max_length"].default)),
            int(kept.get("batch_tokens", EvaluationConfig.model_fields["batch_tokens"].default)),
            PassSettings(
                int(details.get("seed", 0)),
                McDropoutConfig.model_validate(kept.get("mc_dropout", {})),
                EnsembleConfig.model_validate(kept.get("ensemble", {})),
                BlobConfig.model_validate(kept.get("blob", {})),
            ),
        )
    except (KeyError, TypeError, ValueError, ValidationError) as problem:
        raise ModelError(f"{folder / METADATA_FILE}: does not say how its model answers: {problem!r}") from problem


def read_recalibration(folder: Path) -> Fitted | None:
    """The recalibration that a version of a recalibrated method has beside its adapter; None where there is none.

    Raises:
        ModelError: There are several.
        CaltuneError: The file is damaged.
    """
    from components.evaluation.recalibrate import FORMS, read_fitted

    found = [kind for kind in FORMS if (folder / f"{kind}.json").is_file()]
    if len(found) > 1:
        raise ModelError(f"{folder} has several recalibrations ({', '.join(found)}); keep the one that is meant")
    for kind in found:
        path = folder / f"{kind}.json"
        try:
            return read_fitted(kind, read_json(path, "register the model anew"))
        except (TypeError, ValueError) as problem:
            raise CaltuneError(f"{path} cannot be used: {problem}; register the model anew") from problem
    return None
