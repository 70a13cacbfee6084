"""Whether the model's answer is right, told from the logits that training computes anyway.

The papers ask for an indicator from the same forward pass (methods C.1). Among options it is the argmax of their
log-probabilities. For open-ended answers the model is read under teacher forcing: at each position of the right answer
it has seen that answer's tokens before, and its most probable token there counts as what it says.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from components.data.batching import Batch
from components.models.scoring import option_scores
from components.training.objectives.cross_entropy import gold_entries

Correctness = Literal["options", "exact_match", "token_f1"]


@torch.no_grad()
def correctness(logits: Tensor, batch: Batch, kind: Correctness) -> Tensor:
    """Degree to which each row's answer is right.

    Args:
        logits: float32 [P, V], calibration head already applied.
        batch: For `options` collated with all of them; the other kinds read the right answer's tokens only.
        kind: `options`: 1 where the right option scores highest (of equal ones the first counts). `exact_match`: 1
            where every token is right. `token_f1`: F1 of the two bags of tokens as in SQuAD; the answers being equally
            long under teacher forcing, precision, recall and F1 are the share of tokens in common.

    Returns:
        float32 [R], in [0, 1], without a graph.
    """
    if kind == "options":
        return (option_scores(logits, batch).log_probs.argmax(dim=-1) == batch.answers).float()
    gold = gold_entries(batch)
    said = logits[batch.entry_position[gold]].argmax(dim=-1)
    true, row = batch.entry_token[gold], batch.entry_slot[gold] // batch.option_mask.shape[1]
    hit = said == true if kind == "exact_match" else _in_common(said, true, row)
    share = _row_mean(hit.float(), row, len(batch.answers))
    return (share == 1.0).float() if kind == "exact_match" else share


def _in_common(said: Tensor, true: Tensor, row: Tensor) -> Tensor:
    """Which true tokens are said too, whatever the place; one that is said n times counts for n of its equals.

    Args:
        said: int64 [E], tokens of all rows.
        true: int64 [E].
        row: int64 [E]; the row of each token.

    Returns:
        bool [E].
    """
    same_row = row[:, None] == row[None, :]
    equals_before = (same_row & (true[:, None] == true[None, :])).tril(diagonal=-1).sum(dim=1)
    times_said = (same_row & (true[:, None] == said[None, :])).sum(dim=1)
    return equals_before < times_said


def _row_mean(values: Tensor, row: Tensor, rows: int) -> Tensor:
    zeros = torch.zeros(rows, dtype=values.dtype, device=values.device)
    return zeros.index_add(0, row, values) / zeros.index_add(0, row, torch.ones_like(values))
