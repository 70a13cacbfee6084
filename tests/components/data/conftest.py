"""Helpers of the data tests: small question sets, files written by format, and the real data where it is there."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from components.data.rows import make_set
from components.data.schema import Question, QuestionSet


@pytest.fixture
def question() -> Callable[..., Question]:
    """A maker of questions; text, choices and the rest by keyword."""

    def make(id_: str, text: str | None = None, **others: object) -> Question:
        fields: dict[str, object] = {"choices": ("yes", "no", "maybe", "never"), "answer": 0, **others}
        return Question(id=id_, question=text or f"Question {id_}?", **fields)  # type: ignore[arg-type]

    return make


@pytest.fixture
def question_set(question: Callable[..., Question]) -> Callable[..., QuestionSet]:
    """A maker of sets from (text, choices) pairs, for overlaps."""

    def make(name: str, rows: Sequence[tuple[str, tuple[str, ...]]]) -> QuestionSet:
        made = [question(f"{name}-{i}", text, choices=choices) for i, (text, choices) in enumerate(rows)]
        return make_set(name, made, "test")

    return make


@pytest.fixture
def write_rows(tmp_path: Path) -> Callable[..., Path]:
    """Write rows (dicts, or raw lines as text or bytes) as JSON Lines, gzipped by name."""

    def write(rows: Sequence[dict | str | bytes], name: str = "rows.jsonl") -> Path:
        def encode(row: dict | str | bytes) -> bytes:
            text = json.dumps(row) if isinstance(row, dict) else row
            return text if isinstance(text, bytes) else text.encode()

        content = b"".join(encode(row) + b"\n" for row in rows)
        path = tmp_path / name
        path.write_bytes(gzip.compress(content) if name.endswith(".gz") else content)
        return path

    return write


@pytest.fixture(scope="session")
def real_data() -> Path:
    """Folder of the real question-answering files; the test is skipped where it is not."""
    folder = Path(__file__).resolve().parents[4] / "shared" / "data"
    if not folder.is_dir():
        pytest.skip(f"no question files (ARC, MMLU, TriviaQA ...) at {folder}; the built-in facts are tested anyway")
    return folder
