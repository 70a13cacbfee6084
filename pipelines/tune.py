"""`caltune tune`: data and model once, a reference, the search, then its result as files and a table."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from components.config import RunConfig
from components.config_population import PbtConfig
from components.config_tune import TuneConfig
from components.errors import UsageError
from components.models.base import ResolvedModel
from components.tracking.logger import Logger, Status, ending
from components.tracking.mlflow_logger import open_logger
from components.training.job import TrainingJob
from pipelines.calibrate import Calibration
from pipelines.progress import Reporter
from pipelines.run_folder import OnExisting, RunFolder, open_run_folder
from pipelines.tune_result import words_of, write_result
from ray_jobs.cluster import connect
from ray_jobs.trial_choice import Objective
from ray_jobs.trial_outcome import outcome
from ray_jobs.trial_table import REFERENCE, Trial, TrialTable
from ray_jobs.trial_worker import trial_config
from ray_jobs.tune import is_nested, room_for, search

FOLDER, TABLE = "tune", "trials.jsonl"
_STATUS: dict[str, Status] = {"finished": "FINISHED", "stopped": "FINISHED", "failed": "FAILED"}


def tune(
    config: RunConfig, base_folder: Path, on_existing: OnExisting, reporter: Reporter, trials: int | None = None
) -> dict[str, Any]:
    """Searches, or goes on with a search that was broken off.

    Args:
        config: The run, with a `tune` section.
        base_folder: Where relative paths of data sources start.
        on_existing: What to do with a folder that has something in it.
        reporter: Says what is going on.
        trials: Another number of trials than the run file's; what is there counts.

    Returns:
        Content of `tune/search.json`.

    Raises:
        UsageError: There is nothing to search, not the room for one trial, or nodes that share no folder.
        CaltuneError: No trial was finished; the table says why.
    """
    if config.tune is None:
        raise UsageError("the run file has no section 'tune': name a method and the space to search")
    section = config.tune
    if config.resources.storage_path is not None:
        raise UsageError(
            "a search compares trials by what is in their folders, so all nodes must see output_dir: put it on a "
            "shared file system and leave resources.storage_path out (--set resources.storage_path=null)"
        )
    import ray

    connect(dashboard=is_nested(config.resources))
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    room = room_for(section, config.resources, nodes)
    with open_run_folder(config, on_existing) as folder, ending(open_logger(config, folder.path)) as logger:
        stages = Calibration(config, folder, base_folder, logger, reporter)
        stages.prepare()
        resolved = stages.resolve()
        target = folder.path / FOLDER
        table = TrialTable(target / TABLE)
        with folder.stage("tune"):
            floor = _floor(section, config, folder, resolved, table, stages)
            objective = Objective(section, floor)
            reporter.say(room.sentence)
            wanted = trials or section.trials
            with _Log(logger, reporter, objective, wanted) as log:
                job = _job(config, folder, resolved, section.method, target / "trials")
                search(config, job, table, objective, trials=wanted, room=room, on_change=log.on_change)
            return write_result(config, table, objective, target, logger, reporter)


def _floor(
    section: TuneConfig,
    config: RunConfig,
    folder: RunFolder,
    resolved: ResolvedModel,
    table: TrialTable,
    stages: Calibration,
) -> float | None:
    """Least accuracy that suffices; None where accuracy is an objective of its own."""
    if section.mode == "pareto":
        return None
    reference = section.reference_accuracy
    if reference is None:
        trial = table.reference or _train_reference(config, section, folder, resolved, table, stages)
        reference = section.figure(trial.metrics, "accuracy")
        stages.reporter.say(f"reference: sft reaches {words_of(trial.metrics, section)} on validation data")
    floor = max(reference - section.accuracy_margin, 0.0)
    stages.reporter.say(f"wanted: the lowest ECE at an accuracy of at least {floor:.3f}")
    return floor


def _train_reference(
    config: RunConfig,
    section: TuneConfig,
    folder: RunFolder,
    resolved: ResolvedModel,
    table: TrialTable,
    stages: Calibration,
) -> Trial:
    from ray_jobs.train import train

    target = folder.path / FOLDER / "reference"
    own = trial_config(config, "sft", {}, config.resources.cpus_per_worker)
    job = replace(_job(config, folder, resolved, "sft", target), config=own)
    table.put(Trial(REFERENCE, "sft", {}, folder=str(target.resolve())))
    logger = stages.logger.child("reference", {"stage": "tune", "method": "sft"})
    with ending(logger), stages.reporter.task("train the reference sft", config.training.steps) as advance:
        shown = 0

        def on_row(row: Any) -> None:
            nonlocal shown
            step = int(row["step"])
            logger.log_metrics({name: value for name, value in row.items() if name != "step"}, step)
            advance(step - shown, "")
            shown = step

        train(job, resume=True, on_row=on_row)
    return table.change(REFERENCE, **outcome(table[REFERENCE], section))


def _job(config: RunConfig, folder: RunFolder, resolved: ResolvedModel, method: Any, target: Path) -> TrainingJob:
    return TrainingJob(
        config=config,
        method=method,
        data=folder.path / "data",
        folder=target,
        resolved=resolved,
        details={"run": config.run, "seed": config.seed, "git": folder.state["git"]},
    )


class _Log:
    """Takes down what happens to trials: a nested run of each, and a line when one ends.

    Called in the thread that follows Ray Tune.
    """

    def __init__(self, logger: Logger, reporter: Reporter, objective: Objective, wanted: int) -> None:
        self.logger, self.reporter, self.objective, self.wanted = logger, reporter, objective, wanted
        self._open: dict[int, Logger] = {}
        scheduler = objective.tune.scheduler
        self._changing = scheduler.keys if isinstance(scheduler, PbtConfig) else []
        self._taken: Counter[int] = Counter()

    def __enter__(self) -> _Log:
        return self

    def __exit__(self, *problem: object) -> None:
        for logger in self._open.values():
            logger.close("KILLED")

    def on_change(self, trial: Trial) -> None:
        """Logs a trial's start, evaluation or end."""
        tags = {"stage": "tune", "method": trial.method, "trial": str(trial.number)}
        if trial.number not in self._open:
            self._open[trial.number] = self.logger.child(f"trial-{trial.number:03d}", tags)
            self._open[trial.number].log_params(trial.parameters)
            self._taken[trial.number] = len(trial.perturbations)  # of a search that is gone on with, told before
        logger = self._open[trial.number]
        if trial.state == "running":
            values = {f"tune/{key}": float(trial.parameters[key]) for key in self._changing if _is_number(trial, key)}
            logger.log_metrics({**trial.metrics, **values}, trial.step)
            for event in trial.perturbations[self._taken[trial.number] :]:
                self.reporter.say(_exchange_line(trial, event))
            self._taken[trial.number] = len(trial.perturbations)
            return
        if trial.metrics:
            ece, accuracy = self.objective.figures(trial)
            logger.log_metrics({"tune/ece": ece, "tune/accuracy": accuracy}, trial.step)
        logger.set_tags({"caltune.trial_state": trial.state, "caltune.trial_reason": trial.reason})
        self._open.pop(trial.number).close(_STATUS[trial.state])
        self.reporter.say(_line(trial, self.objective.tune, self.wanted))


def _line(trial: Trial, section: TuneConfig, wanted: int) -> str:
    """How a trial ended, in a line."""
    values = ", ".join(f"{key} {_short(value)}" for key, value in trial.parameters.items())
    reason = trial.reason.replace("[", "\\[")  # what looks like markup is none
    if trial.state == "finished":
        how = f"[green]finished[/green], {words_of(trial.metrics, section)}; {reason}"
    else:
        how = f"[red]failed[/red]: {reason}" if trial.state == "failed" else f"[yellow]{reason}[/yellow]"
    return f"trial {trial.number} of {wanted}, {trial.seconds:.0f} s: {how}; {values}"


def _exchange_line(trial: Trial, event: Mapping[str, Any]) -> str:
    """What a trial took over, in a line."""
    values = ", ".join(f"{key} {_short(value)}" for key, value in event["after"].items())
    return (
        f"trial {trial.number} at step {event['step']}, NLL {event['nll']:.3f}: goes on from trial {event['from']}, "
        f"NLL {event['from_nll']:.3f}, with {values}"
    )


def _is_number(trial: Trial, key: str) -> bool:
    return isinstance(trial.parameters[key], (int, float))


def _short(value: object) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)
