"""How far a suite is: the state of each of its cells, what is left of it, and the table that says so.

A cell is one method of one run. Its state stands in that run's `run.json` as the stage `cell/<method>`; `suite.json`
is the overview of all of them, written anew whenever one changes.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any, Literal

from components.config import RunConfig
from components.files import write_json
from components.suite_file import SuitePlan
from pipelines.run_folder import RUN_FILE, STATE, refuse_other_settings

if TYPE_CHECKING:
    from rich.console import Console

SUITE_FILE = "suite.json"
State = Literal["left", "running", "done", "failed"]


@dataclass(frozen=True)
class Cell:
    """One method of one run.

    Attributes:
        name: The run's name in the suite, e.g. of its data.
        seed: The run's seed.
        method: The method.
        folder: The run folder's name within the suite's folder.
        state: How it stands; one that was broken off is left.
        reason: Why it failed.
        seconds: What it took, where it is done; the last try alone.
    """

    name: str
    seed: int
    method: str
    folder: str
    state: State = "left"
    reason: str = ""
    seconds: float | None = None


class SuiteState:
    """The cells of a suite in the order in which they run.

    Args:
        plan: The suite.

    Raises:
        UsageError: A run's folder was made with other settings than the suite's.
    """

    def __init__(self, plan: SuitePlan) -> None:
        self.plan, self.folder = plan, plan.config.folder
        self.cells: dict[tuple[str, str], Cell] = {}
        for run in plan.runs:
            stages = _stages(run.config)
            for method in run.config.methods:
                known = stages.get(stage_of(method), {})
                cell = Cell(run.name, run.config.seed, method, run.config.run)
                self.cells[run.config.run, method] = _as_recorded(cell, known, run.config)

    def of_run(self, config: RunConfig) -> list[Cell]:
        """The cells of one run."""
        return [self.cells[config.run, method] for method in config.methods]

    def change(self, run: str, method: str, **changes: Any) -> None:
        """Notes what has become of a cell, and writes `suite.json`."""
        self.cells[run, method] = replace(self.cells[run, method], **changes)
        self.write()

    def write(self) -> None:
        """Writes `suite.json`, whole or not at all."""
        write_json(self.folder / SUITE_FILE, self.as_dict())

    def as_dict(self) -> dict[str, Any]:
        """Content of `suite.json`: name, counts, estimated seconds left, and every cell."""
        return {
            "suite": self.plan.config.suite,
            "counts": self.counts,
            "seconds_left": self.seconds_left(),
            "cells": [asdict(cell) for cell in self.cells.values()],
        }

    @property
    def counts(self) -> dict[str, int]:
        """Cells by state; a running one counts as left."""
        return _counts(self.cells.values())

    def seconds_left(self) -> float | None:
        """What the cells that are left will take, by those that are done; failed ones are not tried again by then.

        The mean of the same method on the same data, else of the same method, else of all; None where none is done.
        """
        return remaining_seconds(self.cells.values())

    def print(self, console: Console) -> None:
        """A line for each run, then what failed and why, then how much is left."""
        from rich import box
        from rich.markup import escape
        from rich.table import Table

        table = Table(box=box.SIMPLE_HEAD, title=f"suite {self.plan.config.suite}", title_justify="left")
        table.add_column("run", no_wrap=True)
        for heading in ("done", "failed", "left", "minutes"):
            table.add_column(heading, justify="right", no_wrap=True)
        for run in self.plan.runs:
            cells = self.of_run(run.config)
            counts = _counts(cells)
            minutes = sum(cell.seconds or 0.0 for cell in cells) / 60
            numbers = [str(counts[state]) for state in ("done", "failed", "left")]
            table.add_row(run.config.run, *numbers, f"{minutes:.1f}")
        console.print(table)
        for cell in self.cells.values():
            if cell.state == "failed":
                console.print(f"[red]failed[/red] {cell.folder} {cell.method}: {escape(cell.reason)}", soft_wrap=True)
        console.print(self.sentence(), soft_wrap=True)

    def sentence(self) -> str:
        """How far the suite is, in words."""
        counts = self.counts
        words = f"{counts['done']} of {len(self.cells)} cells done, {counts['failed']} failed, {counts['left']} left"
        seconds = self.seconds_left()
        return words + (f", about {duration(seconds)} to go" if counts["left"] and seconds is not None else "")


def stage_of(method: str) -> str:
    """The stage of a run that stands for a cell."""
    return f"cell/{method}"


def remaining_seconds(cells: Iterable[Cell]) -> float | None:
    """As `SuiteState.seconds_left`, of any cells."""
    known = [*cells]
    taken: dict[tuple[str, ...], list[float]] = {}
    for cell in known:
        if cell.state == "done" and cell.seconds is not None:
            for key in ((cell.name, cell.method), (cell.method,), ()):
                taken.setdefault(key, []).append(cell.seconds)
    if not taken:
        return None
    total = 0.0
    for cell in known:
        if cell.state in ("left", "running"):
            keys = ((cell.name, cell.method), (cell.method,), ())
            total += fmean(next(taken[key] for key in keys if key in taken))
    return total


def duration(seconds: float) -> str:
    """`40 s`, `12 min` or `3 h 05 min`."""
    if seconds < 60:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02d} min"


def _counts(cells: Iterable[Cell]) -> dict[str, int]:
    found = Counter("left" if cell.state == "running" else cell.state for cell in cells)
    return {state: found[state] for state in ("done", "failed", "left")}


def _stages(config: RunConfig) -> dict[str, Any]:
    """Stages of a run that has begun; its settings are checked, so that a mistake is told before anything runs."""
    path: Path = config.folder
    if not (path / STATE).is_file() or not (path / RUN_FILE).is_file():
        return {}
    refuse_other_settings(config, path)
    stages: dict[str, Any] = json.loads((path / STATE).read_text(encoding="utf-8"))["stages"]
    return stages


def _as_recorded(cell: Cell, stage: Mapping[str, Any], config: RunConfig) -> Cell:
    """A cell as its run remembers it. It is done only with all recalibrations that are asked for."""
    if stage.get("state") == "done" and stage["recalibrate"] == recalibrations(config, cell.method):
        return replace(cell, state="done", seconds=stage["seconds"])
    if stage.get("state") == "failed":
        return replace(cell, state="failed", reason=stage["reason"])
    return cell


def recalibrations(config: RunConfig, method: str) -> list[str]:
    """Kinds of recalibration of a method."""
    return [str(kind) for name, kinds in config.recalibrate.items() if name == method for kind in kinds]
