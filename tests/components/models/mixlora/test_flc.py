"""FLC: known values at the extremes, which tokens count, and independence of padding and batch."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from components.config import MixLoraConfig
from components.data.batching import PADDING, PROMPT, collate
from components.data.prompts import EncodedQuestion
from components.models.adapter import attach_adapter, trainable_parameters
from components.models.mixlora.flc import functional_confidence
from components.models.mixlora.routing import RouterRecord, Routing
from components.models.scoring import ScoringModel

QUESTIONS = [
    EncodedQuestion("a", (5, 6, 7, 8, 9), ((10,), (11, 12), (13,)), 1),
    EncodedQuestion("b", (20, 21), ((22, 23, 24), (25,)), 0),
    EncodedQuestion("c", (30, 31, 32), ((33,), (34,), (35, 36)), 2),
]


def record(logits, k=2):
    probs = torch.softmax(logits, dim=-1)
    return RouterRecord(logits, probs, probs.topk(k, dim=-1).indices)


def test_an_indifferent_router_states_k_over_n_and_a_certain_one_states_1():
    mask = torch.ones(1, 3, dtype=torch.bool)
    segments = torch.zeros(1, 3, dtype=torch.long)
    indifferent = Routing((record(torch.zeros(3, 8)),), mask)
    certain = Routing((record(1e4 * torch.eye(8)[:3]),), mask)
    for over in ("prompt", "last"):
        torch.testing.assert_close(functional_confidence(indifferent, segments, over), torch.tensor([0.25]))
        torch.testing.assert_close(functional_confidence(certain, segments, over), torch.tensor([1.0]))


def test_hand_worked_mean_over_routers_and_prompt_tokens():
    """Two routers, N 2, k 1, one row: padding, prompt, prompt, option. Top probabilities by router:
    .5, .8, .9 and .7, .6, .6 of the three real tokens. Prompt: ((.5 + .7)/2 + (.8 + .6)/2)/2 = .65; last prompt token
    (.8 + .6)/2 = .7. The option's .9 and .6 do not count."""
    segments = torch.tensor([[PADDING, PROMPT, PROMPT, 1]])
    mask = segments != PADDING

    def of(*tops):
        probs = torch.tensor([[p, 1 - p] for p in tops])
        return RouterRecord(probs.log(), probs, torch.zeros(len(tops), 1, dtype=torch.long))

    routing = Routing((of(0.5, 0.8, 0.9), of(0.7, 0.6, 0.6)), mask)
    torch.testing.assert_close(functional_confidence(routing, segments, "prompt"), torch.tensor([0.65]))
    torch.testing.assert_close(functional_confidence(routing, segments, "last"), torch.tensor([0.7]))


@pytest.fixture
def scoring(tiny_model):
    model = ScoringModel(attach_adapter(tiny_model, MixLoraConfig(r=2, num_experts=6), seed=1)).eval()
    with torch.no_grad():
        for name, parameter in trainable_parameters(model).items():
            if ".router." in name:
                nn.init.normal_(parameter, std=0.5)
            if "lora_B" in name:
                nn.init.normal_(parameter, std=0.2)
    return model


@pytest.mark.parametrize("over", ["prompt", "last"])
def test_flc_depends_on_neither_padding_nor_neighbours_nor_options(over, scoring):
    scoring.flc_over = over
    alone = []
    for question in QUESTIONS:
        batch = collate([question], 0)
        scoring(batch)
        alone.append(scoring.flc(batch))
    expected = torch.cat(alone)
    assert expected.std() > 1e-3, "three different prompts should not agree by chance"
    for side in ("left", "right"):
        for options in ("all", "gold"):
            batch = collate(QUESTIONS, 0, options, side)
            scoring(batch)
            torch.testing.assert_close(scoring.flc(batch), expected, atol=1e-6, rtol=0)


def test_scores_depend_on_neither_padding_side_nor_neighbours(scoring):
    def scores(batch):
        return torch.log_softmax(scoring(batch), dim=-1)[batch.entry_position, batch.entry_token]

    right, left = (scores(collate(QUESTIONS, 0, padding_side=side)) for side in ("right", "left"))
    torch.testing.assert_close(right, left, atol=1e-5, rtol=0)
    torch.testing.assert_close(torch.cat([scores(collate([q], 0)) for q in QUESTIONS]), right, atol=1e-5, rtol=0)


def test_every_router_is_recorded_once_a_pass(scoring):
    scoring(collate(QUESTIONS, 0))
    batch = collate(QUESTIONS[:1], 0)
    scoring(batch)
    assert len(scoring.routing.records) == 2, "two layers"
    assert all(len(r.probs) == int((batch.segments != PADDING).sum()) for r in scoring.routing.records)


def test_gradients_reach_the_routers(scoring):
    scoring.train()
    batch = collate(QUESTIONS, 0)
    scoring(batch)
    scoring.flc(batch).sum().backward()
    for name, parameter in trainable_parameters(scoring).items():
        if ".router." in name:
            assert parameter.grad.abs().sum() > 0, name


def test_a_model_without_routers_states_no_flc(tiny_model):
    scoring = ScoringModel(tiny_model)
    batch = collate(QUESTIONS, 0)
    scoring(batch)
    assert scoring.routing is None
    assert scoring.flc(batch) is None
