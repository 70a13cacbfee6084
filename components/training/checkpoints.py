"""Checkpoints: whole tensors in safetensors, a manifest beside them, published by one rename.

A checkpoint holds whole (consolidated) tensors whatever wrote it, so it can be read by any number of ranks at any ZeRO
stage. Frozen weights are not in it: they come from the model's source (E7, E8).
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from safetensors.torch import load_file, save_file
from torch import Tensor

from components.errors import CheckpointError

log = logging.getLogger(__name__)

STATE, MANIFEST = "state.safetensors", "checkpoint.json"
_DAMAGE = (OSError, ValueError, KeyError, TypeError)


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint as read back.

    Attributes:
        step: Optimiser steps taken.
        state: The space's state.
        stop: The stop rule's state.
    """

    step: int
    state: dict[str, Tensor]
    stop: dict[str, object]


class Checkpoints:
    """The checkpoints of one method of one run.

    Args:
        folder: `<run>/<method>/checkpoints`.
        identity: Hash of what must not differ between a run and its resumption.
        keep: Newest checkpoints kept.
    """

    def __init__(self, folder: Path, identity: str, keep: int) -> None:
        self.folder, self.identity, self.keep = folder, identity, keep

    def save(self, step: int, state: Mapping[str, Tensor], stop: Mapping[str, object]) -> Path:
        """Writes a checkpoint; removes the oldest beyond `keep`, and kept states that no checkpoint refers to."""
        path = self._publish(f"step-{step:08d}", step, state, stop)
        for old in self._numbered()[: -self.keep]:
            shutil.rmtree(old)
        referred = self._kept_steps()
        for kept in self.folder.glob("kept-*[0-9]"):
            if kept.name not in referred:
                shutil.rmtree(kept)
        return path

    def save_kept(self, step: int, state: Mapping[str, Tensor]) -> Path:
        """Writes the values (no optimiser state) that the stop rule wants kept.

        Earlier ones stay until the next checkpoint: a run that resumes from the one before may still want them.
        """
        return self._publish(_kept_name(step), step, {k: v for k, v in state.items() if k.startswith("value/")}, {})

    def newest(self) -> Checkpoint | None:
        """The newest checkpoint that is whole; a damaged one is passed over with a warning.

        Raises:
            CheckpointError: It belongs to a run with other settings, or checkpoints exist and none can be read.
        """
        numbered = self._numbered()
        for path in reversed(numbered):
            try:
                return self._read(path)
            except _DAMAGE as problem:
                log.warning("checkpoint %s is damaged (%s): falling back to the one before", path, problem)
        if numbered:
            raise CheckpointError(f"{self.folder}: none of {len(numbered)} checkpoints can be read")
        return None

    def kept(self, step: int) -> Checkpoint:
        """The state that the stop rule wanted kept.

        Raises:
            CheckpointError: It is missing or damaged.
        """
        path = self.folder / _kept_name(step)
        try:
            return self._read(path)
        except _DAMAGE as problem:
            raise CheckpointError(f"{path} is missing or damaged ({problem}); use --overwrite") from problem

    def _numbered(self) -> list[Path]:
        return sorted(self.folder.glob("step-*[0-9]"))

    def _kept_steps(self) -> set[str]:
        """Folder names of the kept states that the checkpoints refer to; a damaged checkpoint refers to none."""
        names = set()
        for path in self._numbered():
            with suppress(*_DAMAGE):
                step = json.loads((path / MANIFEST).read_text())["stop"]["kept_step"]
                if step is not None:
                    names.add(_kept_name(step))
        return names

    def _publish(self, name: str, step: int, state: Mapping[str, Tensor], stop: Mapping[str, object]) -> Path:
        final, partial, replaced = self.folder / name, self.folder / f".{name}.partial", self.folder / f".{name}.old"
        for leftover in (partial, replaced):
            shutil.rmtree(leftover, ignore_errors=True)
        partial.mkdir(parents=True)
        save_file({k: v.detach().cpu().contiguous() for k, v in state.items()}, partial / STATE)
        manifest = {"step": step, "identity": self.identity, "sha256": _sha256(partial / STATE), "stop": dict(stop)}
        (partial / MANIFEST).write_text(json.dumps(manifest, indent=2))
        for file in (partial / STATE, partial / MANIFEST):
            with file.open("rb") as handle:
                os.fsync(handle.fileno())
        if final.exists():
            final.rename(replaced)
        partial.rename(final)
        shutil.rmtree(replaced, ignore_errors=True)
        return final

    def _read(self, path: Path) -> Checkpoint:
        manifest = json.loads((path / MANIFEST).read_text())
        if manifest["identity"] != self.identity:
            raise CheckpointError(
                f"{path} was written with other settings (run file, data or model changed); "
                "resume with the settings it was started with, or use --overwrite"
            )
        found = _sha256(path / STATE)
        if found != manifest["sha256"]:
            raise ValueError(f"{STATE} has sha256 {found[:12]}, the manifest says {manifest['sha256'][:12]}")
        return Checkpoint(int(manifest["step"]), load_file(path / STATE), dict(manifest["stop"]))


def _kept_name(step: int) -> str:
    return f"kept-{step:08d}"


def _sha256(path: Path) -> str:
    with path.open("rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()
