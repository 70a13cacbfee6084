"""What Ray Tune runs as one trial. Importable by name, so Ray pickles it by reference."""

from __future__ import annotations

import dataclasses
import json
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from components.config import MethodName, RunConfig
from components.config_tune import TuneConfig, Value, with_values
from components.models.base import ResolvedModel
from components.training.session import Process, TrainingJob
from ray_jobs.worker import run_session

ERROR = "error.log"
NLL = "nll"
"""What ASHA compares: the NLL of the data that decides."""


def trial_config(config: RunConfig, method: MethodName, parameters: Mapping[str, Value], cpus: int | None) -> RunConfig:
    """The run of one trial: the searched run with parameters put in, reduced to one method.

    Args:
        config: The run that is searched.
        method: What the trial trains.
        parameters: Values by dotted key.
        cpus: CPU cores of each worker; None divides them evenly.
    """
    tree = with_values(config.model_dump(mode="json", exclude={"tune"}), dict(parameters))
    tree["methods"], tree["recalibrate"] = [method], {}
    tree["resources"]["cpus_per_worker"] = cpus
    return RunConfig.model_validate(tree)


def run_trial(suggestion: dict[str, Any]) -> None:
    """Trains a trial and reports its evaluations to Ray Tune.

    The last evaluation is kept back until the adapter is saved: a scheduler that stops the trial upon it would lose
    what has been paid for.

    Args:
        suggestion: `number`, `parameters` and `resume` from the search; `message`, from `as_message`; `folder`, `cpus`.
    """
    from ray import tune

    message, cpus = suggestion["message"], int(suggestion["cpus"])
    config = RunConfig.model_validate(message["config"])
    section = config.tune
    assert section is not None
    job = TrainingJob(
        config=trial_config(config, message["method"], suggestion["parameters"], cpus),
        method=message["method"],
        data=Path(message["data"]),
        folder=Path(suggestion["folder"]) / f"{suggestion['number']:03d}",
        resolved=ResolvedModel(**message["resolved"]),
        details={**message["details"], "trial": suggestion["number"], "parameters": suggestion["parameters"]},
    )
    job.folder.mkdir(parents=True, exist_ok=True)
    last: dict[str, float] = {}

    def report(row: Mapping[str, float]) -> None:
        last.clear()
        last.update(row)
        if row["step"] < job.config.training.steps:
            tune.report(judged(row, section))

    try:
        _train(job, resume=bool(suggestion["resume"]), cpus=cpus, report=report)
    except Exception:
        (job.folder / ERROR).write_text(traceback.format_exc(), encoding="utf-8")
        raise
    tune.report(judged(last, section))


def judged(row: Mapping[str, float], section: TuneConfig) -> dict[str, float]:
    """An evaluation with the number that a scheduler compares."""
    return {**row, NLL: section.figure(row, "nll")}


def _train(job: TrainingJob, *, resume: bool, cpus: int, report: Any) -> None:
    """In this process where one is enough, else in workers of Ray Train, whose start takes some 15 s."""
    if job.config.resources.workers == 1 and job.config.resources.deepspeed is None:
        import torch

        torch.set_num_threads(cpus)
        device = "cuda" if job.config.resources.use_gpu else "cpu"
        run_session(job, Process(device=device), resume=resume, report=report)
        return
    from ray_jobs.train import train

    def on_row(row: Mapping[str, float]) -> None:
        if any("/" in name for name in row):  # <split>/<metric>: there was an evaluation
            report(row)

    train(job, resume=resume, on_row=on_row)


def last_words(folder: Path) -> str:
    """Why a trial failed, in a line."""
    log = folder / ERROR
    if not log.exists():
        return "its process ended without a word, killed perhaps for want of memory"
    lines = log.read_text(encoding="utf-8").strip().splitlines()
    return f"{lines[-1].strip() if lines else 'unknown'} (all of it: {log})"


def as_message(config: RunConfig, job: TrainingJob) -> dict[str, Any]:
    """What all trials have in common, as plain data for Ray to carry, paths absolute."""
    return {
        "config": json.loads(config.model_dump_json()),
        "method": job.method,
        "data": str(job.data.resolve()),
        "resolved": dataclasses.asdict(job.resolved),
        "details": dict(job.details),
    }
