"""Which questions a step sees, and its share of the randomness: functions of (seed, step, rank) alone.

So a resumed run continues exactly, and a rank needs no word from the others about the data.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch

from components.data.batching import Batch, StepSampler, collate
from components.data.prompts import EncodedQuestion


@dataclass(frozen=True)
class Feed:
    """Deals one split out to steps and ranks.

    Attributes:
        questions: The encoded split, the same on every rank.
        batch_size: Questions a step over all ranks.
        options: `gold` for answers to learn, `all` for options to compare.
        seed: Seeds the order.
        pad_id: Token id that fills rows up.
        rank, world_size: This process and how many there are.
        device: Where batches belong.
    """

    questions: Sequence[EncodedQuestion]
    batch_size: int
    options: Literal["gold", "all"]
    seed: int
    pad_id: int
    rank: int = 0
    world_size: int = 1
    device: torch.device | str = "cpu"
    _sampler: StepSampler = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_sampler", StepSampler(len(self.questions), self.batch_size, self.seed))

    def indices(self, step: int) -> list[int]:
        """Indices of the questions of a step's whole batch."""
        return self._sampler.indices(step)

    def share(self, step: int) -> Batch:
        """This rank's part of a step's batch."""
        mine = self.indices(step)[self.rank :: self.world_size]
        return collate([self.questions[i] for i in mine], self.pad_id, self.options).to(self.device)

    def global_answer_tokens(self, step: int) -> int:
        """Answer tokens in the step's whole batch, known to every rank without asking."""
        return sum(len(q.options[q.answer]) for q in (self.questions[i] for i in self.indices(step)))

    def global_question_tokens(self, step: int) -> int:
        """Tokens of the prompts in the step's whole batch but the first of each, which nothing predicts."""
        return sum(len(self.questions[i].prompt) - 1 for i in self.indices(step))


def seed_dropout(seed: int, step: int, rank: int) -> None:
    """Makes dropout a function of (seed, step, rank)."""
    torch.manual_seed((seed * 1_000_003 + step) * 1_009 + rank)


def member_seed(seed: int, member: int | None) -> int:
    """Seed of the initial weights: the run's own for one adapter and for an ensemble's first member."""
    return seed + 1_000_003 * (member or 0)
