"""Local files: formats, errors that name file, line and field, and oddities that are counted."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from components.config_data import ColumnMapping
from components.data.files import read_open_questions, read_questions
from components.errors import DataError

GOOD = {"id": "a", "question": "Sky?", "choices": ["blue", "red"], "answer": 0}


def test_formats_agree(tmp_path: Path, write_rows: Callable[..., Path]) -> None:
    rows = [
        {"id": "a", "question": 'Say "hi",\nplease?', "choices": ["é", "b", "c"], "answer": 2, "group": "g"},
        {"id": "b", "question": "Two?", "choices": ["1", "2"], "answer": 1, "group": "h"},
    ]
    plain, zipped = write_rows(rows), write_rows(rows, "rows.jsonl.gz")
    parquet, table = tmp_path / "rows.parquet", tmp_path / "rows.csv"
    pq.write_table(pa.Table.from_pylist(rows), parquet)
    with table.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows({**row, "choices": json.dumps(row["choices"])} for row in rows)
    hashes = {read_questions(path, None, "x").content_hash for path in (plain, zipped, parquet, table)}
    assert len(hashes) == 1
    assert read_questions(table, None, "x").questions[1].choices == ("1", "2")


@pytest.mark.parametrize(
    ("row", "field", "problem"),
    [
        ('{"id": "a", ', None, "not JSON"),
        ("[1, 2]", None, "not a JSON object"),
        (b'{"id": "\xff"}', None, "not UTF-8"),
        ({**GOOD, "question": 3}, "question", "a number, not text"),
        ({**GOOD, "question": "  "}, "question", "empty"),
        ({**GOOD, "question": "\ud800"}, "question", "surrogate"),
        ({key: GOOD[key] for key in ("id", "choices", "answer")}, "question", "missing"),
        ({**GOOD, "choices": "blue"}, "choices", "text, not a list"),
        ({**GOOD, "choices": ["blue"]}, "choices", "1 choices"),
        ({**GOOD, "choices": [str(i) for i in range(27)]}, "choices", "27 choices"),
        ({**GOOD, "choices": ["blue", ""]}, r"choices\[1\]", "empty"),
        ({**GOOD, "choices": ["blue", None]}, r"choices\[1\]", "null, not text"),
        ({**GOOD, "answer": 2}, "answer", "2 is out of range"),
        ({**GOOD, "answer": -1}, "answer", "-1 is out of range"),
        ({**GOOD, "answer": True}, "answer", "a boolean"),
        ({**GOOD, "answer": "A"}, "answer", "text, not an integer"),
        ({**GOOD, "answer": 0.5}, "answer", "a fraction"),
        ({**GOOD, "answer": None}, "answer", "null"),
        ('{"id": "b", "question": "?", "choices": ["a", "b"], "answer": NaN}', "answer", "NaN"),
        ({**GOOD, "id": ["a"]}, "id", "a list, not text"),
        ({**GOOD, "id": "first"}, "id", "'first' stands in line 1"),
        ({**GOOD, "group": 4}, "group", "a number, not text"),
        ({**GOOD, "entity": ["x"]}, "entity", "a list, not text"),
    ],
)
def test_a_malformed_row_is_named(
    write_rows: Callable[..., Path], row: dict | str | bytes, field: str | None, problem: str
) -> None:
    path = write_rows([{**GOOD, "id": "first"}, "", row])
    at = rf" field '{field}': " if field else " "
    with pytest.raises(DataError, match=rf"rows\.jsonl:3:{at}.*{problem}") as error:
        read_questions(path, None, "x")
    assert error.value.line == 3


def test_legal_oddities_are_read_and_counted(write_rows: Callable[..., Path]) -> None:
    rows = [
        {"question": "Three?", "choices": ["a", "b", "c"], "answer": 0},
        {"question": "Five?", "choices": list("abcde"), "answer": 4},
        {"question": "All?", "choices": [chr(97 + i) for i in range(26)], "answer": 25},
        {"question": "Same?", "choices": ["a", "a", "b", "c"], "answer": 2},
        {"question": "Case?", "choices": ["New  York", "new york ", "b", "c"], "answer": 1},
        {"question": "Plain?", "choices": list("abcd"), "answer": 1, "extra": float("nan")},
        {"question": "plain? ", "choices": list("ABCD"), "answer": 1},
    ]
    questions = read_questions(write_rows(rows), None, "x")
    assert questions.oddities == {
        "3 choices": 1,
        "5 choices": 1,
        "26 choices": 1,
        "exactly equal choices": 1,
        "choices equal up to case and spaces": 2,
        "right choice has an equal twin": 1,
        "outer spaces": 2,
        "repeated row": 1,
    }
    assert [q.id for q in questions][:2] == ["rows-0", "rows-1"]
    assert questions.questions[4].choices[1] == "new york "


def test_group_comes_from_group_or_subject(write_rows: Callable[..., Path]) -> None:
    rows = [{**GOOD, "id": "1", "subject": "s"}, {**GOOD, "id": "2", "subject": "s", "group": "g", "entity": "e"}]
    first, second = read_questions(write_rows(rows), None, "x")
    assert (first.group, first.entity) == ("s", None)
    assert (second.group, second.entity) == ("g", "e")


@pytest.mark.parametrize(
    ("answer", "index"), [("2", 2), ("red", 1), ("c", 2), ("B", 1)], ids=["index", "text", "letter", "capital"]
)
def test_csv_with_a_column_per_choice(tmp_path: Path, answer: str, index: int) -> None:
    path = tmp_path / "rows.csv"
    path.write_text(f"q,one,two,three,right\nSky?,blue,red,green,{answer}\n")
    columns = ColumnMapping(question="q", choices=["one", "two", "three"], answer="right")
    (question,) = read_questions(path, columns, "x")
    assert question.choices == ("blue", "red", "green")
    assert question.answer == index


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("Sky?,blue,red", "more or fewer cells"),
        ("Sky?,blue,red,0,9", "more or fewer cells"),
        ("Sky?,blue,red,purple", "field 'right': 'purple' is neither"),
        ("Sky?,b,a,a", "field 'right': 'a' is a choice and the letter of another"),
        ("Sky?,blue,red,-1", "field 'right': -1 is out of range"),
        ("Sky?,blue,,0", "field 'two': is empty"),
    ],
)
def test_csv_errors_name_the_line(tmp_path: Path, line: str, problem: str) -> None:
    path = tmp_path / "rows.csv"
    path.write_text(f'q,one,two,right\n"Sky\nhigh?",blue,red,0\n{line}\n')
    columns = ColumnMapping(question="q", choices=["one", "two"], answer="right")
    with pytest.raises(DataError, match=rf"rows\.csv:4: .*{problem}"):
        read_questions(path, columns, "x")


def test_labels_and_nested_columns(tmp_path: Path) -> None:
    rows = [
        {"stem": "Sky?", "choices": {"text": ["blue", "red"], "label": ["A", "B"]}, "key": "B"},
        {"stem": "Sea?", "choices": {"text": ["blue", "red"], "label": ["1", "2"]}, "key": "1"},
    ]
    path = tmp_path / "rows.parquet"
    pq.write_table(pa.Table.from_pylist(rows), path)
    columns = ColumnMapping(question="stem", choices="choices.text", labels="choices.label", answer="key")
    assert [q.answer for q in read_questions(path, columns, "x")] == [1, 0]
    wrong = columns.model_copy(update={"choices": "choices.texts"})
    with pytest.raises(DataError, match=r"rows\.parquet:1: field 'choices\.texts': the column is missing"):
        read_questions(path, wrong, "x")


def test_files_that_cannot_be_read(tmp_path: Path, write_rows: Callable[..., Path]) -> None:
    with pytest.raises(DataError, match="no such file"):
        read_questions(tmp_path / "none.jsonl", None, "x")
    with pytest.raises(DataError, match="no rows"):
        read_questions(write_rows([]), None, "x")
    with pytest.raises(DataError, match="unknown file type"):
        read_questions(write_rows([GOOD], "rows.json"), None, "x")
    cut = write_rows([{**GOOD, "id": str(i)} for i in range(50)], "cut.jsonl.gz")
    cut.write_bytes(cut.read_bytes()[:-12])
    with pytest.raises(DataError, match="cannot be read"):
        read_questions(cut, None, "x")
    broken = tmp_path / "broken.parquet"
    broken.write_bytes(b"PAR1 no")
    with pytest.raises(DataError, match="not a readable Parquet"):
        read_questions(broken, None, "x")


def test_open_questions(write_rows: Callable[..., Path]) -> None:
    path = write_rows([{"question": "Who?", "answers": ["he", "she"]}, {"question": "What?", "answers": []}])
    with pytest.raises(DataError, match=r":2: field 'answers': has 0 entries"):
        read_open_questions(path, None, "x")
    path = write_rows([{"id": "1", "question": "Who?", "answers": ["he", "she"]}])
    (question,) = read_open_questions(path, None, "x")
    assert question.answers == ("he", "she")
