"""Which experts a token goes through, and the record of it that the losses and FLC are computed from.

Shapes: R rows, T tokens a row, M tokens that are not padding, d width, N experts, k experts a token.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from components.errors import ModelError


@dataclass(frozen=True)
class RouterRecord:
    """What one router decided in one forward pass, with its graph.

    Attributes:
        logits: float32 [M, N].
        probs: float32 [M, N], softmax of the logits over all N experts, before any renormalisation.
        experts: int64 [M, k], the chosen experts, most probable first.
    """

    logits: Tensor
    probs: Tensor
    experts: Tensor


@dataclass(frozen=True)
class Routing:
    """What all routers of a model decided in one forward pass.

    Attributes:
        records: One a router, in the order in which the tokens met them.
        token_mask: bool [R, T]; the M tokens that were routed, in row-major order.
    """

    records: tuple[RouterRecord, ...]
    token_mask: Tensor

    @property
    def num_experts(self) -> int:
        """N."""
        return self.records[0].probs.shape[1]

    @property
    def top_k(self) -> int:
        """Number of experts a token goes through, k."""
        return self.records[0].experts.shape[1]


class RoutingRecorder:
    """Tells the routers of one model which tokens are real, and collects what they decide.

    Outside `recording` every token counts as real and nothing is collected.
    """

    def __init__(self) -> None:
        self._mask: Tensor | None = None
        self._tokens: Tensor | None = None
        self._records: list[RouterRecord] | None = None

    @contextmanager
    def recording(self, token_mask: Tensor) -> Iterator[list[RouterRecord]]:
        """Around a forward pass.

        Args:
            token_mask: bool [R, T]; False for padding.

        Yields:
            The list that fills up with the routers' records.
        """
        tokens = None if bool(token_mask.all()) else token_mask.flatten().nonzero().squeeze(1)
        self._mask, self._tokens, self._records = token_mask, tokens, []
        try:
            yield self._records
        finally:
            self._mask = self._tokens = self._records = None

    def checkpoint_contexts(self) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        """`context_fn` of `torch.utils.checkpoint`, called in the forward pass.

        Returns:
            Contexts of the pass and of its repetition in the backward pass, by when `recording` has ended: there the
            same tokens are real, and what the routers decide is not collected a second time (E14).
        """
        return nullcontext(), self._repeating(self._mask, self._tokens)

    @contextmanager
    def _repeating(self, mask: Tensor | None, tokens: Tensor | None) -> Iterator[None]:
        before = self._mask, self._tokens, self._records
        self._mask, self._tokens, self._records = mask, tokens, None
        try:
            yield
        finally:
            self._mask, self._tokens, self._records = before

    def real_tokens(self, hidden: Tensor) -> Tensor | None:
        """Indices of the tokens that are not padding.

        Args:
            hidden: [R, T, d], a layer's input.

        Returns:
            int64 [M] into the flattened [R * T] tokens, None where all are real.

        Raises:
            ModelError: The mask belongs to a batch of another shape.
        """
        if self._mask is not None and self._mask.shape != hidden.shape[:-1]:
            raise ModelError(
                f"the routers were told of {list(self._mask.shape)} tokens but see {list(hidden.shape[:-1])}: "
                "run the model through ScoringModel, which tells them which tokens are padding"
            )
        return self._tokens

    def add(self, record: RouterRecord) -> None:
        """Takes a router's record in, while recording."""
        if self._records is not None:
            self._records.append(record)


class Router(nn.Module):
    """A linear router without bias, in float32 whatever the model's precision (E17).

    Args:
        width: d.
        num_experts: N.
        top_k: k.
        init_std: Standard deviation of the initial weights.
        jitter: In training the input is multiplied by U(1 - jitter, 1 + jitter). Only the router sees that; the experts
            get the input as it is.
    """

    def __init__(self, width: int, num_experts: int, top_k: int, *, init_std: float, jitter: float) -> None:
        super().__init__()
        self.num_experts, self.top_k, self.jitter = num_experts, top_k, jitter
        self.weight = nn.Parameter(torch.empty(num_experts, width, dtype=torch.float32).normal_(0.0, init_std))

    def forward(self, x: Tensor) -> Tensor:
        """Logits of tokens.

        Args:
            x: [M, d].

        Returns:
            float32 [M, N].
        """
        with torch.autocast(x.device.type, enabled=False):
            x = x.float()
            if self.training and self.jitter > 0:
                x = x * torch.empty_like(x).uniform_(1.0 - self.jitter, 1.0 + self.jitter)
            return nn.functional.linear(x, self.weight)


def choose(router: Router, x: Tensor, recorder: RoutingRecorder) -> tuple[Tensor, Tensor]:
    """Routes tokens and keeps the record.

    Args:
        router: The router.
        x: [M, d].
        recorder: Of the router's model.

    Returns:
        Weights of the chosen experts, float32 [M, k], renormalised so that they add up to 1; and the experts, int64
        [M, k].
    """
    logits = router(x)
    probs = torch.softmax(logits, dim=-1)
    chosen, experts = probs.topk(router.top_k, dim=-1)
    recorder.add(RouterRecord(logits, probs, experts))
    return chosen / chosen.sum(dim=-1, keepdim=True), experts
