"""`caltune serve`: a trained model over HTTP, until it is interrupted."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path
from typing import Annotated, Any

import typer

from pipelines.options import Quiet
from pipelines.predict_command import BaseModel, Device, Model, Policy, Uri


def add_serve_command(app: typer.Typer) -> None:
    """Puts the command into `app`."""
    app.command()(serve)


def serve(
    model: Model,
    policy: Policy = None,
    host: Annotated[str, typer.Option(help="Address to listen at.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=1, max=65535, help="Port to listen at.")] = 8000,
    log: Annotated[
        Path | None, typer.Option(help="Prediction log (.jsonl) to append to; drift reads it.", show_default=False)
    ] = None,
    base_model: BaseModel = None,
    uri: Uri = None,
    device: Device = "cpu",
    cpus: Annotated[int | None, typer.Option(min=1, help="CPU cores; by default all.", show_default=False)] = None,
    quiet: Quiet = False,
) -> None:
    """Serve a trained model over HTTP: /predict, /healthz, /readyz, /metrics and, for people, /docs."""
    from pipelines.progress import Reporter

    named = _checked(model, policy, uri)
    from ray_jobs.serve import ServiceSpec, start, stop
    from ray_jobs.serve_requests import Limits

    server = uri or os.environ.get("MLFLOW_TRACKING_URI")  # a replica may have another environment
    options: dict[str, Any] = {"tracking_uri": server, "base_model": base_model, "device": device}
    spec = ServiceSpec(named, options, policy, None if log is None else log.resolve(), Limits())
    ended = threading.Event()
    try:
        start(spec, host, port, cpus or os.cpu_count() or 1, int(device.startswith("cuda")))
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda *_: ended.set())
        Reporter(quiet=quiet).say(f"serving {model} at http://{host}:{port} (/docs says how to ask; Ctrl-C ends it)")
        ended.wait()
    finally:
        stop()


def _checked(model: str, policy: str | None, uri: str | None) -> str:
    """The model's name for another process; what is wrong with it is said here, before anything is started."""
    from components.models.adapter_checks import verify_adapter
    from components.registry.abstention_policy import read_policies
    from components.registry.locate import adapter_folder, is_uri

    with adapter_folder(model, uri) as folder:
        verify_adapter(folder)
        read_policies(folder).choose(policy)
        return model if is_uri(model) else str(folder)
