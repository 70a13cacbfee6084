"""What every metric demands of its input, checked in one place so that each message names the argument at fault."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]
BoolArray = NDArray[np.bool_]

# Softmax rows add up to one within rounding; anything further off is not a distribution.
SUM_TOLERANCE = 1e-6


def unit_interval(values: ArrayLike, name: str) -> FloatArray:
    """`values` as a float64 vector of at least one number in [0, 1].

    Raises:
        ValueError: Not a vector, empty, NaN, or out of range; names `name` and the first bad position.
    """
    array = np.asarray(values, dtype=np.float64)
    if array.ndim != 1:
        raise ValueError(f"{name} must be a vector, not of shape {array.shape}")
    if array.size == 0:
        raise ValueError(f"{name} is empty: a metric needs at least one question")
    bad = np.flatnonzero(~((array >= 0) & (array <= 1)))
    if bad.size:
        raise ValueError(f"{name}[{bad[0]}] is {array[bad[0]]}, but must be a number from 0 to 1")
    return array


def outcomes(confidence: ArrayLike, correct: ArrayLike) -> tuple[FloatArray, FloatArray]:
    """The pair that every top-label metric takes: confidence [n] in [0, 1] and correctness [n] as 0.0 or 1.0.

    Raises:
        ValueError: Lengths differ, a confidence is NaN or outside [0, 1], or `correct` holds anything but 0 and 1.
    """
    confidence_n = unit_interval(confidence, "confidence")
    correct_n = unit_interval(correct, "correct")
    if len(confidence_n) != len(correct_n):
        raise ValueError(f"confidence has {len(confidence_n)} entries, but correct has {len(correct_n)}")
    if not np.isin(correct_n, (0.0, 1.0)).all():
        raise ValueError("correct must hold only true and false (or 1 and 0)")
    return confidence_n, correct_n


def gold_indices(gold: ArrayLike, rows: int, options: int) -> IntArray:
    """`gold` as int64 [n] with entries in [0, options).

    Raises:
        ValueError: Wrong length, not integers, or an index that no option has.
    """
    array = np.asarray(gold)
    if array.shape != (rows,):
        raise ValueError(f"gold must be a vector of {rows} entries, not of shape {array.shape}")
    if not np.issubdtype(array.dtype, np.integer):
        raise ValueError(f"gold must hold integers (0-based option indices), not {array.dtype}")
    bad = np.flatnonzero((array < 0) | (array >= options))
    if bad.size:
        raise ValueError(f"gold[{bad[0]}] is {array[bad[0]]}, but there are {options} options")
    return array.astype(np.int64)


def distribution(probabilities: ArrayLike, gold: ArrayLike) -> tuple[FloatArray, IntArray]:
    """Probabilities [n, K], rows adding up to one, and gold [n].

    Raises:
        ValueError: Wrong shapes, NaN, an entry outside [0, 1], a row that does not add up to one, a bad gold index.
    """
    matrix = np.asarray(probabilities, dtype=np.float64)
    if matrix.ndim != 2 or matrix.size == 0:
        raise ValueError(f"probabilities must be a non-empty matrix [n, options], not of shape {matrix.shape}")
    unit_interval(matrix.ravel(), "probabilities (flattened)")
    bad = np.flatnonzero(np.abs(matrix.sum(axis=1) - 1) > SUM_TOLERANCE)
    if bad.size:
        raise ValueError(f"probabilities[{bad[0]}] add up to {matrix[bad[0]].sum()}, not to 1")
    return matrix, gold_indices(gold, *matrix.shape)


def bin_count(bins: int) -> int:
    """`bins`, a positive integer.

    Raises:
        ValueError: Otherwise.
    """
    if bins < 1:
        raise ValueError(f"bins is {bins}, but must be at least 1")
    return bins
