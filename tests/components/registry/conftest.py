"""Simulated predictions with known calibration, run folders with a real adapter, and the servers of the slow tests."""

from __future__ import annotations

import json
import os
import pwd
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from components.config import AdapterConfig, EvaluationConfig, ModelConfig, RunConfig
from components.config_data import PromptConfig
from components.evaluation.metrics_file import evaluate_predictions, write_metrics
from components.evaluation.predictions import Predictions, write_predictions
from components.registry.gate import Evaluated
from components.run_file import config_hash, save_resolved

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

os.environ["MLFLOW_DISABLE_TELEMETRY"] = "true"  # before MLflow is imported

ROOT = Path(__file__).parents[3]
EVALUATION = EvaluationConfig(bootstrap=200)
GATE = {
    "method": "calm",
    "rules": [
        {"metric": "ece", "threshold": 0.2},
        {"metric": "accuracy", "non_inferiority_margin": 0.02},
        {"metric": "ece", "min_absolute_change": 0.0},
    ],
}


@pytest.fixture(scope="session")
def simulate() -> Callable[..., Predictions]:
    """A maker of predictions: gold is drawn from softmax(z), the model states softmax(sharpening * z).

    `sharpening` 1 is perfectly calibrated, above 1 over-confident; it leaves answers and accuracy as they are. The
    same seed gives the same questions and gold; `wrong`, a share of the questions whose scores are turned upside down.
    """

    def make(
        n: int = 300, *, sharpening: float = 1.0, seed: int = 0, wrong: float = 0.0, flc: float | None = None
    ) -> Predictions:
        generator = np.random.default_rng(seed)
        z = 2.0 * generator.normal(size=(n, 4))
        p = np.exp(z) / np.exp(z).sum(axis=1, keepdims=True)
        gold = (generator.random((n, 1)) > np.cumsum(p, axis=1)[:, :-1]).sum(axis=1)
        z[: int(wrong * n)] *= -1
        ids = tuple(f"{seed}-{i}" for i in range(n))
        routed = None if flc is None else np.full(n, flc)
        return Predictions(ids, gold, sharpening * z, np.full(n, 0.5), (None,) * n, flc=routed)

    return make


@pytest.fixture(scope="session")
def evaluated() -> Callable[..., Evaluated]:
    """Results of one model from its predictions by split."""

    def make(name: str, version: str | None = None, **predictions: Predictions) -> Evaluated:
        metrics = {split: evaluate_predictions(found, EVALUATION, seed=0) for split, found in predictions.items()}
        return Evaluated(name, metrics, predictions, version)

    return make


@pytest.fixture(scope="session")
def adapter(tmp_path_factory, tiny_model_original, tiny_tokenizer: PreTrainedTokenizerFast, tiny_model_folder) -> Path:
    """A real adapter folder."""
    import copy

    import torch

    from components.models.adapter import adapter_state, attach_adapter, trainable_parameters
    from components.models.adapter_files import AdapterRecord, save_adapter
    from components.models.base import resolve_model

    config = ModelConfig(name=str(tiny_model_folder), adapter=AdapterConfig(r=2, alpha=4))
    model = attach_adapter(copy.deepcopy(tiny_model_original), config.adapter, seed=0)
    with torch.no_grad():
        for value in trainable_parameters(model).values():
            value.add_(0.1)
    return save_adapter(
        tmp_path_factory.mktemp("adapter") / "adapter",
        model=model,
        state=adapter_state(model),
        head=None,
        tokenizer=tiny_tokenizer,
        config=config,
        adapter=config.adapter,
        resolved=resolve_model(config),
        record=AdapterRecord("calm", 3, PromptConfig()),
    )


@pytest.fixture
def make_run(tmp_path: Path, adapter: Path) -> Callable[..., Path]:
    """Builds the folder of a finished run; `results` are predictions by method, then split."""

    def make(
        results: Mapping[str, Mapping[str, Predictions]],
        *,
        name: str = "demo",
        gate: Mapping[str, Any] | None = GATE,
        uri: str | None = None,
    ) -> Path:
        config = RunConfig.model_validate(
            {
                "run": name,
                "output_dir": str(tmp_path / "outputs"),
                "methods": ["base", "sft", "calm"],
                "recalibrate": {"sft": ["temperature"]},
                "data": {
                    "source": {"kind": "facts", "domain": "geography"},
                    "ood": {"ood": {"kind": "facts", "domain": "chemistry"}},
                },
                "evaluation": {"bootstrap": EVALUATION.bootstrap},
                "tracking": {"uri": uri},
                **({} if gate is None else {"gate": gate}),
            }
        )
        folder = config.folder
        save_resolved(config, folder / "config.resolved.yaml")
        state = {
            "config_hash": config_hash(config),
            "git": {"commit": "c0ffee" + 34 * "0", "dirty": False},
            "stages": {"prepare": {"state": "done", "hashes": {"train": "aa11", "id": "bb22"}}},
        }
        (folder / "run.json").write_text(json.dumps(state))
        for method, by_split in results.items():
            for split, found in by_split.items():
                place = folder / method / "evaluation" / split
                write_predictions(place / "predictions.parquet", found)
                write_metrics(place / "metrics.json", evaluate_predictions(found, config.evaluation, config.seed))
            if method == "calm":
                shutil.copytree(adapter, folder / method / "adapter")
        return folder

    return make


@pytest.fixture(autouse=True)
def _own_environment(monkeypatch):
    """No setting of the machine reaches a test; a stray MLFLOW_RUN_ID must have no effect anywhere."""
    for name in ("MLFLOW_TRACKING_URI", "MLFLOW_REGISTRY_URI", "MLFLOW_EXPERIMENT_NAME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("MLFLOW_RUN_ID", "0123456789abcdef0123456789abcdef")


class Service:
    """A server on a free loopback port, in a process group of its own, with its log in a file."""

    def __init__(self, folder: Path, name: str) -> None:
        self.folder, self.name = folder, name
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port: int = probe.getsockname()[1]
        self.process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        """Where it answers, for servers that speak HTTP."""
        return f"http://127.0.0.1:{self.port}"

    def start(self, command: list[str], ready: Callable[[], bool], **options: Any) -> None:
        """Starts it and waits until it is ready."""
        with (self.folder / f"{self.name}.log").open("ab") as log:
            self.process = subprocess.Popen(
                command, cwd=self.folder, stdout=log, stderr=log, start_new_session=True, **options
            )
        deadline = time.monotonic() + 300
        while not ready():
            if self.process.poll() is not None or time.monotonic() > deadline:
                self.kill()
                pytest.fail((self.folder / f"{self.name}.log").read_text()[-4000:])
            time.sleep(0.2)

    def answers(self, path: str) -> bool:
        """Whether an HTTP server gives this page."""
        try:
            with urllib.request.urlopen(f"{self.url}{path}", timeout=2):
                return True
        except (urllib.error.URLError, OSError):
            return False

    def kill(self, number: int = signal.SIGKILL) -> None:
        """Ends it and its workers."""
        if self.process is not None:
            os.killpg(self.process.pid, number)
            self.process.wait()
            self.process = None


class MlflowServer(Service):
    """`mlflow server`, set up by environment variables alone, as the files in `mlflow/` do."""

    def __init__(self, folder: Path, settings: Mapping[str, str]) -> None:
        super().__init__(folder, "mlflow")
        own = {"MLFLOW_HOST": "127.0.0.1", "MLFLOW_PORT": str(self.port), "MLFLOW_WORKERS": "2"}
        self.settings = {**settings, **own, "MLFLOW_SERVER_ALLOWED_HOSTS": f"127.0.0.1:{self.port}"}

    def run(self) -> None:
        """Starts it, or starts it again."""
        environment = {name: value for name, value in os.environ.items() if not name.startswith("MLFLOW_")}
        command = [sys.executable, "-m", "mlflow", "server"]
        self.start(command, lambda: self.answers("/health"), env={**environment, **self.settings})


def shipped_settings(name: str) -> dict[str, str]:
    """The variables of one of the settings files in `mlflow/`."""
    lines = (ROOT / "mlflow" / name).read_text().splitlines()
    return dict(line.split("=", 1) for line in lines if line and not line.startswith("#"))


@pytest.fixture(scope="session")
def settings_of() -> Callable[[str], dict[str, str]]:
    """Reads one of the settings files in `mlflow/`."""
    return shipped_settings


@pytest.fixture(scope="session")
def mlflow_server(tmp_path_factory) -> Iterator[Callable[[Mapping[str, str]], MlflowServer]]:
    """Starts MLflow servers, which end with the tests."""
    started: list[MlflowServer] = []

    def start(settings: Mapping[str, str]) -> MlflowServer:
        server = MlflowServer(tmp_path_factory.mktemp("mlflow"), settings)
        started.append(server)
        server.run()
        return server

    yield start
    for server in started:
        server.kill()


@pytest.fixture(scope="session")
def postgres() -> Iterator[Callable[[str], str]]:
    """A PostgreSQL server on loopback; makes an empty database and gives its SQLAlchemy URI.

    It refuses to run as root, so root starts it as `postgres` or, where there is none, `nobody`.
    """
    pytest.importorskip("psycopg", reason="psycopg[binary] is not installed: pip install -e '.[dev]'")
    programs = sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb")) or [Path(shutil.which("initdb") or "")]
    if not programs[-1].is_file():
        pytest.skip("PostgreSQL's server programs are not installed (Debian package postgresql)")
    binaries = programs[-1].parent
    user = None
    if os.geteuid() == 0:
        known = {entry.pw_name for entry in pwd.getpwall()}
        user = next((name for name in ("postgres", "nobody") if name in known), None)
        if user is None:
            pytest.skip("PostgreSQL does not run as root, and there is neither a user `postgres` nor `nobody`")
    folder = Path(tempfile.mkdtemp(prefix="caltune-postgres-"))
    try:
        if user is not None:
            shutil.chown(folder, user)
        data = folder / "data"
        initialise = [binaries / "initdb", "-D", data, "--auth=trust", "--username=mlflow", "--encoding=UTF8"]
        subprocess.run([*initialise, "--locale=C", "--no-sync"], check=True, user=user, cwd=folder, capture_output=True)
        service = Service(folder, "postgres")
        command = [str(binaries / "postgres"), "-D", str(data), "-h", "127.0.0.1", "-p", str(service.port)]
        command += ["-c", "unix_socket_directories=", "-c", "fsync=off", "-c", "max_connections=100"]
        probe = [binaries / "pg_isready", "-q", "-h", "127.0.0.1", "-p", str(service.port)]
        service.start(command, lambda: subprocess.run(probe, check=False).returncode == 0, user=user)

        def database(name: str) -> str:
            address = f"postgresql://mlflow@127.0.0.1:{service.port}"
            subprocess.run(
                [binaries / "psql", "-q", f"{address}/postgres", "-c", f"create database {name}"], check=True
            )
            return f"postgresql+psycopg://mlflow@127.0.0.1:{service.port}/{name}"

        database.binaries = binaries  # type: ignore[attr-defined]
        yield database
        service.kill(signal.SIGQUIT)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="session")
def s3(tmp_path_factory) -> Iterator[Any]:
    """An S3-compatible store (moto's server): a boto3 client of it, with the settings it takes as `settings`."""
    pytest.importorskip("moto.server", reason="moto is not installed: pip install -e '.[dev]'")
    boto3 = pytest.importorskip("boto3", reason="boto3 is not installed: pip install -e '.[dev]'")
    service = Service(tmp_path_factory.mktemp("s3"), "s3")
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(service.port)]
    service.start(command, lambda: service.answers("/moto-api/"))
    keys = {"aws_access_key_id": "test", "aws_secret_access_key": "test", "region_name": "us-east-1"}
    client = boto3.client("s3", endpoint_url=service.url, **keys)
    client.settings = {
        "MLFLOW_S3_ENDPOINT_URL": service.url,
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_DEFAULT_REGION": "us-east-1",
    }
    yield client
    service.kill()
