"""The MLflow side: a client bound to one tracking URI, its experiment, and how long a request may take."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from filelock import FileLock

from components.errors import TrackingError

if TYPE_CHECKING:
    from mlflow import MlflowClient

_TIMEOUT, _RETRIES = "MLFLOW_HTTP_REQUEST_TIMEOUT", "MLFLOW_HTTP_REQUEST_MAX_RETRIES"


class RequestLimits:
    """How long MLflow waits; its own 120 s and 7 retries outlast patience. What the user has set stays."""

    def __init__(self) -> None:
        self._free = [name for name in (_TIMEOUT, _RETRIES) if name not in os.environ]

    @contextmanager
    def seconds(self, timeout: int) -> Iterator[None]:
        """Allow each request this many seconds and one retry; MLflow reads the environment at each request."""
        wanted = {_TIMEOUT: str(timeout), _RETRIES: "1"}
        before = {name: os.environ.get(name) for name in self._free}
        os.environ.update({name: wanted[name] for name in self._free})
        retries = logging.getLogger("urllib3.connectionpool")
        level = retries.level
        retries.setLevel(logging.ERROR)  # a failure is reported once, by us
        try:
            yield
        finally:
            retries.setLevel(level)
            for name, value in before.items():
                if value is None:
                    os.environ.pop(name, None)
                else:
                    os.environ[name] = value


def connect(uri: str, experiment: str, home: Path) -> tuple[MlflowClient, str]:
    """A client and the id of the experiment, which is created where it does not exist.

    Args:
        uri: MLflow tracking URI.
        experiment: The experiment's name.
        home: Folder in which artifacts of a new experiment go where the URI is a database other than SQLite.

    Raises:
        TrackingError: The experiment is deleted there.
    """
    os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")  # nothing but the named server is contacted
    os.environ.setdefault("MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT", "true")  # stdout is for results
    from mlflow import MlflowClient

    for name in ("mlflow.store.db.utils", "alembic"):
        logging.getLogger(name).setLevel(logging.WARNING)
    client = MlflowClient(tracking_uri=uri)
    database = sqlite_file(uri)
    if database is None:
        return client, _find_experiment(client, uri, experiment, _artifact_location(uri, home))
    database.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{database}.lock"):  # SQLite locks up when two processes create the schema
        return client, _find_experiment(client, uri, experiment, _artifact_location(uri, database.parent))


def _find_experiment(client: MlflowClient, uri: str, name: str, location: str | None) -> str:
    from mlflow.exceptions import MlflowException

    found = client.get_experiment_by_name(name)
    if found is None:
        try:
            return str(client.create_experiment(name, artifact_location=location))
        except MlflowException:
            found = client.get_experiment_by_name(name)  # another process was first
            if found is None:
                raise
    if found.lifecycle_stage == "deleted":
        raise TrackingError(
            f"tracking server {shown(uri)}: experiment '{name}' is deleted there; restore it with "
            f"`mlflow experiments restore --experiment-id {found.experiment_id}` or name another one"
        )
    return str(found.experiment_id)


def _artifact_location(uri: str, home: Path) -> str | None:
    """A server knows its own; with a database alone artifacts stand in `mlartifacts` beside it."""
    served = uri.startswith(("http://", "https://", "databricks"))
    return None if served else (home.resolve() / "mlartifacts").as_uri()


def sqlite_file(uri: str) -> Path | None:
    """The database file of a `sqlite:///` URI, None for any other URI."""
    return Path(uri.removeprefix("sqlite:///")).absolute() if uri.startswith("sqlite:///") else None


def shown(uri: str) -> str:
    """A URI fit for messages: a password in it is replaced by stars."""
    return re.sub(r"(://[^:/@]*):[^@/]+@", r"\1:***@", uri)
