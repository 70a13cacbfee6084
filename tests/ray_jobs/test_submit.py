"""Jobs on a real Ray head, started here with dashboard and token authentication, through the command line."""

from __future__ import annotations

import contextlib
import json
import os
import random
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

from components.config import RunConfig
from components.run_file import git_state, to_yaml

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(400)]

ROOT = Path(__file__).parents[2]
HEALTH = "/api/local_raylet_healthz"
UP_SECONDS, JOB_SECONDS = 120, 240
HERE_ONLY = {"HF_TOKEN": "hf_not_for_the_cluster", "MLFLOW_TRACKING_PASSWORD": "word-not-for-the-cluster"}
PORTS = ("--port", "--dashboard-port", "--dashboard-agent-listen-port", "--dashboard-agent-grpc-port")
PORTS += ("--metrics-export-port", "--ray-client-server-port")


@dataclass(frozen=True)
class Head:
    """A running head node.

    Attributes:
        address: URL of its job server.
        token: What it takes.
    """

    address: str
    token: str

    def start(self, *arguments: str | Path, **changes: str) -> subprocess.Popen[str]:
        """Starts `caltune`, which finds the head by RAY_ADDRESS; `changes` are to its environment."""
        environment = _environment() | HERE_ONLY | {"RAY_ADDRESS": self.address, "RAY_AUTH_TOKEN": self.token} | changes
        return subprocess.Popen(
            [sys.executable, "-m", "pipelines.cli", *map(str, arguments)],
            cwd=ROOT,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def call(self, *arguments: str | Path, **changes: str) -> subprocess.CompletedProcess[str]:
        """Runs `caltune` to its end."""
        return finish(self.start(*arguments, **changes))

    def everything_known_of_jobs(self) -> str:
        """What anyone who sees the dashboard can read."""
        return read(f"{self.address}/api/jobs/", self.token)


def read(url: str, token: str) -> str:
    request = urllib.request.Request(url, headers={"Authorization": f"Bearer {token}"})
    return str(urllib.request.urlopen(request, timeout=30).read().decode())


def finish(process: subprocess.Popen[str]) -> subprocess.CompletedProcess[str]:
    try:
        out, err = process.communicate(timeout=JOB_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        pytest.fail(f"{process.args} did not end: {process.communicate()}")
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


def _environment() -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("RAY_", "MLFLOW_"))}
    path = f"{Path(sys.executable).parent}{os.pathsep}{kept['PATH']}"
    # Ray gives its workers way to everybody else; where a machine is busy they do not even start in time.
    return kept | {"RAY_AUTH_MODE": "token", "RAY_worker_niceness": "0", "OMP_NUM_THREADS": "1", "PATH": path}


def _free_ports(count: int) -> list[int]:
    """Below those that systems hand out by themselves, since a head takes seconds to bind what it is given."""
    found: list[int] = []
    for port in random.SystemRandom().sample(range(20000, 32000), 200):
        with contextlib.suppress(OSError), socket.socket() as trial:
            trial.bind(("", port))
            found.append(port)
    return found[:count]


@pytest.fixture(scope="module")
def head() -> Iterator[Head]:
    folder = Path(tempfile.mkdtemp(prefix="ct-", dir="/tmp"))  # short: Ray puts sockets into it
    token, ports = secrets.token_hex(16), _free_ports(len(PORTS))
    command = [Path(sys.executable).with_name("ray"), "start", "--head", "--block", "--num-cpus=2"]
    command += ["--include-dashboard=true", "--dashboard-host=127.0.0.1", f"--temp-dir={folder}/ray"]
    command += ["--disable-usage-stats", *(f"{name}={port}" for name, port in zip(PORTS, ports, strict=True))]
    with (folder / "head.log").open("w") as log:
        process = subprocess.Popen(
            command, cwd=folder, env=_environment() | {"RAY_AUTH_TOKEN": token}, stdout=log, stderr=subprocess.STDOUT
        )
    started = Head(f"http://127.0.0.1:{ports[1]}", token)
    try:
        _wait_until_up([f"{started.address}/api/jobs/", f"http://127.0.0.1:{ports[2]}{HEALTH}"], token, process)
        yield started
    finally:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(10)
        print((folder / "head.log").read_text()[-3000:])  # shown where a test has failed
        _kill_what_runs_in(folder)
        shutil.rmtree(folder, ignore_errors=True)


def _wait_until_up(urls: list[str], token: str, process: subprocess.Popen[bytes]) -> None:
    """The job server answers first, the agent that starts jobs later."""
    deadline = time.monotonic() + UP_SECONDS
    while time.monotonic() < deadline and process.poll() is None:
        with contextlib.suppress(urllib.error.URLError, OSError):
            for url in urls:
                read(url, token)
            return
        time.sleep(0.5)
    pytest.fail(f"the head did not come up: exit code {process.poll()}")


def _kill_what_runs_in(folder: Path) -> None:
    """Ends what a head leaves behind, known by its folder, which is ours alone."""
    for process in psutil.process_iter(["cmdline"]):
        if any(str(folder) in word for word in process.info["cmdline"] or []):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()


@pytest.fixture(scope="module")
def make_run(tmp_path_factory: pytest.TempPathFactory, tiny_model_folder: Path):
    """Writes run files; keyword arguments replace sections."""
    folder = tmp_path_factory.mktemp("submitted")
    words = ["iron", "tin", "zinc", "gold", "lead"]
    rows = [
        {"id": f"{i}", "question": f"Number {i}?", "choices": [words[(i + k) % 5] for k in range(4)], "answer": i % 4}
        for i in range(80)
    ]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    def make(name: str, **sections: Any) -> Path:
        tree = {
            "run": name,
            "output_dir": str(folder / "shared"),
            "methods": ["base", "sft"],
            "model": {"name": str(tiny_model_folder), "adapter": {"r": 3}},
            "data": {
                "source": {"kind": "file", "path": str(folder / "rows.jsonl")},
                "splits": {"train": 32, "calibration": 16, "validation": 10, "test": 10},
                "prompt": {"style": "plain", "delimiter": " "},
            },
            "training": {"steps": 3, "batch_size": 4, "evaluate_every": 10, "checkpoint_every": 10},
            "resources": {"cpus_per_worker": 1},
            "tracking": {"enabled": False},
        }
        path = folder / f"{name}.yaml"
        path.write_text(to_yaml(RunConfig.model_validate(tree | sections)))
        return path

    return make


def test_a_run_is_worked_on_once_waited_for_and_stopped(head, make_run):
    run_file = make_run("long", training={"steps": 10**6, "batch_size": 4})
    accepted = head.call("submit", "train", "--config", run_file, "--no-wait", "--env", "COLOUR=blue")
    assert accepted.returncode == 0, accepted.stderr
    job = accepted.stdout.strip()
    assert job.startswith("long-train-")

    again = head.start("submit", "train", "--config", run_file)
    queued = head.start("submit", "run", "--config", run_file, "--queue", "--timeout", "1")
    follower = head.start("logs", "long", "--follow")
    assert follower.stdout.readline(), "a first line of the log"
    follower.send_signal(signal.SIGINT)
    again, queued, follower = finish(again), finish(queued), finish(follower)
    assert again.returncode == 2, again.stderr
    assert f"already worked on by job {job}" in again.stderr
    assert queued.returncode == 4, queued.stderr
    assert f"timed out waiting for job {job}; nothing was submitted" in queued.stderr
    assert follower.returncode == 130, follower.stderr
    assert f"the job {job} goes on" in follower.stderr
    assert f"caltune stop {job}" in follower.stderr

    listed = {entry["job"]: entry for entry in json.loads(head.call("list", "--json").stdout)}
    assert listed[job]["status"] == "RUNNING"
    assert listed[job]["git_commit"] == (git_state(ROOT)["commit"] or "unknown")
    assert len(listed[job]["config_hash"]) == 64
    known = head.everything_known_of_jobs()
    assert '"COLOUR": "blue"' in known
    assert [name for name, value in HERE_ONLY.items() if name in known or value in known] == []

    follower = head.start("logs", job, "--follow")
    stopped = head.call("stop", "long")
    assert (stopped.returncode, stopped.stdout) == (0, f"{job}: STOPPED\n"), stopped.stderr
    follower = finish(follower)
    assert follower.returncode == 130, "a stopped job is no success"
    assert f"job {job} was stopped" in follower.stderr
    assert head.call("status", "long").returncode == 130


def test_who_may_not(head):
    wrong = head.start("list", RAY_AUTH_TOKEN="of-another-cluster")
    without = head.start("list", RAY_AUTH_MODE="disabled")
    nowhere = head.start("list", "--address", "http://127.0.0.1:1")  # goes before RAY_ADDRESS
    wrong, without, nowhere = finish(wrong), finish(without), finish(nowhere)
    assert wrong.returncode == 2
    assert "the cluster refuses this token" in wrong.stderr
    assert without.returncode == 2
    assert "the cluster wants a token: set RAY_AUTH_MODE=token" in without.stderr
    assert nowhere.returncode == 5
    assert "no cluster answers at http://127.0.0.1:1" in nowhere.stderr
    assert "Traceback" not in wrong.stderr + without.stderr + nowhere.stderr


def test_mistakes_are_found_before_anything_is_sent(head, make_run):
    run_file = make_run("mistaken")
    unknown = head.start("submit", "train", "--config", run_file, "--resum")
    foreign = head.start("submit", "doctor", "--config", run_file)
    relative = head.start("submit", "evaluate", "--config", run_file, "--adapter", "outputs/a")
    secret = head.start("submit", "train", "--config", run_file, "--env", "HF_TOKEN")
    for process, words in (
        (unknown, "No such option: --resum"),
        (foreign, "'doctor' cannot be submitted; choose run, train,"),
        (relative, "--adapter outputs/a: give the absolute path"),
        (secret, "--env HF_TOKEN looks like a secret"),
    ):
        result = finish(process)
        assert result.returncode == 2, result.stderr
        assert words in result.stderr
    assert "mistaken" not in head.everything_known_of_jobs()


def test_the_exit_code_of_the_command_comes_back(head, make_run, tmp_path):
    """The run's folder is not empty, which the command refuses with 2; to Ray that is FAILED, for which Ray says 1."""
    run_file = make_run("occupied", output_dir=str(tmp_path))
    (tmp_path / "occupied").mkdir()
    (tmp_path / "occupied" / "something").touch()
    failed = head.call("submit", "train", "--config", run_file, "--json")
    assert failed.returncode == 2, failed.stderr
    assert "occupied is not empty: use --resume" in failed.stderr, "from the job's log"
    assert "failed with exit code 2" in failed.stderr
    result = json.loads(failed.stdout)
    assert (result["status"], result["exit_code"], result["run"]) == ("FAILED", 2, "occupied")


@pytest.mark.slow
def test_a_job_joins_the_cluster_and_its_workers_get_both_environments(head, tmp_path):
    """`connect` gives workers variables through `ray.init`, the job gives others: Ray takes both (E27).

    The job is sent twice under one id, and runs once.
    """
    (tmp_path / "look.py").write_text(
        "import os, ray\nfrom ray_jobs.cluster import connect\n\n"
        "def see():\n    return [os.environ[name] for name in ('COLOUR', 'HF_HUB_DISABLE_PROGRESS_BARS')]\n\n"
        "connect()\nprint(*ray.get(ray.remote(see).remote()), len(ray.nodes()))\n"
    )
    script = """
import sys
from pathlib import Path
from ray_jobs.job_follow import follow
from ray_jobs.job_package import code_files
from ray_jobs.job_secrets import job_environment
from ray_jobs.job_server import JobServer
folder = Path(sys.argv[1])
for name, origin in code_files().items():
    (folder / name).parent.mkdir(parents=True, exist_ok=True)
    (folder / name).write_bytes(origin.read_bytes())
server = JobServer.connect(None)
for attempt in range(2):  # as after an answer that got lost
    server.submit("look", "python look.py", folder, job_environment(["COLOUR=blue"]), {})
print(follow(server, "look", write=None, say=print).ending())
print(server.log("look"))
"""
    environment = _environment() | {"RAY_ADDRESS": head.address, "RAY_AUTH_TOKEN": head.token}
    done = subprocess.run(
        [sys.executable, "-c", script, tmp_path],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=JOB_SECONDS,
        check=False,
    )
    assert "job look succeeded" in done.stdout, done.stdout + done.stderr
    assert done.stdout.count("blue 1 1\n") == 1


@pytest.mark.slow
def test_an_evaluation_ends_well(head, make_run):
    done = head.call("submit", "evaluate", "--config", make_run("evaluated"))
    assert done.returncode == 0, done.stderr
    job = done.stdout.strip()
    assert job.startswith("evaluated-evaluate-")
    assert f"job {job} succeeded after " in done.stderr
    assert done.stderr.count("predictions and metrics: ") == 1, "each line of the log once"
    folder = make_run("evaluated").parent / "shared" / "evaluated"
    state = json.loads((folder / "run.json").read_text())
    assert state["git"]["commit"] == git_state(ROOT)["commit"], "though the cluster has no checkout"
    assert (folder / "base" / "evaluation" / "id" / "metrics.json").is_file()
    assert list(folder.parent.glob(".shipped/*/rows.jsonl"))


@pytest.mark.slow
def test_training_is_followed_to_its_end_and_found_in_mlflow(head, make_run, tmp_path):
    from mlflow import MlflowClient

    uri = f"sqlite:///{tmp_path}/mlflow.db"
    run_file = make_run("trained", output_dir=str(tmp_path), tracking={"uri": uri})
    done = head.call("submit", "train", "--config", run_file)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "trained" / "sft" / "adapter" / "adapter_model.safetensors").is_file()
    client = MlflowClient(uri)
    experiment = client.get_experiment_by_name("caltune")
    runs = client.search_runs([experiment.experiment_id])
    assert "trained" in {run.info.run_name for run in runs}
    assert {run.info.status for run in runs} == {"FINISHED"}
