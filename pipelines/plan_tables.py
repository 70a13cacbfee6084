"""A plan as tables of 80 columns for the terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING

from components.planning.layouts import GIB, Candidate, MethodPlan, cheapest, cheapest_for_all
from components.planning.memory import PARTS, Layout, Part
from components.planning.run_plan import Plan, assumptions
from components.planning.run_plan import checkpointing_words as _words

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

HEADINGS: dict[Part, str] = {
    "weights": "weights",
    "adapter": "adapter",
    "gradients": "grads",
    "optimiser": "optim",
    "activations": "activ",
    "bilevel": "bilevel",
    "logits": "logits",
    "buffers": "buffers",
}
"""Short enough that the table takes 80 columns."""


def print_plan(plan: Plan, console: Console) -> None:
    """Prints a table for each method, and what follows from it."""
    for of in plan.methods:
        console.print(_headline(plan, of), soft_wrap=True)
        console.print(f"GiB a GPU, {_words(plan.asked)}:")
        console.print(_parts_table(of.of(plan.asked)))
        console.print(f"GiB a GPU in all, {_words(not plan.asked)}:")
        console.print(_totals_table(of.of(not plan.asked)))
        for checkpointing in (plan.asked, not plan.asked):
            console.print(_choice(of.of(checkpointing), checkpointing), soft_wrap=True)
        console.print()
    if len(plan.methods) > 1:
        layout = cheapest_for_all(plan.methods, plan.asked)
        console.print(f"cheapest for all methods, {_words(plan.asked)}: {_layout_words(layout)}", soft_wrap=True)
    if plan.left_out:
        numbers = ", ".join(map(str, plan.left_out))
        console.print(
            f"left out: {numbers} GPUs, among which training.batch_size {plan.config.training.batch_size} cannot be "
            "divided",
            soft_wrap=True,
        )
    for line in assumptions(plan):
        console.print(f"assumed: {line}", soft_wrap=True, style="dim")


def _headline(plan: Plan, of: MethodPlan) -> str:
    sizes = of.dry_run.sizes
    trained = f"{_count(sizes.theta_count)} trained"
    if sizes.router_count:
        trained += f" ({_count(sizes.router_count)} of them routers')"
    if sizes.alpha_count:
        trained += f", {_count(sizes.alpha_count)} in the calibration head"
    times = f"at T = {plan.config.calm.inner_steps}, " if of.method.bilevel else ""
    if of.method.prediction == "ensemble":
        times = f"{plan.config.ensemble.members} members one after the other, each "
    return (
        f"[bold]{of.method.name}[/bold] ({times}{_count(sizes.frozen_count)} frozen weights in "
        f"{plan.config.model.dtype}, {trained}): {of.step_flops[plan.asked]:.3g} FLOPs a step, {of.steps} steps, "
        f"{of.gpu_hours(plan.asked):.3g} GPU-hours"
    )


def _parts_table(candidates: list[Candidate]) -> Table:
    table = _table()
    for heading in ("GPU", "ZeRO", *(HEADINGS[part] for part in PARTS), "total", "free"):
        table.add_column(heading, justify="right", no_wrap=True)
    before = None
    for c in candidates:
        if before not in (None, c.layout.gpus):
            table.add_section()
        before = c.layout.gpus
        cells = [str(c.layout.gpus), _stage(c.layout), *(_gib(c.phase.parts[part]) for part in PARTS)]
        table.add_row(*cells, _coloured(c, c.phase.total), _coloured(c, c.free))
    return table


def _totals_table(candidates: list[Candidate]) -> Table:
    table = _table()
    stages = list(dict.fromkeys(_stage(c.layout) for c in candidates))
    for heading in ("GPU", *(s if s == "none" else f"ZeRO-{s}" for s in stages)):
        table.add_column(heading, justify="right", no_wrap=True)
    for gpus in dict.fromkeys(c.layout.gpus for c in candidates):
        table.add_row(str(gpus), *(_coloured(c, c.phase.total) for c in candidates if c.layout.gpus == gpus))
    return table


def _table() -> Table:
    from rich import box
    from rich.table import Table

    return Table(box=box.SIMPLE_HEAD, padding=0, pad_edge=False)


def _choice(candidates: list[Candidate], checkpointing: bool) -> str:
    chosen = cheapest(candidates)
    if chosen is None:
        nearest = max(candidates, key=lambda c: c.free)
        return f"{_words(checkpointing)}: nothing fits; {_layout_words(nearest.layout)}, the nearest, {nearest.verdict}"
    text = f"{_words(checkpointing)}, cheapest: [bold]{_layout_words(chosen.layout)}[/bold], {chosen.verdict}"
    below = [c for c in candidates if c.layout.gpus == chosen.layout.gpus and not c.fits]
    fewer = [c for c in candidates if c.layout.gpus < chosen.layout.gpus]
    for reason, of in (("fewer GPUs", fewer), ("a lower stage", below)):
        if of:
            best = max(of, key=lambda c: c.free)
            text += f"\n  not {reason}: {_layout_words(best.layout)}, the nearest, {best.verdict}"
    return text


def _layout_words(layout: Layout | None) -> str:
    if layout is None:
        return "no layout fits"
    how = "plain PyTorch" if layout.stage is None else f"ZeRO-{layout.stage}"
    return f"{layout.gpus} GPU{'s' if layout.gpus > 1 else ''}, {how}"


def _stage(layout: Layout) -> str:
    return "none" if layout.stage is None else str(layout.stage)


def _gib(size: float) -> str:
    return f"{size / GIB:.1f}"


def _coloured(candidate: Candidate, size: float) -> str:
    return f"[{'green' if candidate.fits else 'red'}]{_gib(size)}[/]"


def _count(number: int) -> str:
    for unit, size in (("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if number >= size:
            return f"{number / size:.3g} {unit}"
    return str(number)
