"""Temperature scaling: one number that makes confidence fit labelled data, without changing an answer.

min over T of the mean NLL of softmax(z / T) (Guo et al. 2017, arXiv 1706.04599). The NLL is convex in 1 / T, so it has
one valley in log T: L-BFGS on log T from 0 finds it, and a slope of one sign at a bound means that it lies beyond.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from components.posthoc.lbfgs import minimise

if TYPE_CHECKING:
    import torch

MIN_TEMPERATURE, MAX_TEMPERATURE = 0.05, 20.0
"""Bounds of T (ours). Data answered without a mistake would drive T to 0, data answered at random to infinity; neither
says more than "as sharp" or "as flat as allowed"."""

_FLAT = 1e-7  # |d NLL / d log T| that counts as a minimum


@dataclass(frozen=True)
class FittedTemperature:
    """A temperature and how it was found.

    Attributes:
        value: T, in [MIN_TEMPERATURE, MAX_TEMPERATURE]; above 1 means the model was over-confident.
        nll_before: Mean NLL at T = 1 on the data fitted, nats.
        nll_after: The same at T = `value`; never above `nll_before`.
        n: Questions fitted on.
        iterations: L-BFGS iterations; 0 when a bound is the answer.
        converged: False when the best T lies beyond a bound (`value` is that bound) or the slope there is not zero.
    """

    value: float
    nll_before: float
    nll_after: float
    n: int
    iterations: int
    converged: bool


def fit_temperature(option_log_probs: NDArray[np.float64], gold: NDArray[np.int64]) -> FittedTemperature:
    """Fits T on labelled questions, in float64.

    Args:
        option_log_probs: Scores of the options in nats, [n, K], n >= 2; -inf where an option is absent.
        gold: Right option of each question, int [n].

    Raises:
        ValueError: Fewer than 2 questions, NaN or +inf, a question without options, gold at an absent option.
    """
    import torch

    check_labelled(option_log_probs, gold)
    scores = torch.as_tensor(np.asarray(option_log_probs, dtype=np.float64))
    absent = scores.isneginf()
    # Shifting by the best option changes no probability and keeps scores / T within range at small T. Absent options
    # get a finite stand-in, since -inf times a factor has no gradient; `_nll` masks them after the division.
    scores = (scores - scores.amax(dim=1, keepdim=True)).masked_fill(absent, 0.0)
    target = torch.as_tensor(np.asarray(gold, dtype=np.int64))

    def nll_and_slope(log_t: float) -> tuple[float, float]:
        at = torch.tensor(log_t, dtype=torch.float64, requires_grad=True)
        loss = _nll(scores, absent, target, at)
        (slope,) = torch.autograd.grad(loss, at)
        return loss.item(), slope.item()

    before, slope_at_one = nll_and_slope(0.0)
    bound = None
    if slope_at_one > 0 and nll_and_slope(math.log(MIN_TEMPERATURE))[1] >= 0:
        bound = MIN_TEMPERATURE
    elif slope_at_one < 0 and nll_and_slope(math.log(MAX_TEMPERATURE))[1] <= 0:
        bound = MAX_TEMPERATURE
    if bound is not None:
        after, _ = nll_and_slope(math.log(bound))
        return FittedTemperature(bound, before, after, len(target), iterations=0, converged=False)
    log_t = torch.zeros((), dtype=torch.float64, requires_grad=True)
    iterations = minimise(log_t, lambda: _nll(scores, absent, target, log_t), tolerance_grad=1e-12)
    after, slope = nll_and_slope(log_t.item())
    return FittedTemperature(
        math.exp(log_t.item()), before, after, len(target), iterations, converged=abs(slope) < _FLAT
    )


def _nll(scores: torch.Tensor, absent: torch.Tensor, target: torch.Tensor, log_t: torch.Tensor) -> torch.Tensor:
    """Mean -log softmax(scores / T)[gold] over the options present."""
    import torch

    scaled = (scores * torch.exp(-log_t)).masked_fill(absent, -math.inf)
    return torch.nn.functional.cross_entropy(scaled, target)


def check_labelled(option_log_probs: NDArray[np.float64], gold: NDArray[np.int64]) -> None:
    """Refuses labelled questions that nothing can be fitted on.

    Args:
        option_log_probs: Scores of the options, [n, K]; -inf where an option is absent.
        gold: Right option of each question, int [n].

    Raises:
        ValueError: Fewer than 2 questions, NaN or +inf, a question without options, gold at an absent option.
    """
    scores, target = np.asarray(option_log_probs, dtype=np.float64), np.asarray(gold)
    if scores.ndim != 2 or target.shape != (len(scores),):
        raise ValueError(f"option_log_probs of shape {scores.shape} and gold of shape {target.shape} do not fit")
    if len(scores) < 2:
        raise ValueError(f"a fit needs at least 2 labelled questions, not {len(scores)}")
    if not np.issubdtype(target.dtype, np.integer):
        raise ValueError(f"gold must hold integers (0-based option indices), not {target.dtype}")
    problems = {
        "a log-probability is NaN or +inf": (np.isnan(scores) | np.isposinf(scores)).any(axis=1),
        "all its options are absent (-inf)": np.isneginf(scores).all(axis=1),
        "gold names no option": (target < 0) | (target >= scores.shape[1]),
    }
    for problem, rows in problems.items():
        if rows.any():
            raise ValueError(f"question {int(np.argmax(rows))}: {problem}")
    lacking = np.isneginf(scores[np.arange(len(target)), target])
    if lacking.any():
        raise ValueError(f"question {int(np.argmax(lacking))}: gold is an absent option")
