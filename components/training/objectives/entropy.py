"""Predictive entropy: what CALM's upper level raises on inputs whose labels it never sees.

Over which outcomes it is taken decides what it does (methods A.2). Over the options of a question it spreads mass among
answers that compete; over the whole vocabulary it rises through tokens that never compete and leaves the confidence of
the answer where it was. Hence options where there are options, the vocabulary for open-ended text.
"""

from __future__ import annotations

import torch
from torch import Tensor

from components.data.batching import Batch
from components.models.scoring import option_scores


def option_entropy_sum(logits: Tensor, batch: Batch) -> Tensor:
    """Sum over rows of the Shannon entropy over the row's options, renormalised.

    Args:
        logits: float32 [P, V], calibration head already applied.
        batch: Collated with `options="all"`.

    Returns:
        Scalar in nats, between 0 and rows * log(K).
    """
    log_p = torch.log_softmax(option_scores(logits, batch).log_probs, dim=-1)
    # An absent option has log p = -inf and p = 0: 0 * -inf must count as 0, also in the gradient.
    safe = log_p.masked_fill(~batch.option_mask, 0.0)
    return -(safe.exp() * safe * batch.option_mask).sum()


def vocabulary_entropy_sum(logits: Tensor, batch: Batch) -> Tensor:
    """Sum over the scored positions of the Shannon entropy of the next token.

    Args:
        logits: float32 [P, V], calibration head already applied.
        batch: Any batch; with `options="gold"` the positions are those of the answer's tokens.

    Returns:
        Scalar in nats, between 0 and P * log(V).
    """
    del batch
    log_p = torch.log_softmax(logits, dim=-1)
    return -(log_p.exp() * log_p).sum()
