"""Tracking with MLflow: a logger that writes to the spool, and the root of a run, which also has it delivered."""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from components.config import HEAD_METHODS, RunConfig
from components.errors import UsageError
from components.run_file import config_hash, git_state
from components.tracking.delivery import Delivery
from components.tracking.events import ROOT, Spool, child_key, latest, next_key
from components.tracking.logger import Logger, NullLogger, Status
from components.tracking.server import sqlite_file
from components.tracking.spool import Courier

MAX_PARAM_LENGTH = 6000
"""Characters; MLflow cuts longer values without a word."""
_NOT_PARAMS = {"run", "output_dir", "tracking"}
_SECTIONS_OF = {
    "calm": HEAD_METHODS,
    "label_smoothing": ("label_smoothing",),
    "cft": ("cft", "rcft"),
    "regularization": ("regularization",),
    "iterate": ("iterate",),
}
"""Sections that are left out where none of these methods runs."""
_SCHEMES = ("http://", "https://", "sqlite:///", "postgresql", "mysql", "mssql", "databricks")

_log = logging.getLogger(__name__)


class Tracking(NamedTuple):
    """Where a run is tracked, and who said so."""

    uri: str
    experiment: str
    source: str


def resolve_tracking(config: RunConfig, output_dir: Path) -> Tracking:
    """Decide the tracking server: MLFLOW_TRACKING_URI, else the run file's `tracking.uri`, else SQLite in `output_dir`.

    The experiment is MLFLOW_EXPERIMENT_NAME where that is set, else the run file's.

    Raises:
        UsageError: The URI names a file store, which MLflow no longer has.
    """
    experiment = os.environ.get("MLFLOW_EXPERIMENT_NAME") or config.tracking.experiment
    environment = os.environ.get("MLFLOW_TRACKING_URI")
    if environment:
        uri, source = environment, "MLFLOW_TRACKING_URI"
    elif config.tracking.uri:
        uri, source = config.tracking.uri, "tracking.uri"
    else:
        uri, source = f"sqlite:///{output_dir.resolve() / 'mlflow.db'}", "default"
    if not uri.startswith(_SCHEMES):
        raise UsageError(f"{source} is '{uri}': name a server (http://...) or a database (sqlite:///path/mlflow.db)")
    return Tracking(uri, experiment, source)


def view_command(uri: str) -> str:
    """What to type, or open, to look at the runs."""
    database = sqlite_file(uri)
    return f"mlflow server --backend-store-uri sqlite:///{database}" if database else uri


def params_of(config: RunConfig) -> dict[str, str]:
    """The run's parameters under dotted keys, e.g. `calm.eta`; the whole file is logged as an artifact.

    Left out: where results go, prompt texts, null values, and the sections of methods that do not run. They are in
    `config_hash`, so that any change between two parts of a run is noticed.
    """
    skipped = _NOT_PARAMS | {section for section, of in _SECTIONS_OF.items() if not {*of} & {*config.methods}}
    tree = config.model_dump(mode="json", exclude=skipped, exclude_none=True)
    tree["data"].pop("prompt")
    tree["data"]["scoring"] = config.data.prompt.scoring
    return {"config_hash": config_hash(config), **_flat(tree, "")}


class SpoolLogger:
    """Writes to a run folder's spool and nowhere else; whoever holds the root has it delivered.

    May be pickled and used by a worker on the same machine. A run that the spool knows is continued: equal parameters
    are not logged again, and where parameters differ, a new run linked to the old one (`caltune.continues`) takes over,
    because a parameter of an MLflow run never changes.

    Args:
        spool: The run folder's spool.
        key: The local key of the run.
        name: The run's name in MLflow.
        tags: Tags, set when the run is created and when it is continued.
        parent: The key of the run it is nested in.
    """

    def __init__(
        self, spool: Spool, key: str, name: str, tags: Mapping[str, str] | None = None, parent: str | None = None
    ) -> None:
        records = spool.records()
        self.spool, self.name, self.parent, self._tags = spool, name, parent, dict(tags or {})
        self.key = latest(records, key)
        self._resumed = self.key in records
        if not self._resumed:
            self.spool.append(self.key, "start", name=name, parent=parent, tags=self._tags)

    def log_params(self, params: Mapping[str, object]) -> None:
        """Log parameters that are not logged yet; a changed one starts a linked run."""
        values = {name: _param_text(value) for name, value in params.items()}
        records = self.spool.records()
        known = records[self.key].params
        changed = sorted(name for name, value in values.items() if known.get(name, value) != value)
        if changed:
            _log.warning(
                "%s: %s changed since it was first tracked; a linked run begins", self.name, ", ".join(changed)
            )
            if not records[self.key].closed:
                self.spool.append(self.key, "close", status="KILLED")
            old, self.key, self._resumed = self.key, next_key(records, self.key), False
            self.spool.append(self.key, "start", name=self.name, parent=self.parent, tags=self._tags, continues=old)
            known = {}
        new = {name: value for name, value in values.items() if name not in known}
        if new:
            self._write("params", values=new)

    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        """Log metrics of one step."""
        if metrics:
            self._write("metrics", values={name: float(value) for name, value in metrics.items()}, step=int(step))

    def log_artifact(self, path: Path, name: str | None = None) -> None:
        """Log a file or folder by reference; one outside the run folder is copied into the spool first.

        Raises:
            FileNotFoundError: There is nothing at `path`.
        """
        if not path.exists():
            raise FileNotFoundError(f"{path}: no such artifact")
        self._write("artifact", path=self.spool.keep(path), name=name or path.name)

    def log_dict(self, content: Mapping[str, object], name: str) -> None:
        """Log a dictionary of JSON types as a file."""
        self._write("dict", content=dict(content), name=name)

    def set_tags(self, tags: Mapping[str, str]) -> None:
        """Set tags."""
        if tags:
            self._write("tags", values={name: str(value) for name, value in tags.items()})

    def child(self, name: str, tags: Mapping[str, str] | None = None) -> SpoolLogger:
        """The nested run called `name`."""
        return SpoolLogger(self.spool, child_key(self.key, name), name, tags, parent=self.key)

    def close(self, status: Status = "FINISHED") -> None:
        """End the run."""
        self._write("close", status=status)

    def _write(self, do: str, **details: object) -> None:
        if self._resumed:
            self.spool.append(self.key, "reopen", tags=self._tags)
            self._resumed = False
        self.spool.append(self.key, do, **details)


class MlflowLogger(SpoolLogger):
    """The root of a tracked run: its events, and those of all children, are delivered while it is open."""

    def __init__(self, spool: Spool, tracking: Tracking, name: str, tags: Mapping[str, str]) -> None:
        super().__init__(spool, ROOT, name, tags)
        self.tracking = tracking
        self._courier = Courier(Delivery(spool, tracking.uri, tracking.experiment))
        self._courier.start()

    def close(self, status: Status = "FINISHED") -> None:
        """End the run and deliver what is left; where the server cannot be reached that is left to `caltune sync`."""
        super().close(status)
        self._courier.stop()


def open_logger(config: RunConfig, folder: Path) -> Logger:
    """The root logger of a run, with its parameters, tags and resolved file logged; a known run is continued.

    Args:
        config: The run.
        folder: The run folder; `config.resolved.yaml` in it becomes an artifact.

    Raises:
        UsageError: The tracking URI cannot be used.
    """
    if not config.tracking.enabled:
        return NullLogger()
    tracking = resolve_tracking(config, config.output_dir)
    spool = Spool.create(folder, tracking.uri, tracking.experiment)
    logger = MlflowLogger(spool, tracking, config.run, _code_tags())
    logger.log_params(params_of(config))
    resolved = folder / "config.resolved.yaml"
    if resolved.exists():
        logger.log_artifact(resolved)
    return logger


def _code_tags() -> dict[str, str]:
    state = git_state()
    if state["commit"] is None:
        return {}
    return {"mlflow.source.git.commit": str(state["commit"]), "caltune.git_dirty": str(state["dirty"]).lower()}


def _param_text(value: object) -> str:
    """A parameter as text; a long one is cut, visibly and with its hash, since MLflow would cut it in silence."""
    text = value if isinstance(value, str) else json.dumps(value, default=str)
    if len(text) <= MAX_PARAM_LENGTH:
        return text
    note = f"... ({len(text)} characters, sha256 {hashlib.sha256(text.encode()).hexdigest()})"
    return text[: MAX_PARAM_LENGTH - len(note)] + note


def _flat(tree: Mapping[str, object], prefix: str) -> dict[str, str]:
    flat: dict[str, str] = {}
    for key, value in tree.items():
        if isinstance(value, Mapping):
            flat |= _flat(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = _param_text(value)
    return flat
