"""The prediction log: writers that are killed or many, labels that come later, windows judged by the known metrics."""

from __future__ import annotations

import json
import multiprocessing
import re
import signal
import subprocess
import sys
from datetime import datetime, timedelta, timezone
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from components.errors import DataError
from components.evaluation.calibration_error import expected_calibration_error
from components.registry.monitoring import read_labels, windows_of, with_labels
from components.registry.prediction_log import append_rows, log_row, read_confidences, read_log
from pipelines.cli import app


def answered(i: int, confidence: float = 0.5, **others: object) -> dict:
    row = {"id": f"q{i}", "answer": f"text {i}", "answer_index": i % 4, "confidence_softmax": confidence}
    return row | {"probabilities": [confidence], "abstained": False} | others


def written(path: Path, rows: list[dict]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_a_row_holds_the_prediction_and_not_the_question() -> None:
    at = datetime(2024, 5, 1, 12, 0, tzinfo=timezone(timedelta(hours=2)))
    row = log_row(answered(3) | {"question": "secret?"}, latency_s=0.25, gold=3, at=at)
    assert row == {
        "id": "q3",
        "answer": "text 3",
        "answer_index": 3,
        "abstained": False,
        "time": "2024-05-01T10:00:00.000+00:00",
        "confidence_softmax": 0.5,
        "latency_s": 0.25,
        "gold": 3,
    }


def test_what_is_appended_is_read(tmp_path) -> None:
    path = tmp_path / "logs" / "log.jsonl"
    append_rows(path, [log_row(answered(0, 0.25), gold="text 0"), log_row(answered(1, 0.5, abstained=None))])
    append_rows(path, [])
    append_rows(path, [log_row(answered(2, 0.75, answer="line\u2028separator\nand more"), gold=1)])
    log = read_log(path)
    assert [(row.id, row.abstained, row.correct) for row in log] == [
        ("q0", False, True),
        ("q1", None, None),
        ("q2", False, False),
    ]
    assert log[2].answer == "line\u2028separator\nand more"
    assert read_confidences(path, ["softmax"])["softmax"].tolist() == [0.25, 0.5, 0.75]


@settings(max_examples=40, deadline=None)
@given(cut=st.integers(1, 200), whole=st.booleans())
def test_a_torn_last_line_is_passed_over_and_then_cut_off(tmp_path_factory, cut, whole) -> None:
    path = tmp_path_factory.mktemp("log") / "log.jsonl"
    append_rows(path, [log_row(answered(0)), log_row(answered(1))])
    line = json.dumps(log_row(answered(2)))
    torn = line if whole else line[: min(cut, len(line) - 1)]  # a whole row may lack its line break only
    with path.open("a") as file:
        file.write(torn)
    ids = ["q0", "q1", *(["q2"] if whole else [])]
    assert [row.id for row in read_log(path)] == ids
    assert len(read_confidences(path, ["softmax"])["softmax"]) == len(ids)
    append_rows(path, [log_row(answered(3))])
    assert [row.id for row in read_log(path)] == [*ids, "q3"]


def test_a_torn_line_elsewhere_is_an_error(tmp_path) -> None:
    path = tmp_path / "log.jsonl"
    path.write_text(
        '{"id": "a", "confidence_softmax": 0.5}\n{"id": "b", "conf\n{"id": "c", "confidence_softmax": 0.5}\n'
    )
    with pytest.raises(DataError, match=re.escape("log.jsonl:2: is not JSON")):
        read_log(path)


def _append_many(path: Path, writer: int) -> None:
    for i in range(40):
        append_rows(path, [log_row(answered(i, id=f"{writer}-{i}-{part}", answer="x" * 3000)) for part in range(3)])


def test_several_writers_at_once(tmp_path) -> None:
    """Rows of 3 KB, three at a time, by four processes: none lost, none torn, each batch in one piece."""
    path = tmp_path / "log.jsonl"
    with multiprocessing.get_context("fork").Pool(4) as pool:
        pool.starmap(_append_many, [(path, writer) for writer in range(4)])
    ids = [row.id for row in read_log(path)]
    assert sorted(ids) == sorted(f"{w}-{i}-{part}" for w in range(4) for i in range(40) for part in range(3))
    assert all(first.endswith("-0") and ids[at + 2] == first[:-1] + "2" for at, first in enumerate(ids) if at % 3 == 0)


def test_a_killed_writer_leaves_whole_rows(tmp_path) -> None:
    path = tmp_path / "log.jsonl"
    code = f"""
from pathlib import Path
from components.registry.prediction_log import append_rows, log_row
i = 0
while True:
    append_rows(Path({str(path)!r}), [log_row({{"id": str(i), "answer": "x" * 5000, "confidence_softmax": 0.5}})])
    i += 1
    if i == 50:
        print("going", flush=True)
"""
    writer = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    assert writer.stdout is not None
    writer.stdout.readline()
    writer.send_signal(signal.SIGKILL)
    writer.wait()
    found = read_log(path)
    assert len(found) >= 50
    append_rows(path, [log_row({"id": "next", "answer": "", "confidence_softmax": 0.5})])
    assert [row.id for row in read_log(path)] == [*map(str, range(len(found))), "next"]


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        ({"confidence_softmax": 0.5}, "field 'id' is None"),
        ({"id": "a"}, "there is no field 'confidence_<source>'"),
        ({"id": "a", "confidence_flc": 1.2}, "field 'confidence_flc' is 1.2"),
        ({"id": "a", "confidence_softmax": 0.5, "abstained": "no"}, "field 'abstained' is 'no'"),
        ({"id": "a", "confidence_softmax": 0.5, "correct": 1}, "field 'correct' is 1"),
        ({"id": "a", "confidence_softmax": 0.5, "answer_index": True}, "field 'answer_index' is True"),
        ({"id": "a", "confidence_softmax": 0.5, "gold": 2}, "question 'a' was not answered among options"),
    ],
)
def test_a_bad_row_is_named(tmp_path, row, problem) -> None:
    path = written(tmp_path / "log.jsonl", [{"id": "good", "confidence_softmax": 0.5}, row])
    with pytest.raises(DataError, match=re.escape("log.jsonl:2: " + problem)):
        read_log(path)


def test_labels_of_every_kind(tmp_path) -> None:
    log = read_log(written(tmp_path / "log.jsonl", [log_row(answered(i)) for i in (0, 1, 2, 3, 3)]))
    labels = read_labels(
        written(
            tmp_path / "labels.jsonl",
            [
                {"id": "q0", "correct": False},
                {"id": "q1", "answer": "text 1 ", "question": "as in a data file"},
                {"id": "q3", "answer": 0},
                {"id": "q3", "answer": 3},
                {"id": "elsewhere", "correct": True},
            ],
        )
    )
    assert [row.correct for row in with_labels(log, labels)] == [False, True, None, True, True]


@pytest.mark.parametrize(
    "row",
    [
        {"correct": True},
        {"id": "a"},
        {"id": "a", "correct": 1},
        {"id": "a", "answer": None},
        {"id": "a", "answer": 0.5},
    ],
)
def test_a_bad_label_is_named(tmp_path, row) -> None:
    with pytest.raises(DataError, match=re.escape("labels.jsonl:1: field")):
        read_labels(written(tmp_path / "labels.jsonl", [row]))


def test_windows_are_judged_by_the_known_metrics(tmp_path) -> None:
    """Seven answers in windows of three; the second window has one label missing, the last window has none."""
    generator = np.random.default_rng(0)
    confidence = generator.random(7).round(3)
    correct = [True, False, False, True, None, False, None]
    abstained = [False, False, True, True, False, False, True]
    rows = [
        log_row(answered(i, float(confidence[i]), abstained=abstained[i])) | {"correct": correct[i]} for i in range(7)
    ]
    first, second, last = windows_of(read_log(written(tmp_path / "log.jsonl", rows)), 3, 15)
    assert [(w.first, w.last, w.n, w.labelled) for w in (first, second, last)] == [
        (1, 3, 3, 3),
        (4, 6, 3, 2),
        (7, 7, 1, 0),
    ]
    right = np.array([1.0, 0.0, 0.0])
    own = first.sources["softmax"]
    assert own.mean_confidence == pytest.approx(confidence[:3].mean())
    assert own.ece == pytest.approx(expected_calibration_error(confidence[:3], right, 15))
    assert own.brier == pytest.approx(((confidence[:3] - right) ** 2).mean())
    assert first.accuracy == pytest.approx(1 / 3)
    assert (first.abstained, first.answered, first.risk) == (pytest.approx(1 / 3), 2, 0.5)
    assert first.risk_low == pytest.approx(1 - 0.975**0.5, abs=1e-9)  # one of two: P(at least one) = 0.025
    assert second.sources["softmax"].mean_confidence == pytest.approx(confidence[3:6].mean())
    assert second.sources["softmax"].brier == pytest.approx(((confidence[[3, 5]] - [1, 0]) ** 2).mean())
    assert (second.answered, second.risk) == (1, 1.0)
    assert (last.accuracy, last.risk, last.sources["softmax"].ece) == (None, None, None)


def test_an_answer_without_a_policy_is_neither_given_nor_abstained_from(tmp_path) -> None:
    rows = [log_row(answered(i, abstained=None), gold=i % 4) for i in range(4)]
    (window,) = windows_of(read_log(written(tmp_path / "log.jsonl", rows)), 10, 15)
    assert (window.abstained, window.risk, window.accuracy) == (None, None, 1.0)


def test_the_command(tmp_path) -> None:
    generator = np.random.default_rng(1)
    rows = [log_row(answered(i, float(c), confidence_flc=0.5)) for i, c in enumerate(generator.random(250))]
    log = written(tmp_path / "log.jsonl", rows)
    gold = [{"id": f"q{i}", "answer": int(generator.integers(4))} for i in range(150)]
    labels = written(tmp_path / "labels.jsonl", [*gold, {"id": "unknown", "correct": True}])
    call = ["monitor", str(log), "--labels", str(labels), "--window", "100"]
    shown = CliRunner().invoke(app, call, env={"COLUMNS": "80"})
    assert shown.exit_code == 0, shown.exception
    assert "1 labels are of questions that the log does not have" in shown.stdout
    assert "…" not in shown.stdout.partition("labels are of")[0], "it fits 80 columns"
    result = json.loads(CliRunner().invoke(app, [*call, "--json"]).stdout)
    assert [(w["n"], w["labelled"]) for w in result["windows"]] == [(100, 100), (100, 50), (50, 0)]
    assert result == json.loads((tmp_path / "log.jsonl.monitor.json").read_text())
    assert (tmp_path / "log.jsonl.monitor.png").read_bytes().startswith(b"\x89PNG")
    assert read_confidences(log, ["softmax", "flc"])["flc"].tolist() == [0.5] * 250
    refused = CliRunner().invoke(app, ["monitor", str(log), "--window", "0"])
    assert "at least 1" in str(refused.exception)
