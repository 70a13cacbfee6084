"""MLproject: every verb has an entry point, every entry point calls a verb with options that it has, and one runs."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import typer
from ruamel.yaml import YAML

from pipelines.cli import app as caltune

ROOT = Path(__file__).parents[3]
PROJECT = YAML(typ="safe").load((ROOT / "mlflow" / "MLproject").read_text())
ENTRIES = PROJECT["entry_points"]


@pytest.fixture(scope="module")
def commands():
    """Commands by name, groups left out."""
    app = typer.Typer()
    app.registered_commands = list(caltune.registered_commands)
    found = typer.main.get_command(app).commands
    return {name: command for name, command in found.items() if not hasattr(command, "commands")}


def test_every_verb_has_an_entry_point(commands):
    assert commands.keys() - ENTRIES.keys() == set()
    assert ENTRIES.keys() - commands.keys() == {"resume"}


@pytest.mark.parametrize("name", ENTRIES)
def test_an_entry_point_fits_its_verb(commands, name):
    """It gives the verb all it needs and nothing that it does not have."""
    match = re.fullmatch(r"cd \.\. && caltune ([a-z]+)(.*)", ENTRIES[name]["command"])
    assert match, ENTRIES[name]["command"]
    verb, rest = match.groups()
    assert verb == ("run" if name == "resume" else name)
    declared = ENTRIES[name].get("parameters", {})
    assert set(re.findall(r"{(\w+)}", rest)) == declared.keys()
    parameters = commands[verb].params
    options = {option for parameter in parameters for option in parameter.opts if option.startswith("--")}
    assert set(re.findall(r"--[a-z-]+", rest)) <= options
    needed = {parameter.name for parameter in parameters if parameter.required}
    positional = len(re.findall(r"(?<!--)\b\w+\b", re.sub(r"--[a-z-]+( {\w+})?", "", rest)))
    assert positional >= sum(p.required for p in parameters if not p.opts[0].startswith("--"))
    assert all(f"--{option}" in rest for option in needed & {"config", "reason"})


def test_the_environment_names_the_version_that_is_here():
    environment = YAML(typ="safe").load((ROOT / "mlflow" / PROJECT["python_env"]).read_text())
    version = re.search(r'^version = "(.+)"$', (ROOT / "pyproject.toml").read_text(), re.M)[1]
    assert environment["dependencies"] == [f"caltune=={version}"]


@pytest.mark.slow
def test_an_entry_point_runs(tmp_path):
    """From the repository, with a relative path and a further option."""
    mlflow = Path(sys.executable).with_name("mlflow")
    command = [mlflow, "run", "mlflow", "-e", "validate", "--env-manager", "local"]
    command += ["-P", "config=ray_jobs/configs/quickstart.yaml", "-P", "set=seed=41"]
    result = subprocess.run(
        command,
        cwd=ROOT,
        env={
            **os.environ,
            "PATH": f"{mlflow.parent}{os.pathsep}{os.environ['PATH']}",
            "MLFLOW_TRACKING_URI": f"sqlite:///{tmp_path}/mlflow.db",
        },
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    assert "seed: 41" in result.stdout
    assert not (ROOT / "mlflow" / "mlflow.db").exists()
