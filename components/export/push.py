"""An adapter folder or an exported model to a hub repository, with the measured calibration in its card."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from components.errors import ModelError, UsageError
from components.export.card import evaluation_of, measured, with_measured
from components.models.adapter_checks import CARD_FILE, METADATA_FILE, verify_adapter

if TYPE_CHECKING:
    from huggingface_hub import CommitOperationAdd

EXPORT_FILE = "caltune_export.json"


def card_to_push(folder: Path, evaluation: Path | None) -> str:
    """The folder's card, with the figures of its evaluation where there are any.

    Args:
        folder: An adapter folder, which is checked, or an exported model.
        evaluation: A folder of `<split>/metrics.json`; None takes the one beside an adapter. An exported model has its
            figures in its card already.

    Raises:
        ModelError: The folder is damaged or neither of the two, or has no card.
        UsageError: `evaluation` holds no figures.
    """
    if (folder / METADATA_FILE).is_file():
        verify_adapter(folder)
        found = evaluation_of(folder, evaluation)
    elif (folder / EXPORT_FILE).is_file():
        found = None if evaluation is None else evaluation_of(folder, evaluation)
    else:
        raise ModelError(
            f"{folder} has neither {METADATA_FILE} nor {EXPORT_FILE}: it is no adapter folder and no exported model"
        )
    try:
        card = (folder / CARD_FILE).read_text(encoding="utf-8")
    except OSError as problem:
        raise ModelError(f"{folder / CARD_FILE} cannot be read: {problem}") from problem
    return card if found is None else with_measured(card, measured(found))


def upload_operations(folder: Path, card: str) -> list[CommitOperationAdd]:
    """What one commit adds: every file of the folder but hidden ones, and the card in the place of its README.md."""
    from huggingface_hub import CommitOperationAdd

    files = [path for path in sorted(folder.rglob("*")) if path.is_file() and path != folder / CARD_FILE]
    names = {path.relative_to(folder).as_posix(): path for path in files}
    kept = {name: path for name, path in names.items() if not any(part.startswith(".") for part in name.split("/"))}
    operations = [CommitOperationAdd(path_in_repo=CARD_FILE, path_or_fileobj=card.encode())]
    return operations + [CommitOperationAdd(path_in_repo=name, path_or_fileobj=path) for name, path in kept.items()]


def push(folder: Path, repo_id: str, *, evaluation: Path | None = None, private: bool = False) -> str:
    """Makes the repository where it does not exist, and uploads in one commit. HF_ENDPOINT and HF_TOKEN are respected.

    Args:
        folder: An adapter folder, or an exported model.
        repo_id: `owner/name` on the hub.
        evaluation: As for `card_to_push`.
        private: Make a new repository private; one that exists stays what it is.

    Returns:
        Address of the commit.

    Raises:
        ModelError: As for `card_to_push`, or the hub refuses or cannot be reached.
        UsageError: `repo_id` is no name of a repository, the hub is switched off, or as for `card_to_push`.
    """
    from huggingface_hub import HfApi, constants
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    card = card_to_push(folder, evaluation)
    if constants.HF_HUB_OFFLINE:
        raise UsageError("HF_HUB_OFFLINE is set: nothing can be pushed while the hub is switched off")
    api = HfApi()
    try:
        api.create_repo(repo_id, private=private or None, exist_ok=True)
        commit = api.create_commit(
            repo_id,
            operations=upload_operations(folder, card),
            commit_message=f"Add {folder.resolve().name} by caltune",
        )
    except HFValidationError as problem:
        raise UsageError(f"'{repo_id}' is no name of a hub repository: {problem}") from problem
    except (HfHubHTTPError, OSError) as problem:
        raise ModelError(
            f"{repo_id} on {api.endpoint} was not pushed to: {problem} (HF_TOKEN must allow writing there)"
        ) from problem
    return str(commit.commit_url)
