"""Scoring a whole split: batches of similar length, results back in the order of the questions.

On several ranks each scores its share and all get the whole result. Every rank runs equally many forward passes, as
sharded parameters are gathered in collectives that all ranks must enter (E3, E13).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from components.data.batching import Batch, batches_by_length, collate
from components.data.prompts import EncodedQuestion
from components.models.calibration_head import CalibrationHead
from components.models.scoring import apply_head, option_scores

LogitsAt = Callable[[Batch], Tensor]
"""A `ScoringModel`, or an engine around one: batch to float32 [P, V]."""

FlcOf = Callable[[Batch], Tensor | None]
"""The router's confidence in each row of the batch just given to `LogitsAt`, [R]; None where there is no router."""


@dataclass(frozen=True)
class SplitScores:
    """Scores of n questions with up to K options.

    Attributes:
        log_probs: float64 [n, K]; -inf where a question has no such option.
        mass: float64 [n]; probability that the options hold together.
        answers: int64 [n]; right options.
        flc: float64 [n]; the router's confidence, None for a model without routers.

    Raises:
        FloatingPointError: A score or a router's confidence is NaN.
    """

    log_probs: NDArray[np.float64]
    mass: NDArray[np.float64]
    answers: NDArray[np.int64]
    flc: NDArray[np.float64] | None = None

    def __post_init__(self) -> None:
        bad = np.isnan(self.log_probs).any(axis=1)
        if self.flc is not None:
            bad = bad | np.isnan(self.flc)
        if bad.any():
            raise FloatingPointError(f"the model scored {bad.sum()} of {len(self.answers)} questions as NaN")


@torch.no_grad()
def score_questions(
    logits_at: LogitsAt,
    head: CalibrationHead | None,
    questions: Sequence[EncodedQuestion],
    *,
    pad_id: int,
    token_budget: int,
    flc_of: FlcOf | None = None,
    device: torch.device | str = "cpu",
    on_progress: Callable[[int], None] | None = None,
) -> SplitScores:
    """Log-probabilities of every option of every question.

    Args:
        logits_at: The model; put it in evaluation mode first.
        head: Calibration head, or None.
        questions: At least one.
        pad_id: Token id that fills rows up.
        token_budget: Most tokens of a batch, padding included.
        flc_of: Called after `logits_at` with the same batch: `ScoringModel.flc` of that model.
        device: Where the model's inputs belong.
        on_progress: Called with the number of questions done since the last call.

    Raises:
        FloatingPointError: A score or a router's confidence is NaN.
    """
    groups = list(batches_by_length(questions, token_budget))
    world = dist.get_world_size() if dist.is_initialized() else 1
    rank = dist.get_rank() if dist.is_initialized() else 0
    width = max(len(q.options) for q in questions)
    log_probs = np.full((len(questions), width), -np.inf)
    mass = np.zeros(len(questions))
    flc: NDArray[np.float64] | None = None
    for start in range(0, len(groups), world):
        mine = start + rank
        indices = groups[mine] if mine < len(groups) else groups[start]
        batch = collate([questions[i] for i in indices], pad_id).to(device)
        scores = option_scores(apply_head(head, logits_at(batch)), batch)
        stated = flc_of(batch) if flc_of is not None else None
        if stated is not None and flc is None:
            flc = np.zeros(len(questions))
        if mine < len(groups):
            log_probs[indices, : scores.log_probs.shape[1]] = scores.log_probs.double().cpu().numpy()
            mass[indices] = scores.mass.double().cpu().numpy()
            if stated is not None and flc is not None:
                flc[indices] = stated.double().cpu().numpy()
        if on_progress is not None:
            on_progress(sum(len(g) for g in groups[start : start + world]))
    if world > 1:
        log_probs, mass, flc = _gather(groups, log_probs, mass, flc, world)
    return SplitScores(log_probs, mass, np.array([q.answer for q in questions]), flc)


def _gather(
    groups: list[list[int]],
    log_probs: NDArray[np.float64],
    mass: NDArray[np.float64],
    flc: NDArray[np.float64] | None,
    world: int,
) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.float64] | None]:
    """Takes each question's row from the rank that scored it."""
    parts = [(log_probs, mass, flc)] * world
    dist.all_gather_object(parts, (log_probs, mass, flc))
    for number, indices in enumerate(groups):
        theirs, their_mass, their_flc = parts[number % world]
        log_probs[indices], mass[indices] = theirs[indices], their_mass[indices]
        if flc is not None and their_flc is not None:
            flc[indices] = their_flc[indices]
    return log_probs, mass, flc
