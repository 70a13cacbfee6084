"""`caltune render`: manifests from run files. Nothing is applied; that is for `kubectl`."""

from __future__ import annotations

import importlib.metadata
import sys
from pathlib import Path
from typing import Annotated

import typer

from components.errors import UsageError
from pipelines.options import Config, Overrides


def add_render_command(app: typer.Typer) -> None:
    """Puts the command group into `app`."""
    group = typer.Typer(no_args_is_help=True, help="Write manifests for a run file.")
    group.command("k8s", context_settings={"allow_extra_args": True, "ignore_unknown_options": True})(k8s)
    group.callback()(_group)
    app.add_typer(group, name="render")


def _group() -> None:
    """Write manifests for a run file."""


def k8s(
    context: typer.Context,
    config: Config,
    command: Annotated[str, typer.Option(help="What to run there: run, train, tune or evaluate.")] = "run",
    set_: Overrides = None,
    image: Annotated[
        str | None,
        typer.Option(
            help="Trainer image with tag or digest; without it caltune-trainer of this version.", show_default=False
        ),
    ] = None,
    namespace: Annotated[str, typer.Option(help="Namespace that k8s/ was applied to.")] = "caltune",
    name: Annotated[
        str | None, typer.Option(help="Name of the RayJob, instead of the run's.", show_default=False)
    ] = None,
    queue: Annotated[str | None, typer.Option(help="Kueue local queue to wait in.", show_default=False)] = None,
    memory: Annotated[str, typer.Option(help="Memory of each worker.")] = "16Gi",
    hours: Annotated[float, typer.Option(help="Stop the job after this many hours.")] = 24.0,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="File to write instead of stdout.", show_default=False)
    ] = None,
) -> None:
    """Write a RayJob for KubeRay that runs a run file; apply it with kubectl.

    Workers, CPU cores and GPUs are those of the run file's section resources. Paths of the run file have to lie on the
    shared volume, /data. Names, paths and KubeRay's rules are checked first; nothing is written if one is broken. Other
    options are the command's own, e.g. --method.
    """
    from components.run_file import load_run_file
    from pipelines.jobs import SUBMITTABLE
    from pipelines.k8s_job import Placement, as_yaml, manifests

    if command not in SUBMITTABLE:
        raise UsageError(f"--command {command}: choose {', '.join(SUBMITTABLE)}")
    image = image or f"caltune-trainer:{importlib.metadata.version('caltune')}"
    placement = Placement(image, namespace, name, queue, memory, hours)
    text = as_yaml(manifests(load_run_file(config, set_ or []), command, list(context.args), placement))
    if output is None:
        sys.stdout.write(text)
        return
    output.write_text(text, encoding="utf-8")
    print(f"{output}: kubectl apply -f {output}", file=sys.stderr)
