"""`DeepSpeedSpace` against `TorchSpace`: real DeepSpeed, real processes, the same global batches.

The plain run is one process on whole batches. Float32 sums in another order differ in the seventh digit; 1e-6 is a
thousandth of what 20 steps move.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

STAGES = (0, 1, 2, 3)
HALF, WHOLE = 4, 8  # steps of the runs that are interrupted
CHECKS = ("loaded", "no_trace", "forward_only", "masters", "agree", "refuses")

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def plain(calm_on_ranks, tmp_path_factory) -> dict:
    """Plain runs by name, and the file with the state at half-time."""
    job = calm_on_ranks.Job
    file = tmp_path_factory.mktemp("plain") / "half.safetensors"
    half = calm_on_ranks.run(job("half", last=HALF))
    save_file(state_of(half), file)
    return {
        "lora": calm_on_ranks.run(job("lora")),
        "whole": calm_on_ranks.run(job("whole", last=WHOLE)),
        "full": calm_on_ranks.run(job("full", "full", last=4, passes=2)),
        "bf16": calm_on_ranks.run(job("bf16", "lora-bf16", last=2)),
        "single": calm_on_ranks.run(job("single", last=4, bilevel=False)),
        "start": calm_on_ranks.run(job("start", last=0)),
        "half-file": file,
    }


@pytest.fixture(scope="module")
def two_ranks(calm_on_ranks, launch, plain) -> Path:
    """Outcomes on two ranks."""
    job = calm_on_ranks.Job
    half = str(plain["half-file"])
    jobs = [job(f"lora{stage}", stage=stage) for stage in STAGES]
    jobs += [job("full3", "full", 3, last=4, passes=2), job("bf16", "lora-bf16", 3, last=2)]
    jobs += [job("single3", stage=3, last=4, bilevel=False), job("half3", stage=3, last=HALF)]
    jobs += [job(f"resumed{stage}", stage=stage, first=HALF, last=WHOLE, start=half) for stage in (1, 3)]
    return launch(2, jobs)


@pytest.fixture(scope="module")
def one_rank(calm_on_ranks, launch, plain, two_ranks) -> Path:
    """Outcomes on one rank; `moved` ones start from the state that two ranks saved at stage 3."""
    job = calm_on_ranks.Job
    half = two_ranks / "half3-state.safetensors"
    save_file(state_of(load_file(two_ranks / "half3.safetensors")), half)
    jobs = [job(f"lora{stage}", stage=stage) for stage in STAGES]
    jobs += [job(f"moved{stage}", stage=stage, first=HALF, last=WHOLE, start=str(half)) for stage in (0, 2)]
    return launch(1, jobs)


def state_of(outcome: dict) -> dict:
    """The outcome's part that the space can load."""
    return {key: value.clone() for key, value in outcome.items() if "/" in key}


def assert_equal_run(outcome: dict, expected: dict, atol: float = 1e-6) -> None:
    """Same variables and optimiser state within a tolerance, same steps exactly, every check passed."""
    assert outcome.keys() == expected.keys()
    assert [check for check in CHECKS if not outcome[check]] == []
    for key in expected:
        if key.startswith("step/"):
            assert torch.equal(outcome[key], expected[key]), key
    for key, value in state_of(expected).items():
        torch.testing.assert_close(outcome[key], value, rtol=0.0, atol=atol, msg=lambda text, key=key: f"{key}: {text}")
    steps = len(outcome["trace"])  # of the expected run's last steps, where the outcome started from a state
    torch.testing.assert_close(outcome["trace"], expected["trace"][-steps:], rtol=0.0, atol=10 * atol)


@pytest.mark.parametrize("stage", STAGES)
def test_one_rank_equals_the_plain_run(stage, one_rank, plain):
    assert_equal_run(load_file(one_rank / f"lora{stage}.safetensors"), plain["lora"])


@pytest.mark.parametrize("stage", STAGES)
def test_two_ranks_equal_the_plain_run(stage, two_ranks, plain):
    assert_equal_run(load_file(two_ranks / f"lora{stage}.safetensors"), plain["lora"])


def test_the_compared_runs_move_far_more_than_the_tolerance(plain):
    moved = {block: 0.0 for block in ("value/alpha", "value/theta")}
    for key, value in state_of(plain["lora"]).items():
        if key.startswith("value/"):
            block = key.partition(".")[0]
            moved[block] = max(moved[block], float((value - plain["start"][key]).abs().max()))
    assert min(moved.values()) > 1e-3


def test_full_fine_tuning_with_sharded_weights(two_ranks, plain):
    assert_equal_run(load_file(two_ranks / "full3.safetensors"), plain["full"])


def test_frozen_weights_in_bfloat16_with_sharded_weights(two_ranks, plain):
    """bfloat16 keeps 8 bits, so only the losses are compared; no weight may have changed its type on the way."""
    outcome = load_file(two_ranks / "bf16.safetensors")
    assert [check for check in CHECKS if not outcome[check]] == []
    assert all(value.dtype == torch.float32 for key, value in state_of(outcome).items())
    torch.testing.assert_close(outcome["trace"], plain["bf16"]["trace"], rtol=1e-2, atol=1e-2)


def test_single_level_training_needs_no_alpha(two_ranks, plain):
    """Within 1e-5: AdamW's first steps divide a gradient by its own size, so an entry near zero shows its rounding.

    With one thread instead of two in the plain run, one entry of 96 differs by 4e-6.
    """
    assert_equal_run(load_file(two_ranks / "single3.safetensors"), plain["single"], atol=1e-5)


@pytest.mark.parametrize("name", ["resumed1", "resumed3"])
def test_a_plain_state_continues_on_two_ranks(name, two_ranks, plain):
    assert_equal_run(load_file(two_ranks / f"{name}.safetensors"), plain["whole"])


@pytest.mark.parametrize("name", ["moved0", "moved2"])
def test_a_state_of_two_ranks_continues_on_one(name, one_rank, plain):
    assert_equal_run(load_file(one_rank / f"{name}.safetensors"), plain["whole"])


def test_a_sharded_state_continues_in_plain_pytorch(calm_on_ranks, one_rank, two_ranks, plain):
    file = str(two_ranks / "half3-state.safetensors")
    assert_equal_run(calm_on_ranks.run(calm_on_ranks.Job("back", first=HALF, last=WHOLE, start=file)), plain["whole"])


def test_trained_parameters_in_low_precision_are_refused():
    from components.training.deepspeed_engine import make_engine

    layer = torch.nn.Linear(2, 2, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match=r"float32.*weight"):
        make_engine(layer, dict(layer.named_parameters()), 3, 1e-3, 0.0, 1)


def test_alpha_without_an_optimizer_is_refused():
    from components.training.deepspeed_space import DeepSpeedSpace

    with pytest.raises(ValueError, match="no optimizer"):
        DeepSpeedSpace(None, {"l": torch.zeros(1)}, {}, None)
