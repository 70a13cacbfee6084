"""A real MLflow server on real PostgreSQL and an S3-compatible store: nothing is lost, and one of many promotions wins.

Settings are those of `mlflow/server-postgres-s3.env` with other addresses, so that the file is tested too.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from components.errors import TrackingError
from components.registry.candidate import read_candidate
from components.registry.client import Connection
from components.registry.judging import judge_version
from components.registry.promotion import history, promote, rollback
from components.registry.registry import CHALLENGER, Registry
from components.run_file import load_run_file
from components.tracking.logger import ending
from components.tracking.mlflow_logger import open_logger
from components.tracking.spool import sync_spool

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

ROOT = Path(__file__).parents[3]
LENIENT = {"method": "calm", "rules": [{"metric": "ece", "threshold": 0.9}]}
LOG_AND_REGISTER = """
import sys
from pathlib import Path
from components.registry.candidate import read_candidate
from components.registry.client import Connection
from components.registry.registry import Registry
from components.run_file import load_run_file
from components.tracking.logger import ending
from components.tracking.mlflow_logger import open_logger
from components.tracking.spool import sync_spool

folder, uri, model = Path(sys.argv[1]), sys.argv[2], sys.argv[3]
registry = Registry(Connection(uri))
with ending(open_logger(load_run_file(folder / "config.resolved.yaml"), folder)) as logger:
    with ending(logger.child("train-calm")) as child:
        for step in range(100):
            child.log_metrics({"loss": 1 / (step + 1)}, step)
        child.log_artifact(folder / "calm" / "adapter")
version = registry.register(model, read_candidate(folder), sync_spool(folder).runs["run"])
print(version.number)
"""
PROMOTE = """
import sys, time
from pathlib import Path
from components.registry.client import Connection
from components.errors import PromotionConflictError
from components.registry.judging import judge_version
from components.registry.promotion import promote
from components.registry.registry import Registry

uri, model, number, ready, go = sys.argv[1:]
registry = Registry(Connection(uri))
version = registry.version(model, number)
verdict = judge_version(registry, version)
Path(ready).touch()
while not Path(go).exists():
    time.sleep(0.005)
try:
    promote(registry, version, verdict, f"process {number}")
except PromotionConflictError as conflict:
    print("conflict:", conflict)
else:
    print("promoted")
"""


@pytest.fixture(scope="module")
def server(postgres, s3, mlflow_server, settings_of):
    s3.create_bucket(Bucket="mlflow")
    settings = {"MLFLOW_BACKEND_STORE_URI": postgres("mlflow"), "MLFLOW_ARTIFACTS_DESTINATION": "s3://mlflow/artifacts"}
    return mlflow_server({**settings_of("server-postgres-s3.env"), **settings, **s3.settings})


@pytest.fixture
def registry(server):
    return Registry(Connection(server.url))


@pytest.fixture
def model(request):
    return request.node.name


@pytest.fixture
def run_folder(make_run, server, simulate):
    """The folder of a run that is to be tracked on the server."""

    def make(name, sharpening=1.0):
        found = {"calm": {"id": simulate(100, sharpening=sharpening)}}
        return make_run(found, name=name, gate=LENIENT, uri=server.url)

    return make


@pytest.fixture
def ship(registry, model, run_folder):
    """Tracks a run and registers it."""

    def register(name, sharpening=1.0):
        folder = run_folder(name, sharpening)
        with ending(open_logger(load_run_file(folder / "config.resolved.yaml"), folder)):
            pass
        return registry.register(model, read_candidate(folder), sync_spool(folder).runs["run"])

    return register


def keys(s3, bucket="mlflow"):
    pages = s3.get_paginator("list_objects_v2").paginate(Bucket=bucket)
    return [item["Key"] for page in pages for item in page.get("Contents", [])]


def python(code, *arguments):
    return subprocess.Popen(
        [sys.executable, "-c", code, *map(str, arguments)],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def outputs(processes, seconds=280):
    """What processes print; all must end well."""
    found = [process.communicate(timeout=seconds) for process in processes]
    assert [process.returncode for process in processes] == [0] * len(processes), found
    return [out.strip() for out, _ in found]


def contents(registry, model):
    """All that a registry says of a model and its ledger, and a hash of every file of its versions."""
    found = {}
    with registry.connection.requests(60) as client:
        for name in (model, f"{model}-ledger"):
            for version in client.search_model_versions(f"name='{name}'"):
                aliases = sorted(client.get_model_version(name, version.version).aliases)
                found[name, version.version] = (dict(version.tags), aliases, version.run_id, version.source)
    for version in registry.versions(model):
        for part in ("model", "audit"):
            with registry.files(version, part) as folder:
                for path in sorted(p for p in folder.rglob("*") if p.is_file()):
                    digest = hashlib.sha256(path.read_bytes()).hexdigest()
                    found[version.number, part, path.relative_to(folder).as_posix()] = digest
    return found


def test_runs_adapters_reports_and_versions_are_in_the_stores(server, s3, registry, model, run_folder):
    folder = run_folder("demo")
    (folder / "report").mkdir()
    (folder / "report" / "index.html").write_text("<html></html>")
    with ending(open_logger(load_run_file(folder / "config.resolved.yaml"), folder)) as logger:
        with ending(logger.child("train-calm")) as child:
            child.log_metrics({"loss": 0.5}, 1)
            child.log_artifact(folder / "calm" / "adapter")
        logger.log_artifact(folder / "report")
    runs = sync_spool(folder).runs
    version = registry.register(model, read_candidate(folder), runs["run"])
    entry = promote(registry, version, judge_version(registry, version), "ada")
    stored = keys(s3)
    for run_id, name in (
        (runs["run"], "report/index.html"),
        (runs["run/train-calm"], "adapter/adapter_model.safetensors"),
        (version.run_id, "model/adapter_model.safetensors"),
        (version.run_id, "model/evaluation/calm/id/predictions.parquet"),
        (version.run_id, f"audit/{entry.id}/decision.json"),
    ):
        assert any(key.startswith("artifacts/") and key.endswith(f"{run_id}/artifacts/{name}") for key in stored), name
    import psycopg

    address = server.settings["MLFLOW_BACKEND_STORE_URI"].replace("+psycopg", "")
    with psycopg.connect(address) as database:
        ids = {row[0] for row in database.execute("select run_uuid from runs where status = 'FINISHED'")}
        aliases = database.execute("select alias, version from registered_model_aliases where name = %s", [model])
        assert aliases.fetchall() == [("champion", 1)]
    assert {*runs.values(), version.run_id} <= ids
    assert registry.version(model, "1").aliases == ("champion",)


def test_eight_concurrent_runs_lose_nothing(server, registry, model, run_folder):
    folders = [run_folder(f"run-{i}") for i in range(8)]
    numbers = outputs([python(LOG_AND_REGISTER, folder, server.url, model) for folder in folders])
    assert sorted(map(int, numbers)) == list(range(1, 9))
    with registry.connection.requests() as client:
        for folder in folders:
            runs = sync_spool(folder).runs
            steps = [metric.step for metric in client.get_metric_history(runs["run/train-calm"], "loss")]
            assert steps == list(range(100))
            names = {item.path for item in client.list_artifacts(runs["run/train-calm"], "adapter")}
            assert "adapter/adapter_model.safetensors" in names
            assert {client.get_run(run).info.status for run in runs.values()} == {"FINISHED"}
    versions = registry.versions(model)
    assert {version.tags["caltune.run"] for version in versions} == {f"run-{i}" for i in range(8)}
    assert registry.by_alias(model, CHALLENGER) is not None
    for version in versions:
        assert registry.results(version, ["id"]).metrics["id"]["n"] == 100


def test_a_server_killed_in_mid_run_loses_nothing(server, registry, model, run_folder):
    folder = run_folder("demo")
    logger = open_logger(load_run_file(folder / "config.resolved.yaml"), folder)
    child = logger.child("train-calm")
    for step in range(5):
        child.log_metrics({"loss": float(step)}, step)
    before = sync_spool(folder).runs
    server.kill()
    for step in range(5, 10):
        child.log_metrics({"loss": float(step)}, step)
    child.log_artifact(folder / "calm" / "adapter")
    child.close()
    logger.close()
    with pytest.raises(TrackingError, match="cannot be reached: Connection refused"):
        registry.register(model, read_candidate(folder), before["run"])
    server.run()
    runs = sync_spool(folder).runs
    assert runs == before
    with registry.connection.requests() as client:
        history_ = client.get_metric_history(runs["run/train-calm"], "loss")
        assert [(metric.step, metric.value) for metric in history_] == [(step, float(step)) for step in range(10)]
        assert client.list_artifacts(runs["run/train-calm"], "adapter")
    version = registry.register(model, read_candidate(folder), runs["run"])
    assert version.number == "1"
    promote(registry, version, judge_version(registry, version), "ada")
    server.kill()
    server.run()
    assert registry.champion(model).number == "1"
    assert [entry.state for entry in history(registry, model).entries] == ["done"]


def test_of_many_promotions_at_once_one_wins_and_the_others_know(server, registry, model, ship, tmp_path):
    """Four processes, each with a version judged against the same champion, start at the same moment; three rounds."""
    first = ship("first")
    promote(registry, first, judge_version(registry, first), "ada")
    versions = [ship(f"run-{i}", 1.1 + 0.1 * i) for i in range(4)]
    done = 1
    for attempt in range(3):
        champion = registry.champion(model).number
        contenders = [version for version in versions if version.number != champion]
        ready = [tmp_path / f"ready-{attempt}-{version.number}" for version in contenders]
        go = tmp_path / f"go-{attempt}"
        processes = [
            python(PROMOTE, server.url, model, version.number, flag, go)
            for version, flag in zip(contenders, ready, strict=True)
        ]
        while not all(flag.exists() for flag in ready):
            assert all(process.poll() in (None, 0) for process in processes), outputs(processes)
        go.touch()
        found = outputs(processes)
        (winner,) = [v for v, text in zip(contenders, found, strict=True) if text == "promoted"]
        assert all(text.startswith("conflict: ") for text in found if text != "promoted")
        assert registry.champion(model).number == winner.number
        done += 1
        past = history(registry, model)
        finished = [entry for entry in past.entries if entry.state == "done"]
        assert len(finished) == done
        assert {entry.state for entry in past.entries} <= {"done", "lost"}
        assert (finished[-1].version, finished[-1].before, finished[-1].by) == (
            winner.number,
            champion,
            f"process {winner.number}",
        )
        assert not past.moved_by_hand


def test_backup_and_restore_give_the_same_registry(
    server, s3, postgres, mlflow_server, registry, model, ship, tmp_path
):
    for i in range(2):
        version = ship(f"run-{i}", 1.0 + 0.2 * i)
        promote(registry, version, judge_version(registry, version), "ada")
    rollback(registry, model, "bo", "complaints")
    expected = contents(registry, model)
    assert len(expected) > 20
    path = f"{postgres.binaries}{os.pathsep}{os.environ['PATH']}"
    environment = {**os.environ, **server.settings, "PYTHON": sys.executable, "PATH": path}
    subprocess.run([ROOT / "mlflow" / "backup.sh", tmp_path / "backup"], check=True, env=environment)
    s3.create_bucket(Bucket="restored")
    place = {
        "MLFLOW_BACKEND_STORE_URI": postgres("restored"),
        "MLFLOW_ARTIFACTS_DESTINATION": "s3://restored/elsewhere",
    }
    restore = [ROOT / "mlflow" / "restore.sh", tmp_path / "backup"]
    subprocess.run(restore, check=True, env={**environment, **place})
    again = subprocess.run(restore, check=False, env={**environment, **place}, capture_output=True, text=True)
    assert again.returncode == 1
    assert "is not empty" in again.stderr
    restored = Registry(Connection(mlflow_server({**server.settings, **place}).url))
    assert contents(restored, model) == expected
    assert restored.champion(model).number == "1"
    assert [entry.action for entry in history(restored, model).entries] == ["promote", "promote", "rollback"]
    version = restored.version(model, "2")  # and it goes on from there
    assert promote(restored, version, judge_version(restored, version), "ada").number == 4


def test_a_damaged_backup_is_not_restored(tmp_path):
    backup = tmp_path / "backup"
    backup.mkdir()
    (backup / "database.sqlite").write_text("something")
    sums = subprocess.run(["sha256sum", "./database.sqlite"], cwd=backup, capture_output=True, text=True, check=True)
    (backup / "SHA256SUMS").write_text(sums.stdout)
    (backup / "database.sqlite").write_text("something else")
    place = {
        "MLFLOW_BACKEND_STORE_URI": f"sqlite:///{tmp_path}/new/mlflow.db",
        "MLFLOW_ARTIFACTS_DESTINATION": str(tmp_path / "new" / "artifacts"),
    }
    restore = [ROOT / "mlflow" / "restore.sh", backup]
    result = subprocess.run(restore, env={**os.environ, **place}, capture_output=True, text=True, check=False)
    assert result.returncode == 1
    assert "damaged; nothing was restored" in result.stderr
    assert not (tmp_path / "new").exists()


def test_backup_and_restore_of_sqlite(mlflow_server, settings_of, make_run, simulate, tmp_path):
    """From `server-sqlite.env` with another folder, into a third one."""
    settings = {
        **settings_of("server-sqlite.env"),
        "MLFLOW_BACKEND_STORE_URI": f"sqlite:///{tmp_path}/server/mlflow.db",
        "MLFLOW_ARTIFACTS_DESTINATION": str(tmp_path / "server" / "artifacts"),
    }
    (tmp_path / "server").mkdir()
    server = mlflow_server(settings)
    registry = Registry(Connection(server.url))
    folder = make_run({"calm": {"id": simulate(100)}}, gate=LENIENT, uri=server.url)
    with ending(open_logger(load_run_file(folder / "config.resolved.yaml"), folder)):
        pass
    version = registry.register("demo", read_candidate(folder), sync_spool(folder).runs["run"])
    promote(registry, version, judge_version(registry, version), "ada")
    expected = contents(registry, "demo")
    environment = {**os.environ, **server.settings, "PYTHON": sys.executable}
    subprocess.run([ROOT / "mlflow" / "backup.sh", tmp_path / "backup"], check=True, env=environment)
    server.kill()
    place = {
        "MLFLOW_BACKEND_STORE_URI": f"sqlite:///{tmp_path}/new/mlflow.db",
        "MLFLOW_ARTIFACTS_DESTINATION": str(tmp_path / "new" / "artifacts"),
    }
    subprocess.run([ROOT / "mlflow" / "restore.sh", tmp_path / "backup"], check=True, env={**environment, **place})
    restored = Registry(Connection(mlflow_server({**server.settings, **place}).url))
    assert contents(restored, "demo") == expected
    assert json.loads(restored.version("demo", "1").tags["caltune.audit.1"])["by"] == "ada"
