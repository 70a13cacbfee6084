"""Which bin a confidence belongs to, and which questions are tied.

One edge rule throughout: bins are [lo, hi), the last one is [lo, hi]. So 0 falls in the first bin, 1.0 in the last, a
value on an inner edge in the bin above it, and the counts always add up to n. It is numpy's own rule for histograms
and netcal's; torchmetrics 1.9 differs at exactly 1.0 (an extra bin), and (lo, hi] of Guo et al. 2017 at inner edges.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from components.evaluation.checks import FloatArray, IntArray

EDGE_RULE = "[lo, hi); last bin [lo, hi]"
BinStrategy = Literal["equal_width", "equal_mass"]


def equal_width_bins(values: FloatArray, bins: int) -> IntArray:
    """Bin of each value [n], in [0, bins), for `bins` bins of equal width on [0, 1]; see the module's edge rule."""
    edges = np.linspace(0.0, 1.0, bins + 1)
    return np.minimum(np.searchsorted(edges, values, side="right") - 1, bins - 1).astype(np.int64)


@dataclass(frozen=True)
class TiedGroups:
    """Questions sorted by confidence, ascending, with equal confidences (n of them, in G groups) told apart by none.

    Attributes:
        order: Sorting permutation, int [n].
        starts: First sorted position of each group, int [G].
    """

    order: IntArray
    starts: IntArray

    @classmethod
    def of(cls, confidence: FloatArray) -> TiedGroups:
        """Groups of exactly equal confidence."""
        order = np.argsort(confidence, kind="stable")
        ordered = confidence[order]
        starts = np.flatnonzero(np.concatenate(([True], ordered[1:] != ordered[:-1])))
        return cls(order.astype(np.int64), starts.astype(np.int64))

    def total(self, values: FloatArray) -> FloatArray:
        """Sums of `values` [..., n] over each group: [..., G]."""
        return np.add.reduceat(values[..., self.order], self.starts, axis=-1)


def equal_mass_bins(group_sizes: FloatArray, bins: int) -> IntArray:
    """Bin of each tied group, [..., G] in [0, bins), for bins holding the same number of questions.

    A group goes, whole, to the bin in which its middle rank falls: floor(bins * (before + size / 2) / n). Without ties
    bin sizes differ by at most one; a large group may leave neighbouring bins empty.

    Args:
        group_sizes: Questions in each group, ascending confidence, [..., G]; zero is allowed.
        bins: Number of bins.
    """
    through = np.cumsum(group_sizes, axis=-1)
    n = through[..., -1:]
    # Twice the middle rank is a whole number, so the division below is exact where it matters.
    twice_middle = 2 * through - group_sizes
    return np.clip(np.floor_divide(bins * twice_middle, 2 * n), 0, bins - 1).astype(np.int64)
