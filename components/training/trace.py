"""The trace of a training run: one JSON object a line, written as it happens, read by progress bars and reports."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path


class TraceWriter:
    """Appends to a trace. Lines past the step a run resumes from are dropped first: they will be made again.

    Args:
        path: The `.jsonl` file.
        resume_from: Steps already taken; 0 starts a new trace.
    """

    def __init__(self, path: Path, resume_from: int = 0) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        kept = [row for row in read_trace(path) if row["step"] <= resume_from] if resume_from and path.exists() else []
        # A new file in the old one's place: whoever follows the trace sees that it was begun again.
        draft = path.with_name(f".{path.name}.new")
        self._file = draft.open("w", encoding="utf-8")
        for row in kept:
            self._write(row)
        os.replace(draft, path)

    def add(self, step: int, values: Mapping[str, float]) -> None:
        """Adds a row: steps taken so far (0 before the first) and the values seen."""
        self._write({"step": step, **values})

    def _write(self, row: Mapping[str, float]) -> None:
        self._file.write(json.dumps(row) + "\n")
        self._file.flush()

    def close(self) -> None:
        """Closes the file; every row is already in it."""
        self._file.close()


def read_trace(path: Path) -> Iterator[dict[str, float]]:
    """Rows of a trace; a last line cut off by a crash is left out.

    Raises:
        FileNotFoundError: There is no such file.
    """
    with path.open(encoding="utf-8") as file:
        for line in file:
            if line.endswith("\n"):
                yield json.loads(line)
