"""Two losses on routers alone: load balance, and the size of their logits.

Shape letters: L routers, M tokens (padding left out), N experts, k experts that a token goes through.

Over several ranks the balance loss is a product of means, so a rank cannot know its share from its own tokens: the
counts are summed over ranks first, and each rank then adds what its own probabilities contribute. The shares, and their
gradients, sum to the loss of the global batch.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from components.models.mixlora.routing import Routing


def expert_counts(routing: Routing) -> Tensor:
    """How many tokens chose which expert, by place.

    Args:
        routing: Of one forward pass.

    Returns:
        float64 [L, k, N]; entry (l, j, e) counts router l's tokens whose j-th choice is e. Without a graph.
    """
    experts = torch.stack([record.experts for record in routing.records])
    routers, _, k = experts.shape
    place = torch.arange(routers * k, device=experts.device).view(routers, 1, k)
    flat = (place * routing.num_experts + experts).flatten()
    counts = torch.bincount(flat, minlength=routers * k * routing.num_experts)
    return counts.view(routers, k, routing.num_experts).double()


def balance_share(routing: Routing, counts: Tensor, over: Literal["layer", "pooled"]) -> Tensor:
    """This rank's share of the load-balance loss N * sum_{j,e} F[j,e] P[e] (MixLoRA, arXiv 2404.15159).

    F[j, e] is the share of tokens whose j-th choice is expert e, without gradient; P[e] is the mean of its probability
    before any renormalisation. Perfect balance gives k; collapse gives N where k = 1.

    Per layer, which is the default of the run file, the loss is the mean of each router's own. MoE-PEFT puts the tokens
    of all layers into one pool instead, where one layer that sends everything to expert 0 and another that sends
    everything to expert 1 look balanced: imbalances of different layers cancel, and collapsed routers cost nothing.

    Args:
        routing: This rank's tokens; gradient flows to its probabilities.
        counts: `expert_counts` summed over ranks, [L, k, N].
        over: Whether each router is balanced by itself or all together.

    Returns:
        Scalar; the sum over ranks lies between 0 and k * N.
    """
    chosen = counts.sum(dim=1)
    probs = torch.stack([record.probs.sum(dim=0) for record in routing.records])
    if over == "pooled":
        chosen, probs = chosen.sum(dim=0, keepdim=True), probs.sum(dim=0, keepdim=True)
    pools = len(probs)
    tokens_of_pool = token_count(counts) * len(routing.records) / pools
    frequency = (chosen / tokens_of_pool).to(probs.dtype)
    return routing.num_experts * (frequency * probs).sum() / (tokens_of_pool * pools)


def z_loss_share(routing: Routing, counts: Tensor) -> Tensor:
    """This rank's share of the router z-loss, the mean over routers and tokens of logsumexp(logits)^2.

    ST-MoE, arXiv 2202.08906, equation 5. It keeps router logits small without preferring any expert.

    Args:
        routing: This rank's tokens; gradient flows to its logits.
        counts: `expert_counts` summed over ranks.
    """
    logits = torch.stack([record.logits for record in routing.records])
    return logits.logsumexp(dim=-1).square().sum() / (token_count(counts) * len(logits))


def token_count(counts: Tensor) -> Tensor:
    """Tokens of the global batch, scalar: each has one first choice in the first router."""
    return counts[0, 0].sum()
