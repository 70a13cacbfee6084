"""UQ4CT on real ranks: the balance loss is no sum of the ranks' own, and ranks choose different experts all the time.

As in `test_deepspeed_space.py` the plain run is one process on whole batches. The tolerance is a hundredth of what the
routers move; sums in another order differ in the seventh digit.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

STAGES = (0, 2, 3)
HALF, WHOLE = 4, 8  # steps of the runs that are interrupted
CHECKS = ("loaded", "masters", "agree")
ATOL = 1e-5

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(240)]


@pytest.fixture(scope="module")
def plain(uq4ct_on_ranks, tmp_path_factory) -> dict:
    """Plain runs by name, and the file with the state at half-time."""
    job = uq4ct_on_ranks.Job
    file = tmp_path_factory.mktemp("plain") / "half.safetensors"
    half = uq4ct_on_ranks.run(job("half", last=HALF))
    save_file(state_of(half), file)
    return {
        "half": half,
        "uq4ct": uq4ct_on_ranks.run(job("uq4ct")),
        "calm": uq4ct_on_ranks.run(job("calm", last=4, bilevel=True)),
        "experts": uq4ct_on_ranks.run(job("experts", last=3, attention="mixlora")),
        "whole": uq4ct_on_ranks.run(job("whole", last=WHOLE)),
        "start": uq4ct_on_ranks.run(job("start", last=0)),
        "half-file": file,
    }


@pytest.fixture(scope="module")
def two_ranks(uq4ct_on_ranks, launch, plain) -> Path:
    """Outcomes on two ranks."""
    job = uq4ct_on_ranks.Job
    jobs = [job(f"uq4ct{stage}", stage) for stage in STAGES]
    jobs += [job("uq4ct-plain"), job("calm3", 3, last=4, bilevel=True), job("half3", 3, last=HALF)]
    jobs += [job("experts3", 3, last=3, attention="mixlora"), job("recompute3", 3, last=HALF, recompute=True)]
    jobs += [job(f"resumed{stage}", stage, HALF, WHOLE, str(plain["half-file"])) for stage in STAGES]
    return launch(2, jobs, "uq4ct_on_ranks")


def state_of(outcome: dict) -> dict:
    """The outcome's part that the space can load."""
    return {key: value.clone() for key, value in outcome.items() if "/" in key}


def assert_equal_run(outcome: dict, expected: dict) -> None:
    """Same variables and optimiser state within the tolerance, every check passed."""
    assert outcome.keys() == expected.keys()
    assert [check for check in CHECKS if not outcome[check]] == []
    for key, value in state_of(expected).items():
        torch.testing.assert_close(outcome[key], value, rtol=0.0, atol=ATOL, msg=lambda text, key=key: f"{key}: {text}")
    steps = len(outcome["trace"])
    torch.testing.assert_close(outcome["trace"], expected["trace"][-steps:], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["uq4ct-plain", *(f"uq4ct{stage}" for stage in STAGES)])
def test_two_ranks_equal_the_plain_run(name, two_ranks, plain):
    """20 steps; had a rank waited for experts that only the other one uses, the launch would have run out of time."""
    outcome = load_file(two_ranks / f"{name}.safetensors")
    assert outcome.pop("only_one") > 40, "in every step each rank must use an expert that the other one does not"
    assert_equal_run(outcome, {key: value for key, value in plain["uq4ct"].items() if key != "only_one"})


@pytest.mark.parametrize(("name", "expected"), [("calm3", "calm"), ("experts3", "experts"), ("recompute3", "half")])
def test_other_kinds_with_sharded_weights(name, expected, two_ranks, plain):
    """CALM on top, experts on the attention too, activations computed again in the backward pass."""
    outcome = load_file(two_ranks / f"{name}.safetensors")
    assert outcome.pop("only_one") > 0
    assert_equal_run(outcome, {key: value for key, value in plain[expected].items() if key != "only_one"})


@pytest.mark.parametrize("stage", STAGES)
def test_a_plain_state_continues_on_two_ranks(stage, two_ranks, plain):
    """Routers are a parameter group of their own in the engine; the state's names know nothing of groups."""
    outcome = load_file(two_ranks / f"resumed{stage}.safetensors")
    assert_equal_run(outcome | {"only_one": plain["whole"]["only_one"]}, plain["whole"])


def test_a_sharded_state_continues_in_plain_pytorch(uq4ct_on_ranks, two_ranks, plain, tmp_path):
    file = tmp_path / "state.safetensors"
    save_file(state_of(load_file(two_ranks / "half3.safetensors")), file)
    assert_equal_run(uq4ct_on_ranks.run(uq4ct_on_ranks.Job("back", None, HALF, WHOLE, str(file))), plain["whole"])


def test_the_compared_runs_move_far_more_than_the_tolerance(plain):
    """Routers at a rate ten times the experts' move ten times as far."""
    moved = {"router": 0.0, "lora": 0.0}
    for key, value in state_of(plain["uq4ct"]).items():
        if key.startswith("value/"):
            kind = "router" if ".router." in key else "lora"
            moved[kind] = max(moved[kind], float((value - plain["start"][key]).abs().max()))
    assert moved["lora"] > 100 * ATOL
    assert moved["router"] > 5 * moved["lora"]
