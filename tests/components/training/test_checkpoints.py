"""Checkpoints: whole or not there, the newest readable one wins, never another run's."""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from components.errors import CheckpointError
from components.storage import Storage
from components.training.checkpoints import MANIFEST, STATE, Checkpoints

KILLED_BEFORE_THE_RENAME = """
import os, signal, sys
from pathlib import Path
import torch
from components.training.checkpoints import Checkpoints

rename = Path.rename
def killed(self, target):
    if self.name.endswith(".partial"):
        os.kill(os.getpid(), signal.SIGKILL)
    return rename(self, target)
Path.rename = killed
Checkpoints(Path(sys.argv[1]), "run", 2).save(4, {"value/x": torch.ones(3)}, {"kept_step": None})
"""


@pytest.fixture
def checkpoints(tmp_path: Path) -> Checkpoints:
    return Checkpoints(tmp_path / "checkpoints", "run", 2)


def save(checkpoints: Checkpoints, *steps: int, kept_step: int | None = None) -> None:
    for step in steps:
        state = {"value/x": torch.full((3,), float(step)), "exp_avg/x": torch.ones(3)}
        checkpoints.save(step, state, {"kept_step": kept_step, "best": None, "ended": False})


def names(checkpoints: Checkpoints) -> list[str]:
    return sorted(path.name for path in checkpoints.folder.iterdir())


def test_reads_back_what_was_written(checkpoints):
    assert checkpoints.newest() is None
    state = {"value/x": torch.randn(3, 2).T, "step/x": torch.tensor(7.0)}
    checkpoints.save(7, state, {"kept_step": 5, "best": 0.25, "ended": False})
    found = checkpoints.newest()
    assert found.step == 7
    assert found.stop == {"kept_step": 5, "best": 0.25, "ended": False}
    assert found.state.keys() == state.keys()
    assert all(torch.equal(found.state[key], state[key]) for key in state)


def test_the_newest_few_are_kept_by_number_of_steps(checkpoints):
    save(checkpoints, 2, 9, 10, 11)
    assert names(checkpoints) == ["step-00000010", "step-00000011"]
    assert checkpoints.newest().step == 11


def test_a_step_may_be_written_again(checkpoints):
    save(checkpoints, 4)
    checkpoints.save(4, {"value/x": torch.zeros(3)}, {"kept_step": None})
    assert not checkpoints.newest().state["value/x"].any()
    assert names(checkpoints) == ["step-00000004"]


def test_killed_between_writing_and_renaming_the_old_one_stands(checkpoints):
    save(checkpoints, 2)
    command = [sys.executable, "-c", KILLED_BEFORE_THE_RENAME, str(checkpoints.folder)]
    root = Path(__file__).parents[3]
    assert subprocess.run(command, cwd=root, env=os.environ | {"PYTHONPATH": str(root)}).returncode == -signal.SIGKILL
    assert names(checkpoints) == [".step-00000004.partial", "step-00000002"]
    assert checkpoints.newest().step == 2
    save(checkpoints, 4)
    assert names(checkpoints) == ["step-00000002", "step-00000004"]


@pytest.mark.parametrize(
    ("file", "damage"),
    [
        (STATE, lambda path: path.write_bytes(path.read_bytes()[:-4])),
        (STATE, lambda path: path.write_bytes(path.read_bytes()[:-1] + b"\xff")),
        (STATE, Path.unlink),
        (MANIFEST, lambda path: path.write_text(path.read_text()[:-5])),
        (MANIFEST, lambda path: path.write_text("[]")),
        (MANIFEST, lambda path: path.write_text(json.dumps({"step": 4, "identity": "run"}))),
        (MANIFEST, Path.unlink),
    ],
    ids=["truncated", "changed", "no state", "torn manifest", "no object", "keys missing", "no manifest"],
)
def test_a_damaged_newest_one_is_passed_over_with_a_warning(checkpoints, caplog, file, damage):
    save(checkpoints, 2, 4)
    damage(checkpoints.folder / "step-00000004" / file)
    with caplog.at_level(logging.WARNING):
        assert checkpoints.newest().step == 2
    assert "step-00000004 is damaged" in caplog.text


def test_nothing_but_damaged_ones_is_an_error(checkpoints):
    save(checkpoints, 2, 4)
    for path in checkpoints.folder.glob(f"*/{STATE}"):
        path.write_bytes(b"")
    with pytest.raises(CheckpointError, match="none of 2 checkpoints"):
        checkpoints.newest()


def test_another_runs_checkpoint_is_refused_not_passed_over(checkpoints):
    save(checkpoints, 2)
    other = Checkpoints(checkpoints.folder, "other", 2)
    save(other, 4)
    with pytest.raises(CheckpointError, match=r"step-00000004 was written with other settings.*--overwrite"):
        checkpoints.newest()


class TestSharedStorage:
    """Ranks on two nodes, each with a folder of its own."""

    @pytest.fixture
    def nodes(self, tmp_path: Path) -> tuple[Checkpoints, Checkpoints]:
        storage = Storage(str(tmp_path / "shared"))
        return tuple(Checkpoints(tmp_path / name, "run", 2, storage) for name in ("one", "two"))

    def test_what_one_writes_the_other_reads(self, nodes):
        one, two = nodes
        one.save_kept(3, {"value/x": torch.arange(3.0)})
        save(one, 4, kept_step=3)
        assert two.kept(3).state["value/x"].tolist() == [0.0, 1.0, 2.0]
        assert two.newest().step == 4
        assert names(two) == names(one)

    def test_what_one_removes_is_gone(self, nodes):
        one, two = nodes
        save(one, 2, 4, 6)
        assert two.newest().step == 6
        assert names(two) == one.storage.names() == ["step-00000004", "step-00000006"]

    def test_one_cut_off_on_the_way_is_passed_over(self, nodes):
        one, two = nodes
        save(one, 2)
        one.storage.put(one.folder / "step-00000002" / STATE, f"step-00000004/{STATE}")
        assert two.newest().step == 2
        assert "step-00000004 is damaged" in two.passed_over[0]


def test_a_full_disk_is_an_error_that_says_what_to_do(checkpoints, monkeypatch):
    save(checkpoints, 2)

    def full(*arguments: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("components.training.checkpoints.save_file", full)
    with pytest.raises(CheckpointError, match=r"checkpoint at step 4 cannot .*No space left.*go on with --resume"):
        save(checkpoints, 4)
    assert names(checkpoints) == ["step-00000002"]


class TestKept:
    def test_holds_values_alone(self, checkpoints):
        checkpoints.save_kept(3, {"value/x": torch.arange(3.0), "exp_avg/x": torch.ones(3)})
        found = checkpoints.kept(3)
        assert found.step == 3
        assert found.state.keys() == {"value/x"}

    def test_stays_while_a_checkpoint_refers_to_it(self, checkpoints):
        """Kept at 3 and, before the next checkpoint, at 5 and 6: a run killed now resumes at 4 and may want 3."""
        checkpoints.save_kept(3, {"value/x": torch.zeros(1)})
        save(checkpoints, 4, kept_step=3)
        for step in (5, 6):
            checkpoints.save_kept(step, {"value/x": torch.zeros(1)})
        assert checkpoints.kept(3).step == 3
        save(checkpoints, 8, kept_step=6)
        assert names(checkpoints) == ["kept-00000003", "kept-00000006", "step-00000004", "step-00000008"]
        save(checkpoints, 12, kept_step=6)
        assert names(checkpoints) == ["kept-00000006", "step-00000008", "step-00000012"]

    @pytest.mark.parametrize("damage", [None, lambda path: path.write_bytes(path.read_bytes()[:-1])])
    def test_missing_or_damaged_is_an_error(self, checkpoints, damage):
        if damage:
            damage(checkpoints.save_kept(3, {"value/x": torch.zeros(4)}) / STATE)
        with pytest.raises(CheckpointError, match=r"kept-00000003 is missing or damaged.*--overwrite"):
            checkpoints.kept(3)
