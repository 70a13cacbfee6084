"""The loop: which state is kept, what is reported, and that a resumed run is the uninterrupted one bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from components.config import TrainingConfig
from components.config_methods import StopConfig
from components.errors import CheckpointError
from components.training.checkpoints import Checkpoints
from components.training.job import StopRequested
from components.training.loop import LoopResult, TrainingLoop
from components.training.objectives.cross_entropy import cross_entropy_sum
from components.training.parameter_space import TorchSpace, block_groups
from components.training.schedule import rate_factor
from components.training.stopping import StopRule

STEPS = 10


class Killed(BaseException):
    """Stands for the process's end."""


def make_loop(folder: Path, run, evaluate: Callable[[], dict], rule: StopConfig, on_step: Callable, **options):
    config = TrainingConfig(**({"steps": STEPS, "evaluate_every": 3, "checkpoint_every": 2} | options))
    return TrainingLoop(
        run.space,
        run.step,
        config,
        rates_at=lambda step: {rate: 1e-2 * rate_factor(step, config) for rate in ("theta", "alpha", "router")},
        stop=StopRule(rule),
        checkpoints=Checkpoints(folder, "run", config.keep_checkpoints),
        evaluate=evaluate,
        on_step=on_step,
    )


class Counter:
    """Training that adds 1 to its only weight each step; validation values are handed in by step."""

    def __init__(self, nll: dict[int, float]) -> None:
        self.weight, self.nll = torch.zeros(1), nll
        theta = {"w": self.weight}
        self.space = TorchSpace({}, theta, torch.optim.SGD(block_groups({}, theta), lr=1.0))
        self.rows: list[tuple[int, dict]] = []

    def step(self, step: int) -> dict[str, float]:
        self.weight += 1
        return {"loss": float(step)}

    def evaluate(self) -> dict:
        return {"validation": {"nll": self.nll[int(self.weight)], "ece": 0.1, "accuracy": 0.5, "mean_confidence": 0.9}}

    def loop(self, folder: Path, rule: str = "keep_best", stop_at: int | None = None, **options) -> TrainingLoop:
        def on_step(taken: int, values: dict) -> None:
            self.rows.append((taken, dict(values)))
            if taken == stop_at:
                raise Killed

        return make_loop(folder, self, self.evaluate, StopConfig(rule=rule), on_step, **options)


NLL = {0: 1.0, 3: 0.5, 6: 0.7, 9: 0.4, 10: 0.6}


def kept(result: LoopResult) -> tuple[int, int, float]:
    return result.kept_step, result.last_step, float(result.state["value/theta.w"])


class TestWhatIsKept:
    def test_keep_best_gives_the_best_evaluated_state(self, tmp_path):
        assert kept(Counter(NLL).loop(tmp_path).run()) == (9, 10, 9.0)

    def test_keep_best_may_be_the_start_or_the_end(self, tmp_path):
        assert kept(Counter(NLL | {0: 0.1}).loop(tmp_path / "start").run()) == (0, 10, 0.0)
        assert kept(Counter(NLL | {10: 0.1}).loop(tmp_path / "end").run()) == (10, 10, 10.0)

    def test_budget_gives_the_last_state(self, tmp_path):
        assert kept(Counter(NLL).loop(tmp_path, "budget").run()) == (10, 10, 10.0)

    def test_match_ends_the_run(self, tmp_path):
        run = Counter(NLL)
        run.evaluate = lambda: {"validation": {"accuracy": 0.5, "mean_confidence": 0.9 - float(run.weight) / 10}}
        loop = run.loop(tmp_path, "match")
        assert kept(loop.run()) == (6, 6, 6.0)
        assert loop.checkpoints.newest().step == 6

    def test_a_run_killed_after_a_new_best_still_has_the_best_before(self, tmp_path):
        """Best at 3, in the checkpoint at 8; at 9 a better one is found and the run is killed before checkpoint 10.

        Resumed on other hardware, where 9 turns out no better, the state at 3 is the one to give.
        """
        with pytest.raises(Killed):
            Counter(NLL).loop(tmp_path, stop_at=9).run()
        resumed = Counter(NLL | {9: 0.6}).loop(tmp_path)
        assert resumed.resume() == 8
        assert kept(resumed.run()) == (3, 10, 3.0)

    def test_a_lost_best_state_is_an_error_not_another_state(self, tmp_path):
        loop = Counter(NLL).loop(tmp_path)
        loop.run()
        (tmp_path / "kept-00000009" / "state.safetensors").unlink()
        again = Counter(NLL).loop(tmp_path)
        again.resume()
        with pytest.raises(CheckpointError, match="kept-00000009"):
            again.run()


class TestRequests:
    """What is asked from outside: `stop` and `checkpoint`."""

    @staticmethod
    def asked(run: Counter, folder: Path, at: int, word: str):
        loop = run.loop(folder)
        loop.requests = lambda: word if loop.taken == at else None
        return loop

    def test_stop_leaves_a_checkpoint_and_goes_on_as_if_nothing_had_been(self, tmp_path):
        whole = Counter(NLL)
        expected = kept(whole.loop(tmp_path / "whole").run())
        run = Counter(NLL)
        loop = self.asked(run, tmp_path, 5, "stop")  # checkpoints are due at even steps
        with pytest.raises(StopRequested, match="stopped at step 5"):
            loop.run()
        resumed = Counter(NLL)
        again = resumed.loop(tmp_path)
        assert again.resume() == 5
        assert kept(again.run()) == expected
        assert run.rows + resumed.rows == whole.rows

    def test_stop_at_the_last_step_ends_as_ever(self, tmp_path):
        assert kept(self.asked(Counter(NLL), tmp_path, STEPS, "stop").run()) == (9, 10, 9.0)

    def test_a_checkpoint_out_of_turn(self, tmp_path):
        loop = self.asked(Counter(NLL), tmp_path, 7, "checkpoint")
        told: list[tuple] = []
        loop.on_milestone = lambda step, values, path: told.append(
            (step, "validation/nll" in values, path and path.name)
        )
        loop.run()
        assert (7, False, "step-00000007") in told
        assert (3, True, None) in told
        assert (6, True, "step-00000006") in told
        assert [step for step, _, _ in told] == [0, 2, 3, 4, 6, 7, 8, 9, 10]


class TestReports:
    def test_every_step_is_reported_once_in_order(self, tmp_path):
        run = Counter(NLL)
        run.loop(tmp_path).run()
        assert [taken for taken, _ in run.rows] == list(range(11))
        assert [taken for taken, values in run.rows if "validation/nll" in values] == [0, 3, 6, 9, 10]
        assert run.rows[4] == (4, {"loss": 3.0})

    def test_rates_follow_the_schedule(self, tmp_path):
        run, seen = Counter(NLL), []
        run.space.set_learning_rates = seen.append
        run.loop(tmp_path, schedule="linear", warmup_fraction=0.2).run()
        assert [round(rates["theta"], 6) for rates in seen[:4]] == [0.005, 0.01, 0.01, 0.00875]

    def test_resuming_a_finished_run_takes_no_step(self, tmp_path):
        Counter(NLL).loop(tmp_path).run()
        run = Counter(NLL)
        loop = run.loop(tmp_path)
        assert loop.resume() == 10
        assert kept(loop.run()) == (9, 10, 9.0)
        assert run.rows == []

    def test_nothing_to_resume_begins_anew(self, tmp_path):
        run = Counter(NLL)
        loop = run.loop(tmp_path)
        assert loop.resume() == 0
        loop.run()
        assert run.rows[0][0] == 0


@pytest.mark.parametrize("method", ["sft", "calm", "uq4ct", "calm_uq4ct"])
def test_resume_equals_uninterrupted(method, training, feed, encoded, tmp_path):
    """Killed at step 7, resumed from the checkpoint at 6: weights, moments, step counts and trace are equal.

    Dropout is on, evaluation switches it off in between, and the learning rates move.
    """
    whole = judged_loop(training(method, dropout=0.3), feed, tmp_path / "whole", "keep_best")
    expected = whole.run()
    broken = judged_loop(training(method, dropout=0.3), feed, tmp_path / "broken", "keep_best", stop_at=7)
    with pytest.raises(Killed):
        broken.run()
    resumed = judged_loop(training(method, dropout=0.3), feed, tmp_path / "broken", "keep_best")
    assert resumed.resume() == 6
    found = resumed.run()
    assert resumed.rows == whole.rows[7:]
    assert_same_state(resumed.space.state_dict(), whole.space.state_dict())
    assert_same_state(found.state, expected.state)
    assert resumed.stop.state == whole.stop.state
    assert any(key.startswith("exp_avg_sq/theta") for key in whole.space.state_dict())


def judged_loop(run, feed, folder: Path, rule: str, stop_at: int | None = None) -> TrainingLoop:
    """A loop whose validation value is the cross-entropy of a fixed batch."""
    batch = feed("gold").share(99)
    rows: list[tuple[int, dict]] = []

    def evaluate() -> dict:
        run.model.eval()
        with torch.no_grad():
            logits = run.model(batch)
            nll = float(cross_entropy_sum(logits if run.head is None else run.head(logits), batch))
        run.model.train()
        return {"validation": {"nll": nll, "ece": 0.1, "accuracy": 0.5, "mean_confidence": 0.9}}

    def on_step(taken: int, values: dict) -> None:
        rows.append((taken, dict(values)))
        if taken == stop_at:
            raise Killed

    loop = make_loop(folder, run, evaluate, StopConfig(rule=rule), on_step)
    loop.rows = rows
    return loop


def assert_same_state(found: dict, expected: dict) -> None:
    assert found.keys() == expected.keys()
    assert [key for key in expected if not torch.equal(found[key], expected[key])] == []
