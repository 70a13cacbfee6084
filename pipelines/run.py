"""`caltune run`: all stages in order, then the report. What the command line and the tests call."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from components.config import RunConfig
from components.errors import UsageError
from components.evaluation.predictions import Predictions
from components.evaluation.report import ReportInputs, SplitFacts, TemperatureNote, write_report
from components.evaluation.summary import compare, summarise
from components.run_file import git_state
from components.tracking.logger import Logger, ending
from components.tracking.mlflow_logger import open_logger
from components.training.methods import METHODS
from components.training.trace import read_trace
from pipelines.calibrate import Calibration, overlap_sentences
from pipelines.progress import Reporter
from pipelines.run_folder import RUN_FILE, OnExisting, open_run_folder


@dataclass(frozen=True)
class RunResult:
    """What a run ends with.

    Attributes:
        summary: Content of `summary.json`.
        report: The HTML report.
        folder: The run folder.
    """

    summary: dict[str, Any]
    report: Path
    folder: Path


def run(config: RunConfig, base_folder: Path, on_existing: OnExisting, reporter: Reporter) -> RunResult:
    """Runs the pipeline.

    Args:
        config: The run.
        base_folder: Where relative paths of data sources start.
        on_existing: What to do with a folder that has something in it.
        reporter: Says what is going on.

    Raises:
        CaltuneError: A stage failed; what was done before stands in the run folder.
    """
    with open_run_folder(config, on_existing) as folder, ending(open_logger(config, folder.path)) as logger:
        stages = Calibration(config, folder, base_folder, logger, reporter)
        data = stages.prepare()
        resolved = stages.resolve()
        found: dict[str, dict[str, Predictions]] = {}
        temperatures: dict[str, TemperatureNote] = {}
        for method in config.methods:
            stages.train(method, resolved, resume=on_existing == "resume")
            adapter = folder.method(method) / "adapter" if METHODS[method].trains_adapter else None
            found[method] = stages.evaluate(method, data, resolved, adapter)
            for name, (fitted, data_words, tempered) in stages.recalibrate(method, found[method], data).items():
                found[name] = tempered
                temperatures[name] = TemperatureNote(fitted, data_words)
        with folder.stage("report"):
            return _report(stages, data, found, temperatures, logger)


def _report(
    stages: Calibration,
    data: Any,
    found: dict[str, dict[str, Predictions]],
    temperatures: dict[str, TemperatureNote],
    logger: Logger,
) -> RunResult:
    config, folder = stages.config, stages.folder
    tests = ["id", *config.data.ood]
    tested = {name: {split: by_split[split] for split in tests} for name, by_split in found.items()}
    metrics = stages.metrics(list(found), tests)
    comparisons = compare(tested, pairs_worth_comparing(list(found)), config.evaluation, config.seed)
    trained = [m for m in config.methods if (folder.method(m) / "trace.jsonl").exists()]
    inputs = ReportInputs(
        run=config.run,
        git_commit=git_state()["commit"],  # type: ignore[arg-type]
        config_hash=folder.state["config_hash"],
        created=datetime.now().astimezone().strftime("%Y-%m-%d %H:%M %Z"),
        config_yaml=(folder.path / RUN_FILE).read_text(encoding="utf-8"),
        predictions=tested,
        metrics=metrics,
        comparisons=comparisons,
        temperatures=temperatures,
        traces={m: list(read_trace(folder.method(m) / "trace.jsonl")) for m in trained},
        kept_steps={m: folder.notes(f"train/{m}")["kept_step"] for m in trained},
        splits=[SplitFacts.of(split) for split in data.splits.values()],
        overlaps=overlap_sentences(data),
    )
    index = write_report(inputs, folder.path / "report")
    logger.log_artifact(folder.path / "report")
    return RunResult(summarise(config.run, metrics, comparisons), index, folder.path)


def pairs_worth_comparing(names: list[str]) -> list[tuple[str, str]]:
    """CALM against everything it should beat, plain fine-tuning against the model as it is."""
    pairs = [("calm", other) for other in names if "calm" in names and not other.startswith("calm")]
    return [*pairs, ("sft", "base")] if {"sft", "base"} <= set(names) else pairs


def train_only(
    config: RunConfig, base_folder: Path, on_existing: OnExisting, reporter: Reporter, only: str | None = None
) -> dict[str, Path]:
    """Stages `prepare`, `model` and `train`.

    Args:
        config: The run.
        base_folder: Where relative paths of data sources start.
        on_existing: What to do with a folder that has something in it.
        reporter: Says what is going on.
        only: One of the run's methods.

    Returns:
        Adapter folder by method.

    Raises:
        UsageError: Nothing to train.
    """
    methods = [m for m in config.methods if METHODS[m].trains_adapter and only in (None, m)]
    if not methods:
        raise UsageError(f"nothing to train: the run file's methods are {', '.join(config.methods)}")
    with open_run_folder(config, on_existing) as folder, ending(open_logger(config, folder.path)) as logger:
        stages = Calibration(config, folder, base_folder, logger, reporter)
        stages.prepare()
        resolved = stages.resolve()
        for method in methods:
            stages.train(method, resolved, resume=on_existing == "resume")
        return {method: folder.method(method) / "adapter" for method in methods}


def evaluate_only(
    config: RunConfig, base_folder: Path, on_existing: OnExisting, reporter: Reporter, adapter: Path | None
) -> RunResult:
    """Stages `prepare`, `model` and `evaluate`, of the base model or of an adapter folder.

    Raises:
        CaltuneError: A stage failed.
    """
    with open_run_folder(config, on_existing) as folder, ending(open_logger(config, folder.path)) as logger:
        stages = Calibration(config, folder, base_folder, logger, reporter)
        data = stages.prepare()
        name = "base" if adapter is None else _method_of(adapter)
        stages.evaluate(name, data, stages.resolve(), adapter)
        metrics = stages.metrics([name], ["id", *config.data.ood])
        return RunResult(summarise(config.run, metrics, []), folder.path, folder.path)


def _method_of(adapter: Path) -> str:
    from components.models.adapter_files import verify_adapter

    return str(verify_adapter(adapter)["method"])
