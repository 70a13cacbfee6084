"""Encoded questions to tensors. A row holds the prompt once and its options side by side behind it.

Options do not see one another (a block mask) and each continues the prompt's positions, so one row gives the same
numbers as one row per option, for about a third of the tokens. Nothing here depends on the padding side.

Shape letters: R rows, T tokens a row, P scored positions, E entries (position, token), K options of the widest row.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from itertools import pairwise
from typing import Literal

import torch
from torch import Tensor

from components.data.prompts import EncodedQuestion

PROMPT, PADDING = 0, -1
ENOUGH_TOKENS = 512
"""From here on a forward pass costs about as much a token as in larger batches, on two CPU cores."""
PADDING_SHARE = 0.05


@dataclass
class Batch:
    """Tensors of one forward pass.

    Attributes:
        input_ids: int64 [R, T].
        segments: int64 [R, T]; 0 prompt, k + 1 option k, -1 padding.
        position_ids: int64 [R, T].
        positions: int64 [P]; indices into the flattened [R * T] tokens whose logits are needed.
        entry_position: int64 [E]; index into `positions`.
        entry_token: int64 [E]; the token scored there.
        entry_slot: int64 [E]; row * K + option that the log-probability is added to.
        option_mask: bool [R, K]; options that exist.
        answers: int64 [R]; right option's index.
        single_option: Whether no row holds more than one option, so that plain causal attention is right.
    """

    input_ids: Tensor
    segments: Tensor
    position_ids: Tensor
    positions: Tensor
    entry_position: Tensor
    entry_token: Tensor
    entry_slot: Tensor
    option_mask: Tensor
    answers: Tensor
    single_option: bool

    def to(self, device: torch.device | str) -> Batch:
        """The batch on another device."""
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        tensors = {name: v.to(device, non_blocking=True) for name, v in values.items() if isinstance(v, Tensor)}
        return replace(self, **tensors)  # type: ignore[arg-type]  # the one field that is no tensor is not among them

    def attention_mask(self, dtype: torch.dtype) -> Tensor:
        """What the model's attention is given.

        Returns:
            int64 [R, T] (1 token, 0 padding) where rows hold one option at most, else the additive block mask
            [R, 1, T, T] in `dtype`: 0 where attention is allowed, the dtype's minimum elsewhere.
        """
        real = self.segments != PADDING
        if self.single_option:
            return real.long()
        length = self.segments.shape[1]
        causal = torch.ones(length, length, dtype=torch.bool, device=self.segments.device).tril()
        key, query = self.segments[:, None, :], self.segments[:, :, None]
        allowed = causal & real[:, None, :] & ((key == PROMPT) | (key == query))
        # A padding token attends to itself: a row without any allowed key would be NaN.
        allowed |= torch.eye(length, dtype=torch.bool, device=allowed.device)
        mask = torch.zeros(allowed.shape, dtype=dtype, device=allowed.device)
        return mask.masked_fill_(~allowed, torch.finfo(dtype).min)[:, None]


@dataclass
class _Row:
    tokens: list[int]
    segments: list[int]
    position_ids: list[int]
    scored: list[tuple[int, int, int]]  # (index of the predicting token, scored token, option)


def _row(question: EncodedQuestion, options: Sequence[int]) -> _Row:
    prompt = list(question.prompt)
    row = _Row(prompt.copy(), [PROMPT] * len(prompt), list(range(len(prompt))), [])
    for slot, k in enumerate(options):
        option = question.options[k]
        row.scored.append((len(prompt) - 1, option[0], slot))
        for offset, (token, target) in enumerate(pairwise(option)):
            row.scored.append((len(row.tokens), target, slot))
            row.tokens.append(token)
            row.segments.append(slot + 1)
            row.position_ids.append(len(prompt) + offset)
    return row


def collate(
    questions: Sequence[EncodedQuestion],
    pad_id: int,
    options: Literal["all", "gold"] = "all",
    padding_side: Literal["left", "right"] = "right",
) -> Batch:
    """Builds a batch.

    Args:
        questions: At least one.
        pad_id: Token id that fills rows up; never attended to.
        options: `all` scores every option; `gold` only the right one (training on the answer).
        padding_side: Where rows are filled up; the scores do not depend on it.

    Returns:
        The batch; with `gold` it has K = 1 and `answers` all zero.
    """
    rows = [_row(q, [q.answer] if options == "gold" else range(len(q.options))) for q in questions]
    length = max(len(row.tokens) for row in rows)
    slots = 1 if options == "gold" else max(len(q.options) for q in questions)
    input_ids = torch.full((len(rows), length), pad_id)
    segments = torch.full((len(rows), length), PADDING)
    position_ids = torch.zeros((len(rows), length), dtype=torch.long)
    option_mask = torch.zeros((len(rows), slots), dtype=torch.bool)
    places: dict[int, int] = {}
    entries: list[tuple[int, int, int]] = []
    for r, row in enumerate(rows):
        start = length - len(row.tokens) if padding_side == "left" else 0
        stop = start + len(row.tokens)
        input_ids[r, start:stop] = torch.tensor(row.tokens)
        segments[r, start:stop] = torch.tensor(row.segments)
        position_ids[r, start:stop] = torch.tensor(row.position_ids)
        for index, token, slot in row.scored:
            place = places.setdefault(r * length + start + index, len(places))
            entries.append((place, token, r * slots + slot))
            option_mask[r, slot] = True
    columns = torch.tensor(entries).T
    return Batch(
        input_ids=input_ids,
        segments=segments,
        position_ids=position_ids,
        positions=torch.tensor(list(places)),
        entry_position=columns[0],
        entry_token=columns[1],
        entry_slot=columns[2],
        option_mask=option_mask,
        answers=torch.tensor([0 if options == "gold" else q.answer for q in questions]),
        single_option=bool(segments.max() <= 1),
    )


def batches_by_length(questions: Sequence[EncodedQuestion], token_budget: int) -> Iterator[list[int]]:
    """Groups questions of similar length, longest first so that memory problems show at once.

    A batch ends where the budget does, or once it has `ENOUGH_TOKENS` where one row more would make more than
    `PADDING_SHARE` of it padding: a few smaller batches cost less than computing what nobody reads. A batch's own
    questions make the same batch again.

    Args:
        questions: Encoded questions.
        token_budget: Most tokens of a batch, padding included; a single longer row still makes a batch.

    Yields:
        Indices into `questions`; each index exactly once.
    """
    order = sorted(range(len(questions)), key=lambda i: (-questions[i].packed_length, i))
    group: list[int] = []
    real = 0
    for i in order:
        length = questions[i].packed_length
        padded = (questions[group[0]].packed_length if group else length) * (len(group) + 1)
        wasteful = real >= ENOUGH_TOKENS and real + length < (1 - PADDING_SHARE) * padded
        if group and (padded > token_budget or wasteful):
            yield group
            group, real = [], 0
        group.append(i)
        real += length
    if group:
        yield group


class StepSampler:
    """Which questions a step sees: a pure function of (seed, step), so a resumed run continues exactly.

    Epochs are seeded permutations laid end to end; a batch may span two epochs and every question is seen equally
    often.
    """

    def __init__(self, size: int, batch_size: int, seed: int) -> None:
        if size < 1:
            raise ValueError("cannot draw batches from an empty split")
        self.size, self.batch_size, self.seed = size, batch_size, seed
        self._epochs: dict[int, list[int]] = {}

    def _epoch(self, number: int) -> list[int]:
        if number not in self._epochs:
            generator = torch.Generator().manual_seed(self.seed * 1_000_003 + number)
            self._epochs = {number: torch.randperm(self.size, generator=generator).tolist()} | {
                k: v for k, v in self._epochs.items() if k == number - 1
            }
        return self._epochs[number]

    def indices(self, step: int) -> list[int]:
        """Indices of the whole (global) batch of a step, counted from 0."""
        start = step * self.batch_size
        return [self._epoch(i // self.size)[i % self.size] for i in range(start, start + self.batch_size)]
