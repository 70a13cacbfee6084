"""The plan of a whole run: every method that trains, in every layout. Nothing is read but the model's `config.json`."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from components.config import RunConfig
from components.errors import UsageError
from components.models.base import resolve_model
from components.planning.dry_run import DryRun, Rows
from components.planning.layouts import (
    HEADROOM,
    Candidate,
    MethodPlan,
    cheapest,
    cheapest_for_all,
    gpu_counts,
    plan_method,
)
from components.planning.memory import Layout
from components.training.methods import METHODS

TEXT_ANSWER_TOKENS = 8
"""Assumed length of an option that is scored by its text; by letter it is one token."""


@dataclass(frozen=True)
class Machine:
    """What the run is planned for.

    Attributes:
        gpu_memory: GiB of one GPU.
        most_gpus: How many there are at most.
        tflops: 1e12 operations a second that a GPU gets through.
    """

    gpu_memory: float
    most_gpus: int
    tflops: float

    def __post_init__(self) -> None:
        """Checks that all are positive."""
        if self.gpu_memory <= 0 or self.most_gpus < 1 or self.tflops <= 0:
            raise UsageError("--gpu-memory, --max-gpus and --tflops must be above 0")


@dataclass(frozen=True)
class Plan:
    """A run's plan.

    Attributes:
        config: The run.
        machine: What it is planned for.
        rows: Shape of the rows.
        methods: One plan for each method that trains, in the run file's order.
        left_out: Numbers of GPUs among which the batch cannot be divided.
    """

    config: RunConfig
    machine: Machine
    rows: Rows
    methods: tuple[MethodPlan, ...]
    left_out: tuple[int, ...]

    @property
    def asked(self) -> bool:
        """Whether the run file has gradient checkpointing on."""
        return self.config.training.gradient_checkpointing


def rows_of(config: RunConfig, tokens: int | None, answer_tokens: int | None, options: int) -> Rows:
    """Shape of the rows: the longest that the run file lets through, unless told otherwise."""
    by_letter = config.data.prompt.scoring == "letter"
    return Rows(
        config.data.max_length if tokens is None else tokens,
        answer_tokens if answer_tokens is not None else 1 if by_letter else TEXT_ANSWER_TOKENS,
        options,
    )


def make_plan(config: RunConfig, machine: Machine, rows: Rows, say: Callable[[str], None]) -> Plan:
    """Plans every method of a run that trains something.

    Args:
        config: The run.
        machine: What it is planned for.
        rows: Shape of the rows.
        say: Told what is going on.

    Raises:
        UsageError: No method of the run trains anything.
        ModelError: The model cannot be found or laid out.
    """
    methods = [METHODS[name] for name in config.methods if METHODS[name].trains_adapter]
    if not methods:
        raise UsageError(f"nothing to plan: none of the methods {', '.join(config.methods)} trains anything")
    resolved = resolve_model(config.model)
    gpus, left_out = gpu_counts(config.training.batch_size, machine.most_gpus)
    plans = []
    for method in methods:
        say(f"{method.name}: laying out {config.model.name} without its weights")
        dry_run = DryRun(resolved, config, method, rows)
        plans.append(plan_method(dry_run, config, gpus, machine.gpu_memory, machine.tflops))
    return Plan(config, machine, rows, tuple(plans), tuple(left_out))


def as_dict(plan: Plan) -> dict[str, Any]:
    """The whole plan as plain data; memory in bytes."""
    return {
        "run": plan.config.run,
        "model": plan.config.model.name,
        "gpu_memory_gib": plan.machine.gpu_memory,
        "usable_bytes": plan.methods[0].candidates[0].usable,
        "tflops": plan.machine.tflops,
        "batch_size": plan.config.training.batch_size,
        "rows": dataclasses.asdict(plan.rows),
        "steps": plan.config.training.steps,
        "assumptions": assumptions(plan),
        "methods": {of.method.name: _method_dict(of, plan.asked) for of in plan.methods},
        "cheapest_for_all": _layout_dict(cheapest_for_all(plan.methods, plan.asked)),
        "cheapest_for_all_otherwise": _layout_dict(cheapest_for_all(plan.methods, not plan.asked)),
    }


def assumptions(plan: Plan) -> list[str]:
    """What the figures rest on, in words."""
    rows, machine, training = plan.rows, plan.machine, plan.config.training
    return [
        f"rows of {rows.tokens} tokens, {rows.options} options of {rows.answer_tokens} tokens "
        "(--tokens, --options, --answer-tokens; the longest row is data.max_length)",
        f"a batch of {training.batch_size} rows, divided evenly among the GPUs, all at once on each",
        f"{machine.gpu_memory:g} GiB a GPU (--gpu-memory), of which {HEADROOM:.0%} stay free for the CUDA context, "
        "NCCL and fragmentation",
        f"{machine.tflops:g} TFLOP/s got through by each GPU (--tflops); communication, evaluation and checkpoints "
        "take no time",
        *(
            f"the posterior of {of.method.name}, fitted after training, is left out: a forward and a backward pass of "
            "each training question"
            for of in plan.methods
            if of.method.prediction == "laplace"
        ),
    ]


def checkpointing_words(checkpointing: bool) -> str:
    """`with gradient checkpointing`, or without."""
    return f"{'with' if checkpointing else 'without'} gradient checkpointing"


def _method_dict(of: MethodPlan, asked: bool) -> dict[str, Any]:
    return {
        "sizes": dataclasses.asdict(of.dry_run.sizes),
        "flops_per_step": {checkpointing_words(c): of.step_flops[c] for c in (False, True)},
        "gpu_hours": {checkpointing_words(c): of.gpu_hours(c) for c in (False, True)},
        "layouts": [
            {
                **(_layout_dict(c.layout) or {}),
                "phase": c.phase.name,
                "parts": dict(c.phase.parts),
                "total": c.phase.total,
                "fits": c.fits,
                "verdict": c.verdict,
            }
            for c in of.candidates
        ],
        "cheapest": _chosen_dict(of.of(asked)),
        "cheapest_otherwise": _chosen_dict(of.of(not asked)),
    }


def _chosen_dict(candidates: list[Candidate]) -> dict[str, Any] | None:
    chosen = cheapest(candidates)
    return None if chosen is None else _layout_dict(chosen.layout)


def _layout_dict(layout: Layout | None) -> dict[str, Any] | None:
    if layout is None:
        return None
    return {"gpus": layout.gpus, "stage": layout.stage, "gradient_checkpointing": layout.checkpointing}
