"""The prediction log: what a model in service has answered, with the confidence it stated.

One JSON object a line, as `log_row` makes it:

| key | value |
| --- | --- |
| `id` | the question's; one that is asked twice stands there twice |
| `time` | when it was answered, ISO 8601 in UTC |
| `answer` | text of the answer |
| `answer_index` | 0-based option, among options |
| `confidence_<source>` | in [0, 1]: `softmax`, and with routers `flc` |
| `abstained` | whether the policy in force abstained; null without one |
| `latency_s` | seconds from question to answer; null where nobody measured |
| `correct`, or `gold` | if it is known by then whether the answer is right, or which is: a text or a 0-based option |

Questions are not kept: what is asked is the user's. Drift reads the confidences (`drift.prediction_log`), `caltune
monitor` all of it. A writer that is killed leaves a torn last line at most: readers pass over it, and the next writer
cuts it off. Several processes may append to one log of a file system whose locks work.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

from components.errors import DataError
from components.evaluation.checks import FloatArray

_REMEDY = "write one row a question, with the confidence that each source stated"
_CONFIDENCE = "confidence_"
_KEPT = ("id", "answer", "answer_index", "abstained")

Gold = int | str
"""A right answer: a 0-based option, or a text."""


@dataclass(frozen=True)
class Logged:
    """A row of the log.

    Attributes:
        id: The question's.
        time: When it was answered, as it was written; None where it was not.
        answer: Text of the answer.
        answer_index: 0-based option; None without options.
        confidence: In [0, 1], by source.
        abstained: Whether the policy abstained; None without one.
        correct: Whether the answer is right; None where nobody has said.
    """

    id: str
    time: str | None
    answer: str
    answer_index: int | None
    confidence: Mapping[str, float]
    abstained: bool | None
    correct: bool | None

    def judged_by(self, gold: Gold) -> bool:
        """Whether the answer is the right one; texts are compared as they are, surrounding blanks apart.

        Raises:
            ValueError: The right answer is an option's number and this answer is none of any options.
        """
        if isinstance(gold, str):
            return self.answer.strip() == gold.strip()
        if self.answer_index is None:
            raise ValueError(f"question '{self.id}' was not answered among options, so {gold} cannot be its answer")
        return self.answer_index == gold


def log_row(
    prediction: Mapping[str, Any],
    *,
    latency_s: float | None = None,
    gold: Gold | None = None,
    at: datetime | None = None,
) -> dict[str, Any]:
    """The row of a prediction.

    Args:
        prediction: As the predictor gives it: `id`, `answer`, `confidence_<source>`, `abstained` and perhaps
            `answer_index`; its other keys are left out.
        latency_s: Seconds from question to answer.
        gold: The right answer, if it is known already.
        at: When it was answered, with its time zone; None is now.
    """
    stated = {key: value for key, value in prediction.items() if key.startswith(_CONFIDENCE)}
    kept = {key: prediction[key] for key in _KEPT if key in prediction}
    time = (at or datetime.now(UTC)).astimezone(UTC).isoformat(timespec="milliseconds")
    label = {} if gold is None else {"gold": gold}
    return {**kept, "time": time, **stated, "latency_s": latency_s, **label}


def append_rows(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """Appends rows in one write.

    Args:
        path: The log, `.jsonl`; it and its folder are made where they are missing.
        rows: From `log_row`.

    Raises:
        ValueError: A value that JSON lacks (NaN, an infinity).
        OSError: The disk is full or the file may not be written.
    """
    text = "".join(json.dumps(dict(row), allow_nan=False) + "\n" for row in rows)
    if not text:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)  # closing the file lets it go, as the end of a process does
        _end_last_line(descriptor)
        left = memoryview(text.encode())
        while left:
            left = left[os.write(descriptor, left) :]
    finally:
        os.close(descriptor)


def _end_last_line(descriptor: int) -> None:
    """Cuts off the torn line that a killed writer has left; ends one that is whole."""
    size = os.fstat(descriptor).st_size
    if size == 0 or os.pread(descriptor, 1, size - 1) == b"\n":
        return
    content = os.pread(descriptor, size, 0)
    last = content.rfind(b"\n") + 1
    if _is_torn(content[last:]):
        os.ftruncate(descriptor, last)
    else:
        os.write(descriptor, b"\n")


def read_log(path: Path) -> list[Logged]:
    """Reads a log of the form above.

    Raises:
        DataError: The file is missing or empty, or a row is not as above; it is named by its line.
    """
    found = []
    for number, row in numbered_rows(path, _REMEDY):
        try:
            found.append(_logged(row))
        except ValueError as error:
            raise DataError(path, number, None, str(error), _REMEDY) from error
    if not found:
        raise DataError(path, None, None, "has no rows", _REMEDY)
    return found


def read_confidences(path: Path, sources: Sequence[str]) -> dict[str, FloatArray]:
    """Reads the columns `confidence_<source>` of a prediction log; other columns may stand beside them.

    Args:
        path: `.parquet`, as `predictions.parquet` is, or `.jsonl` with an object a line.
        sources: Confidence sources that must be there, `softmax` and with routers `flc`.

    Returns:
        Confidence [n] in [0, 1] by source, rows in the file's order.

    Raises:
        DataError: The file is missing, unreadable or empty, or a confidence is missing or not in [0, 1].
    """
    columns = [f"confidence_{source}" for source in sources]
    table = _parquet(path, columns) if path.suffix == ".parquet" else _jsonl(path, columns)
    if not table[columns[0]]:
        raise DataError(path, None, None, "has no rows", _REMEDY)
    found = {}
    for source, column in zip(sources, columns, strict=True):
        for number, value in enumerate(table[column], start=1):
            if not is_share(value):
                raise DataError(path, number, column, f"is {value!r}, not a number from 0 to 1", _REMEDY)
        found[source] = np.array(table[column], dtype=np.float64)
    return found


def numbered_rows(path: Path, remedy: str) -> list[tuple[int, dict[str, Any]]]:
    """The objects of a JSONL file with their line numbers from 1; a torn last line is passed over.

    Args:
        path: The file.
        remedy: What to do about a bad line, for the error.

    Raises:
        DataError: The file cannot be read, or a line is not a JSON object.
    """
    try:
        content = path.read_bytes()
    except OSError as error:
        raise DataError(path, None, None, f"cannot be read: {error}", remedy) from error
    *lines, last = content.split(b"\n")
    if last and not _is_torn(last):
        lines.append(last)
    rows = []
    for number, line in enumerate(lines, start=1):
        try:
            row = json.loads(line)
        except ValueError as error:
            raise DataError(path, number, None, f"is not JSON: {error}", remedy) from error
        if not isinstance(row, dict):
            raise DataError(path, number, None, "is not a JSON object", remedy)
        rows.append((number, row))
    return rows


def _is_torn(last: bytes) -> bool:
    """Whether what stands after the last line break is the beginning of a row; a whole one ends in its brace."""
    try:
        json.loads(last)
    except ValueError:
        return True
    return False


def _logged(row: Mapping[str, Any]) -> Logged:
    """Raises: ValueError that names the field."""
    if not isinstance(row.get("id"), str):
        raise ValueError(f"field 'id' is {row.get('id')!r}, not a text")
    for key, kinds in _KINDS.items():
        if row.get(key) is not None and (type(row[key]) not in kinds):
            raise ValueError(f"field '{key}' is {row[key]!r}, not {' or '.join(kind.__name__ for kind in kinds)}")
    stated = {key.removeprefix(_CONFIDENCE): value for key, value in row.items() if key.startswith(_CONFIDENCE)}
    for source, value in stated.items():
        if not is_share(value):
            raise ValueError(f"field '{_CONFIDENCE}{source}' is {value!r}, not a number from 0 to 1")
    if not stated:
        raise ValueError(f"there is no field '{_CONFIDENCE}<source>'")
    logged = Logged(
        row["id"],
        row.get("time"),
        row.get("answer") or "",
        row.get("answer_index"),
        stated,
        row.get("abstained"),
        row.get("correct"),
    )
    if logged.correct is not None or row.get("gold") is None:
        return logged
    return replace(logged, correct=logged.judged_by(row["gold"]))


_KINDS: dict[str, tuple[type, ...]] = {
    "time": (str,),
    "answer": (str,),
    "answer_index": (int,),
    "abstained": (bool,),
    "correct": (bool,),
    "gold": (int, str),
}


def is_share(value: Any) -> bool:
    """Whether it is a number from 0 to 1; NaN is none, nor is true."""
    return isinstance(value, int | float) and not isinstance(value, bool) and 0.0 <= value <= 1.0


def _parquet(path: Path, columns: list[str]) -> dict[str, list[Any]]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        there = pq.read_schema(path).names
        missing = [column for column in columns if column not in there]
        if missing:
            raise DataError(path, None, missing[0], "column is missing", _REMEDY)
        return pq.read_table(path, columns=columns).to_pydict()
    except (OSError, pa.ArrowInvalid) as error:
        raise DataError(path, None, None, f"cannot be read as Parquet: {error}", _REMEDY) from error


def _jsonl(path: Path, columns: list[str]) -> dict[str, list[Any]]:
    rows = [row for _, row in numbered_rows(path, _REMEDY)]
    return {column: [row.get(column) for row in rows] for column in columns}
