"""A tiny model with a LoRA that has moved, in float64, and questions by letter and by text."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from components.config import AdapterConfig
from components.config_laplace import LaplaceConfig
from components.data.prompts import EncodedQuestion
from components.models.adapter import attach_adapter, trainable_parameters
from components.models.scoring import ScoringModel
from components.posthoc.laplace.fit import PosteriorFit
from components.posthoc.laplace.posterior import Posterior


@pytest.fixture(scope="session")
def scoring(tiny_model_original: Any) -> ScoringModel:
    """Frozen, as an adapter that was loaded; logits are rounded to float32 all the same."""
    model = attach_adapter(copy.deepcopy(tiny_model_original), AdapterConfig(r=2), seed=1).double()
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for p in trainable_parameters(model).values():
            p += 0.1 * torch.randn(p.shape, generator=generator, dtype=p.dtype)
    model.requires_grad_(False)
    return ScoringModel(model).eval()


@pytest.fixture(scope="session")
def questions() -> list[EncodedQuestion]:
    """12 random questions: 2 to 4 options, of one token in the first half and of 1 to 3 in the second."""
    generator = torch.Generator().manual_seed(11)

    def tokens(count: int) -> tuple[int, ...]:
        return tuple(torch.randint(3, 320, (count,), generator=generator).tolist())

    return [
        EncodedQuestion(
            f"q{i}",
            tokens(4 + i % 4),
            tuple(tokens(1 if i < 6 else 1 + (i + k) % 3) for k in range(2 + i % 3)),
            i % 2,
        )
        for i in range(12)
    ]


@pytest.fixture(scope="session")
def posterior(scoring: ScoringModel, questions: list[EncodedQuestion]) -> Posterior:
    """Fitted with a rank beyond every side, so that nothing is cut off."""
    return fitted(scoring, questions, rank=64)


def fitted(scoring: ScoringModel, questions: list[EncodedQuestion], token_budget: int = 60, **config: Any) -> Posterior:
    """The posterior of some questions."""
    fit = PosteriorFit(scoring, LaplaceConfig(**config), seed=5)
    assert sum(fit.over(questions, pad_id=0, token_budget=token_budget)) == len(questions)
    return fit.posterior()


@pytest.fixture(scope="session")
def fit_on() -> Any:
    """`fitted`, for tests that fit anew."""
    return fitted
