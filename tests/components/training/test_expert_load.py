"""What the experts received, on disk, and the alarm."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest

from components.errors import CaltuneError
from components.training.expert_load import ExpertLoad, ExpertLoadLog


def load(first: float, second: float = 0.5) -> ExpertLoad:
    """Two routers of two experts, k = 1."""
    return ExpertLoad([[first, 1 - first], [second, 1 - second]], [max(first, 1 - first), second], [0.6, 0.7])


def content(path: Path) -> dict:
    return json.loads(path.read_text())


def test_rows_are_added_in_order(tmp_path):
    log = ExpertLoadLog(tmp_path / "load.json", 0.9)
    log.add(10, load(0.5))
    log.add(20, load(0.6))
    assert content(log.path) == {
        "steps": [10, 20],
        "share": [[[0.5, 0.5], [0.5, 0.5]], [[0.6, 0.4], [0.5, 0.5]]],
        "entropy": [[0.6, 0.7], [0.6, 0.7]],
    }


def test_rows_past_the_step_resumed_from_are_made_again(tmp_path):
    broken = ExpertLoadLog(tmp_path / "load.json", 0.9)
    for step in (10, 20, 30):
        broken.add(step, load(0.5))
    resumed = ExpertLoadLog(tmp_path / "load.json", 0.9)
    resumed.resume(20)
    resumed.add(30, load(0.7))
    assert content(resumed.path)["steps"] == [10, 20, 30]
    assert content(resumed.path)["share"][2][0] == [0.7, pytest.approx(0.3)]
    assert len(content(resumed.path)["entropy"]) == 3


def test_a_run_begun_anew_replaces_the_file_of_the_last(tmp_path):
    ExpertLoadLog(tmp_path / "load.json", 0.9).add(10, load(0.5))
    again = ExpertLoadLog(tmp_path / "load.json", 0.9)
    again.add(5, load(0.5))
    assert content(again.path)["steps"] == [5]


def test_a_run_killed_before_its_first_evaluation_has_nothing_to_take_over(tmp_path):
    log = ExpertLoadLog(tmp_path / "load.json", 0.9)
    log.resume(5)
    log.add(10, load(0.5))
    assert content(log.path)["steps"] == [10]


def test_a_damaged_file_is_an_error(tmp_path):
    (tmp_path / "load.json").write_text("{")
    with pytest.raises(CaltuneError, match="--overwrite"):
        ExpertLoadLog(tmp_path / "load.json", 0.9).resume(5)


def test_a_collapsed_router_is_warned_of_once(tmp_path, caplog):
    log = ExpertLoadLog(tmp_path / "load.json", 0.9)
    with caplog.at_level(logging.WARNING):
        log.add(10, load(0.9))
        assert caplog.records == []
        log.add(20, load(0.95))
        log.add(30, load(0.97))
        log.add(40, load(0.97, second=0.92))
    assert [record.getMessage().split(" sends")[0] for record in caplog.records] == [
        "step 20: router 0", "step 40: router 1",
    ]  # fmt: skip
    assert "95 %" in caplog.records[0].getMessage()
