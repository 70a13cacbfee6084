"""What a trial's folder tells of it: its evaluations, and how it ended."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from components.config_tune import TuneConfig
from components.files import read_json
from components.training.trace import read_trace
from ray_jobs.trial_table import Trial
from ray_jobs.worker_files import RESULT, TRACE

ERROR = "error.log"
NLL = "nll"
"""What schedulers compare: the NLL of the data that decides."""


def evaluations(folder: Path) -> list[dict[str, float]]:
    """Rows of a trial's trace that hold an evaluation; none where the trial failed before its first step."""
    trace = folder / TRACE
    return [row for row in read_trace(trace) if "validation/nll" in row] if trace.exists() else []


def judged(row: Mapping[str, float], section: TuneConfig) -> dict[str, float]:
    """An evaluation with the number that a scheduler compares."""
    return {**row, NLL: section.figure(row, "nll")}


def outcome(trial: Trial, tune: TuneConfig) -> dict[str, Any]:
    """What a trial's folder says of its end: attributes of its row.

    A trial that has left `training.json` was finished; one without was stopped at its last evaluation.
    """
    folder = Path(trial.folder)
    rows = evaluations(folder)
    if not (folder / RESULT).exists():
        last = rows[-1]
        nll = tune.figure(last, "nll")
        reason = f"stopped by asha at step {int(last['step'])}: validation NLL {nll:.3f} is worse than most"
        return {"state": "stopped", "reason": reason, **_evaluation(last)}
    result = read_json(folder / RESULT, remedy="search again")
    kept = next(row for row in reversed(rows) if row["step"] <= result["kept_step"])
    taken = "".join(f"; took over trial {e['from']} at step {e['step']}" for e in trial.perturbations)
    return {"state": "finished", "reason": f"kept step {result['kept_step']}{taken}", **_evaluation(kept)}


def failed(trial: Trial) -> dict[str, Any]:
    """Attributes of the row of a trial that failed."""
    return {"state": "failed", "reason": last_words(Path(trial.folder))}


def last_words(folder: Path) -> str:
    """Why a trial failed, in a line."""
    log = folder / ERROR
    if not log.exists():
        return "its process ended without a word, killed perhaps for want of memory"
    lines, where = log.read_text(encoding="utf-8").strip().splitlines(), f" (all of it: {log})"
    return f"{lines[-1].strip().removesuffix(where) if lines else 'unknown'}{where}"


def _evaluation(row: dict[str, float]) -> dict[str, Any]:
    return {"step": int(row["step"]), "metrics": {name: value for name, value in row.items() if "/" in name}}
