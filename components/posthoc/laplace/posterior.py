"""A Gaussian posterior of LoRA weights: Kronecker-factored curvature of each matrix, low rank on the wide side.

For a matrix with d entries on its wide side and r on its narrow one, the curvature of the negative log-likelihood is
taken for  U diag(l) U^T  (x)  V diag(m) V^T,  U [d, k], V [r, r]. With prior variance p the posterior's covariance is

    p I - sum_ij  p w_ij (u_i v_j)(u_i v_j)^T,        w_ij = p c_ij / (1 + p c_ij),   c_ij = l_i m_j,

which is what `I + p (B^T B) (x) (L L^T)` gives by Woodbury's identity, written in its eigenvectors. Matrices are
independent of one another. The evidence of p, up to a constant (Yang et al. 2024, arXiv 2308.13111, with the signs as
derived):

    log-likelihood - |theta|^2 / (2 p) - 1/2 sum_ij log(1 + p c_ij)

It is strictly concave in log p, so its one maximum is found by halving an interval of its slope.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from components.errors import ModelError

_BOUND = 60.0  # of |log p|
_HALVINGS = 100


@dataclass(frozen=True, eq=False)
class Block:
    """The curvature of one LoRA matrix, in eigenvectors.

    Attributes:
        wide_vectors: U, float32 [d, k], orthonormal columns.
        wide_values: l, float32 [k], not negative.
        narrow_vectors: V, float32 [r, r], orthonormal columns.
        narrow_values: m, float32 [r], not negative.
    """

    wide_vectors: Tensor
    wide_values: Tensor
    narrow_vectors: Tensor
    narrow_values: Tensor

    @property
    def curvature(self) -> Tensor:
        """c, float64 [k, r]."""
        return torch.outer(self.wide_values.double(), self.narrow_values.double())

    def to(self, device: torch.device | str) -> Block:
        """The block on another device."""
        return Block(**{name: tensor.to(device) for name, tensor in vars(self).items()})


@dataclass(frozen=True, eq=False)
class Posterior:
    """The posterior of all LoRA matrices of a model.

    Attributes:
        blocks: By the matrices' names, see `layers.LoraLayer`.
        prior_variance: p.
        samples: Draws of option scores that predictions are averaged over.
        n: Questions it was fitted on.
        log_likelihood: Of their right options, nats, summed.
        squared_norm: |theta|^2 of all the matrices.
    """

    blocks: Mapping[str, Block]
    prior_variance: float
    samples: int
    n: int
    log_likelihood: float
    squared_norm: float
    log_evidence: float = field(init=False)

    def __post_init__(self) -> None:
        """Works out the evidence of the prior variance."""
        evidence = log_evidence(
            math.log(self.prior_variance), curvature_of(self.blocks), self.squared_norm, self.log_likelihood
        )
        object.__setattr__(self, "log_evidence", float(evidence))

    def to(self, device: torch.device | str) -> dict[str, Block]:
        """Its blocks on a device."""
        return {name: block.to(device) for name, block in self.blocks.items()}

    @property
    def figures(self) -> dict[str, float | int]:
        """What is worth keeping with a run."""
        return {
            "prior_variance": self.prior_variance,
            "log_evidence": self.log_evidence,
            "log_likelihood": self.log_likelihood,
            "squared_norm": self.squared_norm,
            "n": self.n,
            "samples": self.samples,
        }


def curvature_of(blocks: Mapping[str, Block]) -> Tensor:
    """All c_ij of all matrices, float64 [c]."""
    return torch.cat([block.curvature.flatten().cpu() for block in blocks.values()])


def log_evidence(
    log_prior_variance: float | Tensor, curvature: Tensor, squared_norm: float, log_likelihood: float
) -> Tensor:
    """Log evidence of a prior variance, up to a constant; differentiable in `log_prior_variance`.

    Args:
        log_prior_variance: log p.
        curvature: All c_ij, float64 [c].
        squared_norm: |theta|^2.
        log_likelihood: At theta, nats.
    """
    log_p = torch.as_tensor(log_prior_variance, dtype=torch.float64)
    shrink = squared_norm * torch.exp(-log_p) / 2
    return log_likelihood - shrink - torch.log1p(torch.exp(log_p) * curvature).sum() / 2


def evidence_slope(log_prior_variance: float, curvature: Tensor, squared_norm: float) -> float:
    """Derivative of the log evidence in log p; falls strictly."""
    explained = torch.exp(torch.tensor(log_prior_variance, dtype=torch.float64)) * curvature
    return squared_norm * math.exp(-log_prior_variance) / 2 - float((explained / (1 + explained)).sum()) / 2


def best_prior_variance(curvature: Tensor, squared_norm: float) -> float:
    """The p of highest evidence.

    Args:
        curvature: All c_ij, float64 [c].
        squared_norm: |theta|^2.

    Raises:
        ModelError: There is none: the weights are all zero, or the scores do not depend on them.
    """
    low, high = -_BOUND, _BOUND
    if not evidence_slope(low, curvature, squared_norm) > 0 > evidence_slope(high, curvature, squared_norm):
        raise ModelError(
            "the evidence has no maximum over the prior variance: the adapter is untrained, or has no effect on the "
            "options' scores; train it further or set laplace.prior_variance"
        )
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if evidence_slope(middle, curvature, squared_norm) > 0 else (low, middle)
    return math.exp((low + high) / 2)
