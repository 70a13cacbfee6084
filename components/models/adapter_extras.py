"""A further file in an adapter folder, listed with its checksum like the others."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path

from components.files import json_text, replacing, write_json
from components.models.adapter_checks import METADATA_FILE, read_metadata, verify_adapter
from components.models.smollm2 import sha256_of

ABSTENTION_FILE = "abstention.json"
"""From which confidence on to answer; the one file that may be added without a change to any answer or confidence."""


def add_file(folder: Path, name: str, write: Callable[[Path], None]) -> None:
    """Adds a file to an adapter folder, or replaces an earlier one of that name.

    The list is changed before and after, so that the folder is whole at every moment: killed in between, it is the
    adapter without the file.

    Args:
        folder: An adapter folder.
        name: The file's name.
        write: Writes it to the path given.

    Raises:
        ModelError: The folder was damaged before, or is so afterwards.
    """
    metadata = verify_adapter(folder)
    metadata["files"].pop(name, None)
    write_json(folder / METADATA_FILE, metadata)
    with replacing(folder / name) as temporary:
        write(temporary)
    added = {name: {"bytes": (folder / name).stat().st_size, "sha256": sha256_of(folder / name)}}
    metadata["files"] = dict(sorted((metadata["files"] | added).items()))
    write_json(folder / METADATA_FILE, metadata)
    verify_adapter(folder)


def fingerprint(folder: Path) -> str:
    """Names what an adapter answers with: the checksum of `caltune.json` as it would be without abstention policies.

    So an evaluation stays that of the adapter when a policy is chosen by it.

    Args:
        folder: An adapter folder.

    Raises:
        ModelError: It has no metadata that can be read.
    """
    metadata = read_metadata(folder)
    if ABSTENTION_FILE not in metadata["files"]:
        return sha256_of(folder / METADATA_FILE)
    del metadata["files"][ABSTENTION_FILE]
    return hashlib.sha256(json_text(metadata).encode()).hexdigest()
