"""CALM steps on a tiny model, alone or as one rank of several: what `test_deepspeed_space.py` compares.

The tests import it for the plain run and start it once per rank for the others:

    RANK=0 WORLD_SIZE=2 LOCAL_RANK=0 DS_ACCELERATOR=cpu python calm_on_ranks.py FOLDER

FOLDER holds `jobs.json`, a list of `Job`s; they run one after another in one process group, and rank 0 writes each
job's outcome to FOLDER/<name>.safetensors.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import Tensor

from components.config import AdapterConfig
from components.data.batching import collate
from components.data.prompts import EncodedQuestion
from components.errors import CaltuneError, CheckpointError
from components.models.adapter import attach_adapter, trainable_parameters
from components.models.calibration_head import CalibrationHead
from components.models.scoring import ScoringModel
from components.training.bilevel.bome import Bome
from components.training.objectives.cross_entropy import cross_entropy_sum
from components.training.objectives.entropy import option_entropy_sum
from components.training.parameter_space import (
    BlockVector,
    Loss,
    ParameterSpace,
    TorchSpace,
    block_groups,
    sum_over_ranks,
)

if TYPE_CHECKING:
    from transformers import LlamaForCausalLM

VOCABULARY, ROWS, WEIGHT_DECAY = 64, 6, 0.05
BATCH_SEED = 9000
"""Adam makes a full step of either sign from a gradient that is zero up to rounding. With these batches none is, so
that summing in another order changes nothing beyond 1e-7; with one seed in four it would."""


@dataclass(frozen=True)
class Job:
    """One run.

    Attributes:
        name: Of the outcome's file.
        kind: `lora`, `lora-bf16` (frozen base in bfloat16) or `full`.
        stage: ZeRO stage; None is `TorchSpace` on the global batch.
        first: First step, counted from 0.
        last: Last step, excluded.
        start: File with the state to begin from.
        bilevel: BOME; else plain steps on the lower loss, without alpha.
        passes: Forward passes that the lower loss takes.
    """

    name: str
    kind: str = "lora"
    stage: int | None = None
    first: int = 0
    last: int = 20
    start: str | None = None
    bilevel: bool = True
    passes: int = 1


def tiny_model(kind: str) -> ScoringModel:
    """The tiny Llama with an adapter of the kind; rank 3 gives tensors that two ranks cannot share evenly."""
    model = tiny_llama()
    if kind == "lora-bf16":
        model = model.bfloat16()
    return ScoringModel(attach_adapter(model, AdapterConfig(kind="full" if kind == "full" else "lora", r=3), seed=1))


def tiny_llama() -> LlamaForCausalLM:
    """A tied Llama of 2 layers, its width odd so that two ranks cannot share its tensors evenly."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=49,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=True,
        initializer_range=0.1,
    )
    return LlamaForCausalLM(config)


def questions(step: int) -> list[EncodedQuestion]:
    """The global batch of a step: prompts and options of several lengths."""
    generator = torch.Generator().manual_seed(BATCH_SEED + step)

    def tokens(count: int) -> tuple[int, ...]:
        return tuple(torch.randint(VOCABULARY, (count,), generator=generator).tolist())

    return [
        EncodedQuestion(str(i), tokens(4 + i % 3), tuple(tokens(1 + (i + k) % 2) for k in range(3)), i % 3)
        for i in range(ROWS)
    ]


def make_space(
    job: Job, model: ScoringModel, head: CalibrationHead, world: int
) -> tuple[ParameterSpace, Callable[[], None]]:
    """A job's space, and what closes it."""
    theta = trainable_parameters(model)
    alpha = dict(head.named_parameters()) if job.bilevel else {}
    if job.stage is None:
        groups = block_groups(alpha, theta, WEIGHT_DECAY)
        return TorchSpace(alpha, theta, torch.optim.AdamW(groups)), lambda: None
    from components.training.deepspeed_engine import make_engine
    from components.training.deepspeed_space import DeepSpeedSpace

    engine = make_engine(model, theta, job.stage, 1.0, WEIGHT_DECAY, ROWS // world)
    optimizer = torch.optim.AdamW(block_groups(alpha, {})) if alpha else None
    return DeepSpeedSpace(engine, alpha, theta, optimizer), engine.destroy


def losses(
    model: ScoringModel, head: CalibrationHead, step: int, passes: int, rank: int, world: int
) -> tuple[Loss, Loss]:
    """Upper and lower loss of this rank's share of a step."""
    everyone = questions(step)
    share = everyone[rank::world]
    every, golds = collate(share, 0), [collate(share[i::passes], 0, "gold") for i in range(passes)]
    answer_tokens = sum(len(q.options[q.answer]) for q in everyone)
    if step % 5 == 1:  # a trainer evaluates between steps
        with torch.no_grad():
            model(every)
    return (
        lambda: -option_entropy_sum(head(model(every)), every) / len(everyone),
        lambda: sum(cross_entropy_sum(head(model(gold)), gold) for gold in golds) / answer_tokens,
    )


def run(job: Job, rank: int = 0, world: int = 1) -> dict[str, Tensor]:
    """Runs a job on this rank.

    Returns:
        The space's state after the last step; `trace`, f, g and lambda of every step; and which checks every rank
        passed:
        `loaded` (a loaded state reads back bit for bit), `no_trace` (computing a direction changes no bit),
        `forward_only` (alpha's gradient needs no graph through the model), `masters` (working weights equal the
        optimiser's), `agree` (every rank holds the same), `refuses` (bad input raises).
    """
    model, head = tiny_model(job.kind), CalibrationHead(VOCABULARY)
    space, close = make_space(job, model, head, world)
    checks = {"loaded": True, "no_trace": True, "forward_only": True}
    if job.start is not None:
        space.load_state_dict(load_file(job.start))
        checks["loaded"] = same(space.state_dict(), load_file(job.start))
    bome = Bome(space, inner_steps=2, inner_rate=0.2)
    trace = []
    for step in range(job.first, job.last):
        upper, lower = losses(model, head, step, job.passes, rank, world)
        space.set_learning_rates({"alpha": 1e-2 / (1 + step), "theta": 1e-3 / (1 + step)})
        if not job.bilevel:
            value, gradient = space.gradient(lower, wrt=("theta",))
            space.apply(gradient)
            trace.append([0.0, value, 0.0])
            continue
        if step == job.first + 2:
            before, weights = space.state_dict(), space.snapshot_theta()
            bome.direction(upper, lower)
            restored = all(torch.equal(a, b) for a, b in zip(space.snapshot_theta(), weights, strict=True))
            checks["no_trace"] = restored and same(space.state_dict(), before)
            checks["forward_only"] = not graph_reaches_model(space, model, head, step)
        state = bome.step(upper, lower)
        trace.append([state.f, state.g, state.lam])
    outcome = space.state_dict()
    checks["masters"] = job.stage is None or masters_equal_weights(trainable_parameters(model))
    checks["agree"] = world == 1 or ranks_agree(outcome)
    checks["refuses"] = job.stage is None or refuses_bad_input(space, job.stage, outcome)
    close()
    passed = {key: torch.tensor(sum_over_ranks(float(value)) == world) for key, value in checks.items()}
    return outcome | {"trace": torch.tensor(trace)} | passed


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    """Whether two states are equal bit for bit."""
    return one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)


def graph_reaches_model(space: ParameterSpace, model: ScoringModel, head: CalibrationHead, step: int) -> bool:
    """Whether the model's logits carry a graph while alpha alone is differentiated."""
    seen = []

    def loss() -> Tensor:
        logits = model(collate(questions(step), 0))
        seen.append(logits.requires_grad)
        return head(logits).logsumexp(dim=-1).sum()

    space.gradient(loss, wrt=("alpha",))
    return seen != [False]


def masters_equal_weights(theta: dict[str, torch.nn.Parameter]) -> bool:
    """Whether what the forward pass reads is what DeepSpeed's optimiser holds (stage 0 holds one copy only)."""
    import deepspeed
    from deepspeed.utils import safe_get_full_fp32_param

    equal = True
    for p in theta.values():
        master = safe_get_full_fp32_param(p)
        with deepspeed.zero.GatheredParameters([p]):
            equal &= master is None or torch.equal(master, p.detach())
    return equal


def ranks_agree(state: dict[str, Tensor]) -> bool:
    """Whether this rank holds rank 0's numbers."""
    mine = torch.cat([state[key].flatten() for key in sorted(state)])
    first = mine.clone()
    dist.broadcast(first, 0)
    return torch.equal(mine, first)


def refuses_bad_input(space: ParameterSpace, stage: int, state: dict[str, Tensor]) -> bool:
    """Whether a state with uneven steps and, where DeepSpeed would skip the step, a NaN direction are errors."""
    first = next(key for key in state if key.startswith("step/theta."))
    refused = 0
    try:
        space.load_state_dict(state | {first: state[first] + 1})
    except CheckpointError:
        refused += 1
    alpha = tuple(torch.zeros_like(v) for key, v in state.items() if key.startswith("value/alpha."))
    try:
        space.apply(BlockVector(alpha, tuple(torch.full_like(w, torch.nan) for w in space.snapshot_theta())))
    except CaltuneError:
        refused += 1
    return refused == (1 if stage == 0 else 2)


def run_jobs(folder: Path, run: Callable[[dict, int, int], dict[str, Tensor]]) -> None:
    """Runs every job of a folder as one rank."""
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=world)
    for job in json.loads((folder / "jobs.json").read_text()):
        outcome = run(job, rank, world)
        if rank == 0:
            save_file(outcome, folder / f"{job['name']}.safetensors")
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    run_jobs(Path(sys.argv[1]), lambda job, *where: run(Job(**job), *where))
