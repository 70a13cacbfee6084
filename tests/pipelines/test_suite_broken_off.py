"""A suite that was interrupted once and killed once ends whole, and no cell that was done is made again."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from components.run_file import to_yaml

TIMEOUT_S = 1500

pytestmark = [pytest.mark.slow, pytest.mark.distributed, pytest.mark.timeout(3600)]


def finish(process: subprocess.Popen, code: int, errors: Path) -> None:
    assert process.wait(TIMEOUT_S) == code, errors.read_text()


def wait_until(process: subprocess.Popen, condition) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while not condition():
        assert process.poll() is None, "the suite ended too early"
        assert time.monotonic() < deadline, "the suite is too slow"
        time.sleep(0.02)


def cells(folder: Path) -> dict[str, str]:
    content = json.loads((folder / "suite.json").read_text())["cells"]
    return {f"{cell['folder']} {cell['method']}": cell["state"] for cell in content}


def state(folder: Path, cell: str) -> str:
    return cells(folder)[cell] if (folder / "suite.json").exists() else "left"


def made_at(folder: Path) -> dict[str, int]:
    """When each adapter and each set of predictions was written."""
    paths = [*folder.rglob("predictions.parquet"), *folder.rglob("adapter_model.safetensors")]
    return {str(path.relative_to(folder)): path.stat().st_mtime_ns for path in paths if "+" not in str(path)}


def test_cells_that_are_evaluated_are_done_once(tmp_path, small_run, start):
    """Three seeds of the base model alone: Ctrl-C falls in the second, SIGKILL in the third."""
    config = small_run(
        tmp_path,
        methods=["base"],
        recalibrate={},
        data={
            "source": {"kind": "facts", "domain": "geography"},
            "splits": {"train": 48, "calibration": 16, "validation": 100, "test": 300},
            "prompt": {"style": "plain", "template": "Question: {question}\nAnswer:", "delimiter": " "},
        },
        tracking={"enabled": False},
    )
    (tmp_path / "run.yaml").write_text(to_yaml(config))
    suite = {"suite": "s", "output_dir": str(tmp_path / "out"), "seeds": [0, 1, 2], "runs": [{"file": "run.yaml"}]}
    (tmp_path / "suite.yaml").write_text(json.dumps(suite))
    folder, arguments = tmp_path / "out" / "s", ("suite", "--config", tmp_path / "suite.yaml")

    process = start(tmp_path, *arguments, name="interrupted")
    wait_until(process, lambda: state(folder, "small-s1 base") == "running")
    process.send_signal(signal.SIGINT)
    finish(process, 130, tmp_path / "interrupted.err")
    assert "the same command goes on where it stood" in (tmp_path / "interrupted.err").read_text()
    assert cells(folder) == {"small-s0 base": "done", "small-s1 base": "left", "small-s2 base": "left"}
    before = made_at(folder / "small-s0")

    process = start(tmp_path, *arguments, name="killed")
    wait_until(process, lambda: state(folder, "small-s2 base") == "running")
    os.killpg(process.pid, signal.SIGKILL)
    process.wait(TIMEOUT_S)
    assert cells(folder) == {"small-s0 base": "done", "small-s1 base": "done", "small-s2 base": "running"}
    between = made_at(folder)

    finish(start(tmp_path, *arguments, name="ended"), 0, tmp_path / "ended.err")
    assert set(cells(folder).values()) == {"done"}
    assert made_at(folder / "small-s0") == before
    assert between.items() <= made_at(folder).items()


def test_ctrl_c_and_sigkill_lose_at_most_the_cell_in_progress(tmp_path, small_run, start):
    config = small_run(
        tmp_path,
        training={"steps": 150, "batch_size": 4, "evaluate_every": 50, "checkpoint_every": 10},
        calm={"inner_steps": 2},
        resources={"cpus_per_worker": 1},
        tracking={"enabled": False},
    )
    (tmp_path / "run.yaml").write_text(to_yaml(config))
    suite = {"suite": "s", "output_dir": str(tmp_path / "out"), "seeds": [0, 1], "methods": ["base", "sft"]}
    (tmp_path / "suite.yaml").write_text(json.dumps(suite | {"runs": [{"file": "run.yaml", "name": "facts"}]}))
    folder, arguments = tmp_path / "out" / "s", ("suite", "--config", tmp_path / "suite.yaml")
    trace = folder / "facts-s0" / "sft" / "trace.jsonl"

    process = start(tmp_path, *arguments, name="interrupted")
    wait_until(process, lambda: trace.exists() and len(trace.read_text().splitlines()) > 15)
    process.send_signal(signal.SIGINT)
    finish(process, 130, tmp_path / "interrupted.err")
    assert "the same command goes on where it stood" in (tmp_path / "interrupted.err").read_text()
    expected = {"facts-s0 base": "done", "facts-s0 sft": "left", "facts-s1 base": "left", "facts-s1 sft": "left"}
    assert cells(folder) == expected
    before = made_at(folder)

    process = start(tmp_path, *arguments, name="killed")
    second = folder / "facts-s1" / "sft" / "trace.jsonl"
    wait_until(process, lambda: second.exists() and len(second.read_text().splitlines()) > 15)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait(TIMEOUT_S)
    assert cells(folder) == expected | {"facts-s0 sft": "done", "facts-s1 base": "done", "facts-s1 sft": "running"}
    between = made_at(folder)
    assert before.items() <= between.items()

    # Now with a method more, whose cells are all that is left but the one that was killed; one of its runs cannot
    # leave its checkpoints, which no other cell minds.
    wider = suite | {"methods": ["base", "sft", "calm"], "runs": [{"file": "run.yaml", "name": "facts"}]}
    (tmp_path / "suite.yaml").write_text(json.dumps(wider))
    (folder / "facts-s0" / "calm").write_text("in the way")
    finish(start(tmp_path, *arguments, name="wider"), 1, tmp_path / "wider.err")
    assert cells(folder) == {f"facts-s{s} {m}": "done" for s in (0, 1) for m in ("base", "sft", "calm")} | {
        "facts-s0 calm": "failed"
    }
    assert between.items() <= made_at(folder).items()
    assert "failed facts-s0 calm: " in (tmp_path / "wider.err").read_text()

    (folder / "facts-s0" / "calm").unlink()
    finish(start(tmp_path, *arguments, name="mended"), 0, tmp_path / "mended.err")
    assert set(cells(folder).values()) == {"done"}
    assert between.items() <= made_at(folder).items()
    summary = json.loads((folder / "facts-s1" / "report" / "summary.json").read_text())
    assert {"base", "sft", "calm"} <= summary["methods"].keys()
