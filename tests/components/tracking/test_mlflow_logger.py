"""Tracking into SQLite through the real MLflow: what arrives, what a resume does, and that nothing arrives twice."""

from __future__ import annotations

import json
import math
import time

import pytest

from components.errors import TrackingError, UsageError
from components.tracking.events import Spool
from components.tracking.logger import NullLogger, ending
from components.tracking.mlflow_logger import (
    MAX_PARAM_LENGTH,
    SpoolLogger,
    open_logger,
    params_of,
    resolve_tracking,
    view_command,
)
from components.tracking.spool import find_spools, sync_spool


@pytest.fixture
def client(database):
    from mlflow import MlflowClient

    return MlflowClient(tracking_uri=database)


@pytest.fixture
def runs_of(client):
    """All runs of a configuration's experiment by local key."""

    def runs(config):
        experiment = client.get_experiment_by_name(config.tracking.experiment)
        found = client.search_runs([experiment.experiment_id])
        assert len({run.data.tags["caltune.key"] for run in found}) == len(found), "one MLflow run a key"
        return {run.data.tags["caltune.key"]: run for run in found}

    return runs


def artifacts(client, run, path=None):
    """Paths of all files of a run."""
    found = []
    for item in client.list_artifacts(run.info.run_id, path):
        found += artifacts(client, run, item.path) if item.is_dir else [item.path]
    return sorted(found)


def test_a_run_arrives_whole(make_config, database, client, runs_of, tmp_path):
    config = make_config(database)
    folder = config.folder
    (folder / "calm" / "adapter").mkdir(parents=True)
    (folder / "calm" / "adapter" / "caltune.json").write_text("{}")
    (folder / "config.resolved.yaml").write_text("run: demo\n")
    (tmp_path / "outside.txt").write_text("from elsewhere")

    with ending(open_logger(config, folder)) as logger:
        logger.set_tags({"caltune.dataset_hash": "abc"})
        child = logger.child("calm", {"stage": "train"})
        child.log_params({"steps": 3, "rate": 1e-05, "note": "x" * 7000})
        for step, value in enumerate((0.5, math.nan, math.inf, 0.25)):
            child.log_metrics({"val/ece": value, "coverage@risk": 1.0}, step)
        child.log_artifact(folder / "calm" / "adapter")
        child.log_artifact(tmp_path / "outside.txt", "notes/renamed.txt")
        (tmp_path / "outside.txt").unlink()
        child.log_dict({"ece": 0.1}, "summary.json")
        child.close()

    runs = runs_of(config)
    assert set(runs) == {"run", "run/calm"}
    parent, nested = runs["run"], runs["run/calm"]
    assert nested.data.tags["mlflow.parentRunId"] == parent.info.run_id
    assert (parent.info.run_name, nested.info.run_name, nested.data.tags["stage"]) == ("demo", "calm", "train")
    assert (parent.info.status, nested.info.status) == ("FINISHED", "FINISHED")
    assert parent.data.params == params_of(config)
    assert parent.data.params["calm.eta"] == "0.5"
    assert parent.data.tags["caltune.dataset_hash"] == "abc"
    assert artifacts(client, parent) == ["config.resolved.yaml"]
    assert (nested.data.params["steps"], nested.data.params["rate"]) == ("3", "1e-05")
    assert len(nested.data.params["note"]) == MAX_PARAM_LENGTH
    assert "(7000 characters, sha256 " in nested.data.params["note"]
    history = client.get_metric_history(nested.info.run_id, "val/ece")
    assert [metric.step for metric in history] == [0, 1, 2, 3]
    assert math.isnan(history[1].value)
    assert [history[i].value for i in (0, 2, 3)] == [0.5, 1.7976931348623157e308, 0.25]
    assert nested.data.metrics["coverage_risk"] == 1.0
    assert artifacts(client, nested) == ["adapter/caltune.json", "notes/renamed.txt", "summary.json"]
    assert sync_spool(folder).delivered == 0


def test_resume_continues_the_same_runs(make_config, database, client, runs_of):
    """Killed in the middle, then again after the end: same MLflow runs, parameters once, metrics appended."""
    config = make_config(database)
    crashed = open_logger(config, config.folder)
    crashed.child("calm").log_metrics({"loss": 3.0}, 0)
    sync_spool(config.folder)  # and never closed
    first = {key: run.info.run_id for key, run in runs_of(config).items()}
    for step in (1, 2):
        with ending(open_logger(config, config.folder)) as logger:
            child = logger.child("calm")
            child.log_params({"steps": 3})
            child.log_metrics({"loss": 3.0 - step}, step)
            child.close()
    runs = runs_of(config)
    assert {key: run.info.run_id for key, run in runs.items()} == first
    assert [metric.value for metric in client.get_metric_history(first["run/calm"], "loss")] == [3.0, 2.0, 1.0]
    assert {run.info.status for run in runs.values()} == {"FINISHED"}
    assert "caltune.resumed_at" in runs["run/calm"].data.tags
    assert sum(event["do"] == "params" for _, event in Spool.find(config.folder).read()) == 2


def test_changed_parameters_begin_a_linked_run(make_config, database, runs_of, caplog):
    """A parameter of an MLflow run never changes, so a resume with another seed gets a run of its own, twice over."""
    for seed in (0, 1, 1, 2):
        config = make_config(database, seed=seed)
        with ending(open_logger(config, config.folder)) as logger:
            logger.child("calm").log_metrics({"loss": float(seed)}, 0)
    runs = runs_of(config)
    assert set(runs) == {"run", "run/calm", "run~2", "run~2/calm", "run~3", "run~3/calm"}
    assert [runs[key].data.params["seed"] for key in ("run", "run~2", "run~3")] == ["0", "1", "2"]
    assert runs["run~3"].data.tags["caltune.continues"] == runs["run~2"].info.run_id
    assert runs["run~2"].data.tags["caltune.continues"] == runs["run"].info.run_id
    assert runs["run~3/calm"].data.tags["mlflow.parentRunId"] == runs["run~3"].info.run_id
    assert runs["run"].info.status == "FINISHED"
    assert "demo: config_hash, seed changed since it was first tracked; a linked run begins" in caplog.text


def test_a_lost_or_late_note_delivers_nothing_twice(make_config, database, client, runs_of):
    """A crash between a delivery and its note leaves the note behind, anywhere from not at all to all the way."""
    config = make_config(database)
    with ending(open_logger(config, config.folder)) as logger:
        child = logger.child("calm")
        child.log_params({"a": 1})
        for step in range(5):
            child.log_metrics({"loss": 1.0, "nan": math.nan}, step)
        child.log_dict({"a": 1}, "a.json")
        child.log_metrics({"loss": 1.0}, 5)
    expected = {key: (run.info.run_id, run.data.params) for key, run in runs_of(config).items()}
    spool = Spool.find(config.folder)
    (note,) = spool.folder.glob("delivered-*.json")
    complete = json.loads(note.read_text())
    offsets = [0, *(offset for offset, _ in spool.read())]
    for offset in offsets:
        note.write_text(json.dumps({**complete, "offset": offset, "runs": complete["runs"] if offset else {}}))
        sync_spool(config.folder)
    note.write_text('{"offset": ')
    assert sync_spool(config.folder).refused == []
    assert {key: (run.info.run_id, run.data.params) for key, run in runs_of(config).items()} == expected
    run_id = expected["run/calm"][0]
    assert len(client.get_metric_history(run_id, "loss")) == 6
    assert len(client.get_metric_history(run_id, "nan")) == 5


def test_two_thousand_metrics_are_fast(make_config, database, client, runs_of):
    config = make_config(database)
    logger = open_logger(config, config.folder)
    begin = time.perf_counter()
    for step in range(2000):
        logger.log_metrics({"loss": 1.0 / (step + 1)}, step)
    logged = time.perf_counter() - begin
    logger.close()
    assert logged < 2.0, "a step of training must not notice its logging"
    history = client.get_metric_history(runs_of(config)["run"].info.run_id, "loss")
    assert [metric.step for metric in history] == list(range(2000))


def test_an_artifact_that_is_gone_is_reported_and_holds_nothing_up(make_config, database, runs_of):
    config = make_config(database)
    spool = Spool.create(config.folder, database, config.tracking.experiment)
    logger = SpoolLogger(spool, "run", "demo")
    (config.folder / "gone.txt").write_text("")
    logger.log_artifact(config.folder / "gone.txt")
    logger.close()
    (config.folder / "gone.txt").unlink()
    report = sync_spool(config.folder)
    assert report.missing == [str(config.folder / "gone.txt")]
    assert (report.delivered, report.before) == (3, 0)
    assert runs_of(config)["run"].info.status == "FINISHED"
    with pytest.raises(FileNotFoundError, match="absent"):
        logger.log_artifact(config.folder / "absent.txt")


def test_a_failed_run_is_marked_and_an_interrupted_one_too(make_config, database, runs_of):
    config = make_config(database)
    with pytest.raises(ZeroDivisionError), ending(open_logger(config, config.folder)):
        raise ZeroDivisionError
    assert runs_of(config)["run"].info.status == "FAILED"
    with pytest.raises(KeyboardInterrupt), ending(open_logger(config, config.folder)):
        raise KeyboardInterrupt
    assert runs_of(config)["run"].info.status == "KILLED"


def test_a_deleted_experiment_is_named(make_config, database, client, caplog):
    config = make_config(database)
    client.delete_experiment(client.create_experiment(config.tracking.experiment))
    logger = open_logger(config, config.folder)
    logger.close()
    assert "is deleted there; restore it with `mlflow experiments restore" in caplog.text
    with pytest.raises(TrackingError, match="is deleted there"):
        sync_spool(config.folder)


def test_default_is_sqlite_in_the_output_directory(make_config, database, runs_of):
    """And a run tracked there can be delivered to another server as a whole."""
    config = make_config()
    with ending(open_logger(config, config.folder)) as logger:
        logger.log_dict({"a": 1}, "a.json")
    assert (config.output_dir / "mlflow.db").is_file()
    assert [path.name for path in (config.output_dir / "mlartifacts").glob("*/artifacts/*")] == ["a.json"]
    other = sync_spool(config.folder, database)
    assert (other.before, other.delivered) == (0, 4)
    assert runs_of(config)["run"].info.run_id == other.runs["run"]
    assert find_spools(config.output_dir) == [config.folder]


def test_where_a_run_is_tracked_and_who_said_so(make_config, monkeypatch, tmp_path):
    config = make_config()
    uri = f"sqlite:///{config.output_dir}/mlflow.db"
    assert resolve_tracking(config, config.output_dir) == (uri, config.tracking.experiment, "default")
    assert view_command(uri) == f"mlflow server --backend-store-uri {uri}"
    assert resolve_tracking(make_config("http://own"), tmp_path)[::2] == ("http://own", "tracking.uri")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://mlflow:5000")
    monkeypatch.setenv("MLFLOW_EXPERIMENT_NAME", "theirs")
    assert resolve_tracking(config, tmp_path) == ("http://mlflow:5000", "theirs", "MLFLOW_TRACKING_URI")
    assert resolve_tracking(make_config("http://own"), tmp_path).uri == "http://mlflow:5000"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "./mlruns")
    with pytest.raises(UsageError, match=r"MLFLOW_TRACKING_URI is './mlruns': name a server"):
        resolve_tracking(config, tmp_path)


def test_tracking_can_be_switched_off(make_config):
    config = make_config(tracking={"enabled": False})
    logger = open_logger(config, config.folder)
    assert isinstance(logger, NullLogger)
    logger.child("calm").log_metrics({"loss": 1.0}, 0)
    assert not config.output_dir.exists()
