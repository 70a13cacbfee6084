"""The table of trials, the choice among them, the arithmetic of resources, and what a continued search proposes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from components.config import ResourcesConfig, RunConfig
from components.config_tune import TuneConfig
from components.errors import CaltuneError, UsageError
from ray_jobs.trial_choice import Objective, choose_best, pareto_front
from ray_jobs.trial_outcome import last_words
from ray_jobs.trial_schedulers import last_exchange
from ray_jobs.trial_search import TrialSearch, importances
from ray_jobs.trial_table import Trial, TrialTable
from ray_jobs.tune import first_parameters, room_for

SPACE = {"calm.eta": {"uniform": [0.1, 1.0]}, "calm.inner_steps": {"integer": [1, 5]}}


def tune_of(**changes) -> TuneConfig:
    return TuneConfig.model_validate({"space": SPACE} | changes)


def trial_of(number: int, ece: float, accuracy: float, state="finished", eta: float = 0.5, steps: int = 2) -> Trial:
    metrics = {"validation/ece": ece, "validation/accuracy": accuracy}
    parameters = {"calm.eta": eta, "calm.inner_steps": steps}
    return Trial(number, "calm", parameters, state, f"because {number}", 10, metrics, f"trials/{number:03d}")


class TestTable:
    def test_what_was_written_is_read_back_and_what_ran_was_interrupted(self, tmp_path: Path):
        table = TrialTable(tmp_path / "trials.jsonl")
        table.put(Trial(0, "sft", {}, "finished", metrics={"validation/accuracy": 0.8}))
        table.put(trial_of(1, 0.1, 0.8))
        table.put(Trial(2, "calm", {"calm.eta": 0.3}))
        table.change(2, step=4)
        again = TrialTable(tmp_path / "trials.jsonl")
        assert [t.number for t in again] == [1, 2]
        assert again.closed() == [trial_of(1, 0.1, 0.8)]
        assert again.interrupted() == [
            Trial(2, "calm", {"calm.eta": 0.3}, "interrupted", "the search ended at step 4", 4)
        ]
        assert again.next_number == 3
        assert again.reference is not None
        assert again.reference.metrics == {"validation/accuracy": 0.8}

    def test_only_a_finished_trial_has_an_adapter(self):
        assert trial_of(1, 0.1, 0.8).adapter == Path("trials/001/adapter")
        assert trial_of(1, 0.1, 0.8, "stopped").adapter is None

    def test_a_line_that_is_no_trial_is_named(self, tmp_path: Path):
        path = tmp_path / "trials.jsonl"
        path.write_text('{"number": 1, "method": "calm", "parameters": {}}\n{"number": 2\n')
        with pytest.raises(CaltuneError, match=r"trials\.jsonl:2: not a trial"):
            TrialTable(path)


class TestChoice:
    """Five trials: 1 (.05, .70), 2 (.08, .80), 3 (.10, .78), 4 (.20, .90), 5 stopped (.01, .95)."""

    trials = (
        trial_of(1, 0.05, 0.70),
        trial_of(2, 0.08, 0.80),
        trial_of(3, 0.10, 0.78),
        trial_of(4, 0.20, 0.90),
        trial_of(5, 0.01, 0.95, "stopped"),
    )

    def test_front_leaves_out_what_is_beaten_in_both_and_what_did_not_finish(self):
        """3 is beaten by 2 in both; 5 did not finish."""
        assert [t.number for t in pareto_front(self.trials, Objective(tune_of(), None))] == [1, 2, 4]

    @pytest.mark.parametrize(("floor", "best"), [(0.6, 1), (0.70, 1), (0.75, 2), (0.85, 4), (0.99, 4)])
    def test_constrained_takes_the_least_ece_that_suffices(self, floor, best):
        """At .99 none suffices, so the most accurate is taken."""
        assert choose_best(self.trials, Objective(tune_of(), floor)).number == best

    def test_pareto_takes_the_point_nearest_the_best_of_both(self):
        """Scaled, the front is (0, 0), (.2, .5), (1, 1): distances to (0, 1) are 1, sqrt(.2^2 + .5^2) = .54, 1."""
        assert choose_best(self.trials, Objective(tune_of(), None)).number == 2

    def test_the_sampler_sees_what_suffices_before_what_lacks_before_what_was_stopped(self):
        objective = Objective(tune_of(), 0.8)
        assert [objective.values(t)[0] for t in self.trials] == pytest.approx([1.1, 0.08, 1.02, 0.20, 2.0])
        assert objective.directions == ["minimize"]
        both = Objective(tune_of(mode="pareto"), None)
        assert both.values(self.trials[0]) == [0.05, 0.70]
        assert both.values(self.trials[4]) == [1.0, 0.0]
        assert both.directions == ["minimize", "maximize"]

    def test_figures_that_are_no_numbers_count_as_the_worst(self):
        assert Objective(tune_of(), 0.5).figures(trial_of(1, float("nan"), 0.9)) == (1.0, 0.0)

    def test_no_finished_trial_is_an_error_that_says_why(self):
        with pytest.raises(CaltuneError, match="no trial was finished; trial 1 failed: because 1"):
            choose_best([trial_of(1, 0.1, 0.8, "failed")], Objective(tune_of(), 0.5))


class TestSearch:
    @staticmethod
    def search_over(table: TrialTable, first=None, mode: str = "constrained", seed: int = 0) -> TrialSearch:
        floor = None if mode == "pareto" else 0.5
        return TrialSearch(table, Objective(tune_of(mode=mode), floor), Path("trials"), seed, first)

    def test_it_begins_with_the_run_files_own_values(self, tmp_path):
        first = {"calm.eta": 0.5, "calm.inner_steps": 5}
        table = TrialTable(tmp_path / "t.jsonl")
        search = self.search_over(table, first)
        assert search.suggest("a") == {"suggestion": {"number": 1, "parameters": first, "resume": False}}
        assert search.suggest("b")["suggestion"]["number"] == 2
        assert [t.state for t in table] == ["running", "running"]

    def test_a_closed_search_begins_no_trial(self, tmp_path):
        """Tune's thread goes on for a moment after the search was broken off."""
        table = TrialTable(tmp_path / "t.jsonl")
        search = self.search_over(table)
        search.suggest("a")
        search.close()
        assert search.suggest("b") is None
        assert len(list(table)) == 1

    @pytest.mark.parametrize("mode", ["constrained", "pareto"])
    def test_a_continued_search_goes_on_with_interrupted_trials_and_repeats_none(self, tmp_path, mode):
        table = TrialTable(tmp_path / "t.jsonl")
        search = self.search_over(table, mode=mode)
        drawn = [search.suggest(name)["suggestion"]["parameters"] for name in "abcd"]
        search.tell(table.change(1, state="finished", metrics=trial_of(1, 0.1, 0.8).metrics))
        search.tell(table.change(2, state="failed"))
        search.tell(table.change(3, state="stopped", metrics=trial_of(3, 0.3, 0.6).metrics))
        again = self.search_over(TrialTable(tmp_path / "t.jsonl"), first=drawn[0], mode=mode)
        assert again.suggest("x")["suggestion"] == {"number": 4, "parameters": drawn[3], "resume": True}
        new = again.suggest("y")["suggestion"]
        assert new["number"] == 5
        assert not new["resume"]
        assert new["parameters"] not in drawn

    def test_a_population_that_was_broken_off_knows_its_last_exchange(self, tmp_path):
        """Asked before the search takes its trials up again: then none is interrupted any more."""
        event = {
            "step": 4,
            "from": 1,
            "nll": 2.0,
            "from_nll": 1.0,
            "before": {"calm.eta": 0.4},
            "after": {"calm.eta": 0.5},
        }
        table = TrialTable(tmp_path / "t.jsonl")
        table.put(replace(trial_of(1, 0.1, 0.8), perturbations=[event | {"step": 2}]))
        assert last_exchange(table) == 0
        table.put(Trial(2, "calm", {"calm.eta": 0.5, "calm.inner_steps": 2}, perturbations=[event]))
        table.put(Trial(3, "calm", {"calm.eta": 0.6, "calm.inner_steps": 2}))
        assert last_exchange(TrialTable(tmp_path / "t.jsonl")) == 4

    def test_it_learns_from_the_table_where_the_low_ece_is(self, tmp_path):
        """ECE is |eta - .3|: after 30 evaluated trials most of 20 proposals are within .25 of .3 (random: 5 in 9)."""
        table = TrialTable(tmp_path / "t.jsonl")
        for number in range(1, 31):
            eta = 0.1 + 0.9 * (number * 0.618 % 1)
            table.put(trial_of(number, abs(eta - 0.3), 0.9, eta=eta, steps=1 + number % 5))
        search = self.search_over(table)
        near = [abs(search.suggest(str(i))["suggestion"]["parameters"]["calm.eta"] - 0.3) < 0.25 for i in range(20)]
        assert sum(near) >= 15

    def test_importance_finds_the_key_that_matters(self):
        objective = Objective(tune_of(), 0.5)
        trials = [
            trial_of(n, abs(eta - 0.3), 0.9, eta=eta, steps=1 + n % 5)
            for n in range(1, 21)
            for eta in [0.1 + 0.9 * (n * 0.618 % 1)]
        ]
        shares = importances(trials, objective)
        assert next(iter(shares)) == "calm.eta"
        assert shares["calm.eta"] > 0.8
        assert sum(shares.values()) == pytest.approx(1)
        assert importances(trials[:3], objective) == {}


class TestRoom:
    def test_cores_are_divided_among_the_trials_of_a_time(self):
        room = room_for(tune_of(concurrency=4), ResourcesConfig(), [{"CPU": 10}])
        assert (room.cpus, room.fit, room.at_once) == (2, 5, 4)
        assert (
            room.sentence
            == "each trial takes 2 CPU cores; Ray has 10 CPU cores, which fits 5 at once; 4 at a time will run"
        )

    def test_fewer_run_than_wanted_where_fewer_fit(self):
        room = room_for(tune_of(concurrency=4), ResourcesConfig(cpus_per_worker=2, workers=2), [{"CPU": 10}])
        assert (room.cpus, room.fit, room.at_once) == (2, 2, 2)
        assert room.sentence.endswith("fits 2 at once: 2 at a time will run, not the 4 of tune.concurrency")

    def test_a_worker_needs_all_of_its_cores_on_one_node(self):
        """Two nodes of 3 cores take two workers of 2 cores, not three; of 1 core all six."""
        nodes = [{"CPU": 3}, {"CPU": 3}]
        room = room_for(tune_of(concurrency=3), ResourcesConfig(cpus_per_worker=2), nodes)
        assert (room.fit, room.at_once) == (2, 2)
        assert "Ray has 6 CPU cores on 2 nodes" in room.sentence
        assert room_for(tune_of(concurrency=3), ResourcesConfig(), nodes).cpus == 1

    def test_a_population_larger_than_the_room_takes_turns(self):
        pbt = {"kind": "pbt", "keys": ["calm.eta"], "interval_steps": 10}
        room = room_for(tune_of(scheduler=pbt, trials=4), ResourcesConfig(cpus_per_worker=1), [{"CPU": 2}])
        assert room.at_once == 2
        assert (
            "the 4 trials train 2 at a time, each to the next exchange, and are paused every 10 steps" in room.sentence
        )
        room = room_for(tune_of(scheduler=pbt, trials=4), ResourcesConfig(cpus_per_worker=1), [{"CPU": 8}])
        assert room.at_once == 4
        assert "all 4 train side by side and are paused every 10 steps" in room.sentence

    def test_gpus_limit_too(self):
        resources = ResourcesConfig(use_gpu=True, cpus_per_worker=1)
        assert room_for(tune_of(concurrency=8), resources, [{"CPU": 32, "GPU": 3}]).at_once == 3

    @pytest.mark.parametrize(
        ("resources", "message"),
        [
            ({"workers": 2, "cpus_per_worker": 6}, "a trial needs 2 x 6 CPU cores, Ray has 10 CPU cores: none fits"),
            ({"use_gpu": True}, "needs 10 CPU cores and 1 GPU, Ray has 10 CPU cores and 0 GPUs: none fits"),
        ],
    )
    def test_a_search_with_no_room_for_one_trial_is_refused(self, resources, message):
        with pytest.raises(UsageError, match=message):
            room_for(tune_of(), ResourcesConfig(**resources), [{"CPU": 10}])


def test_a_failed_trials_last_words_name_the_whole_log_once(tmp_path):
    """Where workers of Ray Train failed, their error names the log already."""
    log = tmp_path / "error.log"
    log.write_text(f"Traceback\nCaltuneError: training failed on rank 0: NaN (all of it: {log})\n")
    assert last_words(tmp_path) == f"CaltuneError: training failed on rank 0: NaN (all of it: {log})"
    log.write_text("Traceback\nValueError: no\n")
    assert last_words(tmp_path) == f"ValueError: no (all of it: {log})"
    log.unlink()
    assert last_words(tmp_path).startswith("its process ended without a word")


def test_the_run_files_own_values_come_first_only_where_the_space_holds_them():
    tree = {
        "run": "a",
        "methods": ["calm"],
        "data": {"source": {"kind": "facts", "domain": "geography"}},
        "tune": {"space": SPACE},
    }
    assert first_parameters(RunConfig.model_validate(tree)) == {"calm.eta": 0.5, "calm.inner_steps": 5}
    assert first_parameters(RunConfig.model_validate(tree | {"calm": {"inner_steps": 7}})) is None
