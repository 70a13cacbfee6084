"""Kronecker factors of a LoRA matrix, gathered question by question in any order.

The narrow side's factor (r x r) is summed as it is. Of the wide side's (d x d, which for all matrices of a large model
would outgrow the model) only its product with a fixed narrow matrix of probe vectors is summed, from which its leading
eigenvectors are recovered (Nystrom's method for a stream: Tropp et al. 2017, arXiv 1706.05736). The paper's code keeps
an eigenbasis that is updated and cut back as it goes, which depends on the order of the questions; sums do not. With d
probe vectors nothing is lost but what is beyond the rank.
"""

from __future__ import annotations

import torch
from torch import Tensor

from components.posthoc.laplace.posterior import Block

_SEED = 20230813  # of the probe vectors; any will do
_OVERSAMPLING = 10
_TINY = 1e-12


def probe_count(wide: int, rank: int) -> int:
    """Probe vectors for a side of `wide` entries of which `rank` directions are wanted."""
    return min(wide, 2 * rank + _OVERSAMPLING)


def probe_vectors(wide: int, count: int) -> Tensor:
    """Orthonormal columns, float64 [wide, count]; the same on every machine."""
    if count == wide:
        return torch.eye(wide, dtype=torch.float64)
    generator = torch.Generator().manual_seed(_SEED)
    return torch.linalg.qr(torch.randn(wide, count, dtype=torch.float64, generator=generator)).Q


class Factors:
    """Sums of one matrix.

    Args:
        wide: d.
        narrow: r.
        probes: From `probe_vectors`, float64 [d, l], on the model's device.
    """

    def __init__(self, wide: int, narrow: int, probes: Tensor) -> None:
        self.probes = probes
        self.sketch = torch.zeros(wide, probes.shape[1], dtype=torch.float64, device=probes.device)
        self.small = torch.zeros(narrow, narrow, dtype=torch.float64, device=probes.device)

    def add(self, wide: Tensor, narrow: Tensor) -> None:
        """Adds tokens.

        Args:
            wide: What stood at the wide side, [P, d].
            narrow: What stood at the narrow one, [P, r].
        """
        wide, narrow = wide.double(), narrow.double()
        self.sketch += wide.T @ (wide @ self.probes)
        self.small += narrow.T @ narrow

    def block(self, rank: int, tokens: int) -> Block:
        """The curvature in eigenvectors.

        Args:
            rank: Directions to keep on the wide side.
            tokens: Tokens added. Inputs count by their mean over tokens and slopes by their sum: as if the two were
                independent, sum over tokens of (a a^T) (x) (s s^T) is the product of the two.
        """
        vectors, values = _leading(self.sketch / tokens, self.probes, rank)
        small_values, small_vectors = torch.linalg.eigh(self.small)
        parts = (vectors, values, small_vectors, small_values.clamp(min=0.0))
        return Block(*(part.float().cpu().contiguous() for part in parts))


def _leading(sketch: Tensor, probes: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """Leading eigenvectors [d, k] and eigenvalues [k], the largest first, of the matrix behind a sketch."""
    core = probes.T @ sketch
    values, vectors = torch.linalg.eigh((core + core.T) / 2)
    kept = values > _TINY * values.max().clamp(min=0.0)
    if not kept.any():
        return probes[:, :1].clone(), torch.zeros(1, dtype=probes.dtype, device=probes.device)
    found = torch.linalg.svd(sketch @ (vectors[:, kept] / values[kept].sqrt()), full_matrices=False)
    return found.U[:, :rank], found.S[:rank] ** 2
