"""The MLflow client behind the registry: bound to one server, patient for a stated time, with errors in one sentence.

Only `MlflowClient` is used, with everything named explicitly: MLflow's fluent calls keep global state.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

from filelock import FileLock

from components.errors import RegistryError, TrackingError
from components.tracking.server import RequestLimits, shown, sqlite_file

if TYPE_CHECKING:
    from mlflow import MlflowClient

REQUEST_SECONDS = 20
UPLOAD_SECONDS = 300
_ABSENT = {"RESOURCE_DOES_NOT_EXIST", "INVALID_PARAMETER_VALUE"}


class Connection:
    """One MLflow server, or database, with its registry.

    Args:
        uri: Tracking URI.
        registry_uri: Registry URI; by default MLFLOW_REGISTRY_URI, else the tracking URI.
    """

    def __init__(self, uri: str, registry_uri: str | None = None) -> None:
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
        os.environ.setdefault("MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR", "false")
        os.environ.setdefault("MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT", "true")  # stdout is for results
        from mlflow import MlflowClient

        self.uri = uri
        self.registry_uri = registry_uri or os.environ.get("MLFLOW_REGISTRY_URI") or uri
        self._limits = RequestLimits()
        self._database = sqlite_file(self.registry_uri)
        self._client = MlflowClient(tracking_uri=uri, registry_uri=self.registry_uri)
        if self._database is not None:
            self._database.parent.mkdir(parents=True, exist_ok=True)
            with FileLock(f"{self._database}.lock"), self.requests() as client:  # two at once would lock up SQLite
                client.search_registered_models(max_results=1)

    @contextmanager
    def requests(self, seconds: int = REQUEST_SECONDS) -> Iterator[MlflowClient]:
        """The client; what goes wrong becomes a sentence.

        Raises:
            TrackingError: The server cannot be reached.
            RegistryError: It refuses.
        """
        from mlflow.exceptions import MlflowException

        with self._limits.seconds(seconds):
            try:
                yield self._client
            except MlflowException as error:
                where = f"tracking server {shown(self.uri)}"
                if (reason := _network(error)) is not None:
                    raise TrackingError(f"{where} cannot be reached: {reason}") from error
                raise RegistryError(f"{where}: {_first_line(error)}") from error

    def turn(self) -> AbstractContextManager[object]:
        """Held while the champion is decided about, where the registry is a SQLite file on this machine."""
        if self._database is None:
            return nullcontext()
        return FileLock(Path(f"{self._database}.champion.lock"))


def is_absent(error: RegistryError) -> bool:
    """Whether the server said that there is no such thing, rather than that something is wrong."""
    return getattr(error.__cause__, "error_code", None) in _ABSENT


def _network(error: BaseException) -> str | None:
    """What the network said, where that is what is behind an error; it stands at the end of the chain of causes."""
    while (cause := error.__cause__ or error.__context__) is not None:
        error = cause
    if isinstance(error, OSError):
        return error.strerror or str(error) or "timed out"
    return None


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:300]
