"""What happens to a run when something around it dies: real processes, real signals, a real full disk.

Each fault ends with the weights of the run that was left alone. `docs/reliability.md` lists these tests by fault; the
driver's own death is in `test_kill_and_resume.py`.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from io import FileIO
from pathlib import Path

import psutil
import pytest
import torch
from safetensors.torch import load_file

from components.config import RunConfig
from components.run_file import to_yaml

STEPS, EVERY, METHOD, TIMEOUT_S = 120, 10, "calm", 600
pytestmark = [pytest.mark.slow, pytest.mark.distributed, pytest.mark.timeout(1800)]


class Story:
    """A run that something happens to.

    Args:
        folder: Where its run file and what it says are kept.
        config: The run.
        start: Starts the command line.
        env: Environment of its commands.
    """

    def __init__(self, folder: Path, config: RunConfig, start: Callable, env: dict[str, str] | None = None) -> None:
        self.folder, self.config, self._start, self.env = folder, config, start, env
        self.run_file = folder / "run.yaml"
        self.run_file.parent.mkdir(parents=True, exist_ok=True)
        self.run_file.write_text(to_yaml(config))
        self.method = config.folder / METHOD
        self.attempts = 0

    def start(self, *options: str) -> subprocess.Popen:
        self.attempts += 1
        name = f"attempt-{self.attempts}"
        self.process = self._start(self.folder, "train", "--config", self.run_file, *options, name=name, env=self.env)
        return self.process

    def end(self, code: int = 0) -> str:
        """Waits for the end; returns standard error."""
        found = self.process.wait(TIMEOUT_S)
        errors = (self.folder / f"attempt-{self.attempts}.err").read_text()
        assert found == code, errors
        assert "Traceback" not in errors
        return errors

    def steps(self) -> list[int]:
        trace = self.method / "trace.jsonl"
        lines = trace.read_text().splitlines(keepends=True) if trace.exists() else []
        return [json.loads(line)["step"] for line in lines if line.endswith("\n")]

    def wait_for_step(self, step: int) -> None:
        deadline = time.monotonic() + TIMEOUT_S
        while not (steps := self.steps()) or steps[-1] < step:
            assert self.process.poll() is None, "the run ended too early"
            assert time.monotonic() < deadline, "the run is too slow"
            time.sleep(0.005)
        assert steps[-1] < STEPS - 2 * EVERY, "too late for the fault"

    def workers(self) -> list[psutil.Process]:
        """Ray Train's worker processes of this run."""
        children = psutil.Process(self.process.pid).children(recursive=True)
        return [child for child in children if "RayTrainWorker" in " ".join(child.cmdline())]

    def kill(self) -> None:
        """Kills the driver and waits until its workers have noticed."""
        children = psutil.Process(self.process.pid).children(recursive=True)
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(TIMEOUT_S)
        _, left = psutil.wait_procs(children, timeout=60)
        assert left == []

    def final(self) -> dict[str, torch.Tensor]:
        return load_file(self.method / "checkpoints" / f"step-{STEPS:08d}" / "state.safetensors")


@pytest.fixture(scope="module")
def make_story(tmp_path_factory, small_run, start, tiny_model_folder) -> Callable[..., Story]:
    def make(name: str, output: Path | None = None, env: dict[str, str] | None = None, **sections) -> Story:
        folder = tmp_path_factory.mktemp(name)
        tree = {
            "methods": [METHOD],
            "recalibrate": {},
            "model": {"name": str(tiny_model_folder), "adapter": {"r": 4, "alpha": 8}},
            "training": {"steps": STEPS, "batch_size": 4, "evaluate_every": 40, "checkpoint_every": EVERY},
            "resources": {"cpus_per_worker": 1},
            "tracking": {"enabled": False},
        }
        return Story(folder, small_run(output or folder / "outputs", **(tree | sections)), start, env)

    return make


@pytest.fixture(scope="module")
def whole(make_story) -> Story:
    """The run that is left alone."""
    story = make_story("whole")
    story.start()
    story.end()
    return story


def assert_same(story: Story, whole: Story) -> None:
    """Weights, calibration head, optimiser and trace are those of the run that was left alone, bit for bit."""
    expected, found = whole.final(), story.final()
    assert expected.keys() == found.keys()
    assert [key for key in expected if not torch.equal(expected[key], found[key])] == []
    for file in ("trace.jsonl", "adapter/adapter_model.safetensors", "adapter/calibration_head.safetensors"):
        assert (story.method / file).read_bytes() == (whole.method / file).read_bytes(), file


def test_a_train_worker_is_killed(make_story, whole):
    story = make_story("worker")
    story.start()
    story.wait_for_step(2)
    (worker,) = story.workers()
    story.wait_for_step(33)
    worker.kill()
    errors = story.end()
    assert "workers were lost" in errors
    assert "1 go on from step" in errors
    assert_same(story, whole)


def test_sigterm_leaves_a_checkpoint_and_exits_0(make_story, whole):
    story = make_story("sigterm")
    story.start().poll()
    story.wait_for_step(13)
    story.process.send_signal(signal.SIGTERM)
    errors = story.end(0)
    last = story.steps()[-1]
    assert f"calm stands at step {last}, in a checkpoint; go on with --resume" in errors
    assert (story.method / "checkpoints" / f"step-{last:08d}").is_dir()
    state = json.loads((story.config.folder / "run.json").read_text())["stages"]["train/calm"]["state"]
    assert state == "interrupted"
    assert not (story.method / "adapter").exists()
    story.start("--resume")
    story.end()
    assert_same(story, whole)


def test_the_newest_checkpoint_is_truncated(make_story, whole):
    story = make_story("truncated")
    story.start()
    story.wait_for_step(33)
    story.kill()
    newest = max((story.method / "checkpoints").glob("step-*"))
    state = newest / "state.safetensors"
    state.write_bytes(state.read_bytes()[: state.stat().st_size // 2])
    story.start("--resume")
    errors = story.end()
    assert f"{newest} is damaged" in errors
    assert "falling back to the one before" in errors
    assert_same(story, whole)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=24m", "tmpfs", str(folder)], capture_output=True)
    if mounted.returncode:
        pytest.skip(f"a file system of its own cannot be mounted here: {mounted.stderr.decode().strip()}")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


def test_the_disk_is_full_at_checkpoint_time(make_story, whole, small_disk, tmp_path):
    story = make_story("full", output=small_disk / "outputs")
    story.start()
    story.wait_for_step(13)
    filler = small_disk / "filler"
    fill(filler)
    errors = story.end(1)
    assert "No space left on device" in errors
    assert "--resume" in errors
    filler.unlink()
    story.start("--resume")
    story.end()
    assert_same(story, whole)


def fill(path: Path) -> None:
    """Writes until there is no room."""
    with path.open("wb", buffering=0) as file:
        for size in (2**16, 1):
            with pytest.raises(OSError, match="No space left on device"):
                write_for_ever(file, bytes(size))


def write_for_ever(file: FileIO, block: bytes) -> None:
    while True:
        file.write(block)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def answering(command: list[str], url: str, log: Path) -> subprocess.Popen:
    """Starts a server and waits until it answers."""
    with log.open("ab") as out:
        process = subprocess.Popen(command, stdout=out, stderr=out, start_new_session=True, cwd=log.parent)
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        try:
            with urllib.request.urlopen(url, timeout=2):
                return process
        except OSError:
            assert process.poll() is None, log.read_text()
            time.sleep(0.2)
    raise AssertionError(log.read_text())


def end(process: subprocess.Popen) -> None:
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def test_the_mlflow_server_is_killed(make_story, whole, tmp_path, start):
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    command = [sys.executable, "-m", "mlflow", "server", "--host", "127.0.0.1", "--port", str(port), "--workers", "1"]
    command += [
        "--backend-store-uri",
        f"sqlite:///{tmp_path}/mlflow.db",
        "--artifacts-destination",
        str(tmp_path / "a"),
    ]
    server = answering(command, f"{url}/health", tmp_path / "server.log")
    try:
        story = make_story("mlflow", tracking={"uri": url, "experiment": "faults"})
        story.start()
        story.wait_for_step(13)
        end(server)
        errors = story.end()
        assert "caltune sync" in errors
        assert_same(story, whole)
        server = answering(command, f"{url}/health", tmp_path / "server.log")
        process = start(story.folder, "sync", story.folder / "outputs", name="sync")
        assert process.wait(TIMEOUT_S) == 0, (story.folder / "sync.err").read_text()
        assert steps_in_mlflow(url, "train-calm") == list(range(1, STEPS + 1))
    finally:
        end(server)


def steps_in_mlflow(url: str, run_name: str) -> list[int]:
    from mlflow import MlflowClient

    client = MlflowClient(tracking_uri=url)
    experiment = client.get_experiment_by_name("faults")
    (run,) = client.search_runs([experiment.experiment_id], f"attributes.run_name LIKE '%{run_name}'")
    return [point.step for point in client.get_metric_history(run.info.run_id, "f")]


@pytest.fixture
def bucket(tmp_path: Path) -> Iterator[tuple[str, dict[str, str]]]:
    """An S3-compatible store over HTTP: a bucket's URI and the environment that reaches it."""
    pytest.importorskip("moto.server", reason="moto is not installed: pip install -e '.[dev]'")
    boto3 = pytest.importorskip("boto3", reason="boto3 is not installed: pip install -e '.[dev]'")

    port = free_port()
    url = f"http://127.0.0.1:{port}"
    server = answering([sys.executable, "-m", "moto.server", "-p", str(port)], f"{url}/moto-api/", tmp_path / "s3.log")
    env = {"AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret", "AWS_EC2_METADATA_DISABLED": "true"}
    store = boto3.client(
        "s3", endpoint_url=url, region_name="us-east-1", aws_access_key_id="key", aws_secret_access_key="secret"
    )
    store.create_bucket(Bucket="caltune")
    yield f"s3://caltune/runs?endpoint_override=127.0.0.1:{port}&scheme=http&region=us-east-1", env
    end(server)


def test_workers_that_share_no_folder_leave_all_in_s3(make_story, whole, bucket):
    uri, env = bucket
    story = make_story("s3", env=env, resources={"cpus_per_worker": 1, "storage_path": uri})
    story.start()
    story.wait_for_step(33)
    story.kill()
    assert not (story.method / "checkpoints").exists()
    story.start("--resume")
    story.end()
    for file in ("trace.jsonl", "adapter/adapter_model.safetensors", "adapter/calibration_head.safetensors"):
        assert (story.method / file).read_bytes() == (whole.method / file).read_bytes(), file


def test_a_node_is_lost(make_story, whole):
    """Two nodes with a worker each; the raylet of one is killed, and training goes on with the other worker."""
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1})
    try:
        other = cluster.add_node(num_cpus=1)
        cluster.wait_for_nodes()
        story = make_story(
            "node",
            env={"RAY_ADDRESS": cluster.address},
            resources={"workers": 2, "min_workers": 1, "cpus_per_worker": 1},
        )
        story.start()
        story.wait_for_step(33)
        starts = [json.loads(line) for line in (story.method / "starts.jsonl").read_text().splitlines()]
        assert [row["workers"] for row in starts] == [2]
        other.kill_raylet()
        errors = story.end()
        assert "1 go on from step" in errors
    finally:
        cluster.shutdown()
    expected, found = whole.final(), story.final()
    assert expected.keys() == found.keys()
    for key in expected:
        if key.startswith("value/"):
            torch.testing.assert_close(found[key], expected[key], rtol=0.0, atol=1e-5)
