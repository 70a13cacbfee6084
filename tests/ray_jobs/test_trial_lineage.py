"""What a trial of a population takes over from another: files, values, and the story that the table tells of it."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from components.config_tune import Dimension
from components.errors import CheckpointError
from components.training.checkpoints import Checkpoints
from ray_jobs import trial_lineage
from ray_jobs.trial_lineage import course, settle, take_over, varied
from ray_jobs.trial_table import Trial, TrialTable

RATE = "calm.alpha_learning_rate"
DIMENSIONS = {
    "wide": Dimension(log_uniform=(1e-3, 1.0)),
    "even": Dimension(uniform=(0.1, 3.0)),
    "whole": Dimension(integer=(1, 5)),
    "listed": Dimension(choice=[1, 2, 4, 8]),
}


@given(seed=st.integers(0, 10**6), start=st.sampled_from([0.0, 0.3, 1.0]))
def test_varied_values_stay_within_their_ranges_and_keep_their_types(seed, start):
    values = {
        "wide": 10 ** (-3 + 3 * start),
        "even": 0.1 + 2.9 * start,
        "whole": round(1 + 4 * start),
        "listed": [1, 2, 8][round(2 * start)],
    }
    new = varied(values, DIMENSIONS, random.Random(seed))
    assert all(DIMENSIONS[key].holds(value) for key, value in new.items())
    assert {key: type(value) for key, value in new.items()} == {key: type(value) for key, value in values.items()}


def test_three_in_four_values_are_near_and_the_others_anywhere():
    """A rate of .03 becomes .024 or .036; a choice its neighbour; a whole number at least one more or less."""
    drawn = [varied({"wide": 0.03, "listed": 4, "whole": 2}, DIMENSIONS, random.Random(i)) for i in range(400)]
    near = [d["wide"] for d in drawn if abs(d["wide"] - 0.024) < 1e-9 or abs(d["wide"] - 0.036) < 1e-9]
    assert 0.65 < len(near) / 400 < 0.85
    assert {round(v, 3) for v in near} == {0.024, 0.036}
    assert sum(d["listed"] in (2, 8) for d in drawn) > 300
    assert {d["whole"] for d in drawn} >= {1, 3}


def trial_with_checkpoint(table: TrialTable, folder: Path, number: int, rate: float, steps=(2, 4)) -> None:
    """A trial whose weights are its number; the state of step 2 is kept."""
    own = folder / f"{number:03d}"
    checkpoints = Checkpoints(own / "checkpoints", "x", keep=2)
    for step in steps:
        if step == 2:
            checkpoints.save_kept(2, {"value/a": torch.full((1,), float(number))})
        checkpoints.save(
            step, {"value/a": torch.full((1,), float(number))}, {"kept_step": 2, "best": 0.5, "ended": False}
        )
    rows = [{"step": step, "validation/nll": float(number)} for step in range(6)]
    (own / "trace.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    table.put(Trial(number, "calm", {RATE: rate, "calm.eta": float(number)}, folder=str(own)))


@pytest.fixture
def population(tmp_path: Path) -> TrialTable:
    table = TrialTable(tmp_path / "trials.jsonl")
    for number, rate in ((1, 0.1), (2, 0.2), (3, 0.3)):
        trial_with_checkpoint(table, tmp_path, number, rate)
    return table


def test_a_trial_takes_over_checkpoint_kept_weights_trace_and_the_other_values(population):
    trial = take_over(population, 2, 1, 4, {RATE: 0.08}, (2.0, 1.0))
    folder = Path(trial.folder)
    assert sorted(p.name for p in (folder / "checkpoints").iterdir()) == ["kept-00000002", "step-00000004"]
    checkpoints = Checkpoints(folder / "checkpoints", "x", keep=2)
    newest = checkpoints.newest()
    assert newest is not None
    assert (newest.step, newest.state["value/a"].item(), newest.stop["kept_step"]) == (4, 1.0, 2)
    assert checkpoints.kept(2).state["value/a"].item() == 1.0
    rows = [json.loads(line) for line in (folder / "trace.jsonl").read_text().splitlines()]
    assert [(row["step"], row["validation/nll"]) for row in rows] == [(step, 1.0) for step in range(5)]
    assert trial.parameters == {RATE: 0.08, "calm.eta": 1.0}
    assert trial.perturbations == [
        {"step": 4, "from": 1, "nll": 2.0, "from_nll": 1.0, "before": {RATE: 0.2}, "after": {RATE: 0.08}}
    ]
    assert TrialTable(population.path)[2].perturbations == trial.perturbations
    assert not list(folder.glob(".taken*"))


@pytest.mark.parametrize("moment", ["after the table", "before the table"])
def test_taking_over_that_is_cut_off_is_finished_or_undone(population, monkeypatch, moment):
    """Killed once the row is written, the files follow when the search goes on; killed before, nothing has happened."""
    own, donor = Path(population[2].folder), Path(population[1].folder)
    with monkeypatch.context() as patched:
        if moment == "after the table":
            patched.setattr(trial_lineage, "settle", lambda trial: None)
            take_over(population, 2, 1, 4, {RATE: 0.08}, (2.0, 1.0))
        else:
            trial_lineage._copy(donor, own / ".taken-1", 4)
    table = TrialTable(population.path)
    for _ in range(2):
        settle(table[2])
        newest = Checkpoints(own / "checkpoints", "x", keep=2).newest()
        assert newest is not None
        assert newest.state["value/a"].item() == (1.0 if moment == "after the table" else 2.0)
    assert len(table[2].perturbations) == (moment == "after the table")
    assert not list(own.glob(".taken*"))


def test_without_the_checkpoint_nothing_is_changed(population):
    before = population[2]
    with pytest.raises(CheckpointError, match=r"001 has no checkpoint of step 3 to go on from"):
        take_over(population, 2, 1, 3, {RATE: 0.08}, (2.0, 1.0))
    assert population[2] == before
    assert (Path(before.folder) / "checkpoints" / "step-00000004").exists()


def test_the_course_follows_the_weights_from_trial_to_trial(population):
    """3 took over 2 at step 4, which had taken over 1 at step 2; what 2 did later is not in 3's weights."""

    def event(step: int, source: int, before: float, after: float) -> dict:
        return {
            "step": step,
            "from": source,
            "nll": 2.0,
            "from_nll": 1.0,
            "before": {RATE: before},
            "after": {RATE: after},
        }

    population.change(2, perturbations=[event(2, 1, 0.2, 0.12), event(6, 1, 0.12, 0.08)])
    population.change(3, perturbations=[event(2, 1, 0.3, 0.11), event(4, 2, 0.11, 0.15)])
    rows = {trial.number: trial for trial in population}
    assert course(rows, 3, [RATE]) == [
        {"step": 0, "trial": 1, "values": {RATE: 0.1}},
        {"step": 2, "trial": 2, "values": {RATE: 0.12}},
        {"step": 4, "trial": 3, "values": {RATE: 0.15}},
    ]
    assert course(rows, 1, [RATE]) == [{"step": 0, "trial": 1, "values": {RATE: 0.1}}]
