"""Objectives of the baselines against PyTorch's own, hand-worked values, finite differences and invariants."""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.functional import cross_entropy

from components.data.batching import collate
from components.data.prompts import EncodedQuestion
from components.training.objectives.cft import BINS, BinAccuracy, bin_calibration_loss_sum, targets
from components.training.objectives.cross_entropy import cross_entropy_sum
from components.training.objectives.label_smoothing import uniform_cross_entropy_sum
from components.training.objectives.question_text import question_cross_entropy_sum, with_question_positions

VOCABULARY = 8
QUESTIONS = [
    EncodedQuestion("a", (1, 2, 3), ((4,), (5, 6)), 1),
    EncodedQuestion("b", (2, 7, 6, 5, 1), ((3, 4, 2), (6,), (1,)), 0),
]


class TestLabelSmoothing:
    @pytest.mark.parametrize("smoothing", [0.0, 0.1, 0.7])
    def test_equals_pytorchs(self, smoothing):
        batch = collate(QUESTIONS, 0, "gold")
        logits = torch.randn(len(batch.positions), VOCABULARY, dtype=torch.float64, requires_grad=True)
        answer, uniform = cross_entropy_sum(logits, batch), uniform_cross_entropy_sum(logits, batch)
        found = (1 - smoothing) * answer + smoothing * uniform
        target = torch.zeros(len(batch.positions), dtype=torch.int64)
        target[batch.entry_position] = batch.entry_token
        expected = cross_entropy(logits, target, label_smoothing=smoothing, reduction="sum")
        torch.testing.assert_close(found, expected)
        both = (torch.autograd.grad(value, logits, retain_graph=True)[0] for value in (found, expected))
        torch.testing.assert_close(*both)


class TestBins:
    def test_every_bin_is_measured_the_last_one_too(self):
        """Confidences .95 right, .92 wrong, 1.0 right, .55 right, .45 wrong."""
        p = np.array([[0.95, 0.05, 0], [0.08, 0.92, 0], [0, 0, 1.0], [0.55, 0.45, 0], [0.45, 0.25, 0.3]])
        with np.errstate(divide="ignore"):
            bins = BinAccuracy.measure(np.log(p) - 3.0, np.array([0, 0, 2, 0, 1]))
        assert bins.count == (0, 0, 0, 0, 1, 1, 0, 0, 0, 3)
        assert bins.correct == (0, 0, 0, 0, 0, 1, 0, 0, 0, 2)

    def test_an_empty_bin_takes_the_nearest_filled_one_and_the_lower_of_two(self):
        """Filled: 4 (1 of 2) and 8 (3 of 3). Bin 6 lies between them, 7 is nearer to 8."""
        bins = BinAccuracy((0, 0, 0, 0, 1, 0, 0, 0, 3, 0), (0, 0, 0, 0, 2, 0, 0, 0, 3, 0))
        accuracy, count = bins.tensors(torch.zeros(()))
        assert accuracy.tolist() == [0.5] * 7 + [1.0] * 3
        assert count.tolist() == [2.0] * 7 + [3.0] * 3

    def test_without_a_question_there_are_none(self):
        with pytest.raises(ValueError, match="at least one"):
            BinAccuracy((0,) * BINS, (0,) * BINS)


class TestTargets:
    def test_known_values(self):
        """p = (.6, .2, .1, .1), acc = .5: gamma p = ln 3 (2, 1, 1), tanh(ln 3) = .8, tanh(2 ln 3) = 80/82.

        a = .5 / (80/82 + .8 + .8 + 3).
        """
        p = torch.tensor([[0.6, 0.2, 0.1, 0.1]], dtype=torch.float64)
        found = targets(p.log(), torch.ones(1, 4, dtype=torch.bool), torch.tensor([0.5], dtype=torch.float64))
        a = 0.5 / (80 / 82 + 1.6 + 3)
        assert found[0].tolist() == pytest.approx([0.5, a * (1 + 80 / 82), 1.8 * a, 1.8 * a], rel=1e-12)

    @given(
        scores=st.lists(st.floats(-60, 0), min_size=2, max_size=8),
        accuracy=st.one_of(st.floats(0, 1), st.sampled_from([0.0, 1.0, 1 - 2**-50])),
        absent=st.integers(0, 3),
    )
    @settings(max_examples=150, deadline=None)
    def test_sum_and_order(self, scores, accuracy, absent):
        k = len(scores)
        raw = torch.tensor([[*scores, *[-torch.inf] * absent]], dtype=torch.float64)
        log_p = raw.log_softmax(dim=-1)
        found = targets(log_p, raw > -torch.inf, torch.tensor([accuracy], dtype=torch.float64))[0]
        best = int(log_p[0].argmax())
        others = [j for j in range(k) if j != best]
        assert float(found[best]) == accuracy
        assert float(found[others].sum()) == pytest.approx(1 - accuracy, abs=1e-12)
        assert not found[k:].any()
        by_p = sorted(others, key=lambda j: float(log_p[0, j]))
        for lower, higher in pairwise(by_p):
            assert found[lower] <= found[higher] * (1 + 1e-12)

    def test_options_of_probability_zero_share_alike(self):
        log_p = torch.tensor([[0.0, -torch.inf, -torch.inf, -torch.inf]])
        exists = torch.tensor([[True, True, True, False]])
        assert targets(log_p, exists, torch.tensor([0.5])).tolist() == [[0.5, 0.25, 0.25, 0.0]]


class TestCalibrationLoss:
    BINS = BinAccuracy((0, 0, 1, 2, 0, 3, 1, 2, 1, 0), (0, 0, 2, 4, 1, 4, 2, 2, 2, 5))

    def test_known_value_in_the_last_bin(self):
        """p = (.95, .05), accuracy 0 of 5 there, one other option, whose target is 1: (.95^2 + .95^2) / 5."""
        scores = torch.tensor([[0.95, 0.05]], dtype=torch.float64).log() - 2.0
        found = bin_calibration_loss_sum(scores, torch.ones(1, 2, dtype=torch.bool), self.BINS)
        assert float(found) == pytest.approx(2 * 0.95**2 / 5, rel=1e-12)

    def test_gradient_against_finite_differences(self):
        generator = torch.Generator().manual_seed(2)
        scores = 2 * torch.randn(6, 4, dtype=torch.float64, generator=generator)
        exists = torch.ones(6, 4, dtype=torch.bool)
        exists[2:4, 3], exists[4, 2:] = False, False
        scores.requires_grad_()

        def loss(x: torch.Tensor) -> torch.Tensor:
            return bin_calibration_loss_sum(x.masked_fill(~exists, -torch.inf), exists, self.BINS)

        assert torch.autograd.gradcheck(loss, scores)

    @pytest.mark.parametrize("sharpness", [1.0, 1e2, 1e4])
    def test_gradient_is_finite_at_any_confidence_and_accuracy(self, sharpness):
        always = BinAccuracy((1,) * BINS, (1,) * BINS)
        exists = torch.tensor([[True] * 4, [True, True, False, False]])
        scores = (sharpness * torch.tensor([[1.0, 0.5, 0.2, -1.0]] * 2)).requires_grad_()
        for bins in (always, self.BINS):
            value = bin_calibration_loss_sum(scores.masked_fill(~exists, -torch.inf), exists, bins)
            assert torch.isfinite(torch.autograd.grad(value, scores)[0]).all()


class TestQuestionText:
    @pytest.mark.parametrize("side", ["left", "right"])
    def test_every_token_of_a_prompt_but_its_first_is_predicted_once(self, side):
        """Prompts (1, 2, 3) and (2, 7, 6, 5, 1): 2, 3 and 7, 6, 5, 1 follow something; entries stay as they are."""
        batch = collate(QUESTIONS, 0, "all", side)
        wider, tokens = with_question_positions(batch)
        assert tokens.tolist() == [2, 3, 7, 6, 5, 1]
        own = len(batch.positions)
        assert torch.equal(wider.positions[:own], batch.positions)
        assert len(set(wider.positions.tolist())) == own + 6
        assert batch.input_ids.flatten()[wider.positions[own:]].tolist() == [1, 2, 2, 7, 6, 5]

    def test_known_value(self):
        """Over indifferent logits each token costs log V."""
        found = question_cross_entropy_sum(torch.zeros(5, VOCABULARY), torch.arange(5))
        assert float(found) == pytest.approx(5 * math.log(VOCABULARY))
