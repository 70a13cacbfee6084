"""From a YAML run file to a `RunConfig` and back; also the configuration's hash, its schema and the code's version."""

from __future__ import annotations

import hashlib
import io
import json
import os
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from ruamel.yaml import YAML

from components.config import RunConfig
from components.errors import RunFileError
from components.run_file_errors import boolean_errors, describe_errors
from components.run_file_source import Source, read_source

# Where results go, on how many workers they are made and who judges them does not change what they are.
_OUTSIDE_HASH: Any = {
    "output_dir": True,
    "tracking": True,
    "resources": True,
    "gate": True,
    "drift": True,
    "evaluation": {"actors"},
}
_CODE_ROOT = Path(__file__).resolve().parents[1]
GIT_RECORD = "git_state.json"
"""Beside the packages where they were sent somewhere without their checkout: `git_state` as it was there."""


def load_run_file(path: Path | str, overrides: Sequence[str] = ()) -> RunConfig:
    """Read, override and check a run file.

    Args:
        path: YAML 1.2. Relative `data.*.path` entries, overridden ones too, start at `data.root`, and without it at
            this file's folder.
        overrides: Each `section.key=value`; the value is a YAML scalar, a `[list]` or a `{mapping}`.

    Returns:
        The complete configuration, defaults filled in.

    Raises:
        RunFileError: Names every problem at once, one a line, as `file:line: dotted.field: problem`, or with
            `override 'text'` in the place of the file where an override is at fault.
    """
    return config_of(read_source(Path(path), overrides))


def config_of(source: Source) -> RunConfig:
    """Check what was read of a run file.

    Args:
        source: From `read_source`. Relative `data.*.path` entries become absolute in it.

    Raises:
        RunFileError: As `load_run_file`.
    """
    _anchor_data_paths(source.data, source.file.resolve().parent)
    problems = source.problems + boolean_errors(RunConfig, source)
    try:
        config = RunConfig.model_validate(source.data)
    except ValidationError as error:
        problems += describe_errors(RunConfig, source, error.errors())
    if problems:
        raise RunFileError("\n".join(problems))
    return config


def save_resolved(config: RunConfig, path: Path) -> None:
    """Write the whole configuration, defaults included; loading the file gives an equal configuration back.

    The file appears complete or not at all.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    with partial.open("w", encoding="utf-8") as stream:
        stream.write(to_yaml(config))
        stream.flush()
        os.fsync(stream.fileno())
    partial.replace(path)


def to_yaml(config: RunConfig) -> str:
    """The whole configuration as a run file, defaults included."""
    yaml = YAML()
    yaml.default_flow_style = False
    yaml.width = 120
    stream = io.StringIO()
    yaml.dump(config.model_dump(mode="json"), stream)
    return stream.getvalue()


def config_hash(config: RunConfig, without: Sequence[str] = ()) -> str:
    """SHA-256, 64 hex digits, of everything that decides the results: not where they go, nor on which resources.

    Args:
        config: The run.
        without: Dotted keys that shall not count either.
    """
    content = config.model_dump(mode="json", exclude=_OUTSIDE_HASH)
    for key in without:
        *sections, name = key.split(".")
        section = content
        for part in sections:
            section = section[part]
        section.pop(name)
    return hashlib.sha256(json.dumps(content, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def json_schema() -> dict[str, Any]:
    """The run file's JSON schema (draft 2020-12), each key with its description, for editors and other tools."""
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **RunConfig.model_json_schema()}


def git_state(folder: Path = _CODE_ROOT) -> dict[str, str | bool | None]:
    """Which code runs: `{"commit": <40 hex digits>, "dirty": <tracked files differ from it>}`.

    Where `folder` is not the root of a git checkout, what `GIT_RECORD` in it says; both are None where there is none,
    e.g. for an installed wheel.
    """
    record = folder / GIT_RECORD
    unknown: dict[str, str | bool | None] = {"commit": None, "dirty": None}
    if record.is_file():
        unknown |= json.loads(record.read_text(encoding="utf-8"))
    root = _git(folder, "rev-parse", "--show-toplevel")
    commit = _git(folder, "rev-parse", "HEAD")
    if root is None or commit is None or Path(root).resolve() != folder.resolve():
        return unknown
    return {"commit": commit, "dirty": bool(_git(folder, "status", "--porcelain", "--untracked-files=no"))}


def _git(folder: Path, *arguments: str) -> str | None:
    try:
        result = subprocess.run(
            ["git", "-C", str(folder), *arguments], capture_output=True, text=True, timeout=20, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return result.stdout.strip()


def _anchor_data_paths(data: dict[str, Any], folder: Path) -> None:
    """Make the relative paths of all data sources absolute, so that the resolved file works from anywhere."""
    section = data.get("data")
    if not isinstance(section, dict):
        return
    if isinstance(section.get("root"), str):
        # Given by hand where the run is started, unlike what stands in the file.
        folder = Path(section["root"]).expanduser().resolve()
        section["root"] = None
    ood = section.get("ood")
    others = ood.values() if isinstance(ood, dict) else ()
    for source in (section.get("source"), section.get("test_source"), *others):
        _anchor_source(source, folder)


def _anchor_source(source: Any, folder: Path) -> None:
    if not isinstance(source, dict):
        return
    if isinstance(source.get("path"), str):
        source["path"] = str((folder / Path(source["path"]).expanduser()).resolve())
    if isinstance(source.get("sources"), list):
        for part in source["sources"]:
            _anchor_source(part, folder)
