"""Population based training's bookkeeping: what a trial took over from another one, and how its values changed.

A trial that takes over gets the other one's checkpoint, kept weights and trace, so that its folder tells of the weights
that it goes on with. The copy is made beside the folder's own files and put in their place after the table has the row,
so that a search that is broken off in between can finish it.
"""

from __future__ import annotations

import json
import os
import random
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from components.config_tune import Dimension, Value
from components.errors import CheckpointError
from components.training.checkpoints import MANIFEST
from components.training.expert_load import LOAD_FILE
from components.training.job import CHECKPOINTS
from components.training.trace import read_trace
from ray_jobs.trial_table import Trial, TrialTable
from ray_jobs.worker import TRACE

FACTORS = (0.8, 1.2)
RESAMPLED = 0.25
"""How often a value is drawn anew instead of varied; both as in Ray's and the paper's PBT."""
_COPY = ".taken-{}"


def varied(values: Mapping[str, Value], space: Mapping[str, Dimension], rng: random.Random) -> dict[str, Value]:
    """Values near others, each within its range.

    Args:
        values: By key.
        space: Ranges; may have more keys.
        rng: Where chance comes from.
    """
    return {key: _varied(value, space[key], rng) for key, value in values.items()}


def _varied(value: Value, dimension: Dimension, rng: random.Random) -> Value:
    again, up = rng.random() < RESAMPLED, rng.random() < 0.5
    if dimension.choice is not None:
        place = dimension.choice.index(value) + (1 if up else -1)
        return (
            rng.choice(dimension.choice) if again else dimension.choice[min(max(place, 0), len(dimension.choice) - 1)]
        )
    low, high = (float(end) for end in dimension.ends)
    if again and dimension.log_uniform is not None:
        new = low * (high / low) ** rng.random()
    elif again:
        new = low + (high - low) * rng.random()
    else:
        new = float(value) * FACTORS[up]
    if dimension.integer is not None:
        step = 1 if up else -1
        rounded = round(new)
        new = rounded if again or rounded != value else int(value) + step
    new = min(max(new, low), high)
    return int(new) if dimension.integer is not None else new


def take_over(
    table: TrialTable, number: int, donor: int, step: int, changed: Mapping[str, Value], scores: tuple[float, float]
) -> Trial:
    """Lets a trial go on from another one's checkpoint with other values.

    Args:
        table: The trials; the row gets the new values and one more of `perturbations`.
        number: The trial that takes over; it must not be training.
        donor: The trial that it takes over from; it must not be training.
        step: Of the donor's checkpoint.
        changed: New values by key.
        scores: NLL of the trial and of the donor at this step.

    Raises:
        CheckpointError: The donor has no checkpoint of this step.
    """
    trial, source = table[number], table[donor]
    _copy(Path(source.folder), Path(trial.folder) / _COPY.format(len(trial.perturbations) + 1), step)
    own = {key: trial.parameters[key] for key in changed}
    event = {"step": step, "from": donor, "nll": scores[0], "from_nll": scores[1], "before": own, "after": {**changed}}
    parameters = {**source.parameters, **changed}
    trial = table.change(number, parameters=parameters, perturbations=[*trial.perturbations, event])
    settle(trial)
    return trial


def settle(trial: Trial) -> None:
    """Puts the copy that the table tells of in its place, where that has not been done, and drops any other."""
    folder = Path(trial.folder)
    copy = folder / _COPY.format(len(trial.perturbations))
    if (copy / CHECKPOINTS).exists():
        shutil.rmtree(folder / CHECKPOINTS, ignore_errors=True)
        for item in sorted(copy.iterdir(), key=lambda path: path.name == CHECKPOINTS):  # the last: it says what is left
            os.replace(item, folder / item.name)
    for left in folder.glob(_COPY.format("*")):
        shutil.rmtree(left)


def course(rows: Mapping[int, Trial], number: int, keys: Iterable[str]) -> list[dict[str, Any]]:
    """With which values a trial's weights were trained: entries `step` (from there on), `trial` and `values`.

    Args:
        rows: All trials by number.
        number: The trial.
        keys: Those that changed on the way.
    """
    return _course(rows, number, [*keys], None)


def _course(rows: Mapping[int, Trial], number: int, keys: list[str], until: int | None) -> list[dict[str, Any]]:
    trial = rows[number]
    events = [event for event in trial.perturbations if until is None or event["step"] < until]
    if events:
        last = events[-1]
        entry = {"step": last["step"], "trial": number, "values": {key: last["after"][key] for key in keys}}
        return [*_course(rows, last["from"], keys, last["step"]), entry]
    first = trial.perturbations[0]["before"] if trial.perturbations else trial.parameters
    return [{"step": 0, "trial": number, "values": {key: first[key] for key in keys}}]


def _copy(source: Path, target: Path, step: int) -> None:
    """What `source` has of the run up to a step's checkpoint, as a folder with the names that a trial's folder has."""
    shutil.rmtree(target, ignore_errors=True)
    name = f"step-{step:08d}"
    try:
        kept = json.loads((source / CHECKPOINTS / name / MANIFEST).read_text(encoding="utf-8"))["stop"]["kept_step"]
        names = [name] if kept is None else [name, f"kept-{kept:08d}"]
        for folder in names:
            shutil.copytree(source / CHECKPOINTS / folder, target / CHECKPOINTS / folder)
        rows = [json.dumps(row) for row in read_trace(source / TRACE) if row["step"] <= step]
        (target / TRACE).write_text("".join(f"{row}\n" for row in rows), encoding="utf-8")
        if (source / LOAD_FILE).exists():
            shutil.copy2(source / LOAD_FILE, target / LOAD_FILE)
    except (OSError, ValueError, KeyError) as problem:
        shutil.rmtree(target, ignore_errors=True)
        raise CheckpointError(f"{source} has no checkpoint of step {step} to go on from: {problem}") from problem
