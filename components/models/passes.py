"""Answers from several forward passes: dropout left on, weights drawn from a posterior, one adapter after the other.

Each pass is a `LogitsAt` of its own over one copy of the model. Noise is a function of the run's seed, the pass and the
batch alone: however often and in whatever process a batch is scored, it is scored alike.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor, nn

from components.data.batching import Batch, batches_by_length
from components.data.prompts import EncodedQuestion
from components.models.averaging import Combine
from components.models.blob import blob_layers
from components.models.score_questions import LogitsAt, SplitScores


class NoisyPass:
    """A pass whose noise is reproducible.

    Args:
        logits_at: The model, which draws from torch's global generator.
        seed: The run's.
        number: Of the pass.
    """

    def __init__(self, logits_at: LogitsAt, seed: int, number: int) -> None:
        self.logits_at, self.seed, self.number = logits_at, seed, number

    def __call__(self, batch: Batch) -> Tensor:
        """See `LogitsAt`."""
        with seeded(noise_seed(self.seed, self.number, batch), batch.input_ids.device):
            return self.logits_at(batch)


class MemberPass:
    """A pass with one member's weights in the adapter that all members share.

    Args:
        logits_at: The model.
        places: The adapter's parameters by name.
        values: The member's values by the same names.
    """

    def __init__(self, logits_at: LogitsAt, places: Mapping[str, nn.Parameter], values: Mapping[str, Tensor]) -> None:
        self.logits_at = logits_at
        self._places: list[Tensor] = list(places.values())
        self._values = [values[name].to(p.device) for name, p in places.items()]

    @torch.no_grad()
    def __call__(self, batch: Batch) -> Tensor:
        """See `LogitsAt`."""
        torch._foreach_copy_(self._places, self._values)
        return self.logits_at(batch)


def noise_seed(seed: int, number: int, batch: Batch) -> int:
    """Seed of a pass's noise, in [0, 2^63).

    Args:
        seed: The run's.
        number: Of the pass.
        batch: What is scored; its tokens count.
    """
    tokens = batch.input_ids.cpu().numpy()
    digest = hashlib.sha256(f"{seed} {number} {tokens.shape}".encode() + tokens.tobytes()).digest()
    return int.from_bytes(digest[:8], "big") >> 1


@contextmanager
def seeded(seed: int, device: torch.device) -> Iterator[None]:
    """Seeds torch's generators inside the block; afterwards they are as they were."""
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.manual_seed(seed)
        yield


def switch_dropout_on(model: nn.Module) -> bool:
    """Leaves the adapter's dropout on in evaluation mode; the base model's own stays off.

    Args:
        model: With a LoRA adapter of PEFT, in evaluation mode.

    Returns:
        Whether there is any: at p = 0 every pass is the same.
    """
    found = [m for name, m in model.named_modules() if ".lora_dropout." in f".{name}" and isinstance(m, nn.Dropout)]
    for module in found:
        module.train()
    return any(module.p > 0 for module in found)


def switch_sampling_on(model: nn.Module) -> bool:
    """Has BLoB's layers draw noise in evaluation mode.

    Args:
        model: In evaluation mode.

    Returns:
        Whether there are such layers.
    """
    layers = list(blob_layers(model))
    for layer in layers:
        layer.sampling = True
    return bool(layers)


def score_by_passes(
    score: Callable[[LogitsAt, Sequence[EncodedQuestion]], SplitScores],
    passes: Sequence[LogitsAt],
    combine: Combine,
    questions: Sequence[EncodedQuestion],
    *,
    token_budget: int,
    on_progress: Callable[[int], None] | None = None,
) -> SplitScores:
    """Scores every question by each pass and combines them, one batch after the other.

    Args:
        score: Scores a batch's questions by one pass; `score_questions` with the rest of its arguments.
        passes: At least one.
        combine: From `averaging.py`.
        questions: At least one.
        token_budget: Most tokens of a batch, padding included, as `score` takes it.
        on_progress: Called with the number of questions done since the last call.

    Raises:
        FloatingPointError: A score is NaN.
    """
    log_probs = np.full((len(questions), max(len(q.options) for q in questions)), -np.inf)
    mass, flc = np.zeros(len(questions)), np.zeros(len(questions))
    with_flc = False
    for indices in batches_by_length(questions, token_budget):
        batch = [questions[i] for i in indices]
        found = combine([score(each, batch) for each in passes])
        log_probs[indices, : found.log_probs.shape[1]], mass[indices] = found.log_probs, found.mass
        with_flc = found.flc is not None
        if found.flc is not None:
            flc[indices] = found.flc
        if on_progress is not None:
            on_progress(len(batch))
    return SplitScores(log_probs, mass, np.array([q.answer for q in questions]), flc if with_flc else None)
