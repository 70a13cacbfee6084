"""Cross-entropy on the answer's tokens: the lower level of CALM and the objective of plain fine-tuning."""

from __future__ import annotations

from torch import Tensor

from components.data.batching import Batch
from components.models.scoring import token_log_probs


def cross_entropy_sum(logits: Tensor, batch: Batch) -> Tensor:
    """Sum of the answer tokens' negative log-probabilities.

    A sum, not a mean: the caller divides by the count of the global batch once, so that neither the number of ranks
    nor the way a batch is cut changes the objective.

    Args:
        logits: float32 [P, V], calibration head already applied.
        batch: Collated with `options="gold"`, so that its entries are the answer's tokens.

    Returns:
        Scalar, in nats; gradient flows to the logits.
    """
    return -token_log_probs(logits, batch).sum()


def gold_cross_entropy_sum(logits: Tensor, batch: Batch) -> Tensor:
    """The same of a batch that holds other options too, which are left out: they are no text to learn.

    Args:
        logits: float32 [P, V], calibration head already applied.
        batch: Collated with `options="all"` or `"gold"`.

    Returns:
        Scalar, in nats; gradient flows to the logits.
    """
    return -token_log_probs(logits, batch)[gold_entries(batch)].sum()


def gold_entries(batch: Batch) -> Tensor:
    """Which entries are tokens of the right options, bool [E]."""
    slots = batch.option_mask.shape[1]
    row, option = batch.entry_slot // slots, batch.entry_slot % slots
    return option == batch.answers[row]
