"""The plan's memory against what real steps allocate: DeepSpeed at ZeRO-2 and ZeRO-3 on two ranks, and plain PyTorch.

Nothing is fitted: the figures come from the dry run on the meta device and from the formulas of `memory.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from components.config import RunConfig
from components.planning import memory
from components.planning.dry_run import DryRun
from components.planning.memory import Layout, Phase, peak

TOLERANCE = 0.15
EXACT = 0.005

SHARDED = {
    "sft at ZeRO-2": {"method": "sft", "stage": 2},
    "sft at ZeRO-3": {"method": "sft", "stage": 3},
    "calm at ZeRO-2, T = 5": {"method": "calm", "stage": 2, "inner_steps": 5},
    "calm at ZeRO-3, T = 5": {"method": "calm", "stage": 3, "inner_steps": 5},
}
FURTHER = {
    "calm at ZeRO-2, T = 1": {"method": "calm", "stage": 2},
    "calm at ZeRO-3, T = 1": {"method": "calm", "stage": 3},
    "sft at ZeRO-0": {"method": "sft", "stage": 0},
    "calm at ZeRO-1": {"method": "calm", "stage": 1},
    "calm at ZeRO-2 in bfloat16": {"method": "calm", "stage": 2, "dtype": "bfloat16"},
    "calm at ZeRO-3, recomputing": {"method": "calm", "stage": 3, "inner_steps": 3, "checkpointing": True},
    "every weight at ZeRO-2": {"method": "sft", "stage": 2, "kind": "full"},
    "every weight at ZeRO-3": {"method": "calm", "stage": 3, "kind": "full"},
    "uq4ct at ZeRO-2": {"method": "uq4ct", "stage": 2},
    "calm_uq4ct at ZeRO-3": {"method": "calm_uq4ct", "stage": 3},
}
LARGER = {
    "sft at ZeRO-3": {"method": "sft", "stage": 3},
    "sft at ZeRO-3, recomputing": {"method": "sft", "stage": 3, "checkpointing": True},
    "calm at ZeRO-3 in bfloat16": {"method": "calm", "stage": 3, "dtype": "bfloat16"},
    "calm at ZeRO-2 in bfloat16, T = 5": {"method": "calm", "stage": 2, "dtype": "bfloat16", "inner_steps": 5},
}
ALONE = {
    "sft": {"method": "sft", "workers": 1},
    "calm, T = 5": {"method": "calm", "inner_steps": 5, "workers": 1},
    "calm, recomputing": {"method": "calm", "checkpointing": True, "workers": 1},
}


def planned(content: dict[str, Any], dry_run: Callable[..., DryRun]) -> Phase:
    config = RunConfig.model_validate(content)
    stage = None if config.resources.deepspeed is None else config.resources.deepspeed.stage
    layout = Layout(config.resources.workers, stage, config.training.gradient_checkpointing)
    of = dry_run(content)
    usage = of.usage(config.training.batch_size // layout.gpus, layout.checkpointing)
    return peak(of.sizes, usage, of.method, config.calm.inner_steps, layout)


def errors(
    cases: dict[str, dict[str, Any]],
    world: int,
    tree: Callable[..., dict[str, Any]],
    dry_run: Callable[..., DryRun],
    allocated: Callable[..., dict[str, int]],
    **limits: int,
) -> dict[str, float]:
    """Plan against allocation, relative, by case."""
    contents = {name: tree(**case) for name, case in cases.items()}
    real = allocated(contents, world, **limits)
    found = {name: planned(content, dry_run).total / real[name] - 1 for name, content in contents.items()}
    print("\n".join(f"{name}: {error:+.1%} of {real[name] / 1e6:.1f} MB" for name, error in found.items()))
    return found


@pytest.mark.slow
@pytest.mark.distributed
def test_sharded_steps_allocate_what_is_planned(
    tree: Callable[..., dict[str, Any]], dry_run: Callable[..., DryRun], allocated: Callable[..., dict[str, int]]
) -> None:
    found = errors(SHARDED, 2, tree, dry_run, allocated)
    assert {name: error for name, error in found.items() if abs(error) > TOLERANCE} == {}


@pytest.mark.slow
def test_plain_steps_allocate_what_is_planned_to_half_a_percent(
    tree: Callable[..., dict[str, Any]], dry_run: Callable[..., DryRun], allocated: Callable[..., dict[str, int]]
) -> None:
    found = errors(ALONE, 1, tree, dry_run, allocated)
    assert {name: error for name, error in found.items() if abs(error) > EXACT} == {}


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.timeout(600)
def test_the_other_methods_stages_and_precisions(
    tree: Callable[..., dict[str, Any]], dry_run: Callable[..., DryRun], allocated: Callable[..., dict[str, int]]
) -> None:
    found = errors(FURTHER, 2, tree, dry_run, allocated)
    assert {name: error for name, error in found.items() if abs(error) > TOLERANCE} == {}


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.timeout(600)
def test_a_model_that_is_gathered_in_several_pieces(
    tree: Callable[..., dict[str, Any]], dry_run: Callable[..., DryRun], allocated: Callable[..., dict[str, int]]
) -> None:
    cases = {name: case | {"larger": True} for name, case in LARGER.items()}
    found = errors(cases, 2, tree, dry_run, allocated)
    assert {name: error for name, error in found.items() if abs(error) > TOLERANCE} == {}


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.timeout(600)
def test_a_model_of_which_zero_3_may_not_hold_everything(
    tree: Callable[..., dict[str, Any]],
    dry_run: Callable[..., DryRun],
    allocated: Callable[..., dict[str, int]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As with billions of weights, but everything a hundredth: 55 million weights, of which DeepSpeed may hold 10
    million and fetches one at a time.
    """
    live, prefetch = 10**7, 10**6
    monkeypatch.setattr(memory, "LIVE_ELEMENTS", live)
    monkeypatch.setattr(memory, "BUCKET_ELEMENTS", prefetch)
    cases = {name: case | {"larger": True} for name, case in LARGER.items() if case["stage"] == 3}
    limits = {"stage3_max_live_parameters": live, "stage3_max_reuse_distance": live}
    found = errors(cases, 2, tree, dry_run, allocated, **limits, stage3_prefetch_bucket_size=prefetch)
    assert {name: error for name, error in found.items() if abs(error) > TOLERANCE} == {}
