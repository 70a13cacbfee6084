"""A further file in an adapter folder, listed with its checksum like the others."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from components.files import replacing, write_json
from components.models.adapter_checks import METADATA_FILE, verify_adapter
from components.models.smollm2 import sha256_of


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
