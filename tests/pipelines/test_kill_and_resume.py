"""A run that was interrupted once and killed once ends in the same alpha and theta as one that was left alone.

Of each pair of methods the first is interrupted and the second killed. Slow: four command lines a pair, a Ray each.
That a resumed session equals the uninterrupted one is tested by default, in one process (`test_session.py`).
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
import torch
from safetensors.torch import load_file

from components.config import RunConfig
from components.run_file import to_yaml

STEPS, CHECKPOINT_EVERY, TIMEOUT_S = 120, 10, 900  # steps take milliseconds: enough must be left when a signal falls

PAIRS = [("uq4ct", "calm_uq4ct"), ("sft", "calm")]

pytestmark = [pytest.mark.slow, pytest.mark.distributed, pytest.mark.timeout(1800)]


@dataclass
class Story:
    """What happened.

    Attributes:
        methods: The one that was interrupted and the one that was killed.
        whole: Folder of the run that was left alone.
        broken: Folder of the run that was broken off twice.
        interrupted: Exit code and standard error of the command after Ctrl-C.
        killed_at: Step of the newest checkpoint and last step traced when everything was killed.
        left_over: Processes that outlived the kill.
    """

    methods: tuple[str, str]
    whole: Path
    broken: Path
    interrupted: tuple[int, str]
    killed_at: tuple[int, int]
    left_over: list[psutil.Process]


@pytest.fixture(scope="module", params=PAIRS, ids="-".join)
def story(request, tmp_path_factory, small_run, start, tiny_model_folder) -> Story:
    folder = tmp_path_factory.mktemp("killed")
    first, second = request.param
    whole, broken = (
        small_config(small_run, request.param, tiny_model_folder, folder / name) for name in ("whole", "broken")
    )
    files = {}
    for name, config in (("whole", whole), ("broken", broken)):
        files[name] = folder / f"{name}.yaml"
        files[name].write_text(to_yaml(config))
    finish(start(folder, "train", "--config", files["whole"], name="whole"), folder / "whole.err")

    process = start(folder, "train", "--config", files["broken"], name="interrupted")
    wait_for_step(process, broken.folder / first / "trace.jsonl", 13)
    process.send_signal(signal.SIGINT)
    interrupted = process.wait(TIMEOUT_S), (folder / "interrupted.err").read_text()

    process = start(folder, "train", "--config", files["broken"], "--resume", name="killed")
    wait_for_step(process, broken.folder / second / "trace.jsonl", 0)
    children = psutil.Process(process.pid).children(recursive=True)  # takes a while, so before the moment to kill
    wait_for_step(process, broken.folder / second / "trace.jsonl", 23)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait(TIMEOUT_S)
    _, left_over = psutil.wait_procs(children, timeout=60)
    for child in left_over:
        child.kill()
    killed_at = newest_checkpoint(broken.folder / second), traced_steps(broken.folder / second / "trace.jsonl")[-1]

    finish(start(folder, "train", "--config", files["broken"], "--resume", name="resumed"), folder / "resumed.err")
    return Story(request.param, whole.folder, broken.folder, interrupted, killed_at, left_over)


def small_config(small_run, methods: tuple[str, str], model: Path, output_dir: Path) -> RunConfig:
    return small_run(
        output_dir,
        methods=list(methods),
        recalibrate={},
        model={
            "name": str(model),
            "adapter": {"r": 4, "alpha": 8, "dropout": 0.2},
            "mixlora": {"r": 4, "num_experts": 4, "dropout": 0.2},
        },
        training={
            "steps": STEPS,
            "batch_size": 4,
            "evaluate_every": 40,
            "checkpoint_every": CHECKPOINT_EVERY,
        },
        uq4ct={"collapse_share": 0.25},  # of 4 experts one always receives more
        # Two threads that wait for one another make steps endless where other processes want the cores too.
        resources={"cpus_per_worker": 1},
        tracking={"enabled": False},
    )


def finish(process: subprocess.Popen, errors: Path) -> None:
    assert process.wait(TIMEOUT_S) == 0, errors.read_text()


def wait_for_step(process: subprocess.Popen, trace: Path, step: int) -> None:
    """Returns as soon as the trace has the step, well before the next checkpoint."""
    deadline = time.monotonic() + TIMEOUT_S
    while not trace.exists() or not (steps := traced_steps(trace)) or steps[-1] < step:
        assert process.poll() is None, "the run ended too early"
        assert time.monotonic() < deadline, "the run is too slow"
        time.sleep(0.005)


def traced_steps(trace: Path) -> list[int]:
    return [json.loads(line)["step"] for line in trace.read_text().splitlines(keepends=True) if line.endswith("\n")]


def newest_checkpoint(folder: Path) -> int:
    return max(int(path.name.removeprefix("step-")) for path in (folder / "checkpoints").glob("step-*"))


def test_ctrl_c_ends_with_130_and_says_how_to_go_on(story):
    code, errors = story.interrupted
    assert code == 130
    assert "--resume" in errors
    assert "Traceback" not in errors


def test_the_kill_came_in_mid_training(story):
    """Where exactly between two checkpoints is up to the machine; that steps were still to come is not."""
    checkpoint, last = story.killed_at
    assert 0 < checkpoint <= last < STEPS


def test_nothing_outlives_the_kill(story):
    assert story.left_over == []


@pytest.mark.parametrize("which", [0, 1])
def test_alpha_theta_and_optimiser_equal_the_uninterrupted_runs(story, which):
    states, method = [], story.methods[which]
    for folder in (story.whole / method, story.broken / method):
        assert newest_checkpoint(folder) == STEPS
        states.append(load_file(folder / "checkpoints" / f"step-{STEPS:08d}" / "state.safetensors"))
    whole, broken = states
    assert whole.keys() == broken.keys()
    assert any(key.startswith("value/theta") for key in whole)
    assert any(".router." in key for key in whole) == ("uq4ct" in method)
    assert ("value/alpha.l" in whole) == ("calm" in method)
    assert [key for key in whole if not torch.equal(whole[key], broken[key])] == []


@pytest.mark.parametrize("which", [0, 1])
def test_what_is_left_behind_is_the_same_to_the_byte(story, which):
    method = story.methods[which]
    files = ["trace.jsonl", "adapter/adapter_model.safetensors"]
    files += ["adapter/calibration_head.safetensors"] * ("calm" in method) + ["expert_load.json"] * ("uq4ct" in method)
    for file in files:
        assert (story.broken / method / file).read_bytes() == (story.whole / method / file).read_bytes(), file


def test_a_router_that_collapses_is_spoken_of_once(story):
    lines = (story.whole.parents[1] / "whole.err").read_text().splitlines()
    for method in story.methods:
        assert sum(line.startswith(f"{method}, step ") for line in lines) == ("uq4ct" in method)


def test_every_stage_is_done(story):
    stages = json.loads((story.broken / "run.json").read_text())["stages"]
    assert {name: of["state"] for name, of in stages.items()} == dict.fromkeys(
        ["prepare", "model", *(f"train/{method}" for method in story.methods)], "done"
    )
