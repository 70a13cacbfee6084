"""Data files that travel with a job, put where they stay.

A job's working directory is temporary, has another path on every cluster and is not seen by other nodes. So data goes
from there to `<output_dir>/.shipped/<content hash>/<name>` before the command starts: a resumed run finds it at the
same path. `python -m ray_jobs.shipped_data` in the working directory of a job does that.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from components.config import RunConfig
from components.errors import UsageError
from components.files import replacing

MANIFEST = "shipped.json"
"""In the package: path there -> path that the run file names."""


def local_files(config: RunConfig) -> list[Path]:
    """Data files that the run file names, each once.

    Raises:
        UsageError: One does not exist here.
    """
    found = list(dict.fromkeys(Path(section["path"]) for section in _file_sources(config.model_dump(mode="json"))))
    for path in found:
        if not path.is_file():
            raise UsageError(
                f"{path}: no such data file here, so it cannot travel with the job; "
                "if it is the cluster's, say --data-on-cluster"
            )
    return found


def ship(config: RunConfig) -> tuple[RunConfig, dict[str, Path], dict[str, str]]:
    """The run with its local data files moved to where the job puts them.

    Returns:
        The run file's new content; origin by path in the package; content of `MANIFEST`.
    """
    origins: dict[str, Path] = {}
    targets: dict[str, str] = {}
    moved: dict[str, str] = {}
    for path in local_files(config):
        place = f"{_content_hash(path)}/{path.name}"
        origins[f"data/{place}"] = path
        targets[f"data/{place}"] = moved[str(path)] = str(config.output_dir / ".shipped" / place)
    tree = config.model_dump(mode="json")
    for section in _file_sources(tree):
        section["path"] = moved[section["path"]]
    return RunConfig.model_validate(tree), origins, targets


def put_in_place(package: Path) -> None:
    """Copies what `MANIFEST` lists to where it belongs; a file that is there already has the same content."""
    for source, target in json.loads((package / MANIFEST).read_text(encoding="utf-8")).items():
        if not Path(target).exists():
            with replacing(Path(target)) as temporary:
                shutil.copyfile(package / source, temporary)


def _file_sources(node: Any) -> Iterator[dict[str, Any]]:
    """Every section of a run file that names a local file, wherever it stands."""
    if isinstance(node, dict):
        if node.get("kind") == "file" and node.get("path"):
            yield node
        for inner in node.values():
            yield from _file_sources(inner)


def _content_hash(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()[:16]


if __name__ == "__main__":
    put_in_place(Path.cwd())
