"""Errors cross process borders: what a worker raises must reach the driver as it was."""

from __future__ import annotations

import pickle

import pytest

from components.errors import CaltuneError, CheckpointError, DataError, ModelError, RunFileError, UsageError


@pytest.mark.parametrize("kind", [CaltuneError, RunFileError, UsageError, ModelError, CheckpointError])
def test_errors_survive_pickling(kind: type[CaltuneError]) -> None:
    again = pickle.loads(pickle.dumps(kind("what, where, what to do")))
    assert (type(again), str(again), again.exit_code) == (kind, "what, where, what to do", kind.exit_code)


def test_a_data_error_keeps_its_parts() -> None:
    error = DataError("rows.jsonl", 3, "answer", "is 7, there are 4 choices", "count from 0")
    again = pickle.loads(pickle.dumps(error))
    assert str(again) == "rows.jsonl:3: field 'answer': is 7, there are 4 choices (count from 0)"
    assert (again.path, again.line, again.field) == ("rows.jsonl", 3, "answer")
