"""Decoding: the prompt is read once for all of its answers, and an answer that has ended leaves the batch.

With n samples a question, `transformers.generate` reads each prompt n times and computes every row until the longest
answer of the batch has ended; of short answers that is most of the work.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from components.models.calibration_head import CalibrationHead
from components.models.scoring import apply_head

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class Decoded:
    """One answer.

    Attributes:
        tokens: What was generated, the token that ended it included.
        log_prob: Log-probability in nats of all of them under the calibrated distribution.
    """

    tokens: list[int]
    log_prob: float


class LineEnds:
    """Ends an answer at an end-of-sequence token, or at a token with a line's end in it once the answer says anything.

    Args:
        tokenizer: Says which tokens have one.
        stops: End-of-sequence tokens.
        vocabulary: V, the width of the logits.
        device: Where the tokens are.

    Attributes:
        speaks: Which tokens are more than blanks, bool [V].
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, stops: Sequence[int], vocabulary: int, device: str = "cpu"
    ) -> None:
        known = len(tokenizer)
        texts = tokenizer.batch_decode([[i] for i in range(min(known, vocabulary))], skip_special_tokens=True)
        self._breaks, self._stops, self.speaks = torch.zeros(3, vocabulary, dtype=torch.bool, device=device)
        self._breaks[: len(texts)] = torch.tensor(["\n" in text for text in texts], device=device)
        self.speaks[: len(texts)] = torch.tensor([bool(text.strip()) for text in texts], device=device)
        self._stops[list(stops)] = True

    def at(self, tokens: Tensor, spoke: Tensor) -> Tensor:
        """Which rows end, bool [R].

        Args:
            tokens: The newest of each row, int64 [R].
            spoke: Whether a row says anything, these tokens included, bool [R].
        """
        return self._stops[tokens] | (self._breaks[tokens] & spoke)


@torch.no_grad()
def decode(
    model: nn.Module,
    head: CalibrationHead | None,
    prompts: Sequence[Sequence[int]],
    owners: Sequence[int],
    streams: Sequence[torch.Generator | None],
    ends: LineEnds,
    *,
    max_new_tokens: int,
    pad_id: int,
    device: str = "cpu",
) -> list[Decoded]:
    """Generates R answers side by side.

    Args:
        model: A `transformers` causal language model on `device`, with or without an adapter, in evaluation mode.
        head: Its calibration head, or None.
        prompts: Token ids of each question.
        owners: The prompt that each of the R answers continues.
        streams: Random numbers of each answer; None for the greedy one.
        ends: Where an answer ends.
        max_new_tokens: Where an answer that does not end is cut.
        pad_id: Token id that fills prompts up.
        device: Where the model is.

    Raises:
        FloatingPointError: A log-probability is NaN.
    """
    tokens, mask = _left_padded(prompts, pad_id, device)
    out: Any = model(
        input_ids=tokens, attention_mask=mask, position_ids=_positions(mask), use_cache=True, logits_to_keep=1
    )
    of = torch.tensor(owners, device=device)
    cache = out.past_key_values
    cache.batch_select_indices(of)
    logits, mask = out.logits[:, -1].float()[of], mask[of]
    alive, spoke = list(range(len(owners))), torch.zeros(len(owners), dtype=torch.bool, device=device)
    written: list[list[int]] = [[] for _ in owners]
    sums = [0.0] * len(owners)
    for number in range(max_new_tokens):
        chosen, log_probs = _choose(apply_head(head, logits), [streams[row] for row in alive])
        spoke = spoke | ends.speaks[chosen]
        for row, token, value in zip(alive, chosen.tolist(), log_probs.tolist(), strict=True):
            written[row].append(token)
            sums[row] += value
        going = (~ends.at(chosen, spoke)).nonzero()[:, 0]
        if not len(going) or number + 1 == max_new_tokens:
            break
        if len(going) < len(alive):
            alive = [alive[i] for i in going.tolist()]
            chosen, spoke, mask = chosen[going], spoke[going], mask[going]
            cache.batch_select_indices(going)
        position = mask.sum(dim=1, keepdim=True)
        mask = torch.cat([mask, torch.ones_like(mask[:, :1])], dim=1)
        out = model(
            input_ids=chosen[:, None],
            attention_mask=mask,
            position_ids=position,
            past_key_values=cache,
            use_cache=True,
        )
        logits = out.logits[:, -1].float()
    if any(value != value for value in sums):
        raise FloatingPointError("the model gave a generated token the log-probability NaN")
    return [Decoded(own, value) for own, value in zip(written, sums, strict=True)]


def _left_padded(prompts: Sequence[Sequence[int]], pad_id: int, device: str) -> tuple[Tensor, Tensor]:
    """Tokens and mask, int64 [Q, T]: every prompt ends in the last column, where the first answer token is read."""
    width = max(len(prompt) for prompt in prompts)
    tokens = torch.tensor([[pad_id] * (width - len(prompt)) + list(prompt) for prompt in prompts])
    mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    return tokens.to(device), mask.to(device)


def _positions(mask: Tensor) -> Tensor:
    return (mask.cumsum(dim=1) - 1).clamp(min=0)


def _choose(scores: Tensor, streams: Sequence[torch.Generator | None]) -> tuple[Tensor, Tensor]:
    """Each row's next token [R] and its log-probability, float64 [R]: the most probable one, or a draw.

    A draw is the argmax of log p - log E with E exponentially distributed, which is distributed as p. In float64: among
    50,000 tokens, float32 would draw an E of exactly 0 now and then.

    Args:
        scores: float32 [R, V], calibration head already applied.
        streams: Random numbers of each row, None where its most probable token is wanted.
    """
    log_probs = scores.log_softmax(dim=-1)
    perturbed = log_probs.double()
    for row, stream in enumerate(streams):
        if stream is not None:
            # As `exponential_`, which is five times slower; a uniform number of 0 makes E infinite: never chosen.
            uniform = torch.rand(len(perturbed[row]), generator=stream, dtype=torch.float64, device=scores.device)
            perturbed[row] -= uniform.log_().neg_().log_()
    chosen = perturbed.argmax(dim=-1)
    return chosen, log_probs.gather(1, chosen[:, None])[:, 0].double()
