"""The prediction log: what a model in service has answered, with the confidence it stated. Read for drift."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from components.errors import DataError
from components.evaluation.checks import FloatArray

_REMEDY = "write one row a question, with the confidence that each source stated"


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
            stated = isinstance(value, int | float) and not isinstance(value, bool)
            if not stated or not 0.0 <= value <= 1.0:  # a comparison with NaN is false
                raise DataError(path, number, column, f"is {value!r}, not a number from 0 to 1", _REMEDY)
        found[source] = np.array(table[column], dtype=np.float64)
    return found


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
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(path, None, None, f"cannot be read: {error}", _REMEDY) from error
    rows: dict[str, list[Any]] = {column: [] for column in columns}
    for number, line in enumerate(lines, start=1):
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise DataError(path, number, None, f"is not JSON: {error}", _REMEDY) from error
        if not isinstance(row, dict):
            raise DataError(path, number, None, "is not a JSON object", _REMEDY)
        for column in columns:
            rows[column].append(row.get(column))
    return rows
