"""CFT's calibration loss: the confidence of each question is pulled to the accuracy of its confidence bin.

Calibration-aware fine-tuning (Xiao et al., arXiv 2505.01997). Before training, the E-step measures how often the base
model is right in each of 10 bins of its confidence. In training, the M-step asks that the largest probability among a
question's options equal the accuracy of the bin that it now lies in, and the others share the rest in their order.

Read off the public code: the bins, the targets, division by the E-step's counts, and that gradient flows through the
targets too. Ours: a question may have any number of options; the last bin, [0.9, 1], which the public loop leaves out,
counts; a bin that held no question in the E-step takes the accuracy and count of the nearest one that did (of two
equally near, the lower one), since what training pushes into such a bin would go uncorrected otherwise.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

BINS = 10
"""Of equal width; [k/10, (k+1)/10), the last one with its upper end."""


@dataclass(frozen=True)
class BinAccuracy:
    """What the E-step found.

    Attributes:
        correct: Questions answered right, by bin.
        count: Questions, by bin; at least one in all.
    """

    correct: tuple[int, ...]
    count: tuple[int, ...]

    def __post_init__(self) -> None:
        """Checks that a bin can be found for every confidence."""
        if len(self.correct) != BINS or len(self.count) != BINS or sum(self.count) < 1:
            raise ValueError(f"needs {BINS} bins with a question in at least one, got {self.count}")

    @classmethod
    def measure(cls, log_probs: NDArray[np.float64], answers: NDArray[np.int64]) -> BinAccuracy:
        """The E-step.

        Args:
            log_probs: [n, K], of the base model; -inf where a question has no such option.
            answers: [n], right options.
        """
        p = np.exp(log_probs - np.logaddexp.reduce(log_probs, axis=1, keepdims=True))
        index = np.minimum((p.max(axis=1) * BINS).astype(np.int64), BINS - 1)
        right = p.argmax(axis=1) == answers
        correct, count = (np.bincount(i, minlength=BINS) for i in (index[right], index))
        return cls(tuple(correct.tolist()), tuple(count.tolist()))

    @classmethod
    def from_dict(cls, written: Mapping[str, Any]) -> BinAccuracy:
        """From what `dataclasses.asdict` made, by way of JSON."""
        return cls(tuple(written["correct"]), tuple(written["count"]))

    def tensors(self, like: Tensor) -> tuple[Tensor, Tensor]:
        """Accuracy in [0, 1] and count >= 1 of each bin [10], empty ones filled from the nearest; typed as `like`."""
        source = [self._nearest(b) for b in range(BINS)]
        accuracy = [self.correct[b] / self.count[b] for b in source]
        count = [float(self.count[b]) for b in source]
        return like.new_tensor(accuracy), like.new_tensor(count)

    def _nearest(self, here: int) -> int:
        """The filled bin nearest to one, itself if it is; of two the lower."""
        filled = (b for b in range(BINS) if self.count[b] > 0)
        return min(filled, key=lambda b: (abs(b - here), b))


def targets(log_p: Tensor, exists: Tensor, accuracy: Tensor) -> Tensor:
    """What each option's probability is asked to be.

    The most probable option gets acc. Of the K - 1 others each gets t_j = a tanh(gamma p_j) + a with
    gamma = ln 3 / (p_2nd (1 - acc)) and a = (1 - acc) / (sum_j tanh(gamma p_j) + K - 1): their order is kept, and they
    sum to 1 - acc. The public code has K = 4. At acc = 1 the others get 0. Where they all have probability 0,
    gamma p_j counts as 0 and they share alike.

    Args:
        log_p: [R, K], log-probabilities of a row's options, normalised over them; -inf where there is no such option.
        exists: bool [R, K], options that there are; at least two in a row.
        accuracy: [R], in [0, 1], constant.

    Returns:
        [R, K], each row summing to 1; 0 where there is no option. Gradient flows to `log_p`.
    """
    best = log_p.argmax(dim=-1, keepdim=True)
    is_best = torch.zeros_like(log_p, dtype=torch.bool).scatter(-1, best, True)
    other = exists & ~is_best
    rest = (1.0 - accuracy)[:, None]
    second = log_p.masked_fill(~other, -torch.inf).max(dim=-1, keepdim=True).values
    # p_j / p_2nd through logarithms: exact where both probabilities are too small for their type.
    ratio = torch.where(other & (log_p > -torch.inf), log_p - second, -torch.inf).exp()
    tiny = torch.finfo(log_p.dtype).tiny
    raised = torch.where(other, torch.tanh(math.log(3.0) * ratio / rest.clamp(min=tiny)) + 1.0, 0.0)
    return torch.where(is_best, accuracy[:, None], rest * raised / raised.sum(dim=-1, keepdim=True))


def bin_calibration_loss_sum(scores: Tensor, exists: Tensor, bins: BinAccuracy) -> Tensor:
    """Sum over rows of 1/n_b * sum_j (p_j - t_j)^2, b being the bin of the row's confidence max_j p_j at present.

    Args:
        scores: [R, K], log-probabilities of the options, not normalised; -inf where there is no such option.
        exists: bool [R, K], options that there are.
        bins: From the E-step; n_b is its count.

    Returns:
        Scalar, between 0 and 2 R. Over all questions that the E-step has seen it is the sum over bins of a mean.
    """
    log_p = torch.log_softmax(scores, dim=-1)
    p = log_p.exp()
    index = (p.detach().max(dim=-1).values * BINS).long().clamp(max=BINS - 1)
    accuracy, count = (values[index] for values in bins.tensors(p))
    return ((p - targets(log_p, exists, accuracy)).square().sum(dim=-1) / count).sum()
