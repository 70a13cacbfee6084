"""Questions from local files: JSON Lines (plain or gzip), Parquet, CSV."""

from __future__ import annotations

import csv
import gzip
import json
import zlib
from collections.abc import Iterator
from pathlib import Path

from components.config_data import ColumnMapping
from components.data.rows import Place, Row, make_set, to_open_questions, to_questions
from components.data.schema import OpenQuestion, QuestionSet
from components.errors import DataError

SUFFIXES = (".jsonl", ".jsonl.gz", ".parquet", ".csv")


def read_questions(path: Path, columns: ColumnMapping | None, name: str) -> QuestionSet:
    """Read multiple-choice questions.

    Args:
        path: A file with one of `SUFFIXES`. In CSV the choices are a JSON list in one cell, or one column each by
            `columns`; an answer of digits is an index.
        columns: Column mapping; None for the standard schema.
        name: Name of the resulting set.

    Returns:
        All rows in file order, legal oddities counted.

    Raises:
        DataError: The file cannot be read, has no rows, or a row is malformed (file, line and field are named).
    """
    questions = to_questions(_rows(path, columns), columns, _stem(path))
    if not questions:
        raise DataError(path, None, None, "the file holds no rows")
    return make_set(name, questions, str(path))


def read_open_questions(path: Path, columns: ColumnMapping | None, name: str) -> tuple[OpenQuestion, ...]:
    """Read open-ended questions; as `read_questions`, with a list `answers` (in CSV a JSON list or one text).

    Args:
        path: A file with one of `SUFFIXES`.
        columns: Column mapping; None for the standard schema `id`, `question`, `answers`.
        name: Prefix of the ids of rows that have none.

    Raises:
        DataError: The file cannot be read, has no rows, or a row is malformed.
    """
    questions = to_open_questions(_rows(path, columns), columns, name)
    if not questions:
        raise DataError(path, None, None, "the file holds no rows")
    return questions


def _stem(path: Path) -> str:
    suffix = next((suffix for suffix in SUFFIXES if path.name.endswith(suffix)), "")
    return path.name.removesuffix(suffix)


def _rows(path: Path, columns: ColumnMapping | None) -> Iterator[tuple[Place, Row]]:
    if not path.is_file():
        raise DataError(path, None, None, "no such file", "a relative path starts at the run file's folder")
    if path.name.endswith((".jsonl", ".jsonl.gz")):
        return _json_rows(path)
    if path.name.endswith(".parquet"):
        return _parquet_rows(path)
    if path.name.endswith(".csv"):
        return _csv_rows(path, columns)
    raise DataError(path, None, None, "unknown file type", "one of " + ", ".join(SUFFIXES) + " is needed")


def _json_rows(path: Path) -> Iterator[tuple[Place, Row]]:
    for number, line in _lines(path):
        place = Place(str(path), number)
        try:
            row = json.loads(line.decode("utf-8-sig" if number == 1 else "utf-8"))
        except UnicodeDecodeError as error:
            raise place.error(None, f"not UTF-8 text: {error.reason} at byte {error.start}") from error
        except json.JSONDecodeError as error:
            raise place.error(None, f"not JSON: {error.msg} at column {error.colno}") from error
        if not isinstance(row, dict):
            raise place.error(None, "the line is not a JSON object")
        yield place, row


def _lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """Lines that are not blank, with 1-based numbers."""
    number = 0
    try:
        with gzip.open(path) if path.name.endswith(".gz") else path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                if line.strip():
                    yield number, line
    except (EOFError, OSError, zlib.error) as error:
        raise DataError(path, number + 1, None, f"cannot be read: {error}") from error


def _parquet_rows(path: Path) -> Iterator[tuple[Place, Row]]:
    import pyarrow
    import pyarrow.parquet

    try:
        table = pyarrow.parquet.read_table(path)
    except (pyarrow.ArrowException, OSError) as error:
        raise DataError(path, None, None, f"not a readable Parquet file: {error}") from error
    number = 0
    for batch in table.to_batches(max_chunksize=1024):
        for row in batch.to_pylist():
            number += 1
            yield Place(str(path), number), row


def _csv_rows(path: Path, columns: ColumnMapping | None) -> Iterator[tuple[Place, Row]]:
    with path.open(newline="", encoding="utf-8-sig") as file:
        reader = csv.DictReader(file, strict=True)
        line = 1
        try:
            for cells in reader:
                line = reader.line_num
                place = Place(str(path), line)
                if None in cells or None in cells.values():
                    raise place.error(None, "the row has more or fewer cells than the header")
                yield place, _typed_cells(cells, columns, place)
        except (csv.Error, UnicodeDecodeError) as error:
            raise DataError(path, line + 1, None, f"not a readable CSV file: {error}") from error


def _typed_cells(cells: dict[str, str], columns: ColumnMapping | None, place: Place) -> Row:
    """CSV has text only; lists and indices are recognised where the mapping says they stand."""
    row: dict[str, object] = dict(cells)
    index: str | None = "answer"
    lists = ["choices", "answers"]
    if columns is not None:
        lists = [name for name in (columns.choices, columns.labels, columns.answers) if isinstance(name, str)]
        index = columns.answer if columns.labels is None else None
    for name in lists:
        cell = cells.get(name, "")
        if cell.lstrip().startswith("["):
            try:
                row[name] = json.loads(cell)
            except json.JSONDecodeError as error:
                raise place.error(name, f"not a JSON list: {error.msg} at character {error.colno}") from error
    if index is not None and cells.get(index, "").strip().removeprefix("-").isdecimal():
        row[index] = int(cells[index])
    return row
