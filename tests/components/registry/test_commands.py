"""The registry's commands on a run folder and a real MLflow database: what they print and their exit codes."""

from __future__ import annotations

import json

import pytest
import typer
from typer.testing import CliRunner

from components.config import RunConfig
from components.errors import GateError, UsageError
from components.run_file import load_run_file
from components.tracking.logger import ending
from components.tracking.mlflow_logger import open_logger
from pipelines.registry_commands import add_registry_commands

GATE = {"method": "calm", "rules": [{"metric": "ece", "min_absolute_change": 0.0, "against": "champion"}]}


@pytest.fixture(scope="session")
def caltune():
    """Runs a command; gives its exit code and what it printed."""
    app = typer.Typer()
    add_registry_commands(app)

    def run(*arguments):
        result = CliRunner().invoke(app, [str(argument) for argument in arguments])
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        return result.exit_code, result.output

    return run


@pytest.fixture(scope="module")
def uri(tmp_path_factory):
    return f"sqlite:///{tmp_path_factory.mktemp('database')}/mlflow.db"


@pytest.fixture
def tracked(make_run, uri, simulate):
    """The folder of a tracked run whose model is more or less over-confident."""

    def make(name, sharpening=1.0, **options):
        found = {"calm": {"id": simulate(300, sharpening=sharpening)}}
        folder = make_run(found, name=name, gate=GATE, uri=uri, **options)
        config: RunConfig = load_run_file(folder / "config.resolved.yaml")
        with ending(open_logger(config, folder)):
            pass
        return folder

    return make


@pytest.mark.slow
def test_from_run_folder_to_champion_and_back(caltune, tracked, uri):
    poor, good = tracked("poor", 3.0), tracked("good")
    assert "caltune version 1: calm of run poor, challenger" in caltune("register", poor)[1]
    code, shown = caltune("promote", "--uri", uri, "--by", "ada")
    assert code == 0
    assert "skipped" in shown
    assert "caltune version 1 is champion; before it: none" in shown

    code, shown = caltune("gate", good, "--json")
    verdict = json.loads(shown)
    assert (code, verdict["passed"], verdict["champion"]) == (0, True, "1")
    version = json.loads(caltune("register", good, "--json")[1])
    assert version["number"] == "2"
    assert version["tags"]["caltune.run"] == "good"
    assert caltune("promote", "--config", good / "config.resolved.yaml")[0] == 0

    code, shown = caltune("gate", poor)
    assert code == 3
    assert "did not pass the gate" in shown
    assert "| fail |" in caltune("gate", poor, "--markdown")[1]
    with pytest.raises(GateError):
        caltune("promote", "--version", "1", "--uri", uri)

    assert "version 1 is champion again" in caltune("rollback", "--uri", uri, "--reason", "complaints")[1]
    past = json.loads(caltune("history", "--uri", uri, "--json")[1])
    assert [(entry["action"], entry["version"]) for entry in past["entries"]] == [
        ("promote", "1"),
        ("promote", "2"),
        ("rollback", "1"),
    ]
    shown = caltune("history", "--uri", uri)[1]
    assert "rollback version 1 (before: 2)" in shown
    assert "done: complaints" in shown
    assert "champion of caltune: version 1" in shown


def test_what_cannot_work_is_said(caltune, tmp_path):
    with pytest.raises(UsageError, match="is not a run folder"):
        caltune("register", tmp_path)
    with pytest.raises(UsageError, match="name the MLflow server"):
        caltune("history")
