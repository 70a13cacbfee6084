"""Vector scaling: a scale and an offset for each position among the options (Guo et al. 2017, arXiv 1706.04599).

With z the log-probabilities over the options present, in the order the model was shown them, the new scores are

    z'_k = (exp(d_k) / T) z_k + b_k,        T from temperature scaling, and then
    min over d, b of  mean NLL of softmax(z') + (1 / 2n) sum_k (d_k^2 + b_k^2).

What it can mend beyond a temperature is a liking for a position: "A" is chosen too often. By letter that is a real
failing of models. Where options are scored by their own text, and shuffled, a position means nothing, and what the fit
finds there is chance: read the distance from plain temperature scaling as a measure of it.

The penalty is a standard normal prior on each number (ours). It weighs less the more questions there are, and makes the
fit well posed: a position that is never right, or that few questions have, stays near the temperature, and so does all
of it where answers are perfectly separated. Scores are normalised first, since a constant added to all options would
otherwise matter. Unlike the other recalibrations it may change answers.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import ArrayLike, NDArray

from components.posthoc.lbfgs import minimise
from components.posthoc.temperature import check_labelled, fit_temperature

if TYPE_CHECKING:
    import torch

FloatArray = NDArray[np.float64]

_FLAT = 1e-6  # largest entry of the gradient that counts as a minimum


@dataclass(frozen=True)
class VectorScaling:
    """Scales and offsets, in plain numbers that JSON holds, and how they were found.

    Attributes:
        scales: exp(d_k) / T of each position, K numbers above 0.
        offsets: b_k of each position in nats, K numbers.
        temperature: T, which stands for a position beyond K.
        nll_before: Mean NLL of the scores as they were on the data fitted, nats.
        nll_tempered: The same with T alone.
        nll_after: The same with scales and offsets; never above the other two.
        n: Questions fitted on.
        iterations: L-BFGS iterations.
        converged: Whether the gradient came to nothing.
    """

    scales: list[float]
    offsets: list[float]
    temperature: float
    nll_before: float
    nll_tempered: float
    nll_after: float
    n: int
    iterations: int
    converged: bool

    def of(self, option_log_probs: ArrayLike) -> FloatArray:
        """New scores of questions, [n, K'], -inf where an option is absent.

        Args:
            option_log_probs: Scores in nats, [n, K'], up to a constant per question; K' need not be that of the fit.
        """
        scores = np.asarray(option_log_probs, dtype=np.float64)
        width, fitted = scores.shape[1], min(scores.shape[1], len(self.scales))
        scales, offsets = np.full(width, 1.0 / self.temperature), np.zeros(width)
        scales[:fitted], offsets[:fitted] = self.scales[:fitted], self.offsets[:fitted]
        return _normalised(scores) * scales + offsets


def fit_vector_scaling(option_log_probs: FloatArray, gold: NDArray[np.int64]) -> VectorScaling:
    """Fits scales and offsets on labelled questions, in float64.

    Args:
        option_log_probs: Scores of the options in nats, [n, K], n >= 2; -inf where an option is absent.
        gold: Right option of each question, int [n].

    Raises:
        ValueError: Fewer than 2 questions, NaN or +inf, a question without options, gold at an absent option.
    """
    import torch

    check_labelled(option_log_probs, gold)
    first = fit_temperature(option_log_probs, gold)
    scores = torch.as_tensor(_normalised(np.asarray(option_log_probs, dtype=np.float64)))
    absent = scores.isneginf()
    tempered = scores.masked_fill(absent, 0.0) / first.value
    target = torch.as_tensor(np.asarray(gold, dtype=np.int64))
    parameters = torch.zeros((2, scores.shape[1]), dtype=torch.float64, requires_grad=True)
    # From d = b = 0: the temperature alone.
    iterations = minimise(parameters, lambda: _penalised(parameters, tempered, absent, target), tolerance_grad=1e-10)
    slope = torch.autograd.grad(_penalised(parameters, tempered, absent, target), parameters)[0]
    with torch.no_grad():
        after = float(_nll(parameters, tempered, absent, target))
        log_scales, offsets = parameters.detach()
    return VectorScaling(
        scales=(log_scales.exp() / first.value).tolist(),
        offsets=offsets.tolist(),
        temperature=first.value,
        nll_before=first.nll_before,
        nll_tempered=first.nll_after,
        nll_after=after,
        n=len(target),
        iterations=iterations,
        converged=float(slope.abs().max()) < _FLAT,
    )


def _penalised(
    parameters: torch.Tensor, tempered: torch.Tensor, absent: torch.Tensor, target: torch.Tensor
) -> torch.Tensor:
    return _nll(parameters, tempered, absent, target) + parameters.square().sum() / (2 * len(target))


def _nll(parameters: torch.Tensor, tempered: torch.Tensor, absent: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Mean -log softmax(z')[gold] over the options present; `parameters` holds d and b, [2, K]."""
    import torch

    scaled = (tempered * parameters[0].exp() + parameters[1]).masked_fill(absent, -math.inf)
    return torch.nn.functional.cross_entropy(scaled, target)


def _normalised(scores: FloatArray) -> FloatArray:
    """Log-softmax over the options present, [n, K]; -inf where an option is absent."""
    shifted = scores - scores.max(axis=1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))
