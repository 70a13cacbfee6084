"""`caltune predict`: every row comes out, in order, once, whatever is asked and wherever it is broken off."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from components.registry import load
from components.registry.predictor import Predictor
from pipelines import cli, predict_command


@pytest.fixture
def predict(monkeypatch, capfd):
    """Calls the command in this process: exit code, rows on stdout, stderr."""

    def call(*arguments, stdin=b""):
        monkeypatch.setattr(sys, "argv", ["caltune", "predict", *map(str, arguments)])
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin)))
        capfd.readouterr()
        with pytest.raises(SystemExit) as ended:
            cli.main()
        captured = capfd.readouterr()
        return ended.value.code, [json.loads(line) for line in captured.out.splitlines()], captured.err

    return call


@pytest.fixture
def calm(tiny_adapter) -> Path:
    return tiny_adapter("calm")


@pytest.fixture
def questions(asked_rows, tmp_path) -> Path:
    path = tmp_path / "questions.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in asked_rows))
    return path


@pytest.fixture
def in_fives(monkeypatch):
    monkeypatch.setattr(predict_command, "ROWS", 5)


def rows_in(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def close(found: list[dict], expected: list[dict]) -> bool:
    """Equal but for rounding: batches may have been formed otherwise."""
    return len(found) == len(expected) and all(
        one.keys() == other.keys()
        and all(one[key] == (pytest.approx(other[key], abs=1e-6) if "conf" in key or "prob" in key else other[key])
                for key in other)
        for one, other in zip(found, expected, strict=True)
    )  # fmt: skip


@pytest.mark.parametrize("source", ["file", "stdin"])
def test_a_file_or_stdin_gives_what_the_predictor_gives(source, predict, calm, questions, asked_rows, in_fives):
    arguments, stdin = ([questions], b"") if source == "file" else (["-"], questions.read_bytes())
    code, rows, err = predict("--model", calm, *arguments, stdin=stdin)
    assert (code, len(rows)) == (0, 40)
    assert close(rows, [p.as_row() for p in load(calm).predict(asked_rows)])
    assert "predict: 40/40" in err


def test_bad_rows_come_out_with_their_error_in_their_place(predict, calm, tmp_path, asked_rows, in_fives):
    good = [json.dumps(row) for row in asked_rows[:6]]
    lines = [good[0], "", "{broken", good[1], '{"id": "x", "question": "Q", "choices": ["a"]}', "[1, 2]", good[2],
             json.dumps({"question": "word " * 400, "choices": ["a", "b"]}), *good[3:], '"\\ud800"',
             '{"id": "\\ud800", "question": 1}', '{"question": "Q", "choices": ["a", "b"]}']  # fmt: skip
    path = tmp_path / "mixed.jsonl"
    path.write_bytes("\n".join(lines).encode() + b'\n{"question": "\xff"}\n' + b"1" * 5000)
    code, rows, err = predict("--model", calm, path)
    assert code == 1
    assert "8 of 15 questions could not be answered" in err
    assert len(rows) == 15, "the blank line asks nothing"
    assert [row.get("id", row.get("line")) for row in rows] == [
        "q0", 3, "q1", "x", 6, "q2", 8, "q3", "q4", "q5", 12, "\ud800", "mixed-12", 15, 16,
    ]  # fmt: skip
    assert rows[1]["error"].startswith(f"{path}:3: not JSON")
    assert rows[3]["error"].startswith(f"{path}:5: field 'choices'")
    assert "tokens long" in rows[6]["error"]
    assert "not UTF-8" in rows[-2]["error"]
    assert "number that cannot be read" in rows[-1]["error"]
    answered = [row for row in rows if "error" not in row]
    assert close(answered[:6], [p.as_row() for p in load(calm).predict(asked_rows[:6])])


@pytest.mark.parametrize("cut", [0, 1, 7, 12, 40])
def test_a_broken_off_file_is_gone_on_with(cut, predict, calm, questions, tmp_path, in_fives, monkeypatch):
    """Cut in the middle of a row; those before it are not answered again."""
    output = tmp_path / "out" / "answers.jsonl"
    assert predict("--model", calm, "--output", output, questions)[:2] == (0, [])
    whole = output.read_text()
    lines = whole.splitlines(keepends=True)
    output.write_text("".join(lines[:cut]) + (lines[cut][:30] if cut < 40 else ""))
    asked = []
    answer = Predictor._choose
    monkeypatch.setattr(
        Predictor, "_choose", lambda self, ready, *rest: asked.extend(ready) or answer(self, ready, *rest)
    )
    code, _, err = predict("--model", calm, "--output", output, questions)
    assert code == 0
    assert len(asked) == 40 - cut
    assert close(rows_in(output), [json.loads(line) for line in lines])
    assert (f"{cut} of 40 questions are answered already" in err) == (cut > 0)


def test_errors_that_were_there_still_count(predict, calm, tmp_path):
    path, output = tmp_path / "q.jsonl", tmp_path / "a.jsonl"
    path.write_text("nonsense\n")
    for _ in range(2):
        assert predict("--model", calm, "--output", output, path)[0] == 1
    assert len(rows_in(output)) == 1


def test_another_input_model_or_policy_is_refused(predict, calm, tiny_adapter, questions, tmp_path):
    output = tmp_path / "answers.jsonl"
    assert predict("--model", calm, "--output", output, questions)[0] == 0
    before = output.read_bytes()
    code, _, err = predict("--model", tiny_adapter("uq4ct"), "--output", output, questions)
    assert (code, "begun with another model; choose another output" in err) == (2, True)
    questions.write_text(questions.read_text().replace("number 3", "number 33"))
    code, _, err = predict("--model", calm, "--output", output, questions)
    assert (code, "begun with another input" in err) == (2, True)
    code, _, err = predict("--model", calm, "--output", questions, questions)
    assert (code, "nothing says what it was made from" in err) == (2, True)
    assert output.read_bytes() == before
    output.write_bytes(b"nonsense\n")
    questions.write_text(questions.read_text().replace("number 33", "number 3"))
    code, _, err = predict("--model", calm, "--output", output, questions)
    assert (code, f"{output}:1: is no prediction" in err) == (2, True)


def test_what_cannot_work_is_2_or_1_with_a_sentence(predict, calm, questions, tmp_path):
    for arguments, code, words in (
        ([tmp_path / "none.jsonl", "--model", calm], 2, "is not a file"),
        ([questions, "--model", calm, "--policy", "p"], 2, "no abstention policy 'p'"),
        ([questions, "--model", tmp_path / "none"], 1, "is not a folder"),
        ([questions, "--model", "models:/a/1"], 2, "MLFLOW_TRACKING_URI"),
    ):
        found = predict(*arguments)
        assert (found[0], found[1]) == (code, [])
        assert words in found[2]


@pytest.mark.slow
def test_ctrl_c_leaves_whole_rows_and_the_same_command_goes_on(calm, asked_rows, tmp_path):
    path, output = tmp_path / "many.jsonl", tmp_path / "a.jsonl"
    path.write_text(
        "".join(json.dumps({**row, "id": f"{n}-{row['id']}"}) + "\n" for n in range(100) for row in asked_rows)
    )
    command = [sys.executable, "-m", "pipelines.cli", "predict", "--model", str(calm), "-o", str(output), str(path)]
    process = subprocess.Popen(command, cwd=Path(__file__).parents[2], stderr=subprocess.PIPE, env=dict(os.environ))
    deadline = time.monotonic() + 200
    while not (output.exists() and output.stat().st_size) and time.monotonic() < deadline:
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    err = process.communicate(timeout=60)[1].decode()
    assert process.returncode == 130, err
    assert "the same command goes on" in err
    done = rows_in(output)
    assert 0 < len(done) < 4000
    assert subprocess.run(command, cwd=Path(__file__).parents[2], check=False).returncode == 0
    rows = rows_in(output)
    assert [row["id"] for row in rows] == [f"{n}-{row['id']}" for n in range(100) for row in asked_rows]
    assert rows[: len(done)] == done
