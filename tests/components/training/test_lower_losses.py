"""UQ4CT's loss as a whole on the tiny model, in one process: its parts, its trace, and CALM on top of it."""

from __future__ import annotations

import math

import pytest
import torch

from components.config_methods import CalmConfig, Uq4ctConfig
from components.training.lower_losses import AnswerLoss, Uq4ctLoss

SEEN = {
    "cross_entropy", "balance_loss", "calibration_loss", "flc_mean", "flc_std", "correct_share", "router_entropy",
    "max_expert_share",
}  # fmt: skip


class TestParts:
    def test_the_loss_is_their_weighted_sum(self, training):
        config = Uq4ctConfig(balance_weight=0.3, calibration_weight=2.0, z_loss_weight=0.1)
        values = training("uq4ct", uq4ct=config).step(0)
        assert values.keys() == {"loss", "z_loss", *SEEN}
        expected = values["cross_entropy"] + 0.3 * values["balance_loss"] + 2.0 * values["calibration_loss"]
        assert values["loss"] == pytest.approx(expected + 0.1 * values["z_loss"], rel=1e-6)

    def test_z_loss_is_neither_computed_nor_shown_without_weight(self, training):
        assert training("uq4ct").step(0).keys() == {"loss", *SEEN}

    def test_trace_agrees_with_the_forward_pass(self, training):
        """4 experts, 2 chosen: each value again from the model's own routing of the step's batch."""
        run = training("uq4ct")
        batch = run.step.lower.feed.share(0)
        with torch.no_grad():
            logits, flc = run.model(batch), run.model.flc(batch)
        probs = torch.stack([record.probs.detach() for record in run.model.routing.records])
        first = torch.stack([record.experts[:, 0] for record in run.model.routing.records])
        values = run.step(0)
        assert values["flc_mean"] == pytest.approx(float(flc.mean()), rel=1e-5)
        assert values["flc_std"] == pytest.approx(float(flc.std(correction=0)), rel=1e-3)
        assert values["router_entropy"] == pytest.approx(float(-(probs * probs.log()).sum(-1).mean()), rel=1e-5)
        share = max(float((router == expert).float().mean()) for router in first for expert in range(4))
        assert values["max_expert_share"] == pytest.approx(share, rel=1e-6)
        slot_scores = torch.zeros(batch.option_mask.numel()).index_add(
            0, batch.entry_slot, logits.log_softmax(-1)[batch.entry_position, batch.entry_token]
        )
        right = slot_scores.view_as(batch.option_mask).argmax(-1) == batch.answers
        assert values["correct_share"] == pytest.approx(float(right.float().mean()))

    def test_its_cross_entropy_is_plain_fine_tunings(self, training):
        """Fresh adapters change nothing, so both methods see the base model's loss on the first batch."""
        expected = training("sft").step(0)["loss"]
        assert training("uq4ct").step(0)["cross_entropy"] == pytest.approx(expected, rel=1e-5)

    @pytest.mark.parametrize("kind", ["exact_match", "token_f1"])
    def test_teacher_forced_correctness_needs_no_other_options(self, training, kind):
        run = training("uq4ct", uq4ct=Uq4ctConfig(correctness=kind))
        assert run.step.lower.feed.options == "gold"
        assert 0.0 <= run.step(0)["correct_share"] <= 1.0

    def test_a_feed_with_other_options_is_refused(self, training, feed):
        with pytest.raises(ValueError, match="needs options 'all'"):
            Uq4ctLoss(training("uq4ct").model, feed("gold"), Uq4ctConfig())

    def test_a_model_without_routers_is_refused(self, training, feed):
        loss = Uq4ctLoss(training("sft").model, feed("all"), Uq4ctConfig())
        loss.begin(0)
        with pytest.raises(ValueError, match="routers"):
            loss()


class TestLearning:
    def test_routers_become_as_sure_as_the_answers_are_right(self, training):
        """On one batch, at a router rate of its own, FLC goes from near k/N to the share of right answers."""
        run = training("uq4ct", uq4ct=Uq4ctConfig(calibration_weight=3.0, balance_weight=0.0))
        run.space.set_learning_rates({"theta": 1e-2, "router": 5e-2})
        rows = [run.step(0) for _ in range(40)]
        assert rows[0]["flc_mean"] < 0.65
        assert rows[-1]["correct_share"] == 1.0
        assert rows[-1]["flc_mean"] > 0.9
        assert rows[-1]["calibration_loss"] < 0.1 * rows[0]["calibration_loss"]
        assert rows[-1]["cross_entropy"] < 0.5 * rows[0]["cross_entropy"]

    def test_at_rate_zero_the_routers_stay(self, training):
        run = training("uq4ct")
        before = run.space.state_dict()
        run.space.set_learning_rates({"theta": 1e-2, "router": 0.0})
        run.step(0)
        after = run.space.state_dict()
        moved = {key for key in before if key.startswith("value/") and not torch.equal(before[key], after[key])}
        assert any(".mlp.lora_B" in key for key in moved)
        assert not any(".router." in key for key in moved)


class TestCalm:
    def test_the_lower_level_is_seen_where_the_step_starts(self, training):
        """Inner steps of length 1 change the loss much; the trace must not mix theta_T in."""
        run = training("calm_uq4ct", calm=CalmConfig(inner_steps=2, inner_learning_rate=1.0))
        values = run.step(0)
        assert values.keys() >= {"f", "g", "mean_tau", *SEEN}
        expected = values["cross_entropy"] + 0.01 * values["balance_loss"] + values["calibration_loss"]
        assert values["g"] == pytest.approx(expected, rel=1e-6)
        assert abs(values["residual"]) > 1e-2

    def test_the_loss_is_taken_under_the_adjusted_logits(self, training):
        """A head with tau = 1/4 everywhere makes four times the logits, which the cross-entropy must show."""
        run = training("calm_uq4ct")
        with torch.no_grad():
            run.head.shared.fill_(-math.log(4))
        sharp, plain = run.step(0)["cross_entropy"], training("calm_uq4ct").step(0)["cross_entropy"]
        assert sharp > 1.5 * plain

    def test_all_of_alpha_theta_and_routers_move(self, training):
        run = training("calm_uq4ct")
        before = run.space.state_dict()
        rows = [run.step(0) for _ in range(10)]
        moved = {key for key, value in run.space.state_dict().items() if not torch.equal(value, before.get(key, value))}
        assert {"value/alpha.l", "value/alpha.rho"} <= moved
        assert any(".router." in key for key in moved)
        assert rows[-1]["g"] < rows[0]["g"]


@pytest.mark.parametrize("method", ["uq4ct", "calm_uq4ct"])
def test_dropout_follows_from_seed_and_step_alone(method, training):
    one, two = (training(method, dropout=0.5, warm=True) for _ in range(2))
    torch.rand(7)  # whatever else draws random numbers in between
    assert one.step(3) == two.step(3)
    assert one.step(4) != two.step(3)


def test_the_answer_loss_applies_the_head(training, feed):
    run = training("calm")
    with torch.no_grad():
        run.head.shared.fill_(-math.log(4))
    loss = AnswerLoss(run.model, feed("gold"), run.head)
    loss.begin(0)
    batch = loss.feed.share(0)
    log_probs = (4 * run.model(batch).detach()).log_softmax(-1)[batch.entry_position, batch.entry_token]
    assert float(loss().detach()) == pytest.approx(-float(log_probs.mean()), rel=1e-5)
