"""Tokens sorted by expert and dealt out to blocks, so that all experts run in a few batched products.

A slot is a (token, choice) pair. The slots of an expert fill blocks of equal size, the last of them up with filler that
points at token 0 and is left out of every sum. A product with each block's own matrix is then one `bmm`, however many
experts there are and however unevenly they are chosen (the idea of MegaBlocks, arXiv 2211.15841).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

SMALLEST_BLOCK, LARGEST_BLOCK = 4, 64
"""Slots a block. Large blocks make better products, small ones less filler; 64 was best at 192 slots an expert."""


@dataclass(frozen=True)
class Dispatch:
    """Where every slot lies. B blocks of b slots.

    Attributes:
        token: int64 [B * b], token of each slot; 0 for filler.
        place: int64 [M, k], slot of each token's choices.
        expert: int64 [B], expert of each block.
    """

    token: Tensor
    place: Tensor
    expert: Tensor

    @property
    def blocks(self) -> int:
        """Number of blocks, B."""
        return len(self.expert)

    def gather(self, rows: Tensor) -> Tensor:
        """Each slot's token's row: [M, c] to [B, b, c]."""
        return rows.index_select(0, self.token).view(self.blocks, -1, rows.shape[-1])

    def combine(self, slots: Tensor, weights: Tensor | None = None) -> Tensor:
        """Sum over each token's slots, weighted where weights [M, k] are given: [B, b, c] to [M, c]. No gradient."""
        flat = slots.reshape(-1, slots.shape[-1])
        return functional.embedding_bag(self.place, flat, mode="sum", per_sample_weights=weights)

    def average(self, slots: Tensor, weights: Tensor) -> Tensor:
        """Weighted mean over each token's slots, [B, b, c] to [M, c]. No gradient.

        Args:
            slots: Values.
            weights: [M, k], adding up to 1 for each token. Written as first + sum_j w_j (slot_j - first), so that slots
                that agree give exactly what they agree on: a fresh adapter is the base model, bit for bit.
        """
        flat = slots.view(-1, slots.shape[-1])
        first = flat.index_select(0, self.place[:, 0])
        mean = first
        for j in range(1, self.place.shape[1]):
            beyond = flat.index_select(0, self.place[:, j]).sub_(first)
            mean = torch.addcmul(mean, beyond, weights[:, j, None])
        return mean

    def spread(self, weights: Tensor) -> Tensor:
        """Token weights [M, k] to slots [B, b, 1]; 0 for filler."""
        slots = weights.new_zeros(len(self.token))
        slots[self.place.flatten()] = weights.flatten()
        return slots.view(self.blocks, -1, 1)

    def sum_by_expert(self, blocks: Tensor, num_experts: int) -> Tensor:
        """Sum of the blocks of each expert: [B, ...] to [N, ...]; 0 for an expert without tokens."""
        return blocks.new_zeros(num_experts, *blocks.shape[1:]).index_add_(0, self.expert, blocks)


def dispatch(experts: Tensor, num_experts: int) -> Dispatch:
    """Sorts slots by expert.

    Args:
        experts: int64 [M, k], the chosen experts.
        num_experts: N.
    """
    tokens, top_k = experts.shape
    slots, device = tokens * top_k, experts.device
    size = _block_size(slots, num_experts)
    chosen = experts.flatten()
    order = torch.argsort(chosen, stable=True)
    counts = torch.bincount(chosen, minlength=num_experts)
    blocks = (counts + size - 1) // size
    ends = blocks.cumsum(0)
    # On a GPU asking for the exact number would make the host wait in every layer; the bound needs no answer.
    total = int(ends[-1]) if device.type == "cpu" else slots // size + num_experts
    of_block = torch.searchsorted(ends, torch.arange(total, device=device), right=True).clamp(max=num_experts - 1)
    expert = chosen[order]
    first_slot, first_place = counts.cumsum(0) - counts, (ends - blocks) * size
    place = first_place[expert] + torch.arange(slots, device=device) - first_slot[expert]
    token = torch.zeros(total * size, dtype=torch.long, device=device)
    token[place] = order // top_k
    of_slot = torch.empty_like(place)
    of_slot[order] = place
    return Dispatch(token, of_slot.view(tokens, top_k), of_block)


def _block_size(slots: int, num_experts: int) -> int:
    """The power of two next to the mean number of slots an expert, within bounds."""
    mean = max(slots / num_experts, 1.0)
    return min(LARGEST_BLOCK, max(SMALLEST_BLOCK, 2 ** round(math.log2(mean))))
