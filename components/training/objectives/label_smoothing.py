"""Label smoothing: the answer's cross-entropy mixed with that against the uniform distribution over the vocabulary."""

from __future__ import annotations

import torch
from torch import Tensor

from components.data.batching import Batch


def uniform_cross_entropy_sum(logits: Tensor, batch: Batch) -> Tensor:
    """Sum over the answer tokens of the cross-entropy against the uniform distribution, (1/K) sum_k -log p_k.

    With the sum of the answers' cross-entropy CE this gives label smoothing (Szegedy et al., arXiv 1512.00567, section
    7): the cross-entropy against (1 - s) * onehot + s / K is (1 - s) CE + s U. Since -log p_k is logsumexp(z) - z_k, U
    needs the mean of the logits only, and no second tensor as wide as the vocabulary.

    Args:
        logits: float32 [P, K].
        batch: Collated with `options="gold"`, so that its entries are the answer's tokens.

    Returns:
        Scalar, in nats, at least entries * log(K); gradient flows to the logits.
    """
    per_position = torch.logsumexp(logits, dim=-1) - logits.mean(dim=-1)
    return per_position[batch.entry_position].sum()
