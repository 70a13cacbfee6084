"""The run folder: who may have it, what becomes of what is in it, and what it remembers of its stages."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from components.config import RunConfig
from components.errors import CaltuneError, UsageError
from components.run_file import load_run_file
from pipelines.run_folder import RUN_FILE, STATE, OnExisting, open_run_folder


@pytest.fixture
def config(tmp_path: Path) -> RunConfig:
    data = {"source": {"kind": "facts", "domain": "geography"}}
    return RunConfig.model_validate({"run": "mine", "output_dir": str(tmp_path / "outputs"), "data": data})


def enter(config: RunConfig, on_existing: OnExisting) -> dict:
    """Opens the folder and returns the state it has."""
    with open_run_folder(config, on_existing) as folder:
        return dict(folder.state["stages"])


def test_a_new_folder_says_what_runs(config):
    with open_run_folder(config, "refuse") as folder:
        state = json.loads((folder.path / STATE).read_text())
    assert (state["run"], state["stages"]) == ("mine", {})
    assert len(state["config_hash"]) == 64
    assert state["versions"]["torch"]
    assert load_run_file(config.folder / RUN_FILE) == config


def test_stages_and_their_notes_are_remembered(config):
    with open_run_folder(config, "refuse") as folder:
        with folder.stage("prepare") as notes:
            notes["rows"] = 3
        with pytest.raises(CaltuneError), folder.stage("train/sft"):
            raise CaltuneError("no weights")
    with open_run_folder(config, "resume") as folder:
        assert folder.is_done("prepare")
        assert folder.notes("prepare")["rows"] == 3
        assert not folder.is_done("train/sft")
        assert folder.notes("train/sft")["reason"] == "no weights"
        assert not folder.is_done("evaluate/sft")


@pytest.mark.parametrize("on_existing", ["refuse", "resume", "overwrite"])
def test_an_empty_folder_is_begun(config, on_existing):
    config.folder.mkdir(parents=True)
    assert enter(config, on_existing) == {}


def test_a_folder_with_something_in_it_is_refused_resumed_or_overwritten(config):
    with open_run_folder(config, "refuse") as folder, folder.stage("prepare"):
        pass
    with pytest.raises(UsageError, match=r"--resume.*--overwrite"):
        enter(config, "refuse")
    assert enter(config, "resume").keys() == {"prepare"}
    assert enter(config, "overwrite") == {}


@pytest.mark.parametrize("on_existing", ["resume", "overwrite"])
def test_a_folder_of_somebody_elses_is_left_alone(config, on_existing):
    config.folder.mkdir(parents=True)
    (config.folder / "thesis.tex").write_text("years of work")
    with pytest.raises(UsageError, match="is not a run of caltune"):
        enter(config, on_existing)
    assert [path.name for path in config.folder.iterdir()] == ["thesis.tex"]


def test_other_settings_are_not_resumed_but_another_place_for_results_is(config):
    enter(config, "refuse")
    with pytest.raises(UsageError, match="other settings"):
        enter(config.model_copy(update={"seed": 1}), "resume")
    tracking = config.tracking.model_copy(update={"enabled": False})
    assert enter(config.model_copy(update={"tracking": tracking}), "resume") == {}


def test_a_run_killed_before_its_file_was_written_can_be_resumed(config):
    enter(config, "refuse")
    (config.folder / RUN_FILE).unlink()
    enter(config, "resume")
    assert load_run_file(config.folder / RUN_FILE) == config


def test_another_process_at_work_is_noticed(config):
    code = (
        "import sys\nfrom pathlib import Path\nfrom components.run_file import load_run_file\n"
        "from pipelines.run_folder import open_run_folder\n"
        "with open_run_folder(load_run_file(sys.argv[1]), 'resume'):\n    print('in', flush=True)\n    input()"
    )
    enter(config, "refuse")
    command = [sys.executable, "-c", code, str(config.folder / RUN_FILE)]
    root = Path(__file__).parents[2]
    with subprocess.Popen(command, cwd=root, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout.readline() == "in\n"
        for on_existing in ("resume", "overwrite"):
            with pytest.raises(UsageError, match="another process"):
                enter(config, on_existing)
        other.communicate("\n")
    assert enter(config, "resume") == {}
