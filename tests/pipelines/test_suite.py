"""Suites: cells that are done stay done whatever is added, a failed one stops no other, and what is left is told.

The suites here evaluate a tiny random model and train nothing, except the slow ones.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from components.config import RunConfig
from components.errors import UsageError
from components.run_file import load_run_file, to_yaml
from components.suite_file import SuitePlan, load_suite_file
from pipelines.compare_suite import compare_suite
from pipelines.progress import Reporter
from pipelines.run_folder import RUN_FILE
from pipelines.suite import run_suite
from pipelines.suite_state import SUITE_FILE, Cell, SuiteState, duration, remaining_seconds

QUIET = Reporter(quiet=True)


@pytest.fixture
def plan(tmp_path: Path, small_run: Callable[..., RunConfig]) -> Callable[..., SuitePlan]:
    """Builds a suite of a small run file; keyword arguments replace keys of the suite file."""
    config = small_run(
        tmp_path,
        methods=["base"],
        recalibrate={},
        data={
            "source": {"kind": "facts", "domain": "geography"},
            "splits": {"train": 8, "calibration": 4, "validation": 4, "test": 8},
            "prompt": {"style": "plain", "template": "Question: {question}\nAnswer:", "delimiter": " "},
        },
        tracking={"enabled": False},
    )
    (tmp_path / "data0.yaml").write_text(to_yaml(config))

    def build(**keys: Any) -> SuitePlan:
        entries = [{"file": "data0.yaml", "name": "data0"}]
        content = {"suite": "s", "output_dir": str(tmp_path / "out"), "seeds": [0], "runs": entries} | keys
        (tmp_path / "suite.yaml").write_text(json.dumps(content))
        return load_suite_file(tmp_path / "suite.yaml")

    return build


def states(state: SuiteState) -> dict[str, str]:
    return {f"{cell.folder} {cell.method}": cell.state for cell in state.cells.values()}


def evaluated(state: SuiteState, run: str) -> int:
    """When a run's base model was evaluated."""
    return (state.folder / run / "base/evaluation/id/predictions.parquet").stat().st_mtime_ns


def test_seeds_and_recalibrations_may_be_added_and_nothing_is_repeated(plan):
    first = run_suite(plan(), QUIET)
    assert states(first) == {"data0-s0 base": "done"}
    assert json.loads((first.folder / SUITE_FILE).read_text())["counts"] == {"done": 1, "failed": 0, "left": 0}
    before = evaluated(first, "data0-s0")

    wider = plan(seeds=[0, 1], set=["recalibrate={base: [temperature]}"])
    assert states(SuiteState(wider)) == {"data0-s0 base": "left", "data0-s1 base": "left"}
    second = run_suite(wider, QUIET)
    assert set(states(second).values()) == {"done"}
    assert evaluated(second, "data0-s0") == before
    assert (second.folder / "data0-s0/base+temperature/evaluation/id/metrics.json").exists()
    assert (second.folder / "data0-s1/report/summary.json").exists()
    cells = second.cells.values()
    assert all(cell.seconds > 0 for cell in cells)

    made = compare_suite(second.folder, lambda text: None, draws=200)
    assert [table.title for table in made.tables] == ["data0, id"]
    assert made.tables[0].seeds == {"base": (0, 1), "base+temperature": (0, 1)}
    assert {path.name for path in made.files} == {
        "tables.md",
        "tables.csv",
        "tables.tex",
        "pareto_data0_id.png",
        "ranks_ece.png",
        "ranks_top_label_brier_score.png",
    }
    assert all(path.stat().st_size for path in made.files)


def test_a_run_that_cannot_begin_stops_no_other(plan):
    """The first run file has more training questions than there are facts."""
    entries = [{"file": "data0.yaml", "name": "broken", "set": ["data.splits.train=1000000"]}, {"file": "data0.yaml"}]
    state = run_suite(plan(runs=entries), QUIET)
    assert states(state) == {"broken-s0 base": "failed", "small-s0 base": "done"}
    assert "train needs 1000000 questions" in state.cells["broken-s0", "base"].reason


def test_other_settings_are_refused_before_anything_runs(plan):
    run_suite(plan(), QUIET)
    with pytest.raises(UsageError, match="other settings than its methods"):
        run_suite(plan(seeds=[1, 0], set=["evaluation.bins=7"]), QUIET)
    folder = plan().config.folder
    assert not (folder / "data0-s1").exists()
    assert load_run_file(folder / "data0-s0" / RUN_FILE).evaluation.bins == 15


def test_time_left_takes_the_most_alike_cells():
    """sft on a took 10 and 20 s, on b 40 s, base on a 2 s.

    Left: sft on a, 15 s; sft on c, whose own figure is unknown, the mean of sft, 70/3 s; calm, the mean of all, 18 s.
    """
    done = [("a", "sft", 10.0), ("a", "sft", 20.0), ("b", "sft", 40.0), ("a", "base", 2.0)]
    cells = [Cell(name, i, method, "", "done", "", seconds) for i, (name, method, seconds) in enumerate(done)]
    cells += [Cell("a", 9, "sft", ""), Cell("c", 9, "sft", ""), Cell("c", 9, "calm", "", "running")]
    cells += [Cell("d", 9, "sft", "", "failed")]
    assert remaining_seconds(cells) == pytest.approx(15 + 70 / 3 + 18)
    assert remaining_seconds(cells[4:]) is None


@pytest.mark.parametrize(("seconds", "words"), [(40, "40 s"), (720, "12 min"), (11100, "3 h 05 min")])
def test_durations_in_words(seconds, words):
    assert duration(seconds) == words
