"""Versions of a model in MLflow's registry: registered from a run, found again by alias, fetched with their results.

A version's files are the artifacts of a small run of its own, nested in the run that it came from: `model/` is the
adapter folder, with the results that a gate reads in `model/evaluation/<method>/<split>/` and the run file beside them,
and what makes it an MLflow model (`pyfunc.py`). So a version can be judged, used and served anywhere, long after the
run folder is gone.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from components.config_gate import CHAMPION
from components.errors import RegistryError, UsageError
from components.evaluation.predictions import SOFTMAX
from components.registry.candidate import CHAMPION_NOTE, RUN_FILE, Candidate, read_results
from components.registry.client import UPLOAD_SECONDS, Connection, is_absent
from components.registry.gate import Evaluated

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities.model_registry import ModelVersion

CHALLENGER = "challenger"
MODEL_FOLDER, RESULTS_FOLDER = "model", "evaluation"
SHOWN = ("accuracy", "ece", "nll", "top_label_brier_score", "auroc")
"""Figures that a version shows as tags."""
_ATTEMPTS = 3


@dataclass(frozen=True)
class Version:
    """One version of a registered model.

    Attributes:
        model: Name of the model.
        number: The version, as MLflow writes it.
        run_id: The run whose artifacts it is.
        tags: Run, method, commit, hashes and figures.
        aliases: Aliases that point at it.
    """

    model: str
    number: str
    run_id: str
    tags: dict[str, str] = field(default_factory=dict)
    aliases: tuple[str, ...] = ()

    @property
    def method(self) -> str:
        """The method it is of."""
        return self.tags["caltune.method"]

    @property
    def name(self) -> str:
        """What it is called in verdicts and messages."""
        return f"{self.model} version {self.number}"


class Registry:
    """The models of one MLflow server.

    Args:
        connection: The server.
    """

    def __init__(self, connection: Connection) -> None:
        self.connection = connection

    def register(self, model: str, candidate: Candidate, tracked_run: str) -> Version:
        """Makes a version of a run's method and points the alias `challenger` at it.

        Registering the same files again, as a repeated pipeline step does, gives the version that there is.

        Args:
            model: Name of the registered model; created where it does not exist.
            candidate: What to register.
            tracked_run: MLflow run id of the run it comes from.

        Raises:
            ModelError: The adapter folder is incomplete or damaged.
            UsageError: The run has no results of the method.
            TrackingError: The server cannot be reached.
            RegistryError: The server refuses, or has not stored what it was sent.
        """
        from components.models.adapter_checks import verify_adapter

        verify_adapter(candidate.adapter)
        if candidate.method not in candidate.compared:
            raise UsageError(f"{candidate.folder} has no results of '{candidate.method}'; evaluate it first")
        with tempfile.TemporaryDirectory() as scratch:
            staged = _stage(candidate, Path(scratch) / MODEL_FOLDER)
            digest = _digest(staged, tracked_run)
            found = next((v for v in self.versions(model) if v.tags.get("caltune.digest") == digest), None)
            if found is None:
                found = self._create(model, candidate, tracked_run, staged, digest)
        with self.connection.requests() as client:
            client.set_registered_model_alias(model, CHALLENGER, found.number)
        return self.version(model, found.number)

    def versions(self, model: str) -> list[Version]:
        """All versions of a model, the oldest first; none where there is no such model."""
        found, token = [], None
        with self.connection.requests() as client:
            while True:
                page = client.search_model_versions(f"name='{model}'", max_results=200, page_token=token)
                found += [_version(item) for item in page]
                if not (token := page.token):
                    return sorted(found, key=lambda version: int(version.number))

    def version(self, model: str, number: str) -> Version:
        """One version.

        Raises:
            RegistryError: There is none of that number.
        """
        with self.connection.requests() as client:
            return _version(client.get_model_version(model, number))

    def by_alias(self, model: str, alias: str) -> Version | None:
        """The version that an alias points at; None where the alias or the model does not exist."""
        try:
            with self.connection.requests() as client:
                return _version(client.get_model_version_by_alias(model, alias))
        except RegistryError as error:
            if is_absent(error):
                return None
            raise

    def champion(self, model: str) -> Version | None:
        """The model in service."""
        return self.by_alias(model, CHAMPION)

    @contextmanager
    def files(self, version: Version, part: str = MODEL_FOLDER) -> Iterator[Path]:
        """A version's files, or a part of them, in a temporary folder.

        Raises:
            RegistryError: They are not there.
        """
        with tempfile.TemporaryDirectory() as scratch:
            yield self.download(version, Path(scratch), part)

    def download(self, version: Version, folder: Path, part: str = MODEL_FOLDER) -> Path:
        """Fetches a version's files into a folder: an adapter folder, with results beside it.

        Returns:
            Where they are in `folder`.

        Raises:
            RegistryError: They are not there.
        """
        folder.mkdir(parents=True, exist_ok=True)
        try:
            with self.connection.requests(UPLOAD_SECONDS) as client:
                return Path(client.download_artifacts(version.run_id, part, str(folder)))
        except OSError as error:
            raise RegistryError(f"{version.name}: {part} cannot be fetched: {error}") from error

    def results(self, version: Version, splits: list[str]) -> Evaluated:
        """A version's own results on test splits, as it was registered with."""
        with self.files(version, f"{MODEL_FOLDER}/{RESULTS_FOLDER}") as folder:
            return read_results(folder / version.method, version.name, splits, version.number)

    def _create(self, model: str, candidate: Candidate, tracked_run: str, staged: Path, digest: str) -> Version:
        from components.registry.pyfunc import add_model_files

        with self.connection.requests() as client:
            parent = client.get_run(tracked_run).info
            run = client.create_run(
                parent.experiment_id,
                run_name=f"register-{candidate.method}",
                tags={"mlflow.parentRunId": tracked_run, "stage": "registry", "method": candidate.method},
            )
        run_id = run.info.run_id
        try:
            add_model_files(staged, routed=_is_routed(staged))
            self._upload(run_id, staged)
        except Exception:
            with self.connection.requests() as client:
                client.set_terminated(run_id, "FAILED")
            raise
        with self.connection.requests() as client:
            client.set_terminated(run_id)
            _create_model(client, model)
            made = client.create_model_version(
                model,
                f"{run.info.artifact_uri}/{MODEL_FOLDER}",
                run_id=run_id,
                tags={**_tags(candidate, tracked_run), "caltune.digest": digest},
                description=f"{candidate.method} of run {candidate.run}",
                await_creation_for=0,
            )
        return _version(made)

    def _upload(self, run_id: str, staged: Path) -> None:
        """Uploads, then looks whether everything is there: a server may answer before its store has it."""
        from tenacity import Retrying, stop_after_attempt, wait_exponential

        for attempt in Retrying(stop=stop_after_attempt(_ATTEMPTS), wait=wait_exponential(max=10), reraise=True):
            with attempt, self.connection.requests(UPLOAD_SECONDS) as client:
                client.log_artifacts(run_id, str(staged), MODEL_FOLDER)
                stored = dict(_listing(client, run_id, MODEL_FOLDER))
                sent = {f"{MODEL_FOLDER}/{name}": size for name, size in _sizes(staged).items()}
                if lacking := {name for name, size in sent.items() if stored.get(name) != size}:
                    raise RegistryError(
                        f"run {run_id}: {min(lacking)} was sent but is not stored ({len(lacking)} such)"
                    )


def _stage(candidate: Candidate, folder: Path) -> Path:
    """Puts everything that belongs to a version into one folder."""
    shutil.copytree(candidate.adapter, folder)
    shutil.copy2(candidate.folder / RUN_FILE, folder / RUN_FILE)
    if candidate.recalibration is not None:
        shutil.copy2(candidate.recalibration, folder / candidate.recalibration.name)
    for name in candidate.compared:
        for split in candidate.test_splits:
            source = candidate.folder / name / RESULTS_FOLDER / split
            if source.is_dir():
                shutil.copytree(source, folder / RESULTS_FOLDER / name / split)
    note = candidate.folder / CHAMPION / CHAMPION_NOTE
    if (folder / RESULTS_FOLDER / CHAMPION).is_dir() and note.is_file():
        shutil.copy2(note, folder / RESULTS_FOLDER / CHAMPION / CHAMPION_NOTE)
    return folder


def _is_routed(folder: Path) -> bool:
    """Whether the version states a router confidence; a recalibrated one does not."""
    from components.models.adapter_checks import read_metadata
    from components.registry.folder_spec import read_recalibration

    return read_metadata(folder)["adapter"]["kind"] == "mixlora" and read_recalibration(folder) is None


def _sizes(folder: Path) -> dict[str, int]:
    return {p.relative_to(folder).as_posix(): p.stat().st_size for p in sorted(folder.rglob("*")) if p.is_file()}


def _digest(folder: Path, tracked_run: str) -> str:
    """SHA-256 of the files of a version and of the run they come from."""
    from components.models.smollm2 import sha256_of

    content = {name: sha256_of(folder / name) for name in _sizes(folder)}
    return hashlib.sha256(json.dumps([tracked_run, content], sort_keys=True).encode()).hexdigest()


def _listing(client: MlflowClient, run_id: str, path: str) -> Iterator[tuple[str, int]]:
    for item in client.list_artifacts(run_id, path):
        if item.is_dir:
            yield from _listing(client, run_id, item.path)
        else:
            yield item.path, int(item.file_size or 0)


def _create_model(client: MlflowClient, model: str) -> None:
    from mlflow.exceptions import MlflowException

    try:
        client.create_registered_model(model)
    except MlflowException as error:
        if error.error_code != "RESOURCE_ALREADY_EXISTS":
            raise


def _tags(candidate: Candidate, tracked_run: str) -> dict[str, str]:
    """What is to be seen of a version without opening its files."""
    tags: dict[str, Any] = {
        "caltune.run": candidate.run,
        "caltune.method": candidate.method,
        "caltune.run_id": tracked_run,
        "caltune.run_hash": candidate.config_hash,
        "caltune.git_commit": candidate.git.get("commit") or "unknown",
        "caltune.git_dirty": str(candidate.git.get("dirty")).lower(),
        **{f"caltune.data_hash.{split}": value for split, value in candidate.data_hashes.items()},
    }
    for split, metrics in candidate.results(candidate.method).metrics.items():
        for source, block in metrics["sources"].items():
            prefix = "" if source == SOFTMAX else f"{source}_"
            for metric in (name for name in SHOWN if name in block):
                tags[f"{split}/{prefix}{metric}"] = _figure(block[metric])
    return tags


def _figure(figure: dict[str, float | None]) -> str:
    if any(figure[end] is None for end in ("value", "ci_low", "ci_high")):
        return "undefined"
    return f"{figure['value']:.4f} [{figure['ci_low']:.4f}, {figure['ci_high']:.4f}]"


def _version(item: ModelVersion) -> Version:
    return Version(item.name, str(item.version), str(item.run_id), dict(item.tags), tuple(item.aliases or ()))
