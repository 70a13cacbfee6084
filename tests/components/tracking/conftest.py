"""A real MLflow server that can be killed and started again, and what the tests need to look into one."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from components.config import RunConfig

os.environ["MLFLOW_DISABLE_TELEMETRY"] = "true"  # before MLflow is imported


class MlflowServer:
    """`mlflow server` on a free loopback port, with SQLite and artifacts in a folder that outlives the process."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self.uri = f"http://127.0.0.1:{self.port}"
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start, and wait until it answers."""
        command = [sys.executable, "-m", "mlflow", "server", "--host", "127.0.0.1", "--port", str(self.port)]
        command += ["--workers", "1", "--backend-store-uri", f"sqlite:///{self.folder}/server.db"]
        command += ["--artifacts-destination", str(self.folder / "artifacts")]
        with (self.folder / "server.log").open("ab") as log:
            self.process = subprocess.Popen(command, cwd=self.folder, stdout=log, stderr=log, start_new_session=True)
        deadline = time.monotonic() + 120
        while time.monotonic() < deadline:
            try:
                with urllib.request.urlopen(f"{self.uri}/health", timeout=2):
                    return
            except (urllib.error.URLError, OSError):
                assert self.process.poll() is None, (self.folder / "server.log").read_text()
                time.sleep(0.2)
        pytest.fail((self.folder / "server.log").read_text())

    def signal(self, number: int) -> None:
        """Send a signal to the server and its workers."""
        assert self.process is not None
        os.killpg(self.process.pid, number)

    def kill(self) -> None:
        """End it without warning."""
        if self.process is not None:
            self.signal(signal.SIGKILL)
            self.process.wait()
            self.process = None


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """A running server, one for the module."""
    running = MlflowServer(tmp_path_factory.mktemp("server"))
    running.start()
    yield running
    running.kill()


@pytest.fixture(scope="session")
def database(tmp_path_factory) -> str:
    """URI of one SQLite database for all tests without a server; creating its schema takes seconds."""
    return f"sqlite:///{tmp_path_factory.mktemp('database')}/mlflow.db"


@pytest.fixture
def make_config(tmp_path, request):
    """Builds a configuration that tracks to `uri`, in an experiment of the test's own."""

    def make(uri: str | None = None, **changes: object) -> RunConfig:
        content = {
            "run": "demo",
            "output_dir": str(tmp_path / "outputs"),
            "data": {"source": {"kind": "facts", "domain": "geography"}},
            "tracking": {"uri": uri, "experiment": request.node.name},
        }
        return RunConfig.model_validate({**content, **changes})

    return make


@pytest.fixture(autouse=True)
def _own_environment(monkeypatch):
    """No setting of the machine reaches a test; a stray MLFLOW_RUN_ID must have no effect anywhere."""
    for name in ("MLFLOW_TRACKING_URI", "MLFLOW_EXPERIMENT_NAME", "MLFLOW_HTTP_REQUEST_TIMEOUT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("MLFLOW_RUN_ID", "0123456789abcdef0123456789abcdef")
