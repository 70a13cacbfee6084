"""Brings spooled events to an MLflow server, in order, each exactly once.

Only `MlflowClient` with explicit run ids is used: MLflow's fluent calls keep global state, and MLFLOW_RUN_ID makes a
child overwrite its parent there. An interruption between a delivery and the note of it is harmless, because repeating
any event changes nothing: a run is found by its tags before it is created, and equal parameters, tags, artifacts, and
metrics with the same time, step and value are kept once by MLflow.
"""

from __future__ import annotations

import hashlib
import json
import logging
import re
import socket
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

from filelock import FileLock, Timeout

from components.errors import TrackingError
from components.tracking.events import Spool, replace_text
from components.tracking.server import RequestLimits, connect, shown

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import Metric

_METRICS_A_BATCH = 1000  # MLflow's limits for one log_batch
_TEXTS_A_BATCH = 100
_REQUEST_SECONDS = 10
_UPLOAD_SECONDS = 120  # a server answers an upload only when its store has everything
_REFUSALS = {"INVALID_PARAMETER_VALUE", "BAD_REQUEST", "INVALID_STATE"}  # repeating such a request cannot help

_log = logging.getLogger(__name__)


@dataclass
class Progress:
    """What one server has received.

    Attributes:
        offset: Bytes of the events file that are delivered.
        events: Their number.
        runs: MLflow run id of each key.
        missing: Artifacts that were gone from the run folder when their turn came.
        refused: What the server would not take, with its reason.
        torn: Lines that a crash cut off.
    """

    offset: int = 0
    events: int = 0
    runs: dict[str, str] = field(default_factory=dict)
    missing: list[str] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)
    torn: int = 0


class Delivery:
    """One spool's way to one server.

    Args:
        spool: The events.
        uri: MLflow tracking URI.
        experiment: Name of the experiment; created where it does not exist.
    """

    def __init__(self, spool: Spool, uri: str, experiment: str) -> None:
        self.spool, self.uri, self.experiment = spool, uri, experiment
        self._file = spool.folder / f"delivered-{hashlib.sha256(uri.encode()).hexdigest()[:12]}.json"
        self._lock = FileLock(spool.folder / "delivery.lock")
        self._limits = RequestLimits()
        self._client: MlflowClient | None = None
        self._experiment_id = ""

    def progress(self) -> Progress:
        """What has been delivered so far. An unreadable note counts as nothing delivered, which costs only time."""
        try:
            return Progress(**json.loads(self._file.read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError):
            return Progress()

    def deliver(self, wait: float = 0.0) -> Progress | None:
        """Deliver everything that is written and not delivered.

        Args:
            wait: Seconds to wait for another process that is delivering.

        Returns:
            What has been delivered, or None where another process is at it.

        Raises:
            TrackingError: The server cannot be reached or fails; what was delivered until then is noted.
        """
        try:
            with self._lock.acquire(timeout=wait), self._limits.seconds(_REQUEST_SECONDS):
                progress = self.progress()
                if progress.offset < self.spool.size():
                    self._deliver_from(progress)
                return progress
        except Timeout:
            return None

    def _deliver_from(self, progress: Progress) -> None:
        """Metrics wait until something else follows or a batch is full; all other events go one by one, in order."""
        waiting: dict[str, list[Metric]] = {}
        done, count = progress.offset, 0
        try:
            if self._client is None:
                self._client, self._experiment_id = connect(self.uri, self.experiment, self.spool.run_folder.parent)
            for done, event in self.spool.read(progress.offset):
                if event is None:
                    progress.torn += 1
                elif event["do"] == "metrics":
                    progress.events += 1
                    count += len(event["values"])
                    waiting.setdefault(event["run"], []).extend(_metrics(event))
                    if count >= _METRICS_A_BATCH:
                        self._settle(waiting, progress, done)
                        count = 0
                else:
                    self._send_metrics(waiting, progress)
                    self._send(event, progress)
                    progress.events += 1
                    self._settle(waiting, progress, done)
                    count = 0
            self._settle(waiting, progress, done)
        except TrackingError:
            raise
        except Exception as error:
            raise TrackingError(
                f"tracking server {shown(self.uri)}{_connection(error) or ': ' + _reason(error)}"
            ) from error

    def _settle(self, waiting: dict[str, list[Metric]], progress: Progress, offset: int) -> None:
        self._send_metrics(waiting, progress)
        progress.offset = offset
        replace_text(self._file, json.dumps(asdict(progress), indent=1))

    def _send(self, event: Mapping[str, Any], progress: Progress) -> None:
        if event["do"] == "start":
            progress.runs[event["run"]] = self._find_or_create_run(event, progress)
            return
        what = f"{event['run']}: {event['do']} {event.get('name') or event.get('path') or ''}".strip()
        with self._refusals(event["run"], what, progress) as run_id:
            if run_id is not None:
                self._apply(event, run_id, progress)

    def _find_or_create_run(self, event: Mapping[str, Any], progress: Progress) -> str:
        client, spool_id = self._open_client(), self.spool.header()["id"]
        mine = f"tags.`caltune.spool` = '{spool_id}' and tags.`caltune.key` = '{event['run']}'"
        found = client.search_runs([self._experiment_id], filter_string=mine, max_results=1)
        if found:
            return str(found[0].info.run_id)
        tags = {**event["tags"], "caltune.spool": spool_id, "caltune.key": event["run"]}
        for tag, key in (("mlflow.parentRunId", event.get("parent")), ("caltune.continues", event.get("continues"))):
            if key in progress.runs:
                tags[tag] = progress.runs[key]
        run = client.create_run(self._experiment_id, start_time=event["time"], tags=tags, run_name=event["name"])
        return str(run.info.run_id)

    def _apply(self, event: Mapping[str, Any], run_id: str, progress: Progress) -> None:
        client, do = self._open_client(), event["do"]
        if do == "params":
            self._send_texts(run_id, "params", event["values"])
        elif do == "tags":
            self._send_texts(run_id, "tags", event["values"])
        elif do == "dict":
            client.log_dict(run_id, event["content"], event["name"])
        elif do == "artifact":
            self._upload(run_id, self.spool.run_folder / event["path"], event["name"], progress)
        elif do == "reopen":
            client.update_run(run_id, status="RUNNING")
            self._send_texts(run_id, "tags", {**event["tags"], "caltune.resumed_at": str(event["time"])})
        elif do == "close":
            client.set_terminated(run_id, status=event["status"], end_time=event["time"])

    def _send_texts(self, run_id: str, kind: str, values: Mapping[str, str]) -> None:
        from mlflow.entities import Param, RunTag

        items = [(_name(key), value) for key, value in values.items()]
        for start in range(0, len(items), _TEXTS_A_BATCH):
            part = items[start : start + _TEXTS_A_BATCH]
            if kind == "params":
                self._open_client().log_batch(run_id, params=[Param(*item) for item in part])
            else:
                self._open_client().log_batch(run_id, tags=[RunTag(*item) for item in part])

    def _send_metrics(self, waiting: dict[str, list[Metric]], progress: Progress) -> None:
        for key, metrics in waiting.items():
            for start in range(0, len(metrics), _METRICS_A_BATCH):
                with self._refusals(key, f"{key}: metrics", progress) as run_id:
                    if run_id is not None:
                        self._open_client().log_batch(run_id, metrics=metrics[start : start + _METRICS_A_BATCH])
        waiting.clear()

    def _upload(self, run_id: str, path: Path, name: str, progress: Progress) -> None:
        client = self._open_client()
        if not path.exists():
            progress.missing.append(str(path))
            _log.warning("%s is gone, so it cannot be delivered to %s", path, shown(self.uri))
            return
        client.get_run(run_id)  # a server that hangs is noticed here, at the short limit
        with self._limits.seconds(_UPLOAD_SECONDS), tempfile.TemporaryDirectory() as scratch:
            if path.is_dir():
                client.log_artifacts(run_id, str(path), name)
                return
            target = PurePosixPath(name)
            if target.name != path.name:  # MLflow keeps a file's own name, so give it the wanted one
                renamed = Path(scratch) / target.name
                renamed.symlink_to(path.resolve())
                path = renamed
            client.log_artifact(run_id, str(path), None if len(target.parts) == 1 else target.parent.as_posix())

    @contextmanager
    def _refusals(self, key: str, what: str, progress: Progress) -> Iterator[str | None]:
        """Give the run id; note, instead of raising, what the server will never take, so that the rest goes on."""
        from mlflow.exceptions import MlflowException

        reason = None
        if key not in progress.runs:
            reason = "its run was never started"
        try:
            yield progress.runs.get(key)
        except MlflowException as error:
            if error.error_code not in _REFUSALS:
                raise
            reason = _reason(error)
        if reason is not None:
            progress.refused.append(f"{what}: {reason}")
            _log.warning("%s refused %s: %s", shown(self.uri), what, reason)

    def _open_client(self) -> MlflowClient:
        if self._client is None:
            raise TrackingError(f"tracking server {shown(self.uri)}: not connected")
        return self._client


def _metrics(event: Mapping[str, Any]) -> list[Metric]:
    from mlflow.entities import Metric

    return [Metric(_name(key), value, event["time"], event["step"]) for key, value in event["values"].items()]


def _name(text: str) -> str:
    """A key that MLflow takes: `coverage@risk` becomes `coverage_risk`."""
    return re.sub(r"[^\w\-. :/]", "_", text)


def _connection(error: BaseException) -> str:
    """What the network said, where that is what is behind an error; it stands at the end of a long chain of causes."""
    while (cause := error.__cause__ or error.__context__) is not None:
        error = cause
    if isinstance(error, ConnectionError | TimeoutError | socket.gaierror):
        return f" cannot be reached: {error.strerror or 'timed out'}"
    return ""


def _reason(error: Exception) -> str:
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return lines[0][:300]
