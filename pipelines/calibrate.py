"""The main job: prepare the data, then train, evaluate and recalibrate each method, compare them, report.

Every stage leaves its result in the run folder before the next begins, so a run that was broken off goes on from there.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from components.config import MethodName, RunConfig
from components.errors import UsageError
from components.evaluation.metrics_file import evaluate_predictions, read_metrics, write_metrics
from components.evaluation.predictions import Predictions, read_predictions, write_predictions
from components.files import write_json
from components.tracking.logger import Logger, ending
from components.training.methods import METHODS
from pipelines.progress import Reporter
from pipelines.run_folder import RunFolder

if TYPE_CHECKING:
    from components.data.prepare import PreparedData
    from components.models.base import ResolvedModel
    from components.posthoc.temperature import FittedTemperature


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
        """Stage `train`: the method's adapter, through Ray Train."""
        stage = f"train/{method}"
        if not METHODS[method].trains_adapter or self.folder.is_done(stage):
            return
        from components.training.session import TrainingJob
        from ray_jobs.train import train

        job = TrainingJob(
            config=self.config,
            method=method,
            data=self.folder.path / "data",
            folder=self.folder.method(method),
            resolved=resolved,
            details={"run": self.config.run, "seed": self.config.seed, "git": self.folder.state["git"]},
        )
        logger = self.logger.child(f"train-{method}", {"stage": "train", "method": method})
        with (
            self.folder.stage(stage) as notes,
            ending(logger),
            self.reporter.task(f"train {method}", self.config.training.steps) as advance,
        ):
            shown = 0

            def on_row(row: Mapping[str, float]) -> None:
                nonlocal shown
                step = int(row["step"])
                logger.log_metrics({k: v for k, v in row.items() if k != "step"}, step)
                advance(step - shown, _headline(row))
                shown = step

            notes.update(train(job, resume=resume, on_row=on_row))
            logger.log_artifact(job.folder / "adapter")

    def evaluate(
        self, method: str, data: PreparedData, resolved: ResolvedModel, adapter: Path | None
    ) -> dict[str, Predictions]:
        """Stage `evaluate`: predictions and metrics of a method on every split that is not trained on.

        Args:
            method: The name the results get.
            data: The prepared data.
            resolved: The base model.
            adapter: The method's adapter folder; None for the base model alone.

        Raises:
            UsageError: The run that is resumed has evaluated another adapter under this name.
        """
        from components.models.adapter_checks import METADATA_FILE
        from components.models.smollm2 import sha256_of

        stage = f"evaluate/{method}"
        splits = [name for name in data.splits if name not in ("train", "calibration")]
        fingerprint = None if adapter is None else sha256_of(adapter / METADATA_FILE)
        if self.folder.is_done(stage):
            if self.folder.notes(stage)["adapter"] != fingerprint:
                raise UsageError(
                    f"{self.folder.path} holds an evaluation of another adapter as '{method}'; use --overwrite or "
                    "another run name"
                )
            folders = {split: self._split_folder(method, split) for split in splits}
            return {split: read_predictions(folder / "predictions.parquet") for split, folder in folders.items()}
        from ray_jobs.evaluate import EvaluationJob, evaluate

        total = sum(len(data.splits[split]) for split in splits)
        with self.folder.stage(stage) as notes, self.reporter.task(f"evaluate {method}", total) as advance:
            notes["adapter"] = fingerprint
            job = EvaluationJob(self.config, data, resolved, adapter, splits)
            found = evaluate(job, lambda done: advance(done, ""))
            self.keep(method, found, data)
        return found

    def keep(self, name: str, found: Mapping[str, Predictions], data: PreparedData) -> None:
        """Writes predictions and metrics of a method, recalibrated or not, and logs the figures."""
        logger = self.logger.child(f"evaluate-{name}", {"stage": "evaluate", "method": name})
        with ending(logger):
            for split, predictions in found.items():
                folder = self._split_folder(name, split)
                write_predictions(folder / "predictions.parquet", predictions)
                metrics = evaluate_predictions(
                    predictions, self.config.evaluation, self.config.seed, data_hash=data.splits[split].content_hash
                )
                write_metrics(folder / "metrics.json", metrics)
                logger.log_artifact(folder / "metrics.json", f"evaluation/{split}/metrics.json")
                block = metrics["sources"]["softmax"]
                logger.log_metrics(
                    {f"{split}/{metric}": of["value"] for metric, of in block.items() if of["value"] is not None}, 0
                )

    def recalibrate(
        self, method: MethodName, found: Mapping[str, Predictions], data: PreparedData
    ) -> dict[str, tuple[FittedTemperature, str, dict[str, Predictions]]]:
        """Stage `recalibrate`: one temperature for each set of labelled data the run has seen, by the name it gets.

        Returns:
            By name: the temperature, the splits it was fitted on in words, and the tempered predictions.
        """
        from components.evaluation.recalibrate import temper

        results = {}
        for name, splits in self.recalibrations(method).items():
            with self.folder.stage(f"recalibrate/{name}") as notes:
                fitted, tempered = temper(found, splits)
                notes["temperature"], notes["fitted_on"] = fitted.value, list(splits)
                write_json(self.folder.method(name) / "temperature.json", {**vars(fitted), "fitted_on": list(splits)})
                self.keep(name, tempered, data)
            results[name] = (fitted, " and ".join(splits), tempered)
        return results

    def recalibrations(self, method: MethodName) -> dict[str, tuple[str, ...]]:
        """Names of a method's recalibrations and the labelled splits each is fitted on.

        Beside the in-domain validation split, a temperature is fitted on exactly the labelled data that CALM's stop
        rule reads, so that the two are compared at equal information.
        """
        if "temperature" not in self.config.recalibrate.get(method, []):
            return {}
        fits: dict[str, tuple[str, ...]] = {f"{method}+temperature": ("validation",)}
        stop = self.config.calm.stop
        if "calm" in self.config.methods and stop.rule != "budget" and stop.split != "validation":
            splits = ("validation", "validation_shift") if stop.split == "both" else (stop.split,)
            fits[f"{method}+temperature@{stop.split}"] = splits
        return fits

    def metrics(self, names: list[str], splits: list[str]) -> dict[str, dict[str, Any]]:
        """Content of `metrics.json` by method, then split."""
        return {
            name: {split: read_metrics(self._split_folder(name, split) / "metrics.json") for split in splits}
            for name in names
        }

    def _split_folder(self, name: str, split: str) -> Path:
        return self.folder.method(name) / "evaluation" / split


def _headline(row: Mapping[str, float]) -> str:
    """The few numbers worth showing beside a progress bar."""
    shown = ("loss", "g", "f", "mean_tau", "validation/nll", "validation/ece")
    return "  ".join(f"{key} {row[key]:.3f}" for key in shown if key in row)


def overlap_sentences(data: PreparedData) -> list[str]:
    """Questions that stand in two splits, in words."""
    policy = data.manifest["overlap_policy"]
    did = "dropped from the earlier one" if policy == "drop" else "kept"
    return [
        f"{overlap.questions} question texts stand in {overlap.first} and in {overlap.second} "
        f"({overlap.same_choices} with the same choices); {did}"
        for overlap in data.overlaps
    ]
