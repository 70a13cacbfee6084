"""What Ray Tune runs as one trial. Importable by name, so Ray pickles it by reference."""

from __future__ import annotations

import dataclasses
import json
import tempfile
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from components.config import MethodName, RunConfig
from components.config_population import PbtConfig
from components.config_tune import Value, with_values
from components.models.base import ResolvedModel
from components.training.job import CHECKPOINTS, Process, TrainingJob
from ray_jobs.trial_outcome import ERROR, evaluations, judged
from ray_jobs.worker import run_session


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


def run_trial(task: dict[str, Any]) -> None:
    """Trains a trial, from its newest checkpoint if it has one, and reports its evaluations to Ray Tune.

    The last evaluation is kept back until the adapter is saved: a scheduler that stops the trial upon it would lose
    what has been paid for.

    Args:
        task: `suggestion` from the search; `message`, from `as_message`; `folder`, `cpus`.
    """
    from ray import tune

    suggestion, message, cpus = task["suggestion"], task["message"], int(task["cpus"])
    config = RunConfig.model_validate(message["config"])
    section = config.tune
    assert section is not None
    job = TrainingJob(
        config=trial_config(config, message["method"], suggestion["parameters"], cpus),
        method=message["method"],
        data=Path(message["data"]),
        folder=Path(task["folder"]) / f"{suggestion['number']:03d}",
        resolved=ResolvedModel(**message["resolved"]),
        details={**message["details"], "trial": suggestion["number"], "parameters": suggestion["parameters"]},
        varied=tuple(section.scheduler.keys) if isinstance(section.scheduler, PbtConfig) else (),
    )
    job.folder.mkdir(parents=True, exist_ok=True)

    def report(row: Mapping[str, float], checkpoint: Path | None = None) -> None:
        if row["step"] < job.config.training.steps:
            _report(judged(row, section), checkpoint if job.varied else None)

    try:
        if job.varied and suggestion["resume"] and tune.get_checkpoint() is None:
            _report_again(job.folder, report)
        _train(job, resume=bool(suggestion["resume"]), cpus=cpus, report=report)
    except Exception as problem:
        log = job.folder / ERROR
        with log.open("a" if str(log) in str(problem) else "w", encoding="utf-8") as file:  # workers have left theirs
            file.write(traceback.format_exc())
        raise
    tune.report(judged(evaluations(job.folder)[-1], section))


def _report(row: dict[str, float], checkpoint: Path | None) -> None:
    """Reports an evaluation; with a checkpoint that another trial may go on from, a file that names it.

    The checkpoint itself stays where it is: Tune would copy it at every report.
    """
    from ray import tune

    if checkpoint is None:
        tune.report(row)
        return
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "checkpoint.json").write_text(json.dumps({"checkpoint": str(checkpoint)}), encoding="utf-8")
        tune.report(row, checkpoint=tune.Checkpoint.from_directory(folder))


def _report_again(folder: Path, report: Callable[[Mapping[str, float], Path | None], None]) -> None:
    """Reports the evaluation at the newest checkpoint of a trial that was interrupted.

    It may have been waiting there for an exchange with others, and would not evaluate a second time.
    """
    newest = max((folder / CHECKPOINTS).glob("step-*[0-9]"), default=None)
    row = next((row for row in evaluations(folder) if newest and newest.name == f"step-{int(row['step']):08d}"), None)
    if row is not None:
        report(row, newest)


def _train(job: TrainingJob, *, resume: bool, cpus: int, report: Any) -> None:
    """In this process where one is enough, else in workers of Ray Train, whose start takes some 15 s."""
    if job.config.resources.workers == 1 and job.config.resources.deepspeed is None:
        import torch

        torch.set_num_threads(cpus)
        device = "cuda" if job.config.resources.use_gpu else "cpu"

        def on_milestone(step: int, values: Mapping[str, float], checkpoint: Path | None) -> None:
            if values:
                report({"step": step, **values}, checkpoint)

        run_session(job, Process(device=device), report=on_milestone)
        return
    from ray_jobs.train import train

    def on_row(row: Mapping[str, float]) -> None:
        if any("/" in name for name in row):  # <split>/<metric>: there was an evaluation
            report(row)

    train(job, resume=resume, on_row=on_row)


def as_message(config: RunConfig, job: TrainingJob) -> dict[str, Any]:
    """What all trials have in common, as plain data for Ray to carry, paths absolute."""
    return {
        "config": json.loads(config.model_dump_json()),
        "method": job.method,
        "data": str(job.data.resolve()),
        "resolved": dataclasses.asdict(job.resolved),
        "details": dict(job.details),
    }
