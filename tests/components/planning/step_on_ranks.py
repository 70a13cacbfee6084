"""Training steps on a small Llama, as one rank of several, that say how many bytes PyTorch had allocated at most.

    RANK=0 WORLD_SIZE=2 LOCAL_RANK=0 DS_ACCELERATOR=cpu python step_on_ranks.py FOLDER

FOLDER holds `jobs.json`, a list of `Job`s; they run one after another, and rank 0 writes FOLDER/peaks.json. The figures
are the allocator's own, read from the profiler's memory events, which begin before a job's first tensor is made.
"""

from __future__ import annotations

import gc
import json
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd.profiler import profile

from components.config import RunConfig
from components.data.prompts import EncodedQuestion
from components.models.adapter import attach_adapter, trainable_parameters
from components.models.scoring import ScoringModel
from components.training import deepspeed_engine
from components.training.baseline_losses import CftLoss
from components.training.build import make_head, make_lower, make_step
from components.training.feed import Feed
from components.training.methods import METHODS
from components.training.objectives.cft import BINS, BinAccuracy
from components.training.parameter_space import ParameterSpace, TorchSpace, block_groups
from components.training.recompute import recompute_activations
from components.training.steps import TrainingStep

ZERO_CONFIG = deepspeed_engine.zero_config
STEP = "one training step"
STEPS = 3
"""The optimiser's moments come into being in the first step. Of the others the one that takes less is read: gloo's
threads hold a buffer until they get to letting it go, which a busy machine puts off."""


@dataclass(frozen=True)
class Job:
    """What to train.

    Attributes:
        name: What to call it.
        config: A run file's content; `model.name` is a folder with `config.json`, whose weights are made here.
        method: Which method.
        tokens: Length of a row with all its options.
        answer_tokens: Tokens of each option.
        options: Options of a question.
        limits: Settings of ZeRO-3 in the place of the engine's.
    """

    name: str
    config: dict[str, Any]
    method: str
    tokens: int
    answer_tokens: int
    options: int
    limits: dict[str, int] = field(default_factory=dict)


def questions(job: Job, count: int, vocabulary: int) -> list[EncodedQuestion]:
    """Random questions, all equally long but for one in four, so that there is padding."""
    generator = torch.Generator().manual_seed(3)
    prompt = job.tokens - job.options * (job.answer_tokens - 1)

    def tokens(length: int) -> tuple[int, ...]:
        return tuple(torch.randint(3, vocabulary, (length,), generator=generator).tolist())

    return [
        EncodedQuestion(
            str(i), tokens(prompt - (i % 4 == 1)), tuple(tokens(job.answer_tokens) for _ in range(job.options)), 0
        )
        for i in range(count)
    ]


def build(job: Job, config: RunConfig, rank: int, world: int) -> TrainingStep:
    """The step as `components.training.session` builds it, without tokenizer and data files."""
    from transformers import AutoConfig, AutoModelForCausalLM

    method = METHODS[job.method]
    described = AutoConfig.from_pretrained(config.model.name)
    torch.manual_seed(0)
    base = AutoModelForCausalLM.from_config(described, dtype=getattr(torch, config.model.dtype))
    base.requires_grad_(False)
    model = attach_adapter(base, method.adapter_spec(config), seed=0)
    if config.training.gradient_checkpointing:
        recompute_activations(model)
    module = ScoringModel(model)
    head = make_head(method, config, base)
    alpha = {} if head is None else {n: p for n, p in head.named_parameters() if p.requires_grad}
    space = place(config, module, alpha, world)
    module.train()

    def feed(split: str, options: str) -> Feed:
        batch = config.training.batch_size
        return Feed(questions(job, batch, described.vocab_size), batch, options, 0, 0, rank, world)

    lower = make_lower(method, config, module, head, feed)
    if isinstance(lower, CftLoss):
        lower.bins = BinAccuracy((1,) * BINS, (2,) * BINS)
    return make_step(method, config, space, lower, module, head, feed)


def place(config: RunConfig, module: ScoringModel, alpha: dict[str, torch.nn.Parameter], world: int) -> ParameterSpace:
    theta = trainable_parameters(module.model)
    if config.resources.deepspeed is None:
        return TorchSpace(alpha, theta, torch.optim.AdamW(block_groups(alpha, theta), lr=1e-3))
    from components.training.deepspeed_space import DeepSpeedSpace

    engine = deepspeed_engine.make_engine(
        module, theta, config.resources.deepspeed.stage, 1e-3, 0.0, config.training.batch_size // world
    )
    return DeepSpeedSpace(engine, alpha, theta, torch.optim.AdamW(block_groups(alpha, {})) if alpha else None)


def limited(limits: dict[str, int]) -> Callable[[int, int], dict[str, Any]]:
    """The engine's configuration with other limits."""

    def config(*arguments: int) -> dict[str, Any]:
        content = ZERO_CONFIG(*arguments)
        content["zero_optimization"] |= limits
        return content

    return config


def peaks(profiler: profile) -> list[int]:
    """Most bytes allocated at any moment of each step."""
    events = sorted(profiler.kineto_results.events(), key=lambda event: event.start_ns())
    alive, found = 0, []
    for event in events:
        if event.name() == "[memory]":
            alive += event.nbytes()
        elif event.name() == STEP:
            found.append(alive)
        if found:
            found[-1] = max(found[-1], alive)
    return found


def run(job: Job, rank: int, world: int) -> int:
    """Bytes that a step of a job allocates at most, the model and everything else included."""
    config = RunConfig.model_validate(job.config)
    deepspeed_engine.zero_config = limited(job.limits)
    with profile(profile_memory=True, use_kineto=True) as profiler:
        step = build(job, config, rank, world)
        for number in range(STEPS):
            with torch.autograd.profiler.record_function(STEP):
                step(number)
    return min(peaks(profiler)[1:])


def main(folder: Path) -> None:
    """Runs the jobs of a folder as one rank."""
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=world)
    found = {}
    for job in json.loads((folder / "jobs.json").read_text()):
        found[job["name"]] = run(Job(**job), rank, world)
        gc.collect()  # what a job leaves behind must not be freed while the next one is being counted
        dist.barrier()
    if rank == 0:
        (folder / "peaks.json").write_text(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
