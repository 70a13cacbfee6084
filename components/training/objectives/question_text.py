"""The text of the questions themselves as something to learn, beside their answers."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from components.data.batching import PROMPT, Batch


def with_question_positions(batch: Batch) -> tuple[Batch, Tensor]:
    """Asks for logits at the prompts' tokens too.

    Args:
        batch: Any.

    Returns:
        The batch with further positions behind its own P, which its entries do not refer to: each token of a prompt
        but the last one, whose position the options begin at; and the tokens that follow there, int64 [Q].
    """
    inside = batch.segments == PROMPT
    row, column = (inside[:, :-1] & inside[:, 1:]).nonzero().unbind(dim=1)
    positions = row * batch.segments.shape[1] + column
    return replace(batch, positions=torch.cat([batch.positions, positions])), batch.input_ids[row, column + 1]


def question_cross_entropy_sum(logits: Tensor, tokens: Tensor) -> Tensor:
    """Sum of the negative log-probabilities of the prompts' tokens but the first of each.

    Args:
        logits: float32 [Q, V], at the further positions of `with_question_positions`.
        tokens: int64 [Q].

    Returns:
        Scalar, in nats; gradient flows to the logits.
    """
    return (torch.logsumexp(logits, dim=-1) - logits.gather(-1, tokens[:, None]).squeeze(-1)).sum()
