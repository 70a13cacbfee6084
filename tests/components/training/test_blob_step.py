"""BLoB's step: weights of the KL by hand, and one step against the same arithmetic written out."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch

from components.config import RunConfig
from components.config_bayes import BlobAdapterConfig
from components.models.adapter import attach_adapter, trainable_parameters
from components.models.scoring import ScoringModel
from components.training.blob_step import BlobStep, kl_cycle, kl_weight
from components.training.feed import Feed, seed_dropout
from components.training.lower_losses import AnswerLoss
from components.training.objectives.cross_entropy import cross_entropy_sum
from components.training.parameter_space import TorchSpace, block_groups

SPEC = BlobAdapterConfig(r=2, alpha=4, dropout=0.0, target_modules=["q_proj"], init_scale=0.5, prior_std=0.2)


def test_weights_double_through_the_cycle_and_begin_anew():
    """M = 3: 2, 4 and 8 over 2^4 - 1 = 15."""
    found = [kl_weight(step, 3) for step in range(6)]
    assert found == pytest.approx([2 / 15, 4 / 15, 8 / 15] * 2, rel=1e-15)


@pytest.mark.parametrize("cycle", [1, 52, 1100, 10**6])
def test_weights_of_long_cycles_are_numbers(cycle):
    """2^1100 is beyond a float; the last weight is 2^M / (2^(M + 1) - 1), a little more than a half."""
    assert kl_weight(cycle - 1, cycle) == pytest.approx(1 / (2 - 2.0**-cycle), rel=1e-15)
    assert 0.0 <= kl_weight(0, cycle) < 1.0


def test_length_of_the_cycle():
    """n = 800, batch 16: 800^(pi / 8) = 13.80, so int(1380 / 16) = 86; an epoch has 800 / 16 = 50 steps."""
    assert kl_cycle(800, 16, 8.0) == 86
    assert kl_cycle(800, 16, None) == 50
    assert kl_cycle(801, 16, None) == 51
    assert kl_cycle(1, 1000, 8.0) == 1


@pytest.fixture
def run() -> RunConfig:
    return RunConfig.model_validate(
        {
            "run": "a",
            "data": {"source": {"kind": "facts", "domain": "geography"}},
            "training": {"steps": 4, "warmup_fraction": 0.5, "schedule": "constant"},
            "blob": {"kl_learning_rate": 0.02, "kl_gamma": None},
        }
    )


def test_one_step_is_adamw_on_the_loss_then_sgd_on_the_weighted_kl(
    tiny_model_original, feed: Callable[..., Feed], run: RunConfig
):
    """24 questions in batches of 6 make M = 4, so at step 1 pi = 4 / 31; the rate is .02, warm-up being over.

    The gradient of the KL is M / beta^2 in M and -2 / G + 2 G^3 / beta^2 in G, at the point that AdamW has reached.
    """
    models = [ScoringModel(attach_adapter(copy.deepcopy(tiny_model_original), SPEC, seed=1)).train() for _ in range(2)]
    thetas = [trainable_parameters(model) for model in models]
    for theta in thetas:
        with torch.no_grad():
            for name, p in theta.items():
                p += 0.05 * torch.randn(p.shape, generator=torch.Generator().manual_seed(len(name)))
    ours, theirs = thetas
    space = TorchSpace({}, ours, torch.optim.AdamW(block_groups({}, ours), lr=1e-2))
    step = BlobStep(space, AnswerLoss(models[0], feed("gold")), models[0], run)
    values = step(1)

    optimiser = torch.optim.AdamW(theirs.values(), lr=1e-2, weight_decay=0.0)
    batch = feed("gold").share(1)
    seed_dropout(5, 1, 0)
    loss = cross_entropy_sum(models[1](batch), batch) / feed("gold").global_answer_tokens(1)
    loss.backward()
    optimiser.step()
    rate = 0.02 * 4 / 31
    with torch.no_grad():
        for name, p in theirs.items():
            if name.endswith("lora_A"):
                p -= rate * p / 0.04
            if name.endswith("lora_G"):
                p -= rate * (-2 / p + 2 * p**3 / 0.04)
    assert values["loss"] == pytest.approx(float(loss), abs=1e-6)
    assert values["kl_weight"] == pytest.approx(4 / 31)
    for name, p in theirs.items():
        torch.testing.assert_close(ours[name], p, rtol=0, atol=1e-6, msg=lambda text, at=name: f"{at}: {text}")


def test_noise_and_kl_reach_the_standard_deviations(tiny_model_original, feed: Callable[..., Feed], run: RunConfig):
    """G starts far below the prior's (G = sqrt .2 = .447 at the prior), and the KL raises it."""
    spec = SPEC.model_copy(update={"init_scale": 0.05})
    model = ScoringModel(attach_adapter(copy.deepcopy(tiny_model_original), spec, seed=1)).train()
    theta = trainable_parameters(model)
    space = TorchSpace({}, theta, torch.optim.AdamW(block_groups({}, theta), lr=1e-3))
    step = BlobStep(space, AnswerLoss(model, feed("gold")), model, run)
    rows = [step(number) for number in range(4)]
    assert rows[-1]["mean_std"] > 2 * rows[0]["mean_std"]
    assert rows[-1]["kl"] < rows[0]["kl"]
