"""From what names a trained model to its adapter folder: a folder, an MLflow run's artifact, a registered version."""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from components.errors import ModelError, RegistryError, UsageError

_RUN = re.compile(r"runs:/(?P<run>[^/]+)/(?P<path>.+)")
_VERSION = re.compile(r"models:/(?P<model>[^/@]+)(@(?P<alias>[^/@]+)|/(?P<version>\d+))")
_FORMS = "a folder, runs:/<run id>/<artifact path>, models:/<name>@<alias> or models:/<name>/<version>"


def is_uri(named: str) -> bool:
    """Whether a name means something on an MLflow server."""
    return named.startswith(("runs:", "models:"))


@contextmanager
def adapter_folder(named: str | Path, tracking_uri: str | None = None) -> Iterator[Path]:
    """The adapter folder of a trained model; one that was fetched is gone after the block.

    Args:
        named: An adapter folder, `runs:/<run id>/<artifact path>`, `models:/<name>@<alias>` or
            `models:/<name>/<version>`.
        tracking_uri: MLflow server or database; by default MLFLOW_TRACKING_URI.

    Raises:
        UsageError: The name is none of these, or no server is known.
        ModelError: The folder does not exist.
        TrackingError: The server cannot be reached.
        RegistryError: There is no such version or artifact.
    """
    if not is_uri(str(named)):
        folder = Path(named).expanduser()
        if not folder.is_dir():
            raise ModelError(f"'{named}' is not a folder; name {_FORMS}")
        yield folder.resolve()
        return
    with tempfile.TemporaryDirectory(prefix="caltune-model-") as scratch:
        yield _fetch(str(named), _server(named, tracking_uri), Path(scratch))


def _fetch(uri: str, server: str, folder: Path) -> Path:
    from components.registry.client import UPLOAD_SECONDS, Connection
    from components.registry.registry import Registry

    if found := _RUN.fullmatch(uri):
        try:
            with Connection(server).requests(UPLOAD_SECONDS) as client:
                return Path(client.download_artifacts(found["run"], found["path"].rstrip("/"), str(folder)))
        except OSError as error:
            raise RegistryError(f"{uri} cannot be fetched: {error}") from error
    named = _VERSION.fullmatch(uri)
    if named is None:
        raise UsageError(f"'{uri}' names no model; name {_FORMS}")
    registry, model = Registry(Connection(server)), named["model"]
    if named["version"] is not None:
        version = registry.version(model, named["version"])
    elif (by_alias := registry.by_alias(model, named["alias"])) is not None:
        version = by_alias
    else:
        raise RegistryError(f"{uri}: no version of '{model}' has the alias '{named['alias']}'")
    return registry.download(version, folder)


def _server(named: object, tracking_uri: str | None) -> str:
    if server := tracking_uri or os.environ.get("MLFLOW_TRACKING_URI"):
        return server
    raise UsageError(f"'{named}' is on an MLflow server; name the server with MLFLOW_TRACKING_URI or a tracking URI")
