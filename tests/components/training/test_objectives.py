"""Objectives against hand-worked values, finite differences and their own definitions."""

from __future__ import annotations

import math

import pytest
import torch

from components.data.batching import collate
from components.data.prompts import EncodedQuestion
from components.training.objectives.cross_entropy import cross_entropy_sum
from components.training.objectives.entropy import option_entropy_sum, vocabulary_entropy_sum

VOCABULARY = 6


def question(options, answer=0, prompt=(1, 2)):
    return EncodedQuestion("q", tuple(prompt), tuple(tuple(o) for o in options), answer)


def test_cross_entropy_of_uniform_logits_is_log_vocabulary_per_token():
    """Three answer tokens under uniform logits cost 3 ln 6."""
    batch = collate([question([(3,), (4, 5, 3)], answer=1)], pad_id=0, options="gold")
    logits = torch.zeros(len(batch.positions), VOCABULARY)
    assert cross_entropy_sum(logits, batch).item() == pytest.approx(3 * math.log(6), rel=1e-6)


def test_option_entropy_of_equal_options_is_log_count():
    """One row with 4 equal options and one with 2: ln 4 + ln 2."""
    batch = collate([question([(1,), (2,), (3,), (4,)]), question([(1,), (2,)])], pad_id=0)
    logits = torch.zeros(len(batch.positions), VOCABULARY)
    assert option_entropy_sum(logits, batch).item() == pytest.approx(math.log(8), rel=1e-6)


def test_option_entropy_of_known_probabilities():
    """Logits ln(1), ln(3) on the two options, all else equal: p = (.25, .75), H = .5623 nats."""
    batch = collate([question([(1,), (2,)])], pad_id=0)
    logits = torch.zeros(1, VOCABULARY)
    logits[0, 2] = math.log(3)
    assert option_entropy_sum(logits, batch).item() == pytest.approx(
        -(0.25 * math.log(0.25) + 0.75 * math.log(0.75)), rel=1e-6
    )


def test_vocabulary_entropy_bounds():
    batch = collate([question([(1,), (2,)])], pad_id=0)
    assert vocabulary_entropy_sum(torch.zeros(1, VOCABULARY), batch).item() == pytest.approx(math.log(6), rel=1e-6)
    peaked = torch.zeros(1, VOCABULARY)
    peaked[0, 0] = 200.0
    assert vocabulary_entropy_sum(peaked, batch).item() == pytest.approx(0.0, abs=1e-6)


@pytest.mark.parametrize("objective", [cross_entropy_sum, option_entropy_sum, vocabulary_entropy_sum])
def test_gradients_agree_with_finite_differences(objective):
    options = "gold" if objective is cross_entropy_sum else "all"
    batch = collate([question([(1, 3), (2,), (4, 5, 1)]), question([(1,), (2, 2)], prompt=(3,))], 0, options)
    logits = torch.randn(len(batch.positions), VOCABULARY, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda z: objective(z, batch), (logits,))


def test_absent_options_leave_the_gradient_finite():
    batch = collate([question([(1,), (2,), (3,)]), question([(1,), (2,)])], pad_id=0)
    logits = torch.randn(len(batch.positions), VOCABULARY, requires_grad=True)
    option_entropy_sum(logits, batch).backward()
    assert torch.isfinite(logits.grad).all()
