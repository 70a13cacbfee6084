"""The spool: the file into which every tracked event is written before any server hears of it.

One JSON object a line in `<run folder>/tracking_spool/events.jsonl`, appended in a single write, so that the driver and
its workers may share the file and a crash costs at most the line being written. Runs are named by local keys: `run` is
the root, `run/calm` a child of it, `run~2` a run linked to `run` because its parameters changed. Which MLflow run a key
stands for is decided at delivery and kept beside the events.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import time
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from components.errors import TrackingError

FOLDER = "tracking_spool"
ROOT = "run"
_NAME = re.compile(r"[\w .+:@-]+")
_SYNC_SECONDS = 1.0  # metrics reach the disk at least this often, everything else at once


@dataclass
class RunRecord:
    """What the spool knows of one run key."""

    params: dict[str, str] = field(default_factory=dict)
    closed: bool = False
    continued_by: str | None = None


class Spool:
    """The events of one run folder. Holds no open file, so it can be pickled and sent to a worker on this machine.

    Attributes:
        folder: `<run folder>/tracking_spool`.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._synced_at = 0.0

    @classmethod
    def create(cls, run_folder: Path, uri: str, experiment: str) -> Spool:
        """Open the spool of a run folder, made on first use, and note where its events go by default.

        A URI with a password is not written to disk.
        """
        spool = cls(run_folder / FOLDER)
        spool.folder.mkdir(parents=True, exist_ok=True)
        identity = spool.header()["id"] if spool.header_file.exists() else uuid.uuid4().hex
        target = {"id": identity, "uri": None if urlsplit(uri).password else uri, "experiment": experiment}
        replace_text(spool.header_file, json.dumps(target, indent=1))
        return spool

    @classmethod
    def find(cls, folder: Path) -> Spool:
        """The existing spool in a run folder, or at `folder` itself.

        Raises:
            TrackingError: There is none.
        """
        for candidate in (folder / FOLDER, folder):
            if (candidate / "spool.json").is_file():
                return cls(candidate)
        raise TrackingError(f"{folder}: no tracked run here: neither it nor {FOLDER}/ in it holds spool.json")

    @property
    def run_folder(self) -> Path:
        """The folder whose run is tracked."""
        return self.folder.parent

    @property
    def header_file(self) -> Path:
        """Identity and default destination."""
        return self.folder / "spool.json"

    @property
    def events_file(self) -> Path:
        """The events, one JSON object a line."""
        return self.folder / "events.jsonl"

    def header(self) -> dict[str, str]:
        """`id`, `uri` (null where it held a password) and `experiment`."""
        content: dict[str, str] = json.loads(self.header_file.read_text(encoding="utf-8"))
        return content

    def append(self, run: str, do: str, **details: object) -> None:
        """Write one event. All but metrics are on the disk when this returns; metrics within a second or so.

        Args:
            run: The run's key.
            do: `start`, `reopen`, `params`, `metrics`, `tags`, `artifact`, `dict` or `close`.
            details: What the event says.
        """
        event = {"time": time.time_ns() // 1_000_000, "run": run, "do": do, **details}
        line = json.dumps(event, separators=(",", ":")) + "\n"
        descriptor = os.open(self.events_file, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o644)
        try:
            size = os.fstat(descriptor).st_size
            if size and os.pread(descriptor, 1, size - 1) != b"\n":
                line = "\n" + line  # a crash tore the last line; the new one must not be glued to it
            os.write(descriptor, line.encode())
            now = time.monotonic()
            if do != "metrics" or now - self._synced_at >= _SYNC_SECONDS:
                os.fsync(descriptor)
                self._synced_at = now
        finally:
            os.close(descriptor)

    def read(self, offset: int = 0) -> Iterator[tuple[int, dict[str, Any] | None]]:
        """Complete lines from a byte offset on: the offset after each, and its event, None for a torn line."""
        if not self.events_file.exists():
            return
        with self.events_file.open("rb") as stream:
            stream.seek(offset)
            for line in stream:
                if not line.endswith(b"\n"):
                    return
                offset += len(line)
                if line.strip():
                    yield offset, _event(line)

    def size(self) -> int:
        """Bytes written so far."""
        return self.events_file.stat().st_size if self.events_file.exists() else 0

    def records(self) -> dict[str, RunRecord]:
        """What is known of every run key, in the order of their start."""
        records: dict[str, RunRecord] = {}
        for _, event in self.read():
            if event is None:
                continue
            record = records.setdefault(event["run"], RunRecord())
            if event["do"] == "params":
                record.params |= event["values"]
            elif event["do"] in {"close", "reopen"}:
                record.closed = event["do"] == "close"
            elif event["do"] == "start" and event.get("continues"):
                records[event["continues"]].continued_by = event["run"]
        return records

    def keep(self, path: Path) -> str:
        """How an artifact is named in an event: relative to the run folder; one from elsewhere is copied in first."""
        if path.resolve().is_relative_to(self.run_folder.resolve()):
            return path.resolve().relative_to(self.run_folder.resolve()).as_posix()
        copy = self.folder / "files" / uuid.uuid4().hex[:12] / path.name
        copy.parent.mkdir(parents=True)
        if path.is_dir():
            shutil.copytree(path, copy)
        else:
            shutil.copy2(path, copy)
        return copy.relative_to(self.run_folder).as_posix()


def child_key(parent: str, name: str) -> str:
    """The key of a child run.

    Raises:
        ValueError: The name holds characters other than letters, digits, spaces and `_.+:@-`.
    """
    if not _NAME.fullmatch(name):
        raise ValueError(f"run name {name!r}: only letters, digits, spaces and _ . + : @ - are allowed")
    return f"{parent}/{name}"


def latest(records: Mapping[str, RunRecord], key: str) -> str:
    """The last of the runs linked one to the next from `key` on."""
    while key in records and records[key].continued_by is not None:
        key = str(records[key].continued_by)
    return key


def next_key(records: Mapping[str, RunRecord], key: str) -> str:
    """A free key for a run linked to `key`."""
    stem, _, number = key.rpartition("~") if re.search(r"~\d+$", key) else (key, "", "1")
    count = int(number) + 1
    while f"{stem}~{count}" in records:
        count += 1
    return f"{stem}~{count}"


def replace_text(path: Path, text: str) -> None:
    """Write a small file so that readers see the old content or the new, never a part."""
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    partial.write_text(text, encoding="utf-8")
    partial.replace(path)


def _event(line: bytes) -> dict[str, Any] | None:
    try:
        event = json.loads(line)
    except ValueError:
        return None
    return event if isinstance(event, dict) and {"time", "run", "do"} <= event.keys() else None
