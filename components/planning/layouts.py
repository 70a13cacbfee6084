"""Which layouts of a training there are, what each takes, and the cheapest that fits a GPU."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from components.config import RunConfig
from components.planning.dry_run import DryRun
from components.planning.flops import gpu_hours, step_flops
from components.planning.memory import Layout, Phase, peak
from components.training.methods import Method

GIB = 2**30
STAGES: tuple[int | None, ...] = (None, 0, 1, 2, 3)
HEADROOM = 0.1
"""Share of a GPU's memory that is not planned with: the CUDA context and the libraries' work spaces (about 1 GiB), the
buffers of NCCL, and what PyTorch's allocator loses between blocks of different sizes."""


@dataclass(frozen=True)
class Candidate:
    """A layout and what it takes.

    Attributes:
        layout: GPUs, ZeRO stage, checkpointing.
        phase: The phase of a step in which a GPU holds most.
        usable: Bytes of a GPU that are planned with.
    """

    layout: Layout
    phase: Phase
    usable: float

    @property
    def free(self) -> float:
        """Bytes left; negative where it does not fit."""
        return self.usable - self.phase.total

    @property
    def fits(self) -> bool:
        """Whether the GPU's memory is enough."""
        return self.free >= 0

    @property
    def verdict(self) -> str:
        """Why it does or does not fit."""
        if self.fits:
            return f"fits, {self.free / GIB:.1f} GiB to spare"
        part, size = max(self.phase.parts.items(), key=lambda item: item[1])
        return (
            f"lacks {-self.free / GIB:.1f} GiB in the phase '{self.phase.name}'; of its "
            f"{self.phase.total / GIB:.1f} GiB the part '{part}' takes {size / GIB:.1f}"
        )


@dataclass(frozen=True)
class MethodPlan:
    """What a method's training takes.

    Attributes:
        method: Its name.
        dry_run: What it was told from.
        candidates: By GPUs, checkpointing as the run file has it first, then by stage.
        step_flops: Operations of one step over all GPUs, by checkpointing.
        steps: Optimiser steps, of all members of an ensemble together.
        tflops: What a GPU gets through.
    """

    method: Method
    dry_run: DryRun
    candidates: tuple[Candidate, ...]
    step_flops: dict[bool, float]
    steps: int
    tflops: float

    def gpu_hours(self, checkpointing: bool) -> float:
        """Hours of GPUs for all steps, however many GPUs share the work."""
        return gpu_hours(self.step_flops[checkpointing] * self.steps, self.tflops)

    def of(self, checkpointing: bool) -> list[Candidate]:
        """The candidates with or without checkpointing."""
        return [c for c in self.candidates if c.layout.checkpointing == checkpointing]


def gpu_counts(batch_size: int, most: int) -> tuple[list[int], list[int]]:
    """Powers of two up to a number: those among which a batch can be divided, and the others."""
    counts = [2**i for i in range(most.bit_length()) if 2**i <= most]
    return [n for n in counts if batch_size % n == 0], [n for n in counts if batch_size % n]


def plan_method(
    dry_run: DryRun, config: RunConfig, gpus: Sequence[int], gpu_memory_gib: float, tflops: float
) -> MethodPlan:
    """What every layout takes.

    Args:
        dry_run: Of the method.
        config: The run.
        gpus: Numbers of GPUs, each a divisor of the batch size.
        gpu_memory_gib: Of one GPU.
        tflops: What a GPU gets through.
    """
    method, steps, inner = dry_run.method, config.training.steps, config.calm.inner_steps
    turns = config.iterate.calibration_steps
    stages = STAGES if method.adapter != "blob" else (None,)  # whose second step DeepSpeed would not see
    if method.prediction == "ensemble":
        steps *= config.ensemble.members
    asked = config.training.gradient_checkpointing
    usable = gpu_memory_gib * GIB * (1.0 - HEADROOM)
    found = []
    for n in gpus:
        for checkpointing in (asked, not asked):
            usage = dry_run.usage(config.training.batch_size // n, checkpointing)
            layouts = [Layout(n, stage, checkpointing) for stage in stages]
            found += [Candidate(x, peak(dry_run.sizes, usage, method, inner, x), usable) for x in layouts]
    flops = {
        checkpointing: gpus[0]
        * step_flops(dry_run.usage(config.training.batch_size // gpus[0], checkpointing), method, inner, turns)
        for checkpointing in (False, True)
    }
    return MethodPlan(method, dry_run, tuple(found), flops, steps, tflops)


def cheapest(candidates: Iterable[Candidate]) -> Candidate | None:
    """Of those that fit, the one with the fewest GPUs, then the lowest stage; plain training counts below stage 0."""
    fitting = [c for c in candidates if c.fits]
    return min(fitting, key=lambda c: (c.layout.gpus, -1 if c.layout.stage is None else c.layout.stage), default=None)


def cheapest_for_all(plans: Sequence[MethodPlan], checkpointing: bool) -> Layout | None:
    """The cheapest layout in which every method fits."""
    fits = [{c.layout for c in plan.of(checkpointing) if c.fits} for plan in plans]
    shared = [c for c in plans[0].of(checkpointing) if all(c.layout in of for of in fits)]
    found = cheapest(shared)
    return None if found is None else found.layout
