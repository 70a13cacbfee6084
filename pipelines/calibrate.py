"""The main job: prepare the data, then train, evaluate and recalibrate each method, compare them, report.

Every stage leaves its result in the run folder before the next begins, so a run that was broken off goes on from there.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from components.config import HEAD_METHODS, MethodName, RecalibrationName, RunConfig
from components.errors import UsageError
from components.evaluation.metrics_file import evaluate_predictions, read_metrics, write_metrics
from components.evaluation.open_predictions import (
    AnyPredictions,
    among_options,
    read_any_predictions,
    write_any_predictions,
)
from components.files import write_json
from components.storage import joined
from components.tracking.logger import Logger, ending
from components.training.expert_load import LOAD_FILE
from components.training.methods import METHODS
from pipelines.progress import Reporter
from pipelines.run_folder import RunFolder
from pipelines.sentences import collapse_sentence, headline, overlap_sentences, start_sentences

if TYPE_CHECKING:
    from components.data.prepare import PreparedData
    from components.evaluation.recalibrate import Recalibrated
    from components.models.base import ResolvedModel
    from components.training.job import TrainingJob
    from ray_jobs.worker_files import Start


@dataclass
class Calibration:
    """One run of the pipeline, stage by stage.

    Attributes:
        config: The run.
        folder: Its folder.
        base_folder: Where relative paths of data sources start.
        logger: The run's tracker.
        reporter: Says what is going on.
    """

    config: RunConfig
    folder: RunFolder
    base_folder: Path
    logger: Logger
    reporter: Reporter

    def prepare(self) -> PreparedData:
        """Stage `prepare`: questions to splits, in `data/`."""
        from components.data.prepare import load_prepared, prepare

        target = self.folder.path / "data"
        if not self.folder.is_done("prepare"):
            with self.folder.stage("prepare") as notes:
                prepared = prepare(self.config, target, self.base_folder)
                notes["hashes"] = {name: split.content_hash for name, split in prepared.splits.items()}
            self.logger.log_dict(dict(prepared.manifest), "data/manifest.json")
            self.logger.set_tags({f"data_hash.{name}": h for name, h in notes["hashes"].items()})
        prepared = load_prepared(target)
        sizes = ", ".join(f"{name} {len(split)}" for name, split in prepared.splits.items())
        self.reporter.say(f"data: {sizes}")
        for sentence in overlap_sentences(prepared):
            self.reporter.say(f"[yellow]{sentence}[/yellow]")
        return prepared

    def resolve(self) -> ResolvedModel:
        """Stage `model`: finds the base model; `resolve_model` logs which one it is."""
        from components.models.base import resolve_model

        with self.folder.stage("model") as notes:
            resolved = resolve_model(self.config.model)
            notes["origin"], notes["revision"] = resolved.origin, resolved.revision
        return resolved

    def train(self, method: MethodName, resolved: ResolvedModel, resume: bool) -> None:
        """Stage `train`, and `posterior` for a method that has one."""
        if METHODS[method].trains_adapter and not self.folder.is_done(f"train/{method}"):
            self._train(method, resolved, resume)
        if METHODS[method].prediction == "laplace":
            from pipelines.posterior import fit_posterior

            fit_posterior(self, method, resolved)

    def _train(self, method: MethodName, resolved: ResolvedModel, resume: bool) -> None:
        """Stage `train`: the method's adapter, through Ray Train."""
        stage = f"train/{method}"
        from components.training.job import TrainingJob

        job = TrainingJob(
            config=self.config,
            method=method,
            data=self.folder.path / "data",
            folder=self.folder.method(method),
            resolved=resolved,
            details={"run": self.config.run, "seed": self.config.seed, "git": self.folder.state["git"]},
            storage=storage_of(self.config, method),
        )
        if METHODS[method].prediction == "ensemble":
            from pipelines.ensemble import train_members

            train_members(self, job, resume)
        else:
            self.train_adapter(job, stage, method, resume)

    def train_adapter(self, job: TrainingJob, stage: str, name: str, resume: bool) -> None:
        """Trains one adapter, a method's or a member's of an ensemble, as a stage; `name` stands for it in words."""
        from ray_jobs.train import train

        logger = self.logger.child(f"train-{name.replace('/', '-')}", {"stage": "train", "method": job.method})
        with (
            self.folder.stage(stage) as notes,
            ending(logger),
            self.reporter.task(f"train {name}", self.config.training.steps) as advance,
        ):
            shown, collapsed = 0, False

            def on_row(row: Mapping[str, float]) -> None:
                nonlocal shown, collapsed
                step = int(row["step"])
                logger.log_metrics({k: v for k, v in row.items() if k != "step"}, step)
                advance(step - shown, headline(row))
                shown = step
                if not collapsed and row.get("max_expert_share", 0.0) > self.config.uq4ct.collapse_share:
                    collapsed = True
                    self.reporter.say(f"[yellow]{collapse_sentence(name, row)}[/yellow]")

            def on_start(start: Start) -> None:
                nonlocal shown
                advance(start.from_step - shown, "")
                shown = start.from_step
                for sentence in start_sentences(name, start):
                    self.reporter.say(f"[yellow]{sentence}[/yellow]")

            notes.update(train(job, resume=resume, on_row=on_row, on_start=on_start))
            if job.member is None:
                logger.log_artifact(job.folder / "adapter")
            if (job.folder / LOAD_FILE).exists():
                logger.log_artifact(job.folder / LOAD_FILE)

    def evaluate(
        self, method: str, data: PreparedData, resolved: ResolvedModel, adapter: Path | None
    ) -> dict[str, AnyPredictions]:
        """Stage `evaluate`: predictions and metrics of a method on its `evaluated_splits`.

        Args:
            method: The name the results get.
            data: The prepared data.
            resolved: The base model.
            adapter: The method's adapter folder; None for the base model alone.

        Raises:
            UsageError: The run that is resumed has evaluated another adapter under this name.
        """
        from components.models.adapter_extras import fingerprint

        stage = f"evaluate/{method}"
        splits = self.evaluated_splits(method, data)
        evaluated = None if adapter is None else fingerprint(adapter)
        folders = {split: self._split_folder(method, split) for split in splits}
        # A method that is recalibrated in a further way may need a split that was not evaluated before.
        kept = all((folder / "predictions.parquet").exists() for folder in folders.values())
        if self.folder.is_done(stage) and kept:
            if self.folder.notes(stage)["adapter"] != evaluated:
                raise UsageError(
                    f"{self.folder.path} holds an evaluation of another adapter as '{method}'; use --overwrite or "
                    "another run name"
                )
            return {split: read_any_predictions(folder / "predictions.parquet") for split, folder in folders.items()}
        from ray_jobs.evaluate import EvaluationJob, evaluate

        total = sum(len(data.splits[split]) for split in splits)
        with self.folder.stage(stage) as notes, self.reporter.task(f"evaluate {method}", total) as advance:
            notes["adapter"] = evaluated
            generated = self.folder.method(method) / "generated"
            job = EvaluationJob(self.config, data, resolved, adapter, splits, generated)
            found = evaluate(job, lambda done: advance(done, ""))
            self.keep(method, found, data)
        shutil.rmtree(generated, ignore_errors=True)  # the predictions hold all of it
        return found

    def evaluated_splits(self, method: str, data: PreparedData) -> list[str]:
        """Every split that is not trained on, and `calibration` where a recalibration of the method reads it."""
        asked = {name for name, kinds in self.config.recalibrate.items() if "flc_temperature" in kinds}
        read = method in asked and "calibration" in _reference(data)
        return [
            name for name in data.splits if name not in ("train", "calibration") or (name == "calibration" and read)
        ]

    def keep(self, name: str, found: Mapping[str, AnyPredictions], data: PreparedData) -> None:
        """Writes predictions and metrics of a method, recalibrated or not, and logs the figures.

        The inputs of `calibration` count as unlabelled, so no metric is computed on them.
        """
        logger = self.logger.child(f"evaluate-{name}", {"stage": "evaluate", "method": name})
        with ending(logger):
            for split, predictions in found.items():
                folder = self._split_folder(name, split)
                write_any_predictions(folder / "predictions.parquet", predictions)
                if split == "calibration":
                    continue
                of_split = data.splits[split]
                judged = self.config.evaluation
                if of_split.open_ended:
                    judged = judged.model_copy(update={"bins": self.config.generation.bins})
                metrics = evaluate_predictions(predictions, judged, self.config.seed, data_hash=of_split.content_hash)
                write_metrics(folder / "metrics.json", metrics)
                logger.log_artifact(folder / "metrics.json", f"evaluation/{split}/metrics.json")
                primary = predictions.sources[0]
                figures = {
                    f"{split}/{metric}" if source == primary else f"{split}/{source}_{metric}": of["value"]
                    for source, block in metrics["sources"].items()
                    for metric, of in block.items()
                }
                logger.log_metrics({name: value for name, value in figures.items() if value is not None}, 0)

    def recalibrate(
        self, method: MethodName, found: Mapping[str, AnyPredictions], data: PreparedData
    ) -> dict[str, Recalibrated]:
        """Stage `recalibrate`: every one of the method's `recalibrations`, by the name its result gets."""
        from components.evaluation.recalibrate import recalibrate

        results = {}
        for name, (kind, splits) in self.recalibrations(method, data).items():
            with self.folder.stage(f"recalibrate/{name}") as notes:
                result = recalibrate(kind, among_options(found), splits)
                notes["fitted_on"] = list(splits)
                write_json(self.folder.method(name) / f"{kind}.json", {**vars(result.fitted), **notes})
                self.keep(name, result.predictions, data)
            results[name] = result
        return results

    def recalibrations(
        self, method: MethodName, data: PreparedData
    ) -> dict[str, tuple[RecalibrationName, tuple[str, ...]]]:
        """Names of a method's recalibrations, the kind of each, and the splits it is fitted on.

        Beside the in-domain validation split, a temperature is fitted on exactly the labelled data that CALM's stop
        rule reads, so that the two are compared at equal information. Temperatures from router confidence read no
        labels, so they come from all inputs that are neither trained on nor tested.
        """
        fits: dict[str, tuple[RecalibrationName, tuple[str, ...]]] = {}
        stop = self.config.calm.stop
        calm_stops = {*HEAD_METHODS} & {*self.config.methods} and stop.rule != "budget"
        for kind in self.config.recalibrate.get(method, []):
            if kind == "flc_temperature":
                fits[f"{method}+{kind}"] = (kind, _reference(data))
                continue
            fits[f"{method}+{kind}"] = (kind, ("validation",))
            if calm_stops and stop.split != "validation":
                splits = ("validation", "validation_shift") if stop.split == "both" else (stop.split,)
                fits[f"{method}+{kind}@{stop.split}"] = (kind, splits)
        return fits

    def metrics(self, names: list[str], splits: list[str]) -> dict[str, dict[str, Any]]:
        """Content of `metrics.json` by method, then split."""
        return {
            name: {split: read_metrics(self._split_folder(name, split) / "metrics.json") for split in splits}
            for name in names
        }

    def chosen_sources(self, names: list[str], data: PreparedData) -> dict[str, str]:
        """The confidence source to rely on, for each of the methods that has several; chosen on validation data."""
        from components.evaluation.summary import choose_sources
        from components.training.session import validation_splits

        return choose_sources(self.metrics(names, list(validation_splits(data))))

    def _split_folder(self, name: str, split: str) -> Path:
        return self.folder.method(name) / "evaluation" / split


def _reference(data: PreparedData) -> tuple[str, ...]:
    """The splits off which temperatures from router confidence are read: all inputs outside training and test."""
    return tuple(name for name in ("calibration", "validation", "validation_shift") if len(data.splits.get(name, ())))


def storage_of(config: RunConfig, method: str) -> str | None:
    """Shared storage's folder of a method; None where workers share the run's folder."""
    path = config.resources.storage_path
    return None if path is None else joined(path, f"{config.run}/{method}")
