"""The spool file: complete whatever happens to the processes that write it."""

from __future__ import annotations

import json
import multiprocessing
import pickle

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from components.errors import TrackingError
from components.tracking.events import Spool, child_key, latest, next_key
from components.tracking.memory import MemoryLogger
from components.tracking.mlflow_logger import SpoolLogger
from components.tracking.server import shown
from components.tracking.spool import sync_spool


@pytest.fixture
def spool(tmp_path) -> Spool:
    return Spool.create(tmp_path / "run", "sqlite:///nowhere.db", "tests")


def log_from_worker(pickled: bytes, worker: int) -> None:
    """What a training worker does with the logger it was sent."""
    logger = pickle.loads(pickled)
    for step in range(300):
        logger.log_metrics({f"loss/{worker}": float(step), "note": float("nan")}, step)


def test_workers_share_the_file(spool):
    """Every line of two processes and the driver arrives whole, each writer's in its own order."""
    logger = SpoolLogger(spool, "run", "demo").child("calm")
    context = multiprocessing.get_context("spawn")
    workers = [context.Process(target=log_from_worker, args=(pickle.dumps(logger), worker)) for worker in (0, 1)]
    for worker in workers:
        worker.start()
    for step in range(300):
        logger.log_metrics({"loss/2": float(step)}, step)
    for worker in workers:
        worker.join()
        assert worker.exitcode == 0
    events = [event for _, event in spool.read()]
    assert None not in events
    for writer in range(3):
        steps = [event["step"] for event in events if f"loss/{writer}" in event.get("values", {})]
        assert steps == list(range(300))


def test_a_torn_line_costs_itself_alone(spool):
    """A crash in the middle of a write: the piece is not read while it is last, and spoils nothing written after it."""
    logger = SpoolLogger(spool, "run", "demo")
    logger.log_metrics({"loss": 1.0}, 0)
    whole = spool.size()
    logger.log_metrics({"loss": 2.0}, 1)
    with spool.events_file.open("r+b") as stream:
        stream.truncate(spool.size() - 9)
    assert [offset for offset, _ in spool.read()][-1] == whole
    logger.log_metrics({"loss": 3.0}, 2)
    assert [event and event.get("step") for _, event in spool.read()] == [None, 0, None, 2]


@settings(max_examples=15, deadline=None)
@given(values=st.dictionaries(st.text(max_size=8), st.floats(), max_size=4), tags=st.dictionaries(st.text(), st.text()))
def test_events_come_back_as_written(tmp_path_factory, values, tags):
    spool = Spool.create(tmp_path_factory.mktemp("run"), "sqlite:///nowhere.db", "tests")
    spool.append("run", "metrics", values=values, step=3)
    spool.append("run", "tags", values=tags)
    (first, metrics), (second, tagged) = spool.read()
    assert metrics is not None
    assert tagged is not None
    assert repr(metrics["values"]) == repr(values)
    assert tagged["values"] == tags
    assert second == spool.size()
    assert list(spool.read(first)) == [(second, tagged)]


def test_keys_of_linked_runs(spool):
    for key, continues in (("run", None), ("run~2", "run"), ("run~3", "run~2")):
        spool.append(key, "start", continues=continues)
    records = spool.records()
    assert latest(records, "run") == "run~3"
    assert next_key(records, "run~3") == "run~4"
    assert next_key(records, "run/calm") == "run/calm~2"
    assert child_key("run", "calm+temperature") == "run/calm+temperature"
    with pytest.raises(ValueError, match="only letters"):
        child_key("run", "a/b")


def test_a_password_is_neither_stored_nor_shown(tmp_path, monkeypatch):
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    uri = "https://me:pass@mlflow.example.org"
    spool = Spool.create(tmp_path, uri, "tests")
    SpoolLogger(spool, "run", "demo")
    assert not any(":pass@" in path.read_text() for path in spool.folder.iterdir() if path.is_file())
    assert shown(uri) == "https://me:***@mlflow.example.org"
    with pytest.raises(TrackingError, match="name it with --uri"):
        sync_spool(tmp_path)


def test_a_folder_without_a_spool(tmp_path):
    with pytest.raises(TrackingError, match="no tracked run here"):
        sync_spool(tmp_path)


def test_the_identity_of_a_spool_stays(tmp_path):
    first = Spool.create(tmp_path, "http://one", "a").header()
    second = Spool.create(tmp_path, "http://two", "b").header()
    assert second == {"id": first["id"], "uri": "http://two", "experiment": "b"}
    json.loads(Spool.find(tmp_path).header_file.read_text())


def test_memory_logger_keeps_what_it_is_given(tmp_path):
    logger = MemoryLogger()
    child = logger.child("calm", {"stage": "train"})
    child.log_params({"a": 1})
    child.log_params({"a": 1})
    child.log_metrics({"loss": 1.0}, 0)
    child.log_metrics({"loss": 0.5}, 1)
    child.log_artifact(tmp_path, "adapter")
    child.close("FAILED")
    assert logger.children["calm"] is logger.child("calm") is child
    assert (child.metrics, child.artifacts) == ({"loss": [(0, 1.0), (1, 0.5)]}, {"adapter": tmp_path})
    assert (child.tags, child.status, logger.status) == ({"stage": "train"}, "FAILED", None)
    with pytest.raises(ValueError, match="parameter 'a' was 1, now 2"):
        child.log_params({"a": 2})
