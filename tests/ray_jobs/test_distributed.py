"""20 CALM steps through Ray Train on two workers, sharded or not, against one plain process in this one.

With sharded weights the lower level is UQ4CT's, which needs all that CALM needs and counts of experts over ranks.
`test_deepspeed_space.py` and `test_uq4ct_on_ranks.py` in `tests/components/training` have every stage without Ray; this
is the way that `caltune` goes.
Float32 sums in another order differ in the seventh digit, which AdamW turns into steps that differ by some thousandths
of the rate; the rates are chosen so that 1e-6 is above that and far below what the steps move.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from components.config import ResourcesConfig
from components.models.adapter_files import verify_adapter
from components.training.job import Process, TrainingJob
from ray_jobs.train import train
from ray_jobs.worker import run_session

STEPS = 20
TRAINING = {"steps": STEPS, "batch_size": 8, "evaluate_every": 10, "checkpoint_every": 10, "learning_rate": 2e-4}
WAYS = {
    "plain": {"workers": 2},
    "zero2": {"workers": 2, "deepspeed": {"stage": 2}},
    "zero3": {"workers": 2, "deepspeed": {"stage": 3}},
}
METHOD = {"plain": "calm", "zero2": "calm", "zero3": "calm_uq4ct"}
ENTROPY = {"plain": "vocabulary", "zero2": "options", "zero3": "options"}
UQ4CT = {"router_learning_rate": 2e-4}

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(600)]


def calm(entropy_over: str) -> dict:
    return {
        "inner_steps": 2,
        "alpha_learning_rate": 1e-3,
        "entropy_over": entropy_over,
        "stop": {"rule": "budget"},
    }


@pytest.fixture(scope="module")
def single(make_job: Callable[..., TrainingJob]) -> dict[str, TrainingJob]:
    """Runs of one plain process by the way they are compared with."""
    jobs = {}
    for way, method in METHOD.items():
        jobs[way] = make_job(f"single-{way}", method, training=TRAINING, calm=calm(ENTROPY[way]), uq4ct=UQ4CT)
        run_session(jobs[way], Process(), report=lambda step, values, checkpoint: None)
    return jobs


@pytest.fixture(scope="module", params=["plain", pytest.param("zero2", marks=pytest.mark.slow), "zero3"])
def pair(request, ray_here, make_job, single) -> tuple[TrainingJob, TrainingJob, list[dict]]:
    """A job of one process, the same on two workers, and the rows that the driver was told."""
    way = request.param
    sections = {"training": TRAINING, "calm": calm(ENTROPY[way]), "uq4ct": UQ4CT, "resources": WAYS[way]}
    job = make_job(way, METHOD[way], **sections)
    rows: list[dict] = []
    train(job, resume=False, on_row=rows.append)
    return single[way], job, rows


def final_state(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "checkpoints" / f"step-{STEPS:08d}" / "state.safetensors")


def test_alpha_and_theta_are_the_single_processes(pair):
    one, two, _ = pair
    assert_close(final_state(two.folder), final_state(one.folder), 1e-6)


def test_a_checkpoint_of_two_workers_goes_on_on_one(pair, tmp_path):
    _, two, _ = pair
    resources = two.config.resources.model_copy(update={"workers": 1, "deepspeed": None})
    job = cut_short(two, tmp_path / two.method, resources)
    run_session(job, Process(), report=lambda step, values, checkpoint: None)
    assert_close(final_state(job.folder), final_state(two.folder), 1e-5)


@pytest.mark.slow
def test_a_checkpoint_of_one_worker_goes_on_on_two(pair, tmp_path):
    one, two, _ = pair
    job = cut_short(one, tmp_path / one.method, two.config.resources)
    train(job, resume=True, on_row=lambda row: None)
    assert_close(final_state(job.folder), final_state(one.folder), 1e-5)


def cut_short(job: TrainingJob, folder: Path, resources: ResourcesConfig) -> TrainingJob:
    """The job as it stood at half of its steps, to go on with other resources."""
    shutil.copytree(job.folder, folder, ignore=shutil.ignore_patterns("ray", "adapter", f"step-{STEPS:08d}"))
    return replace(job, folder=folder, config=job.config.model_copy(update={"resources": resources}))


def assert_close(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], tolerance: float) -> None:
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        if key.startswith("value/"):
            torch.testing.assert_close(found[key], value, rtol=0.0, atol=tolerance)


def test_they_have_moved_far_more_than_the_tolerance(pair):
    one, two, _ = pair
    start = load_file(one.folder / "checkpoints" / "step-00000010" / "state.safetensors")
    end = final_state(two.folder)
    for block in ("value/alpha", "value/theta"):
        moved = max(float((end[key] - start[key]).abs().max()) for key in end if key.startswith(block))
        assert moved > 2e-4


def test_the_trace_is_the_single_processes_and_the_driver_is_told_each_row_once(pair):
    one, two, told = pair
    expected, found = (
        [json.loads(line) for line in (job.folder / "trace.jsonl").read_text().splitlines()] for job in (one, two)
    )
    assert told == found
    assert [row["step"] for row in found] == list(range(STEPS + 1))
    for row, other in zip(found, expected, strict=True):
        assert row == pytest.approx(other, rel=1e-3, abs=1e-4)


def test_the_adapter_folder_is_whole(pair):
    _, two, _ = pair
    assert verify_adapter(two.folder / "adapter")["steps"] == STEPS


def test_what_the_experts_received_is_that_of_all_ranks(pair):
    one, two, _ = pair
    files = [job.folder / "expert_load.json" for job in (one, two)]
    assert [file.exists() for file in files] == [one.method == "calm_uq4ct"] * 2
    if files[0].exists():
        expected, found = (json.loads(file.read_text()) for file in files)
        assert found["steps"] == expected["steps"] == [10, 20]
        for key in ("share", "entropy"):
            torch.testing.assert_close(torch.tensor(found[key]), torch.tensor(expected[key]), rtol=0.0, atol=1e-4)
