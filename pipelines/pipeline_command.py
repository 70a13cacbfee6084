"""`caltune pipeline`: Kubeflow pipelines from run files, compiled, run here or on a server, and scheduled."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from components.errors import CaltuneError, GateError, UsageError
from pipelines.options import Config, Json, Overrides

if TYPE_CHECKING:
    from components.config import RunConfig
    from pipelines.kubeflow.settings import Settings

Pipeline = Literal["calibrate", "retrain"]

Which = Annotated[Pipeline, typer.Argument(help="calibrate or retrain.", show_default=False)]
Image = Annotated[
    str | None,
    typer.Option(help="Image of the steps; without it caltune-pipeline of this version.", show_default=False),
]
TrainOn = Annotated[
    Literal["step", "ray", "rayjob"],
    typer.Option(help="Where methods are trained: in the step, on a Ray cluster that is there, on a RayJob's."),
]
RayAddress = Annotated[
    str | None, typer.Option(help="Ray's dashboard, for --train-on ray: http://<head>:8265.", show_default=False)
]
TrainerImage = Annotated[
    str | None,
    typer.Option(
        help="Image of Ray's pods, for --train-on rayjob; else caltune-trainer of this version.", show_default=False
    ),
]
Memory = Annotated[str, typer.Option(help="Memory of each worker.")]
Hours = Annotated[float, typer.Option(help="Stop a RayJob after this many hours.")]
Host = Annotated[str, typer.Option(help="Address of Kubeflow Pipelines' API.", show_default=False)]
Namespace = Annotated[
    str | None, typer.Option(help="Your namespace, where the server has several users.", show_default=False)
]
Account = Annotated[
    str | None, typer.Option(help="Kubernetes account of the steps; else the server's default.", show_default=False)
]
Name = Annotated[str | None, typer.Option(help="Name of the schedule; else the pipeline's.", show_default=False)]


def add_pipeline_command(app: typer.Typer) -> None:
    """Puts the command group into `app`."""
    group = typer.Typer(no_args_is_help=True, help="Compile, run and schedule Kubeflow pipelines.")
    group.command("compile")(compile_)
    group.command()(run)
    group.command()(schedule)
    group.command("schedule-diff")(schedule_diff)
    group.command()(unschedule)
    app.add_typer(group, name="pipeline")


def compile_(
    pipeline: Which,
    config: Config,
    output: Annotated[Path, typer.Option("--output", "-o", help="File to write.", show_default=False)],
    set_: Overrides = None,
    image: Image = None,
    train_on: TrainOn = "step",
    ray_address: RayAddress = None,
    trainer_image: TrainerImage = None,
    memory: Memory = "16Gi",
    hours: Hours = 24.0,
) -> None:
    """Write a pipeline for a run file; its methods, resources, retries and images are settled by that."""
    from pipelines.kubeflow.dags import compile_pipeline

    settings = _settings(image, train_on, ray_address, trainer_image, memory, hours)
    compile_pipeline(pipeline, _load(config, set_), settings, output)
    print(output)


def run(
    pipeline: Which,
    config: Config,
    local: Annotated[bool, typer.Option("--local", help="Run it on this machine, step by step.")] = False,
    host: Annotated[
        str | None, typer.Option(help="Run it on this Kubeflow Pipelines server.", show_default=False)
    ] = None,
    set_: Overrides = None,
    image: Image = None,
    train_on: TrainOn = "step",
    ray_address: RayAddress = None,
    trainer_image: TrainerImage = None,
    memory: Memory = "16Gi",
    hours: Hours = 24.0,
    namespace: Namespace = None,
    service_account: Account = None,
    follow: Annotated[bool, typer.Option("--follow/--no-wait", help="Wait for the end, on a server.")] = True,
    json_: Json = False,
) -> None:
    """Run a pipeline; exit code 3 when its model does not pass the gate.

    On this machine each step is a process of its own and works in the run file's output_dir. On a server, exit code 1
    covers a model that was refused too; the run's page says which.
    """
    if local == (host is not None):
        raise UsageError("say where: --local, or --host ADDRESS")
    loaded = _load(config, set_)
    settings = _settings(image, train_on, ray_address, trainer_image, memory, hours)
    if host is not None:
        _run_on_server(pipeline, loaded, settings, host, namespace, service_account, follow, json_)
        return
    from pipelines.kubeflow.local_run import run_locally

    ended = run_locally(pipeline, loaded, settings)
    if json_:
        print(json.dumps({**asdict(ended), "folder": str(ended.folder)}, indent=2))
    else:
        print(f"{ended.outcome}: {ended.reason}\nrun folder: {ended.folder}")
    if ended.outcome == "refused":
        raise typer.Exit(GateError.exit_code)


def schedule(
    pipeline: Which,
    config: Config,
    cron: Annotated[str, typer.Option(help="Five fields, read in UTC, e.g. '0 3 * * 1'.", show_default=False)],
    host: Host,
    set_: Overrides = None,
    name: Name = None,
    image: Image = None,
    train_on: TrainOn = "step",
    ray_address: RayAddress = None,
    trainer_image: TrainerImage = None,
    memory: Memory = "16Gi",
    hours: Hours = 24.0,
    namespace: Namespace = None,
    service_account: Account = None,
    json_: Json = False,
) -> None:
    """Have a server run a pipeline again and again, one run at a time; times that were missed are not made up for.

    A schedule of the same name is replaced where it differs, and left alone where it does not.
    """
    from pipelines.kubeflow.cron import next_runs, shown
    from pipelines.kubeflow.dags import pipeline_name
    from pipelines.kubeflow.schedule import Asked, server
    from pipelines.kubeflow.schedule import schedule as put

    times = next_runs(cron, datetime.now(UTC))
    loaded = _load(config, set_)
    settings = _settings(image, train_on, ray_address, trainer_image, memory, hours)
    title = pipeline_name(pipeline, loaded)
    with _compiled(pipeline, loaded, settings) as package, server(host, namespace) as client:
        made = put(client, Asked(name or title, cron, title, package, service_account), namespace)
    if json_:
        print(json.dumps({**asdict(made), "next": [moment.isoformat() for moment in times]}, indent=2))
        return
    print(f"{name or title}: {made.did}, pipeline version {made.version}, next runs:")
    for moment in times:
        print(f"  {shown(moment)}")


def schedule_diff(
    pipeline: Which,
    config: Config,
    host: Host,
    set_: Overrides = None,
    name: Name = None,
    image: Image = None,
    train_on: TrainOn = "step",
    ray_address: RayAddress = None,
    trainer_image: TrainerImage = None,
    memory: Memory = "16Gi",
    hours: Hours = 24.0,
    namespace: Namespace = None,
) -> None:
    """Show how the pipeline version that a schedule runs differs from the one compiled here; exit code 1 if it does."""
    from pipelines.kubeflow.dags import pipeline_name
    from pipelines.kubeflow.schedule import differences, existing, pinned, server

    loaded = _load(config, set_)
    settings = _settings(image, train_on, ray_address, trainer_image, memory, hours)
    title = name or pipeline_name(pipeline, loaded)
    with _compiled(pipeline, loaded, settings) as package:
        with server(host, namespace) as client:
            version, spec = pinned(client, existing(client, title, namespace))
        lines = differences(spec, package.read_text(encoding="utf-8"), version)
    print(f"{title} runs pipeline version {version}", file=sys.stderr)
    print("\n".join(lines) if lines else "no difference")
    if lines:
        raise typer.Exit(1)


def unschedule(
    name: Annotated[str, typer.Argument(help="Name of the schedule.", show_default=False)],
    host: Host,
    namespace: Namespace = None,
) -> None:
    """Delete a schedule; its pipeline and past runs stay."""
    from pipelines.kubeflow.schedule import server
    from pipelines.kubeflow.schedule import unschedule as remove

    with server(host, namespace) as client:
        gone = remove(client, name, namespace)
    print(f"{name}: deleted ({gone})")


def _run_on_server(
    pipeline: Pipeline,
    config: RunConfig,
    settings: Settings,
    host: str,
    namespace: str | None,
    service_account: str | None,
    follow: bool,
    as_json: bool,
) -> None:
    from pipelines.kubeflow.schedule import EXPERIMENT, server

    with _compiled(pipeline, config, settings) as package, server(host, namespace) as client:
        experiment = client.create_experiment(EXPERIMENT, namespace=namespace)
        begun = client.run_pipeline(
            experiment.experiment_id,
            f"{config.run} {datetime.now(UTC):%Y-%m-%d %H:%M}",
            str(package),
            service_account=service_account,
        )
        # The client's own limit of time has no "none"; ten years will do.
        state = client.wait_for_run_completion(begun.run_id, 3.2e8).state if follow else "started"
    print(json.dumps({"run_id": begun.run_id, "state": state}) if as_json else f"run {begun.run_id}: {state}")
    if follow and state != "SUCCEEDED":
        raise CaltuneError(f"run {begun.run_id} ended as {state}; its page on {host} says where")


@contextmanager
def _compiled(pipeline: Pipeline, config: RunConfig, settings: Settings) -> Iterator[Path]:
    from pipelines.kubeflow.dags import compile_pipeline

    with tempfile.TemporaryDirectory() as scratch:
        package = Path(scratch) / "pipeline.yaml"
        compile_pipeline(pipeline, config, settings, package)
        yield package


def _load(config: Path, overrides: list[str] | None) -> RunConfig:
    from components.run_file import load_run_file

    return load_run_file(config, overrides or [])


def _settings(
    image: str | None,
    train_on: Literal["step", "ray", "rayjob"],
    ray_address: str | None,
    trainer_image: str | None,
    memory: str,
    hours: float,
) -> Settings:
    """The options as settings.

    Raises:
        UsageError: Kubeflow's SDK is not installed.
    """
    if importlib.util.find_spec("kfp") is None:
        raise UsageError("Kubeflow's SDK is not installed: pip install 'caltune[kubeflow]'")
    from pipelines.kubeflow.settings import Settings

    version = importlib.metadata.version("caltune")
    return Settings(
        image or f"caltune-pipeline:{version}",
        train_on,
        ray_address,
        trainer_image or f"caltune-trainer:{version}",
        memory,
        hours,
    )
