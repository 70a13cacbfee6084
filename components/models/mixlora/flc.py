"""Functional-level confidence (UQ4CT, arXiv 2410.06431): how sure the routers are of their experts.

    FLC(x) = mean over routers and tokens of sum_{i in top k} p_i

with p the softmax over all N experts. It must be taken before the k weights are renormalised: after that they add up to
1 whatever the router thinks. It lies in [k / N, 1]: k / N for an indifferent router, 1 for one that is certain. The
paper leaves open which tokens count (methods C.1); both readings are offered.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from components.data.batching import PROMPT
from components.models.mixlora.routing import Routing


def functional_confidence(routing: Routing, segments: Tensor, over: Literal["prompt", "last"]) -> Tensor:
    """FLC of each row, differentiable; the same whatever side rows are padded on.

    Args:
        routing: Of one forward pass.
        segments: int64 [R, T], as in `Batch`; 0 marks the prompt.
        over: `prompt` averages over the prompt's tokens, `last` takes its last one.

    Returns:
        float32 [R].
    """
    of_routers = [record.probs.gather(1, record.experts).sum(dim=1) for record in routing.records]
    of_tokens = torch.stack(of_routers).mean(dim=0)
    grid = of_tokens.new_zeros(segments.shape).masked_scatter(routing.token_mask, of_tokens)
    prompt = segments == PROMPT
    if over == "prompt":
        return (grid * prompt).sum(dim=1) / prompt.sum(dim=1)
    last = (prompt * torch.arange(segments.shape[1], device=segments.device)).argmax(dim=1, keepdim=True)
    return grid.gather(1, last).squeeze(1)
