"""Whether two models say the same: log-probabilities of every token after every token of real questions."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from components.config_data import PromptConfig
from components.data.facts.builder import build_facts
from components.data.prompts import PromptEncoder

QUESTIONS = 16

Adjust = Callable[[Tensor], Tensor]
"""From a model's logits [T, V] to those that count: a calibration head, or nothing."""


@dataclass(frozen=True)
class Difference:
    """How far two models are apart.

    Attributes:
        greatest: Greatest absolute difference of a log-probability, in nats.
        positions: Positions looked at, each with the whole vocabulary.
    """

    greatest: float
    positions: int


def real_rows(tokenizer: PreTrainedTokenizerBase, prompt: PromptConfig) -> list[tuple[int, ...]]:
    """Token ids of built-in geography questions with their right answers, as the adapter's prompt puts them.

    Args:
        tokenizer: The model's.
        prompt: The adapter's.
    """
    questions = build_facts("geography", seed=0).with_choices
    chosen = questions[:: max(1, len(questions) // QUESTIONS)][:QUESTIONS]
    encoder = PromptEncoder(tokenizer, prompt, sys.maxsize)
    encoded = encoder.encode_all(chosen)
    return [question.prompt + question.options[question.answer] for question in encoded]


@torch.no_grad()
def log_probs_of(model: nn.Module, rows: Sequence[Sequence[int]], adjust: Adjust | None = None) -> list[Tensor]:
    """Log-probabilities after every token.

    Args:
        model: A `transformers` causal language model in evaluation mode, with or without an adapter.
        rows: Token ids, a text a row.
        adjust: Applied to the logits.

    Returns:
        float32 [T, V] for each row.
    """
    device = next(model.parameters()).device
    found = []
    for row in rows:
        output: Any = model(input_ids=torch.tensor([list(row)], device=device), use_cache=False)
        logits = output.logits[0].float()
        found.append((logits if adjust is None else adjust(logits)).log_softmax(dim=-1).cpu())
    return found


def difference(one: Sequence[Tensor], other: Sequence[Tensor]) -> Difference:
    """How far two outcomes of `log_probs_of` on the same rows are apart; NaN in either counts as infinitely far."""
    apart = max(float((a - b).abs().nan_to_num(nan=torch.inf).max()) for a, b in zip(one, other, strict=True))
    return Difference(apart, sum(len(a) for a in one))
