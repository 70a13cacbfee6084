"""Checkpoints: whole tensors in safetensors, a manifest beside them, published by one rename.

A checkpoint holds whole (consolidated) tensors whatever wrote it, so it can be read by any number of ranks at any ZeRO
stage. Frozen weights are not in it: they come from the model's source (E7, E8). Where ranks do not share the folder,
each checkpoint is copied to shared storage, its manifest last, and read from there.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from components.errors import CheckpointError
from components.storage import Storage

log = logging.getLogger(__name__)

STATE, MANIFEST = "state.safetensors", "checkpoint.json"
_DAMAGE = (OSError, ValueError, KeyError, TypeError, SafetensorError)


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint as read back.

    Attributes:
        step: Optimiser steps taken.
        state: The space's state.
        stop: The stop rule's state.
        written: How it was written, see `components.training.resumption`; empty for a kept state.
    """

    step: int
    state: dict[str, Tensor]
    stop: dict[str, object]
    written: dict[str, Any] = field(default_factory=dict)


class Checkpoints:
    """The checkpoints of one method of one run.

    Args:
        folder: `<run>/<method>/checkpoints`.
        identity: Hash of what must not differ between a run and its resumption.
        keep: Newest checkpoints kept.
        storage: Where other nodes find them; None where all share the folder.

    Attributes:
        passed_over: Damaged checkpoints that `newest` came across, a sentence each.
    """

    def __init__(self, folder: Path, identity: str, keep: int, storage: Storage | None = None) -> None:
        self.folder, self.identity, self.keep, self.storage = folder, identity, keep, storage
        self.passed_over: list[str] = []

    def save(
        self,
        step: int,
        state: Mapping[str, Tensor],
        stop: Mapping[str, object],
        written: Mapping[str, Any] | None = None,
    ) -> Path:
        """Writes a checkpoint; removes the oldest beyond `keep`, and kept states that no checkpoint refers to.

        Raises:
            CheckpointError: It cannot be written. Those before it stand.
            StorageError: It cannot be copied to shared storage.
        """
        path = self._publish(
            f"step-{step:08d}", state, {"step": step, "stop": dict(stop), "written": dict(written or {})}
        )
        for old in self._numbered()[: -self.keep]:
            self._remove(old)
        referred = self._kept_steps()
        for kept in self.folder.glob("kept-*[0-9]"):
            if kept.name not in referred:
                self._remove(kept)
        return path

    def save_kept(self, step: int, state: Mapping[str, Tensor]) -> Path:
        """Writes the values (no optimiser state) that the stop rule wants kept.

        Earlier ones stay until the next checkpoint: a run that resumes from the one before may still want them.
        """
        values = {k: v for k, v in state.items() if k.startswith("value/")}
        return self._publish(_kept_name(step), values, {"step": step, "stop": {}, "written": {}})

    def newest(self) -> Checkpoint | None:
        """The newest checkpoint that is whole; a damaged one is passed over with a warning.

        Raises:
            CheckpointError: It belongs to a run with other settings, or checkpoints exist and none can be read.
            StorageError: Shared storage cannot be read.
        """
        self._fetch()
        numbered = self._numbered()
        for path in reversed(numbered):
            try:
                return self._read(path)
            except _DAMAGE as problem:
                self.passed_over.append(f"checkpoint {path} is damaged ({problem}): falling back to the one before")
                log.warning(self.passed_over[-1])
        if numbered:
            raise CheckpointError(f"{self.folder}: none of {len(numbered)} checkpoints can be read")
        return None

    def kept(self, step: int) -> Checkpoint:
        """The state that the stop rule wanted kept.

        Raises:
            CheckpointError: It is missing or damaged.
        """
        path = self.folder / _kept_name(step)
        if not path.exists():
            self._fetch()
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

    def _fetch(self) -> None:
        """Copies what shared storage has and this folder has not."""
        for name in self.storage.names() if self.storage is not None else ():
            if not (self.folder / name).exists():
                partial = self.folder / f".{name}.partial"
                shutil.rmtree(partial, ignore_errors=True)
                self.storage.get(name, partial)  # type: ignore[union-attr]
                partial.rename(self.folder / name)

    def _remove(self, path: Path) -> None:
        shutil.rmtree(path)
        if self.storage is not None:
            self.storage.remove(path.name)

    def _publish(self, name: str, state: Mapping[str, Tensor], manifest: Mapping[str, Any]) -> Path:
        try:
            path = self._write(name, state, manifest)
        except (OSError, SafetensorError) as problem:
            shutil.rmtree(self.folder / f".{name}.partial", ignore_errors=True)  # what it took is needed by others
            raise CheckpointError(
                f"the checkpoint at step {manifest['step']} cannot be written to {self.folder}: {problem}; those "
                "before it stand: make room and go on with --resume"
            ) from problem
        if self.storage is not None:
            self.storage.put(path, name, last=(MANIFEST,))
        return path

    def _write(self, name: str, state: Mapping[str, Tensor], manifest: Mapping[str, Any]) -> Path:
        final, partial, replaced = self.folder / name, self.folder / f".{name}.partial", self.folder / f".{name}.old"
        for leftover in (partial, replaced):
            shutil.rmtree(leftover, ignore_errors=True)
        partial.mkdir(parents=True)
        save_file({k: v.detach().cpu().contiguous() for k, v in state.items()}, partial / STATE)
        facts = {"identity": self.identity, "sha256": _sha256(partial / STATE), "tensors": len(state)}
        (partial / MANIFEST).write_text(json.dumps({**manifest, **facts}, indent=2))
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
        state = load_file(path / STATE)
        if len(state) != manifest["tensors"]:
            raise ValueError(f"{STATE} holds {len(state)} tensors, the manifest says {manifest['tensors']}")
        return Checkpoint(int(manifest["step"]), state, dict(manifest["stop"]), dict(manifest["written"]))


def _kept_name(step: int) -> str:
    return f"kept-{step:08d}"


def _sha256(path: Path) -> str:
    with path.open("rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()
