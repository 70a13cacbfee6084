"""Many comparisons at once: p-values that allow for their number, and ranks over data sets with what they are worth."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from components.evaluation.checks import FloatArray


def holm(p_values: Sequence[float]) -> list[float]:
    """Holm's (1979) step-down adjustment: the chance of any false alarm among all comparisons stays below the level.

    With the m p-values in ascending order, the i-th (from 0) becomes the largest of (m - j) p_j over j <= i, at most 1.
    Undefined ones (NaN) stay so and do not count towards m.

    Args:
        p_values: In [0, 1], in any order.

    Returns:
        Adjusted p-values in the same order.

    Raises:
        ValueError: A value outside [0, 1].
    """
    values = np.asarray(p_values, dtype=np.float64)
    bad = values[~(np.isnan(values) | ((values >= 0) & (values <= 1)))]
    if bad.size:
        raise ValueError(f"p-value {bad[0]} is not in [0, 1]")
    order = np.argsort(values, kind="stable")  # NaN last
    order = order[: int((~np.isnan(values)).sum())]
    scaled = values[order] * np.arange(len(order), 0, -1)
    adjusted = np.full(len(values), np.nan)
    adjusted[order] = np.minimum(np.maximum.accumulate(scaled), 1.0)
    return [float(value) for value in adjusted]


def mean_ranks(scores: FloatArray) -> tuple[FloatArray, FloatArray]:
    """Ranks of methods on each data set and their means; 1 is the lowest score, ties share the mean of their ranks.

    Args:
        scores: [N data sets, k methods], lower is better, no NaN.

    Returns:
        Ranks [N, k] and mean ranks [k].
    """
    from scipy.stats import rankdata

    ranks = np.asarray(rankdata(scores, axis=1, method="average"), dtype=np.float64)
    return ranks, ranks.mean(axis=0)


def critical_difference(methods: int, data_sets: int, level: float = 0.05) -> float:
    """Nemenyi's critical difference: mean ranks closer than this cannot be told apart (Demsar 2006, JMLR 7, eq. 2).

    q sqrt(k (k + 1) / (6 N)), q the studentised range's upper quantile for k means and infinite degrees of freedom,
    divided by sqrt(2).

    Args:
        methods: k, at least 2.
        data_sets: N, at least 2.
        level: Chance of a false alarm among all pairs.

    Raises:
        ValueError: Fewer than two methods or data sets.
    """
    if methods < 2 or data_sets < 2:
        raise ValueError(f"a critical difference needs two methods and two data sets, not {methods} and {data_sets}")
    from scipy.stats import studentized_range

    q = float(studentized_range.ppf(1 - level, methods, math.inf)) / math.sqrt(2)
    return q * math.sqrt(methods * (methods + 1) / (6 * data_sets))
