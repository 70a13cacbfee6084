"""The steps of the Kubeflow pipelines: typed wrappers, a line or two each, around what the installed package does.

Kubeflow sends a step's source to its pod, so a step imports what it needs within itself. Nothing is installed there:
Kubeflow's SDK and caltune are in the image. How steps hand over to one another is said in `steps.py`.

This module goes without `from __future__ import annotations`, because Kubeflow reads the types of signatures as they
are; its images are set when a pipeline is compiled (`settings.py`).
"""

import functools
from typing import NamedTuple

from kfp import dsl
from kfp.dsl import HTML, Dataset, Input, Markdown, Metrics, Model, Output

component = functools.partial(
    dsl.component, base_image="caltune-pipeline", packages_to_install=None, install_kfp_package=False
)


@component()
def prepare(run_file: str, job: str, data: Output[Dataset]) -> str:
    """Read the questions as they are now, and divide them.

    Args:
        run_file: The run file's text.
        job: Tells this run's folder from others.
        data: The splits.

    Returns:
        The run folder, on the shared volume.
    """
    from pipelines.kubeflow.steps import prepare_run

    return prepare_run(run_file, job, data)


@component()
def train(folder: str, method: str, data: Input[Dataset], adapter: Output[Model]) -> None:
    """Train a method in this step's own container; goes on from its last checkpoint.

    Args:
        folder: The run folder.
        method: The method.
        data: The splits.
        adapter: The adapter folder.
    """
    from pipelines.kubeflow.steps import train_here

    train_here(folder, method, data, adapter)


@component()
def train_on_ray(folder: str, method: str, address: str, data: Input[Dataset], adapter: Output[Model]) -> None:
    """Have a Ray cluster that is there train a method; goes on from its last checkpoint.

    Args:
        folder: The run folder, which the cluster has too.
        method: The method.
        address: Ray's dashboard.
        data: The splits.
        adapter: The adapter folder.
    """
    from pipelines.kubeflow.remote import train_by_job

    train_by_job(folder, method, address, data, adapter)


@component()
def train_as_rayjob(
    folder: str, method: str, image: str, memory: str, hours: float, data: Input[Dataset], adapter: Output[Model]
) -> None:
    """Create a RayJob that trains a method, and wait for its end; goes on from its last checkpoint.

    Args:
        folder: The run folder.
        method: The method.
        image: Image of Ray's pods.
        memory: Memory of each worker.
        hours: After which the RayJob is stopped.
        data: The splits.
        adapter: The adapter folder.
    """
    from pipelines.kubeflow.remote import train_by_rayjob

    train_by_rayjob(folder, method, image, memory, hours, data, adapter)


@component()
def evaluate(folder: str, method: str, data: Input[Dataset], metrics: Output[Metrics]) -> None:
    """Measure the base model in domain and out of domain.

    Args:
        folder: The run folder.
        method: The name the results get.
        data: The splits.
        metrics: Figures by split.
    """
    from pipelines.kubeflow.steps import check_data, evaluate_run

    check_data(folder, data)
    evaluate_run(folder, method, metrics)


@component()
def evaluate_adapter(folder: str, method: str, adapter: Input[Model], metrics: Output[Metrics]) -> None:
    """Measure a trained method in domain and out of domain.

    Args:
        folder: The run folder.
        method: The method.
        adapter: The adapter folder.
        metrics: Figures by split.
    """
    from pipelines.kubeflow.steps import check_adapter, evaluate_run

    check_adapter(folder, method, adapter)
    evaluate_run(folder, method, metrics)


@component()
def recalibrate(folder: str, method: str, metrics: Output[Metrics]) -> None:
    """Fit the recalibrations of a method and measure them.

    Args:
        folder: The run folder.
        method: The method.
        metrics: Figures by recalibration and split.
    """
    from pipelines.kubeflow.steps import recalibrate_run

    recalibrate_run(folder, method, metrics)


@component()
def compare(folder: str, report: Output[HTML], figures: Output[Metrics]) -> None:
    """Set all methods side by side, with intervals, and write the report.

    Args:
        folder: The run folder.
        report: The report, one self-contained page.
        figures: Accuracy and ECE by method and test set.
    """
    from pipelines.kubeflow.steps import compare_run

    compare_run(folder, report, figures)


@component()
def evaluate_champion(folder: str, data: Input[Dataset], metrics: Output[Metrics]) -> str:
    """Measure the model in service on the fresh data.

    Args:
        folder: The run folder.
        data: The splits.
        metrics: Figures by split.

    Returns:
        The champion's version; empty where there is none.
    """
    from pipelines.kubeflow.champion import evaluate_on_fresh_data
    from pipelines.kubeflow.steps import check_data

    check_data(folder, data)
    return evaluate_on_fresh_data(folder, metrics) or ""


@component()
def decide_drift(folder: str, champion: str, figures: Output[Metrics]) -> NamedTuple(  # type: ignore[valid-type]
    "Drift", [("drifted", bool), ("reason", str)]
):
    """Decide whether a retraining is due.

    Args:
        folder: The run folder.
        champion: The champion's version; empty where there is none.
        figures: How much worse it has become, with intervals.

    Returns:
        The decision and why.
    """
    from pipelines.kubeflow.champion import decide

    return decide(folder, champion or None, figures)


@component()
def gate(folder: str, verdict: Output[Markdown]) -> NamedTuple("Gate", [("passed", bool), ("reason", str)]):  # type: ignore[valid-type]
    """Judge the run's candidate by the run file's rules.

    Args:
        folder: The run folder.
        verdict: The verdict as a table.

    Returns:
        Whether it passed, and the verdict in a sentence.
    """
    from pipelines.kubeflow.shipping import judge_candidate

    return judge_candidate(folder, verdict)


@component()
def register(folder: str) -> str:
    """Make the candidate a version of the registered model, with the alias challenger.

    Args:
        folder: The run folder.

    Returns:
        The version.
    """
    from pipelines.kubeflow.shipping import register_candidate

    return register_candidate(folder)


@component()
def promote(folder: str, version: str, by: str) -> None:
    """Make a version champion, provided that it passes the gate against the champion there is now.

    Args:
        folder: The run folder.
        version: The version.
        by: Who promotes.
    """
    from pipelines.kubeflow.shipping import promote_version

    promote_version(folder, version, by)


@component()
def stop(folder: str, reason: str) -> str:
    """End well without a new model.

    Args:
        folder: The run folder.
        reason: Why no model is due.

    Returns:
        The reason.
    """
    from pipelines.kubeflow.shipping import stop_run

    return stop_run(folder, reason)


@component()
def refuse(folder: str, reason: str) -> None:
    """End the run as failed, because its candidate did not pass the gate.

    Args:
        folder: The run folder.
        reason: The verdict in a sentence.
    """
    from pipelines.kubeflow.shipping import refuse_candidate

    refuse_candidate(folder, reason)
