"""`caltune run`: all stages in order, then the report. What the command line and the tests call."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from components.config import ROUTED_METHODS, SAMPLED_METHODS, MethodName, RunConfig
from components.errors import UsageError
from components.evaluation.display import row_name
from components.evaluation.expert_load import ExpertLoads
from components.evaluation.head_summary import read_head_summary
from components.evaluation.open_predictions import AnyPredictions
from components.evaluation.predictions import FLC
from components.evaluation.recalibrate import Recalibrated
from components.evaluation.report import (
    FlcTemperatureNote,
    IsotonicNote,
    ReportInputs,
    SplitFacts,
    TemperatureNote,
    VectorScalingNote,
    write_report,
)
from components.evaluation.summary import compare, summarise
from components.posthoc.flc_temperature import FlcTemperature
from components.posthoc.isotonic import IsotonicFit
from components.posthoc.temperature import FittedTemperature
from components.posthoc.vector_scaling import VectorScaling
from components.run_file import git_state
from components.tracking.logger import ending
from components.tracking.mlflow_logger import open_logger
from components.training.expert_load import LOAD_FILE
from components.training.methods import METHODS
from components.training.trace import read_trace
from pipelines.calibrate import Calibration
from pipelines.progress import Reporter
from pipelines.run_folder import RUN_FILE, OnExisting, open_run_folder
from pipelines.sentences import overlap_sentences

if TYPE_CHECKING:
    from components.data.prepare import PreparedData
    from components.models.base import ResolvedModel

PLAIN = ("base", "sft")
"""Methods that every other one is compared with."""
CALM_ABLATIONS = ("regularization", "iterate", "learned_ts")


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
    with opened(config, base_folder, on_existing, reporter) as (stages, data, resolved):
        found: dict[str, dict[str, AnyPredictions]] = {}
        recalibrated: dict[str, Recalibrated] = {}
        for method in config.methods:
            stages.train(method, resolved, resume=on_existing == "resume")
            found[method] = evaluate_method(stages, method, data, resolved)
            for name, result in stages.recalibrate(method, found[method], data).items():
                found[name], recalibrated[name] = {**result.predictions}, result
        with stages.folder.stage("report"):
            return report(stages, data, found, recalibrated)


@contextmanager
def opened(
    config: RunConfig, base_folder: Path, on_existing: OnExisting, reporter: Reporter
) -> Iterator[tuple[Calibration, PreparedData, ResolvedModel]]:
    """Takes hold of a run with its data prepared and its base model found: how every stage begins.

    Args:
        config: The run.
        base_folder: Where relative paths of data sources start.
        on_existing: What to do with a folder that has something in it.
        reporter: Says what is going on.

    Yields:
        The stages, the data and the base model. The folder and the tracked run are let go of afterwards.

    Raises:
        CaltuneError: The folder cannot be had, the data are wrong, or there is no such model.
    """
    with open_run_folder(config, on_existing) as folder, ending(open_logger(config, folder.path)) as logger:
        stages = Calibration(config, folder, base_folder, logger, reporter)
        data = stages.prepare()
        yield stages, data, stages.resolve()


def evaluate_method(
    stages: Calibration, method: MethodName, data: PreparedData, resolved: ResolvedModel
) -> dict[str, AnyPredictions]:
    """Predictions of one of the run's methods, with its adapter where it trains one."""
    adapter = stages.folder.method(method) / "adapter" if METHODS[method].trains_adapter else None
    return stages.evaluate(method, data, resolved, adapter)


def report(
    stages: Calibration,
    data: PreparedData,
    found: dict[str, dict[str, AnyPredictions]],
    recalibrated: dict[str, Recalibrated],
) -> RunResult:
    """Compares the methods of a run and writes its report.

    Args:
        stages: Of the run; its configuration's methods are all in `found`.
        data: The prepared data.
        found: Predictions by method, recalibrated ones included, then split.
        recalibrated: What was fitted, by the recalibrated method's name.
    """
    config, folder = stages.config, stages.folder
    tests = ["id", *config.data.ood]
    tested = {name: {split: by_split[split] for split in tests} for name, by_split in found.items()}
    metrics = stages.metrics(list(found), tests)
    chosen = stages.chosen_sources(list(found), data)
    comparisons = compare(tested, pairs_worth_comparing(list(found), chosen), config.evaluation, config.seed)
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
        temperatures={
            name: TemperatureNote(result.fitted, " and ".join(result.fitted_on))
            for name, result in recalibrated.items()
            if isinstance(result.fitted, FittedTemperature)
        },
        flc_temperatures=_flc_temperatures(tested, recalibrated),
        vector_scalings={
            name: VectorScalingNote(result.fitted, " and ".join(result.fitted_on))
            for name, result in recalibrated.items()
            if isinstance(result.fitted, VectorScaling)
        },
        isotonic={
            name: IsotonicNote(result.fitted, " and ".join(result.fitted_on))
            for name, result in recalibrated.items()
            if isinstance(result.fitted, IsotonicFit)
        },
        chosen_sources=chosen,
        traces={m: list(read_trace(folder.method(m) / "trace.jsonl")) for m in trained},
        kept_steps={m: folder.notes(f"train/{m}")["kept_step"] for m in trained},
        expert_loads={m: ExpertLoads.read(path) for m in trained if (path := folder.method(m) / LOAD_FILE).exists()},
        experts_per_token=config.model.mixlora.top_k,
        collapse_share=config.uq4ct.collapse_share,
        splits=[SplitFacts.of(split) for split in data.splits.values()],
        overlaps=overlap_sentences(data),
        questions={split: data.splits[split] for split in tests},
        heads={m: head for m in trained if (head := read_head_summary(folder.method(m) / "adapter")) is not None},
    )
    index = write_report(inputs, folder.path / "report")
    stages.logger.log_artifact(folder.path / "report")
    return RunResult(summarise(config.run, metrics, comparisons, chosen), index, folder.path)


def _flc_temperatures(
    tested: Mapping[str, Mapping[str, AnyPredictions]], recalibrated: Mapping[str, Recalibrated]
) -> dict[str, FlcTemperatureNote]:
    """What the report says of temperatures from router confidence, by the name of the recalibrated method."""
    notes = {}
    for name, result in recalibrated.items():
        if isinstance(result.fitted, FlcTemperature):
            before = tested[name.partition("+")[0]]
            means = {split: float(result.fitted.of(found.confidence(FLC)).mean()) for split, found in before.items()}
            notes[name] = FlcTemperatureNote(result.fitted, " and ".join(result.fitted_on), means)
    return notes


def pairs_worth_comparing(names: list[str], chosen: Mapping[str, str] | None = None) -> list[tuple[str, str]]:
    """Pairs of rows of the summary whose difference is worth an interval.

    Every method against plain fine-tuning and the model as it is, recalibrated or not; the composition of CALM and
    UQ4CT against each of them too, CALM against its ablations, plain fine-tuning against the model as it is. The
    chosen source of a method with routers against plain fine-tuning and the method's own softmax; its temperatures
    from router confidence against these and against plain fine-tuning with a temperature; its other recalibrations
    against the same one of plain fine-tuning, as those of Laplace-LoRA and of a method that averages over several
    passes. Vector scaling and isotonic regression against the temperature of the same method, fitted on the same data.

    Args:
        names: Methods, recalibrated ones included.
        chosen: Chosen confidence source of the methods that have several.
    """
    plain = [name for name in names if name.startswith(("base", "sft"))]
    wanted: list[tuple[str, str]] = [(ours, other) for ours in METHODS if ours not in PLAIN for other in plain]
    wanted += [("calm_uq4ct", "calm"), ("calm_uq4ct", "uq4ct")]
    wanted += [("calm", ablation) for ablation in CALM_ABLATIONS]
    for kind in ("+vector_scaling", "+isotonic"):
        wanted += [(name, name.replace(kind, "+temperature")) for name in names if kind in name]
    rows = {row_name(method, source): method for method, source in (chosen or {}).items()}
    for method in ROUTED_METHODS:
        wanted += [(name, f"sft{name.removeprefix(method)}") for name in names if name.startswith(f"{method}+")]
        wanted += [(f"{method}+flc_temperature", other) for other in ("sft", method, "sft+temperature")]
    wanted += [(row, other) for row, method in rows.items() if row != method for other in ("sft", method)]
    for method in (*SAMPLED_METHODS, "laplace"):
        wanted += [(name, f"sft{name.removeprefix(method)}") for name in names if name.startswith(f"{method}+")]
    wanted += [("sft", "base")]
    return [pair for pair in wanted if {*pair} <= {*names, *rows}]


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
    with opened(config, base_folder, on_existing, reporter) as (stages, _, resolved):
        for method in methods:
            stages.train(method, resolved, resume=on_existing == "resume")
        return {method: stages.folder.method(method) / "adapter" for method in methods}


def evaluate_only(
    config: RunConfig, base_folder: Path, on_existing: OnExisting, reporter: Reporter, adapter: Path | None
) -> RunResult:
    """Stages `prepare`, `model` and `evaluate`, of the base model or of an adapter folder.

    Raises:
        CaltuneError: A stage failed.
    """
    with opened(config, base_folder, on_existing, reporter) as (stages, data, resolved):
        name = "base" if adapter is None else _method_of(adapter)
        stages.evaluate(name, data, resolved, adapter)
        metrics = stages.metrics([name], ["id", *config.data.ood])
        summary = summarise(config.run, metrics, [], stages.chosen_sources([name], data))
        return RunResult(summary, stages.folder.path, stages.folder.path)


def _method_of(adapter: Path) -> str:
    from components.models.adapter_files import verify_adapter

    return str(verify_adapter(adapter)["method"])
