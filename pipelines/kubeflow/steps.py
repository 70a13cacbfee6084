"""What the steps of the Kubeflow pipelines do in a run folder.

Steps hand over through the run folder on a volume that all of them mount; its path is what `prepare` returns. Each step
opens the folder as `caltune run --resume` does, does the stages that are its own, and finds done what came before. That
is chosen over passing every file as an artifact, because checkpoints have to be there when a pod is lost and its step
is tried again, because Ray's workers read and write the same folder, and because a pipeline that was broken off can be
taken up by `caltune run --resume` on the folder, and the other way round. The price is that a folder has one writer at
a time, so methods are trained one after the other.

Artifacts carry copies of what matters out of it: splits, adapters, figures, report. Those that a step takes in are
checked against the folder, so that it cannot work on something else than the pipeline shows.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol, cast

from components.config import MethodName, RunConfig
from components.errors import UsageError
from components.files import read_json
from components.run_file import load_run_file
from pipelines.progress import Reporter
from pipelines.run_folder import RUN_FILE, STATE

JOB_LENGTH = 8
"""Characters of the pipeline run's id that become part of the run's name."""
SHOWN = ("accuracy", "ece", "ece_adaptive", "nll", "brier_score", "auroc", "mean_confidence")
"""Figures shown with the pipeline; the others are in the run folder and in MLflow."""


class Artifact(Protocol):
    """What a step needs of Kubeflow's artifacts."""

    path: str
    metadata: dict[str, Any]


class Figures(Artifact, Protocol):
    """What a step needs of Kubeflow's `Metrics`."""

    def log_metric(self, metric: str, value: float) -> None: ...  # noqa: D102


def run_name(run: str, job: str) -> str:
    """Name of the run that one execution of a pipeline makes: the run file's, and the beginning of the job's id."""
    return f"{run}-{job[:JOB_LENGTH]}"


def config_of(folder: str) -> RunConfig:
    """The run that a folder is of.

    Raises:
        UsageError: The folder is not where its run file says, so the volume is mounted elsewhere than in other steps.
    """
    config = load_run_file(Path(folder) / RUN_FILE)
    if config.folder != Path(folder):
        raise UsageError(
            f"{folder} says of itself to be {config.folder}; mount the volume at the same place everywhere"
        )
    return config


def test_splits(config: RunConfig) -> list[str]:
    """The splits that models are judged on."""
    return ["id", *config.data.ood]


def prepare_run(run_file: str, job: str, data: Artifact) -> str:
    """Makes the run folder, with the splits and the base model found.

    Args:
        run_file: The run file's text.
        job: Id of the pipeline's execution.
        data: Gets a copy of the splits.

    Returns:
        The run folder.
    """
    from pipelines.run import opened

    with tempfile.TemporaryDirectory() as scratch:
        source = Path(scratch) / "run.yaml"
        source.write_text(run_file, encoding="utf-8")
        asked = load_run_file(source)
    content = asked.model_dump() | {"run": run_name(asked.run, job), "output_dir": asked.output_dir.resolve()}
    config = RunConfig.model_validate(content)
    with opened(config, Path(), "resume", Reporter()) as (stages, prepared, _):
        shutil.copytree(stages.folder.path / "data", data.path, dirs_exist_ok=True)
        data.metadata["run"] = config.run
        for name, split in prepared.splits.items():
            data.metadata |= {f"n_{name}": len(split), f"hash_{name}": split.content_hash}
    return str(config.folder)


def train_here(folder: str, method: str, data: Artifact, adapter: Artifact) -> None:
    """Trains a method in this process's container.

    Args:
        folder: The run folder.
        method: The method.
        data: The splits, as the pipeline shows them.
        adapter: Gets a copy of the adapter folder.
    """
    from pipelines.run import train_only

    check_data(folder, data)
    train_only(config_of(folder), Path(), "resume", Reporter(), only=method)
    hand_over_adapter(folder, method, adapter)


def hand_over_adapter(folder: str, method: str, adapter: Artifact) -> None:
    """Puts a copy of a trained method's adapter, and what it is, into an artifact.

    Raises:
        CaltuneError: The adapter is missing or damaged.
    """
    from components.models.adapter_files import verify_adapter

    source = Path(folder) / method / "adapter"
    verify_adapter(source)
    shutil.copytree(source, adapter.path, dirs_exist_ok=True)
    adapter.metadata |= {
        "method": method,
        "base_model": config_of(folder).model.name,
        "kept_step": _state(folder)[f"train/{method}"]["kept_step"],
        "sha256": _fingerprint(folder, method),
    }


def check_data(folder: str, data: Artifact) -> None:
    """Refuses to work on other data than the pipeline shows.

    Raises:
        UsageError: The folder holds other splits.
    """
    shown = {name.removeprefix("hash_"): value for name, value in data.metadata.items() if name.startswith("hash_")}
    if shown != _state(folder)["prepare"]["hashes"]:
        raise UsageError(f"{folder} holds other splits than this pipeline made; somebody else has written there")


def check_adapter(folder: str, method: str, adapter: Artifact) -> None:
    """Refuses to measure another adapter than the pipeline shows.

    Raises:
        UsageError: The folder holds another one.
    """
    if adapter.metadata["sha256"] != _fingerprint(folder, method):
        raise UsageError(f"{folder} holds another adapter of '{method}' than this pipeline trained; it was overwritten")


def evaluate_run(folder: str, method: str, metrics: Figures) -> None:
    """Measures a method on every split that is not trained on.

    Args:
        folder: The run folder.
        method: The method.
        metrics: Gets the figures by split.
    """
    from pipelines.run import evaluate_method, opened

    with opened(config_of(folder), Path(), "resume", Reporter()) as (stages, data, resolved):
        evaluate_method(stages, cast("MethodName", method), data, resolved)
        show(metrics, stages.metrics([method], test_splits(stages.config)))


def recalibrate_run(folder: str, method: str, metrics: Figures) -> None:
    """Fits the recalibrations of an evaluated method and measures them.

    Args:
        folder: The run folder.
        method: The method.
        metrics: Gets the figures by recalibration and split.
    """
    from pipelines.run import evaluate_method, opened

    name = cast("MethodName", method)
    with opened(config_of(folder), Path(), "resume", Reporter()) as (stages, data, resolved):
        made = stages.recalibrate(name, evaluate_method(stages, name, data, resolved), data)
        show(metrics, stages.metrics(list(made), test_splits(stages.config)))


def compare_run(folder: str, report: Artifact, figures: Figures) -> None:
    """Compares all methods and writes the report: what is left of `caltune run` when everything before it is done.

    Args:
        folder: The run folder.
        report: Gets the page.
        figures: Gets accuracy and ECE by method and test set.
    """
    from pipelines.run import run

    result = run(config_of(folder), Path(), "resume", Reporter())
    shutil.copy2(result.report, report.path)
    report.metadata |= {"run": result.summary["run"], "methods": ", ".join(result.summary["methods"])}
    for method, by_split in result.summary["methods"].items():
        for split, block in by_split.items():
            _log(figures, f"{method}_{split}", block, ("accuracy", "ece"))


def show(metrics: Figures, content: Mapping[str, Mapping[str, Any]]) -> None:
    """Puts figures of `metrics.json`, by method and split, into an artifact; undefined ones are left out."""
    for method, by_split in content.items():
        for split, found in by_split.items():
            for source, block in found["sources"].items():
                _log(metrics, f"{method}_{split}_{source}", block, SHOWN)


def _log(metrics: Figures, prefix: str, block: Mapping[str, Any], names: tuple[str, ...]) -> None:
    for name in names:
        value = block.get(name, {}).get("value")
        if value is not None:
            metrics.log_metric(f"{prefix}_{name}", float(value))


def _state(folder: str) -> dict[str, Any]:
    stages: dict[str, Any] = read_json(Path(folder) / STATE, remedy="start the pipeline anew")["stages"]
    return stages


def _fingerprint(folder: str, method: str) -> str:
    from components.models.adapter_extras import fingerprint

    return fingerprint(Path(folder) / method / "adapter")
