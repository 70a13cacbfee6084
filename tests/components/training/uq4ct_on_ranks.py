"""UQ4CT steps on a tiny mixture of experts, alone or as one rank of several: what `test_uq4ct_on_ranks.py` compares.

Started like its sibling `calm_on_ranks.py`, from which it has its model, its checks and its way of running jobs.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from calm_on_ranks import (
    VOCABULARY,
    WEIGHT_DECAY,
    masters_equal_weights,
    questions,
    ranks_agree,
    run_jobs,
    same,
    tiny_llama,
)
from safetensors.torch import load_file
from torch import Tensor

from components.config import MixLoraConfig
from components.config_methods import CalmConfig, Uq4ctConfig
from components.models.adapter import attach_adapter, trainable_parameters
from components.models.calibration_head import CalibrationHead
from components.models.scoring import ScoringModel
from components.training.feed import Feed
from components.training.lower_losses import Uq4ctLoss
from components.training.objectives.balance import expert_counts
from components.training.parameter_space import ParameterSpace, TorchSpace, block_groups, sum_over_ranks
from components.training.recompute import recompute_activations
from components.training.steps import CalmStep, SupervisedStep

BATCH = 6


@dataclass(frozen=True)
class Job:
    """One run.

    Attributes:
        name: Of the outcome's file.
        stage: ZeRO stage; None is `TorchSpace`.
        first: First step, counted from 0.
        last: Last step, excluded.
        start: File with the state to begin from.
        bilevel: CALM on top.
        attention: Experts on the attention projections too, or one LoRA each.
        recompute: Gradient checkpointing.
    """

    name: str
    stage: int | None = None
    first: int = 0
    last: int = 20
    start: str | None = None
    bilevel: bool = False
    attention: str = "lora"
    recompute: bool = False


def mixture(job: Job) -> ScoringModel:
    """Routers that tell tokens apart from the start, so that two ranks' few tokens go to different experts."""
    spec = MixLoraConfig(r=3, num_experts=8, top_k=2, attention=job.attention, router_init_std=0.3)
    model = attach_adapter(tiny_llama(), spec, seed=1)
    if job.recompute:
        recompute_activations(model)
    return ScoringModel(model).train()


def make_space(
    job: Job, model: ScoringModel, head: CalibrationHead | None, world: int
) -> tuple[ParameterSpace, Callable[[], None]]:
    """A job's space, and what closes it."""
    theta = trainable_parameters(model)
    alpha = {} if head is None else dict(head.named_parameters())
    if job.stage is None:
        return TorchSpace(alpha, theta, torch.optim.AdamW(block_groups(alpha, theta, WEIGHT_DECAY))), lambda: None
    from components.training.deepspeed_engine import make_engine
    from components.training.deepspeed_space import DeepSpeedSpace

    engine = make_engine(model, theta, job.stage, 1.0, WEIGHT_DECAY, BATCH // world)
    optimizer = torch.optim.AdamW(block_groups(alpha, {})) if alpha else None
    return DeepSpeedSpace(engine, alpha, theta, optimizer), engine.destroy


def run(job: Job, rank: int = 0, world: int = 1) -> dict[str, Tensor]:
    """Runs a job on this rank.

    Returns:
        The space's state after the last step; `trace`, the values of every step in the order of their names; `only_one`
        the number of (step, router, expert) that exactly one of the ranks used; and which checks every rank passed:
        `loaded` (a loaded state reads back bit for bit), `masters` (working weights equal the optimiser's), `agree`
        (every rank holds the same, weights and trace).
    """
    model = mixture(job)
    head = CalibrationHead(VOCABULARY) if job.bilevel else None
    space, close = make_space(job, model, head, world)
    checks = {"loaded": True}
    if job.start is not None:
        space.load_state_dict(load_file(job.start))
        checks["loaded"] = same(space.state_dict(), load_file(job.start))
    pool = [q for step in range(4) for q in questions(step)]
    feed = Feed(pool, BATCH, "all", seed=3, pad_id=0, rank=rank, world_size=world)
    lower = Uq4ctLoss(model, feed, Uq4ctConfig(balance_weight=0.1, z_loss_weight=0.01), head)
    step = SupervisedStep(space, lower)
    if head is not None:
        step = CalmStep(space, lower, model, head, feed, CalmConfig(inner_steps=2))
    trace, only_one = [], 0
    for number in range(job.first, job.last):
        space.set_learning_rates({"alpha": 1e-2, "theta": 1e-3 / (1 + number), "router": 1e-2 / (1 + number)})
        values = step(number)
        trace.append([values[name] for name in sorted(values)])
        only_one += used_by_one(model, world)
    outcome = space.state_dict() | {"trace": torch.tensor(trace), "only_one": torch.tensor(float(only_one))}
    checks["masters"] = job.stage is None or masters_equal_weights(trainable_parameters(model))
    checks["agree"] = world == 1 or ranks_agree(outcome)
    close()
    return outcome | {key: torch.tensor(sum_over_ranks(float(value)) == world) for key, value in checks.items()}


def used_by_one(model: ScoringModel, world: int) -> int:
    """How many experts of all routers got tokens on exactly one rank in the last forward pass."""
    used = (expert_counts(model.routing).sum(dim=1) > 0).long()
    if world > 1:
        dist.all_reduce(used)
    return int((used == 1).sum())


if __name__ == "__main__":
    run_jobs(Path(sys.argv[1]), lambda job, *where: run(Job(**job), *where))
