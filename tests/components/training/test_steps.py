"""One training step of each kind on the tiny model, in one process."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from components.config_methods import CalmConfig
from components.training.parameter_space import BlockVector, TorchSpace

TRACE_KEYS = {
    "f", "g", "residual", "lambda", "inner_product", "residual_norm_sq",
    "mean_tau", "offset_norm", "mean_confidence", "accuracy",
}  # fmt: skip


class Recorder:
    """Stands before a space and remembers every gradient; `apply` moves nothing."""

    def __init__(self, space: TorchSpace) -> None:
        self.space, self.gradients = space, []

    def __getattr__(self, name: str):
        return getattr(self.space, name)

    def gradient(self, loss, wrt=("alpha", "theta")) -> tuple[float, BlockVector]:
        found = self.space.gradient(loss, wrt)
        self.gradients.append(found)
        return found

    def apply(self, direction: BlockVector) -> None:
        pass


class TestFeed:
    def test_shares_of_all_ranks_are_the_whole_batch(self, feed):
        whole = feed("all").share(3)
        shares = [replace(feed("all"), rank=rank, world_size=2).share(3) for rank in (0, 1)]
        rows = sorted(tuple(row[row != 0].tolist()) for share in shares for row in share.input_ids)
        assert rows == sorted(tuple(row[row != 0].tolist()) for row in whole.input_ids)
        assert torch.equal(whole.answers[0::2], shares[0].answers)

    def test_tokens_are_those_of_the_whole_batch_on_every_rank(self, feed):
        one = feed("gold")
        two = replace(one, rank=1, world_size=2)
        for step in range(5):
            count = one.global_answer_tokens(step)
            assert count == len(one.share(step).entry_token)
            assert two.global_answer_tokens(step) == count
            assert len(two.share(step).entry_token) < count

    def test_a_step_sees_the_same_whenever_it_is_asked(self, feed):
        one, two = feed("gold"), feed("gold")
        for step in range(9):
            one.share(step)
        assert torch.equal(one.share(2).input_ids, two.share(2).input_ids)
        assert not torch.equal(one.share(2).entry_token, replace(one, seed=one.seed + 1).share(2).entry_token)


class TestSupervised:
    def test_loss_falls(self, training):
        run = training("sft")
        losses = [run.step(0)["loss"] for _ in range(15)]
        assert losses[-1] < 0.8 * losses[0]

    def test_a_batch_in_two_shares_sums_to_the_whole(self, training):
        assert_shares_sum(training, "sft", calls=1)


class TestCalm:
    def test_trace_has_every_quantity(self, training):
        values = training("calm").step(0)
        assert values.keys() == TRACE_KEYS
        assert values["mean_tau"] == pytest.approx(1.0, abs=0.05)
        assert 0.25 <= values["mean_confidence"] <= 1.0
        assert 0.0 <= values["accuracy"] <= 1.0

    @pytest.mark.parametrize("entropy_over", ["options", "vocabulary"])
    @pytest.mark.parametrize("head", ["vocabulary", "scalar"])
    def test_lowers_what_it_descends_on(self, training, head, entropy_over):
        """BOME's direction lowers f and keeps q falling: on one batch f + lambda_0 q is lower after 15 steps."""
        run = training("calm", calm=CalmConfig(head=head, entropy_over=entropy_over, inner_steps=2))
        rows = [run.step(0) for _ in range(15)]
        weight = rows[0]["lambda"]
        merit = [row["f"] + weight * row["residual"] for row in rows]
        assert merit[-1] < merit[0]
        assert rows[-1]["f"] < rows[0]["f"]
        assert rows[-1]["mean_confidence"] < rows[0]["mean_confidence"]

    def test_both_blocks_move_and_theta_keeps_learning_the_task(self, training):
        run = training("calm")
        before = run.space.state_dict()
        rows = [run.step(0) for _ in range(15)]
        moved = {key for key, value in run.space.state_dict().items() if not torch.equal(value, before.get(key, value))}
        assert {"value/alpha.l", "value/alpha.rho"} <= moved
        assert any(key.startswith("value/theta.") for key in moved)
        assert rows[-1]["g"] < rows[0]["g"]

    def test_temperatures_stay_within_bounds(self, training):
        run = training("calm", calm=CalmConfig(max_temperature=1.01, inner_steps=1))
        run.space.set_learning_rates({"alpha": 1.0, "theta": 1e-3})
        run.step(0)
        log_tau = (run.head.rho + run.head.shared).detach()
        assert float(log_tau.abs().max()) == pytest.approx(math.log(1.01), rel=1e-5)

    def test_labels_of_the_upper_levels_data_are_never_used(self, training, encoded):
        """Every answer of S_V replaced by another: alpha and theta stay the same bit for bit, the trace's accuracy not.

        The rows are the same in every way but `answer`, so only a look at a label could make a difference.
        """
        relabelled = [replace(q, answer=(q.answer + 1) % len(q.options)) for q in encoded[24:]]
        one, two = training("calm"), training("calm", upper=relabelled)
        rows = [(one.step(step), two.step(step)) for step in range(4)]
        assert any(a["accuracy"] != b["accuracy"] for a, b in rows)
        states = one.space.state_dict(), two.space.state_dict()
        assert all(torch.equal(states[0][key], states[1][key]) for key in states[0])

    def test_the_lower_level_draws_one_dropout_mask_a_step(self, training):
        """With inner steps of next to no length theta_T = theta, so q is 0 unless the masks differ on the way."""
        calm = CalmConfig(inner_steps=3, inner_learning_rate=1e-12)
        run = training("calm", dropout=0.5, warm=True, calm=calm)
        first, second = run.step(0), run.step(1)
        assert first["residual"] == pytest.approx(0.0, abs=1e-6)
        assert second["residual"] == pytest.approx(0.0, abs=1e-6)
        undropped = training("calm", dropout=0.0, warm=True, calm=calm).step(0)
        assert abs(first["g"] - undropped["g"]) > 1e-3

    def test_dropout_follows_from_seed_and_step_alone(self, training):
        one, two = (training("calm", dropout=0.5, warm=True) for _ in range(2))
        torch.rand(7)  # whatever else draws random numbers in between
        assert one.step(3) == two.step(3)
        assert one.step(4) != two.step(3)

    @pytest.mark.parametrize("inner_steps", [1, 3])
    def test_a_batch_in_two_shares_sums_to_the_whole(self, training, inner_steps):
        """The first gradient is g's at theta, the last one f's: of these two both level's sums are made."""
        assert_shares_sum(training, "calm", calls=inner_steps + 2, calm=CalmConfig(inner_steps=inner_steps))


@pytest.mark.parametrize(("method", "calls"), [("label_smoothing", 1), ("cft", 1), ("rcft", 1), ("regularization", 2)])
def test_a_batch_of_a_baseline_in_two_shares_sums_to_the_whole(training, method, calls):
    assert_shares_sum(training, method, calls=calls, sections={"cft": {"weight": 0.9}})


def assert_shares_sum(training: Callable, method: str, calls: int, **options) -> None:
    """Losses and gradients at the start, ranks 0 and 1 of 2 against one process.

    The gradients in between are taken at points that depend on the sum over ranks, which one process does not have.
    """
    found = []
    for rank, world_size in ((0, 1), (0, 2), (1, 2)):
        run = training(method, rank=rank, world_size=world_size, recorder=Recorder, warm=True, **options)
        run.step(2)
        assert len(run.space.gradients) == calls
        found.append([run.space.gradients[0], run.space.gradients[-1]])
    for whole, *parts in zip(*found, strict=True):
        assert sum(value for value, _ in parts) == pytest.approx(whole[0], rel=1e-6)
        total = parts[0][1].plus(parts[1][1])
        for block in ("alpha", "theta"):
            for expected, got in zip(getattr(whole[1], block), getattr(total, block), strict=True):
                torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-6)
