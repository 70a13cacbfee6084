"""The trace file: written as it happens, begun again on resume, readable after a crash."""

from __future__ import annotations

from pathlib import Path

import pytest

from components.training.trace import TraceWriter, read_trace


def write(path: Path, steps: range, resume_from: int = 0) -> None:
    writer = TraceWriter(path, resume_from)
    for step in steps:
        writer.add(step, {"loss": step / 10})
    writer.close()


def steps(path: Path) -> list[float]:
    return [row["step"] for row in read_trace(path)]


def test_rows_are_there_before_the_file_is_closed(tmp_path):
    writer = TraceWriter(tmp_path / "sft" / "trace.jsonl")
    writer.add(0, {"validation/nll": 1.5})
    assert list(read_trace(tmp_path / "sft" / "trace.jsonl")) == [{"step": 0, "validation/nll": 1.5}]


def test_resuming_drops_the_steps_that_will_be_taken_again(tmp_path):
    path = tmp_path / "trace.jsonl"
    write(path, range(8))
    write(path, range(5, 7), resume_from=4)
    assert steps(path) == list(range(7))
    assert list(tmp_path.iterdir()) == [path]


def test_a_torn_last_line_is_ignored(tmp_path):
    path = tmp_path / "trace.jsonl"
    write(path, range(3))
    with path.open("a") as file:
        file.write('{"step": 3, "lo')
    assert steps(path) == [0, 1, 2]
    write(path, range(3, 5), resume_from=2)
    assert steps(path) == [0, 1, 2, 3, 4]


def test_starting_anew_replaces_what_is_there(tmp_path):
    path = tmp_path / "trace.jsonl"
    write(path, range(8))
    write(path, range(2))
    assert steps(path) == [0, 1]


def test_a_run_that_resumes_before_its_first_checkpoint_may_have_no_trace(tmp_path):
    write(tmp_path / "trace.jsonl", range(3, 5), resume_from=2)
    assert steps(tmp_path / "trace.jsonl") == [3, 4]


def test_no_file_is_an_error(tmp_path):
    with pytest.raises(FileNotFoundError):
        list(read_trace(tmp_path / "trace.jsonl"))
