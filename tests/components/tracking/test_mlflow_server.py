"""A real MLflow server on loopback that is down, hangs, or is killed: the run goes on and nothing is lost."""

from __future__ import annotations

import json
import signal
import socket
import time

import pytest

from components.errors import TrackingError
from components.tracking.events import Spool
from components.tracking.logger import ending
from components.tracking.mlflow_logger import open_logger
from components.tracking.spool import sync_spool


@pytest.fixture
def client(server):
    from mlflow import MlflowClient

    return MlflowClient(tracking_uri=server.uri)


def closed_port() -> int:
    """A loopback port on which nobody listens."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def wait_for(condition, seconds=30.0):
    """Wait until a condition holds, and return its value."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        value = condition()
        if value:
            return value
        time.sleep(0.1)
    return pytest.fail(f"not within {seconds} s")


def delivered_run(config, key):
    """The MLflow run of a key, once the logger has created it by itself."""
    for note in Spool.find(config.folder).folder.glob("delivered-*.json"):
        return json.loads(note.read_text())["runs"].get(key)
    return None


def history(client, run_id):
    return [(metric.step, metric.value) for metric in client.get_metric_history(run_id, "loss")]


def test_metrics_are_visible_while_the_run_goes_on(server, client, make_config):
    config = make_config(server.uri)
    (config.folder / "adapter").mkdir(parents=True)
    (config.folder / "adapter" / "adapter_model.safetensors").write_bytes(bytes(2_000_000))
    with ending(open_logger(config, config.folder)) as logger:
        child = logger.child("calm")
        child.log_metrics({"loss": 1.0}, 0)
        child.log_artifact(config.folder / "adapter")
        run_id = wait_for(lambda: delivered_run(config, "run/calm"))
        wait_for(lambda: history(client, run_id) == [(0, 1.0)])
    run = client.get_run(run_id)
    parent = client.get_run(run.data.tags["mlflow.parentRunId"])
    assert parent.info.run_name == "demo"
    assert parent.info.status == "FINISHED"
    (stored,) = client.list_artifacts(run_id, "adapter")
    assert (stored.path, stored.file_size) == ("adapter/adapter_model.safetensors", 2_000_000)


def test_server_down_from_the_start(server, client, make_config, caplog):
    config = make_config(f"http://127.0.0.1:{closed_port()}")
    begin = time.monotonic()
    with ending(open_logger(config, config.folder)) as logger:
        child = logger.child("calm")
        for step in range(20):
            child.log_metrics({"loss": float(step)}, step)
        logged = time.monotonic() - begin
        wait_for(lambda: "The run goes on" in caplog.text)
    assert logged < 2.0
    (warning,) = [record.message for record in caplog.records]  # it says so once, and nobody else says anything
    assert warning == (
        f"tracking server {config.tracking.uri} cannot be reached: Connection refused. "
        f"The run goes on; `caltune sync {config.folder}` delivers later what it logs."
    )
    with pytest.raises(TrackingError, match=r"127\.0\.0\.1:\d+ cannot be reached: Connection refused"):
        sync_spool(config.folder)
    report = sync_spool(config.folder, server.uri)
    assert report.delivered == 1 + 1 + 1 + 20 + 1  # start, params, child's start, metrics, close
    assert history(client, report.runs["run/calm"]) == [(step, float(step)) for step in range(20)]
    assert sync_spool(config.folder, server.uri).delivered == 0


def test_a_server_that_hangs_holds_nothing_up(server, client, make_config, caplog, monkeypatch):
    """Stopped, not dead: connections are accepted and never answered."""
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "1")
    config = make_config(server.uri)
    server.signal(signal.SIGSTOP)
    try:
        begin = time.monotonic()
        logger = open_logger(config, config.folder)
        logger.log_metrics({"loss": 1.0}, 0)
        assert time.monotonic() - begin < 2.0
        begin = time.monotonic()
        logger.close()
        assert time.monotonic() - begin < 25.0
    finally:
        server.signal(signal.SIGCONT)
    assert f"{server.uri} cannot be reached: timed out. The run goes on" in caplog.text
    monkeypatch.delenv("MLFLOW_HTTP_REQUEST_TIMEOUT")
    assert history(client, sync_spool(config.folder).runs["run"]) == [(0, 1.0)]


def test_server_killed_in_mid_run(server, client, make_config, caplog):
    """What was delivered before stays, the rest follows by sync into the same runs, each metric once."""
    config = make_config(server.uri)
    logger = open_logger(config, config.folder)
    child = logger.child("calm")
    child.log_metrics({"loss": 0.0}, 0)
    first = sync_spool(config.folder).runs
    assert history(client, first["run/calm"]) == [(0, 0.0)]
    server.kill()
    for step in range(1, 6):
        child.log_metrics({"loss": float(step)}, step)
    child.close()
    logger.close()
    assert "The run goes on" in caplog.text
    with pytest.raises(TrackingError):
        sync_spool(config.folder)
    server.start()
    report = sync_spool(config.folder)
    assert report.runs == first
    assert history(client, first["run/calm"]) == [(step, float(step)) for step in range(6)]
    assert {client.get_run(run_id).info.status for run_id in first.values()} == {"FINISHED"}
    assert sync_spool(config.folder).delivered == 0
