"""Answers from several passes against passes made by hand."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import nn

from components.config import AdapterConfig
from components.config_bayes import BlobAdapterConfig
from components.data.batching import batches_by_length, collate
from components.data.prompts import EncodedQuestion
from components.models.adapter import attach_adapter
from components.models.averaging import mean_of_probabilities
from components.models.passes import NoisyPass, noise_seed, score_by_passes, switch_dropout_on, switch_sampling_on
from components.models.score_questions import SplitScores, score_questions
from components.models.scoring import ScoringModel, option_scores

QUESTIONS = [
    EncodedQuestion(
        str(i),
        tuple(range(3 + i, 6 + i + i % 4)),
        tuple((20 + 3 * k + i,) * (1 + (i + k) % 2) for k in range(3 + i % 2)),
        i % 3,
    )
    for i in range(7)
]
BUDGET = 20
SAMPLES = 3


@pytest.fixture
def lora(tiny_model, trained: Callable[..., nn.Module]) -> Callable[[float], ScoringModel]:
    """The tiny model with LoRA moved at random and dropout p."""
    return lambda p: ScoringModel(trained(attach_adapter(tiny_model, AdapterConfig(r=4, dropout=p), seed=1))).eval()


@pytest.fixture
def blob(tiny_model, trained: Callable[..., nn.Module]) -> ScoringModel:
    spec = BlobAdapterConfig(r=4, alpha=8, dropout=0.0, target_modules="all-linear", init_scale=0.4, prior_std=0.2)
    return ScoringModel(trained(attach_adapter(tiny_model, spec, seed=1))).eval()


def score(logits_at, questions=QUESTIONS) -> SplitScores:
    return score_questions(logits_at, None, questions, pad_id=0, token_budget=BUDGET)


def by_passes(model, questions=QUESTIONS, on_progress=None) -> SplitScores:
    passes = [NoisyPass(model, 5, number) for number in range(SAMPLES)]
    return score_by_passes(
        score, passes, mean_of_probabilities, questions, token_budget=BUDGET, on_progress=on_progress
    )


@torch.no_grad()
def by_hand(model: ScoringModel) -> np.ndarray:
    """Probabilities: each batch in three passes after seeding torch, softmax over the options, plain mean."""
    found = np.zeros((7, 4))
    for indices in batches_by_length(QUESTIONS, BUDGET):
        batch = collate([QUESTIONS[i] for i in indices], 0)
        total = np.zeros(tuple(batch.option_mask.shape))
        for number in range(SAMPLES):
            torch.manual_seed(noise_seed(5, number, batch))
            total += torch.softmax(option_scores(model(batch), batch).log_probs.double(), dim=-1).numpy()
        found[indices, : total.shape[1]] = total / SAMPLES
    return found


def probabilities(scores: SplitScores) -> np.ndarray:
    return np.exp(scores.log_probs) / np.exp(scores.log_probs).sum(axis=1, keepdims=True)


def test_mc_dropout_is_the_mean_over_passes_seeded_by_hand(lora):
    model = lora(0.4)
    plain = score(model)
    assert switch_dropout_on(model)
    found = by_passes(model)
    np.testing.assert_allclose(probabilities(found), by_hand(model), atol=1e-6)
    assert np.abs(probabilities(found) - probabilities(plain)).max() > 1e-2
    assert len(list(batches_by_length(QUESTIONS, BUDGET))) > 2


def test_only_the_adapters_dropout_is_left_on(lora):
    model = lora(0.4)
    switch_dropout_on(model)
    on = {name for name, module in model.named_modules() if module.training}
    assert on
    assert all(".lora_dropout." in name for name in on)


def test_without_dropout_there_is_nothing_to_average(lora):
    assert not switch_dropout_on(lora(0.0))


def test_blob_is_the_mean_over_draws_seeded_by_hand(blob):
    plain = score(blob)
    assert switch_sampling_on(blob)
    found = by_passes(blob)
    np.testing.assert_allclose(probabilities(found), by_hand(blob), atol=1e-6)
    assert np.abs(probabilities(found) - probabilities(plain)).max() > 1e-3


def test_a_batch_scores_alike_whenever_and_wherever_it_is_scored(blob):
    """As an actor sees it: one batch, another random state before. The random state is left as it was."""
    switch_sampling_on(blob)
    whole = by_passes(blob)
    for indices in batches_by_length(QUESTIONS, BUDGET):
        torch.manual_seed(99)
        before = torch.get_rng_state()
        again = by_passes(blob, [QUESTIONS[i] for i in indices])
        assert torch.equal(torch.get_rng_state(), before)
        np.testing.assert_array_equal(again.log_probs, whole.log_probs[indices, : again.log_probs.shape[1]])
        np.testing.assert_array_equal(again.mass, whole.mass[indices])


def test_seeds_tell_runs_passes_and_batches_apart():
    batches = [collate([question], 0) for question in QUESTIONS[:2]]
    seeds = {noise_seed(seed, number, batch) for seed in (0, 1) for number in (0, 1) for batch in batches}
    assert len(seeds) == 8
    assert all(0 <= seed < 2**63 for seed in seeds)


def test_progress_counts_questions_not_passes(lora):
    seen: list[int] = []
    by_passes(lora(0.0), on_progress=seen.append)
    assert sum(seen) == len(QUESTIONS)
