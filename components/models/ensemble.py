"""An ensemble as an adapter folder: complete adapter folders inside one, `member-0`, `member-1` and so on.

`caltune.json` on top names the members and holds the checksums of all their files; each member's own says the rest. So
every tool that opens an adapter folder opens a member.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors.torch import load_file
from torch import Tensor, nn

from components.errors import ModelError
from components.models.adapter import AdapterKind, adapter_parameters
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
from components.models.adapter_files import load_adapter, publish
from components.models.base import ResolvedModel
from components.models.model_card import model_card
from components.models.smollm2 import sha256_of

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def member_name(number: int) -> str:
    """A member's folder in the ensemble's."""
    return f"member-{number}"


def save_ensemble(
    folder: Path, members: Sequence[Path], *, method: str, resolved: ResolvedModel, details: Mapping[str, Any]
) -> Path:
    """Writes the folder from adapter folders, checks it, and only then puts it in the place of an earlier one.

    Args:
        folder: Where it goes. An earlier adapter folder there is replaced; anything else there is left alone.
        members: At least two adapter folders, from `save_adapter`, of one shape on one base model. They are copied.
        method: Name of the method.
        resolved: The base model.
        details: Anything more to keep in `caltune.json`; must be JSON.

    Returns:
        The folder.

    Raises:
        ModelError: A member is damaged or unlike the others, or `folder` holds something else.
    """
    if folder.exists() and not (folder / METADATA_FILE).is_file() and (folder.is_file() or any(folder.iterdir())):
        raise ModelError(f"{folder} exists and is not an adapter folder; it is left as it is, choose another place")
    of_members = [verify_adapter(member) for member in members]
    folder.parent.mkdir(parents=True, exist_ok=True)
    draft = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        draft.chmod(0o755)
        for number, member in enumerate(members):
            shutil.copytree(member, draft / member_name(number))
        card = model_card(kind=ENSEMBLE, resolved=resolved, method=method, with_head=False, results="")
        (draft / CARD_FILE).write_text(card, encoding="utf-8")
        metadata = _metadata(draft, of_members, method, details)
        text = json.dumps(metadata, indent=2, ensure_ascii=False, allow_nan=False)
        (draft / METADATA_FILE).write_text(text + "\n", encoding="utf-8")
        verify_adapter(draft)
        publish(draft, folder)
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    return folder


def _metadata(
    draft: Path, members: Sequence[Mapping[str, Any]], method: str, details: Mapping[str, Any]
) -> dict[str, Any]:
    first = members[0]
    files = sorted(path for path in draft.rglob("*") if path.is_file())
    return {
        "format": FORMAT,
        "method": method,
        "steps": min(int(member["steps"]) for member in members),
        "adapter": {"kind": ENSEMBLE, "member": first["adapter"]},
        "members": [member_name(number) for number in range(len(members))],
        "head": None,
        **{key: first[key] for key in ("base_model", "prompt", "versions")},
        "details": dict(details),
        "files": {
            path.relative_to(draft).as_posix(): {"bytes": path.stat().st_size, "sha256": sha256_of(path)}
            for path in files
        },
    }


def is_ensemble(metadata: Mapping[str, Any]) -> bool:
    """Whether a `caltune.json` is an ensemble's."""
    return bool(metadata["adapter"]["kind"] == ENSEMBLE)


def load_ensemble(folder: Path, base_model: PreTrainedModel) -> tuple[nn.Module, list[dict[str, Tensor]]]:
    """Puts an ensemble's adapter on a base model, strictly; the base model is there once.

    Args:
        folder: Written by `save_ensemble`.
        base_model: The model it was trained on, from `load_model`; it is changed in place.

    Returns:
        The model with the first member's adapter, frozen and in evaluation mode, and each member's values by the names
        of the adapter's parameters.

    Raises:
        ModelError: The folder is damaged or no ensemble, or a member does not fit the model.
    """
    metadata = verify_adapter(folder)
    if not is_ensemble(metadata):
        raise ModelError(f"{folder} holds one '{metadata['adapter']['kind']}' adapter, which is no ensemble")
    paths = [folder / name for name in metadata["members"]]
    model, _ = load_adapter(paths[0], base_model)
    kind: AdapterKind = metadata["adapter"]["member"]["kind"]
    names = {name: file_key(name) for name in adapter_parameters(model, kind)}
    values = []
    for path in paths:
        stored = load_file(path / TENSOR_FILES[kind])
        require_same_keys(stored, expected_shapes(model, kind), str(path / TENSOR_FILES[kind]))
        values.append({name: stored[key] for name, key in names.items()})
    return model, values
