"""Questions from JSON lines, and predictions to a file that can be gone on with where it was broken off."""

from __future__ import annotations

import hashlib
import io
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from components.errors import DataError, UsageError
from components.files import read_json, write_json

STDIN = "-"


@dataclass(frozen=True)
class Line:
    """A line that asks a question.

    Attributes:
        number: 1-based, in the file; blank lines count and are no questions.
        index: 0-based, among the questions.
        row: What it holds; None where it is not JSON.
        problem: Why it is not.
    """

    number: int
    index: int
    row: Any
    problem: str | None = None

    def failed(self, reason: str) -> dict[str, Any]:
        """What is written in the place of a prediction."""
        own = self.row.get("id") if isinstance(self.row, Mapping) else None
        named = isinstance(own, str | int) and not isinstance(own, bool) and own != ""
        return {"id": str(own)} | {"error": reason} if named else {"line": self.number, "error": reason}


class Questions:
    """The input: a file, which is read twice and never held, or all of stdin.

    Args:
        source: A path, or `-`.

    Attributes:
        name: For messages.
        stem: Ids of questions without one begin with it, as those of data sources do.
        count: How many there are.
        digest: SHA-256 of the content.

    Raises:
        UsageError: There is no such file.
    """

    def __init__(self, source: str) -> None:
        path = Path(source)
        if source != STDIN and not path.is_file():
            raise UsageError(f"{source} is not a file; name one with a JSON object a line, or - for stdin")
        self._file: BinaryIO = io.BytesIO(sys.stdin.buffer.read()) if source == STDIN else path.open("rb")
        self.name, self.stem = ("stdin", "stdin") if source == STDIN else (source, path.stem)
        digest, self.count = hashlib.sha256(), 0
        for line in self._file:
            digest.update(line)
            self.count += bool(line.strip())
        self.digest = digest.hexdigest()

    def lines(self, skip: int) -> Iterator[Line]:
        """The questions after the first `skip` ones."""
        self._file.seek(0)
        there = ((number, line) for number, line in enumerate(self._file, start=1) if line.strip())
        for index, (number, line) in enumerate(there):
            if index >= skip:
                yield self._parsed(number, index, line)

    def _parsed(self, number: int, index: int, line: bytes) -> Line:
        try:
            return Line(number, index, json.loads(line.decode("utf-8-sig" if number == 1 else "utf-8")))
        except UnicodeDecodeError as error:
            problem = f"not UTF-8 text: {error.reason} at byte {error.start}"
        except json.JSONDecodeError as error:
            problem = f"not JSON: {error.msg} at column {error.colno}"
        except ValueError as error:
            problem = f"JSON with a number that cannot be read: {error}"
        except RecursionError:
            problem = "not JSON that can be read: nested too deeply"
        return Line(number, index, None, str(DataError(self.name, number, None, problem)))


class Answers:
    """The output: stdout, or a file with another beside it, `<file>.origin.json`, that says what it was made from.

    Rows are in the order of the questions, so how many there are says which have been answered.

    Args:
        path: The file; None for stdout.
        origin: What decides the content: input, model, policy. Plain JSON.

    Attributes:
        done: Rows that were there.
        failed: Rows with an error, those that were there included.

    Raises:
        UsageError: The file was made from something else.
    """

    def __init__(self, path: Path | None, origin: Mapping[str, Any]) -> None:
        self.done = self.failed = 0
        if path is None:
            self._file: BinaryIO = sys.stdout.buffer
            return
        note = path.with_name(path.name + ".origin.json")
        if path.exists():
            self._continue(path, note, origin)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_json(note, origin)
        self._file = path.open("ab")

    def write(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Appends rows, all at once, so that an interruption comes before or after them."""
        self.failed += sum("error" in row for row in rows)
        text = "".join(json.dumps(row, ensure_ascii=False, allow_nan=False) + "\n" for row in rows)
        # Half a surrogate pair, which an id may hold, becomes the JSON escape that it came from.
        self._file.write(text.encode("utf-8", "backslashreplace"))
        self._file.flush()

    def _continue(self, path: Path, note: Path, origin: Mapping[str, Any]) -> None:
        remedy = f"choose another output, or delete {path}"
        if not note.is_file():
            raise UsageError(f"{path} exists and nothing says what it was made from; {remedy}")
        before = read_json(note, remedy)
        if changed := [key for key, value in origin.items() if before.get(key) != value]:
            raise UsageError(f"{path} was begun with another {' and '.join(changed)}; {remedy}")
        with path.open("r+b") as file:
            whole = 0
            for line in file:
                if not line.endswith(b"\n"):
                    break  # cut short while it was written
                whole += len(line)
                self.done += 1
                self.failed += "error" in self._row(path, line, remedy)
            file.truncate(whole)

    def _row(self, path: Path, line: bytes, remedy: str) -> Mapping[str, Any]:
        try:
            row: Mapping[str, Any] = json.loads(line)
        except ValueError as error:
            raise UsageError(f"{path}:{self.done}: is no prediction: {error}; {remedy}") from error
        return row
