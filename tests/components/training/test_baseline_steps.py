"""Steps of the baselines and of CALM's ablations on the tiny model, in one process."""

from __future__ import annotations

import pytest
import torch

from components.config_methods import CalmConfig
from components.training.baseline_losses import CALIBRATION_SCALE, CftLoss
from components.training.objectives.cft import bin_calibration_loss_sum
from components.training.parameter_space import BlockVector

NEW = ("label_smoothing", "cft", "rcft", "regularization", "iterate")
AT_ZERO = {
    "label_smoothing": {"smoothing": 0.0},
    "cft": {"weight": 0.0},
    "regularization": {"beta": 0.0},
    "iterate": {"calibration_steps": 0},
}
"""The settings at which a method is plain fine-tuning."""
STEPS = 3


def values_of(run) -> dict[str, torch.Tensor]:
    return {key: value for key, value in run.space.state_dict().items() if "/theta." in key}


class TestWeightZero:
    @pytest.mark.parametrize("method", AT_ZERO)
    def test_is_plain_fine_tuning(self, training, method):
        """Same losses, weights and moments as `sft` bit for bit, dropout included. CFT reads the answers out of rows
        with other options, which is the same sum in another order, so there dropout is off and the last digits differ.
        """
        dropout, exact = (0.0, False) if method == "cft" else (0.5, True)
        run = training(method, dropout=dropout, warm=True, sections={method: AT_ZERO[method]})
        plain = training("sft", dropout=dropout, warm=True)
        for step in range(STEPS):
            row, expected = run.step(step), plain.step(step)["loss"]
            assert row.get("loss", row.get("g")) == pytest.approx(expected, rel=0 if exact else 1e-5)
        states = values_of(run), values_of(plain)
        assert states[0].keys() == states[1].keys()
        for key, value in states[1].items():
            if exact:
                assert torch.equal(states[0][key], value), key
            else:
                torch.testing.assert_close(states[0][key], value, rtol=1e-3, atol=1e-4)

    @pytest.mark.parametrize("method", ["regularization", "iterate"])
    def test_leaves_the_head_alone(self, training, method):
        run = training(method, sections={method: AT_ZERO[method]})
        run.step(0)
        assert not any(p.detach().any() for p in run.head.parameters())

    @pytest.mark.parametrize("method", AT_ZERO)
    def test_any_other_is_not(self, training, method):
        run, plain = training(method, warm=True), training("sft", warm=True)
        run.step(0), plain.step(0)
        states = values_of(run), values_of(plain)
        assert any(not torch.equal(value, states[0][key]) for key, value in states[1].items())


class TestAblations:
    def test_the_weighted_sums_direction_is_the_sums_gradient(self, training):
        """Both blocks, from one differentiation of g + beta f."""
        seen = []
        run = training("regularization", warm=True, sections={"regularization": {"beta": 0.7}})
        run.step.lower.begin(1), run.step.upper.begin(1)
        value, expected = run.space.gradient(lambda: run.step.lower() + 0.7 * run.step.upper())
        run.space.apply = seen.append
        row = run.step(1)
        assert row["loss"] == pytest.approx(value, rel=1e-6)
        assert row["loss"] == pytest.approx(row["g"] + 0.7 * row["f"], rel=1e-6)
        for block in ("alpha", "theta"):
            for found, want in zip(getattr(seen[0], block), getattr(expected, block), strict=True):
                torch.testing.assert_close(found, want, rtol=1e-4, atol=1e-6)

    def test_iterates_steps_on_the_task_move_no_head_and_those_on_f_both(self, training):
        directions = []
        run = training("iterate", sections={"iterate": {"calibration_steps": 2}})
        apply = run.space.apply
        run.space.apply = lambda d: (directions.append(d), apply(d))
        run.step(0)
        assert [(bool(d.alpha), bool(d.theta)) for d in directions] == [(False, True), (True, True), (True, True)]
        steps = {key: float(value) for key, value in run.space.state_dict().items() if key.startswith("step/")}
        assert {value for key, value in steps.items() if "/theta." in key} == {3.0}
        assert {value for key, value in steps.items() if "/alpha." in key} == {2.0}

    @pytest.mark.parametrize("method", ["regularization", "iterate"])
    def test_confidence_falls_and_the_head_moves(self, training, method):
        run = training(method, sections={"regularization": {"beta": 1.0}})
        rows = [run.step(0) for _ in range(12)]
        assert rows[-1]["f"] < rows[0]["f"]
        assert rows[-1]["mean_confidence"] < rows[0]["mean_confidence"]
        assert rows[-1]["mean_tau"] != 1.0

    def test_learned_ts_is_calm_with_a_scalar_head(self, training):
        one, two = training("learned_ts"), training("calm", calm=CalmConfig(inner_steps=2, head="scalar"))
        assert [one.step(step) for step in range(STEPS)] == [two.step(step) for step in range(STEPS)]
        states = one.space.state_dict(), two.space.state_dict()
        assert [key for key in states[1] if not torch.equal(states[0][key], states[1][key])] == []
        assert states[0]["value/alpha.shared"].any()


class TestCft:
    def test_the_trace_shows_the_parts_of_the_loss(self, training, feed):
        run = training("cft", warm=True, sections={"cft": {"weight": 0.25}})
        bins, batch = run.step.lower.bins, run.step.lower.feed.share(0)
        with torch.no_grad():
            logits = run.model(batch)
        log_p = logits.log_softmax(-1)[batch.entry_position, batch.entry_token]
        scores = torch.zeros(batch.option_mask.numel()).index_add(0, batch.entry_slot, log_p).view_as(batch.option_mask)
        expected = float(bin_calibration_loss_sum(scores, batch.option_mask, bins)) * sum(bins.count) / 6
        row = run.step(0)
        assert row.keys() == {"loss", "cross_entropy", "calibration_loss", "mean_confidence", "accuracy"}
        assert row["calibration_loss"] == pytest.approx(expected, rel=1e-5)
        tuning, calibration = row["cross_entropy"], CALIBRATION_SCALE * row["calibration_loss"]
        assert row["loss"] == pytest.approx(0.75 * tuning + 0.25 * calibration, rel=1e-5)
        assert row["mean_confidence"] == pytest.approx(float(scores.softmax(-1).max(-1).values.mean()), rel=1e-5)

    def test_rcft_learns_the_questions_text(self, training):
        """The mean over both kinds of tokens; each prompt counted again token by token from the model's logits."""
        run = training("rcft", warm=True, sections={"cft": {"weight": 0.0}})
        feed = run.step.lower.feed
        total = 0.0
        for index in feed.indices(0):
            prompt = torch.tensor(feed.questions[index].prompt)[None]
            with torch.no_grad():
                log_p = run.model.model(input_ids=prompt).logits[0, :-1].log_softmax(-1)
            total -= float(log_p.gather(-1, prompt[0, 1:, None]).sum())
        row = run.step(0)
        questions, answers = feed.global_question_tokens(0), feed.global_answer_tokens(0)
        assert row["question_cross_entropy"] == pytest.approx(total / questions, rel=1e-4)
        expected = (total + row["cross_entropy"] * answers) / (questions + answers)
        assert row["loss"] == pytest.approx(expected, rel=1e-4)

    def test_alone_it_moves_confidence_towards_the_bins_accuracy(self, training):
        run = training("cft", warm=True, sections={"cft": {"weight": 1.0}})
        rows = [run.step(0) for _ in range(15)]
        assert rows[-1]["calibration_loss"] < 0.7 * rows[0]["calibration_loss"]

    def test_without_the_e_step_there_is_no_loss(self, training):
        loss = training("cft").step.lower
        loss.bins = None
        loss.begin(0)
        with pytest.raises(ValueError, match="before the first step"):
            loss()

    def test_a_feed_without_other_options_is_refused(self, training, feed):
        run = training("cft")
        with pytest.raises(ValueError, match="options 'all'"):
            CftLoss(run.model, feed("gold"), run.step.lower.config, learns_questions=False)


@pytest.mark.parametrize("method", NEW)
def test_dropout_follows_from_seed_and_step_alone(training, method):
    one, two = (training(method, dropout=0.5, warm=True) for _ in range(2))
    torch.rand(7)  # whatever else draws random numbers in between
    assert one.step(3) == two.step(3)
    assert one.step(4) != two.step(3)


def test_a_direction_without_a_block_leaves_it_and_its_moments(training):
    run = training("calm")
    run.step(0)
    before = run.space.state_dict()
    _, gradient = run.space.gradient(run.step.lower)
    run.space.apply(BlockVector(theta=gradient.theta))
    after = run.space.state_dict()
    still = {key for key in before if torch.equal(before[key], after[key])}
    assert {key for key in before if "/alpha." in key} <= still
    assert {key for key in before if key.startswith("step/theta.")}.isdisjoint(still)
