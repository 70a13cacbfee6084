"""Calibration errors: how far confidence and accuracy lie apart, bin by bin (Guo et al. 2017, arXiv 1706.04599).

Each metric exists once, over a matrix of counts [B, n]: row b says how often each question stands in bootstrap draw b
(`..._draws`, results [B]). The function with the plain name is the same code on a single row of ones. Shape letters:
B draws, n questions, K options, G groups of tied confidence.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from components.evaluation import checks
from components.evaluation.binning import BinStrategy, TiedGroups, equal_mass_bins, equal_width_bins
from components.evaluation.checks import FloatArray, IntArray


def expected_calibration_error(confidence: ArrayLike, correct: ArrayLike, bins: int = 15) -> float:
    """Top-label ECE over bins of equal width, L1: sum over bins of (n_b / n) * |accuracy_b - mean confidence_b|.

    Args:
        confidence: Confidence of the chosen answer, [n], in [0, 1].
        correct: Whether that answer is right, [n].
        bins: Number of bins on [0, 1]; edge rule in `binning.py`.

    Returns:
        A number in [0, 1]; 0 is calibrated as far as the bins can tell.

    Raises:
        ValueError: Lengths differ, NaN, confidence outside [0, 1], no questions.
    """
    confidence_n, correct_n = checks.outcomes(confidence, correct)
    return float(ece_draws(confidence_n, correct_n, _once(confidence_n), checks.bin_count(bins))[0])


def adaptive_calibration_error(confidence: ArrayLike, correct: ArrayLike, bins: int = 15) -> float:
    """ECE over bins of equal mass (Nguyen & O'Connor 2015); tied confidences stay in one bin.

    Arguments, range and errors as for `expected_calibration_error`.
    """
    confidence_n, correct_n = checks.outcomes(confidence, correct)
    return float(adaptive_ece_draws(confidence_n, correct_n, _once(confidence_n), checks.bin_count(bins))[0])


def maximum_calibration_error(confidence: ArrayLike, correct: ArrayLike, bins: int = 15) -> float:
    """MCE: the largest |accuracy_b - mean confidence_b| among non-empty bins of equal width.

    Arguments, range and errors as for `expected_calibration_error`.
    """
    confidence_n, correct_n = checks.outcomes(confidence, correct)
    return float(mce_draws(confidence_n, correct_n, _once(confidence_n), checks.bin_count(bins))[0])


def classwise_calibration_error(
    probabilities: ArrayLike, gold: ArrayLike, bins: int = 15, n_options: ArrayLike | None = None
) -> float:
    """cw-ECE: the ECE of each option position's probability, averaged over positions (Kull et al. 2019; CFT).

    For position c: sum over bins of (n_cb / n_c) * |share of gold = c in the bin - mean p_c in the bin|, over the n_c
    questions that have an option at c. Where all questions have the same number of options, n_c = n, as published.

    Args:
        probabilities: [n, K], rows adding up to one, 0 where an option is absent.
        gold: Right option, [n].
        bins: Number of bins of equal width on [0, 1].
        n_options: Options of each question, [n]; K for all when left out.

    Returns:
        A number in [0, 1].

    Raises:
        ValueError: Shapes do not fit, NaN, entries outside [0, 1], or an option count outside [1, K].
    """
    matrix, gold_n = checks.distribution(probabilities, gold)
    n, k = matrix.shape
    counts_n = np.full(n, k) if n_options is None else np.asarray(n_options)
    if counts_n.shape != (n,) or counts_n.min() < 1 or counts_n.max() > k:
        raise ValueError(f"n_options must be {n} whole numbers from 1 to {k}")
    return float(classwise_ece_draws(matrix, gold_n, counts_n, _once(gold_n), checks.bin_count(bins))[0])


def ece_draws(confidence: FloatArray, correct: FloatArray, counts: FloatArray, bins: int) -> FloatArray:
    """ECE of each draw, [B]; `counts` [B, n]."""
    gap_nb = _one_hot(equal_width_bins(confidence, bins), bins) * (correct - confidence)[:, None]
    return np.abs(counts @ gap_nb).sum(axis=1) / counts.sum(axis=1)


def mce_draws(confidence: FloatArray, correct: FloatArray, counts: FloatArray, bins: int) -> FloatArray:
    """MCE of each draw, [B]; `counts` [B, n]."""
    member_nb = _one_hot(equal_width_bins(confidence, bins), bins)
    gap = np.abs(counts @ (member_nb * (correct - confidence)[:, None]))
    size = counts @ member_nb
    return np.divide(gap, size, out=np.zeros_like(gap), where=size > 0).max(axis=1)


def adaptive_ece_draws(confidence: FloatArray, correct: FloatArray, counts: FloatArray, bins: int) -> FloatArray:
    """Equal-mass ECE of each draw, [B]; every draw gets its own bins. `counts` [B, n]."""
    groups = TiedGroups.of(confidence)
    size = groups.total(counts)
    gap = groups.total(counts * (correct - confidence))
    draws = len(counts)
    cell = equal_mass_bins(size, bins) + bins * np.arange(draws)[:, None]
    gap_per_bin = np.bincount(cell.ravel(), weights=gap.ravel(), minlength=draws * bins).reshape(draws, bins)
    return np.abs(gap_per_bin).sum(axis=1) / counts.sum(axis=1)


def classwise_ece_draws(
    probabilities: FloatArray, gold: IntArray, n_options: IntArray, counts: FloatArray, bins: int
) -> FloatArray:
    """cw-ECE of each draw, [B]. A position that no question of a draw has is left out of that draw's mean."""
    per_class = []
    for c in range(probabilities.shape[1]):
        present = n_options > c
        p = probabilities[present, c]
        gap_nb = _one_hot(equal_width_bins(p, bins), bins) * ((gold[present] == c) - p)[:, None]
        counts_c = counts[:, present]
        size = counts_c.sum(axis=1)
        error = np.abs(counts_c @ gap_nb).sum(axis=1)
        per_class.append(np.divide(error, size, out=np.full_like(error, np.nan), where=size > 0))
    return np.nanmean(per_class, axis=0)


@dataclass(frozen=True)
class ReliabilityTable:
    """One row per bin, arrays of equal length; empty bins have count 0 and NaN for the means.

    Attributes:
        lower: Lower edges. For equal mass: the smallest confidence in the bin, NaN where it is empty.
        upper: Upper edges. For equal mass: the largest confidence in the bin.
        count: Questions in the bin; adds up to n.
        confidence: Mean confidence in the bin.
        accuracy: Share of right answers in the bin.
    """

    lower: FloatArray
    upper: FloatArray
    count: IntArray
    confidence: FloatArray
    accuracy: FloatArray

    @property
    def calibration_error(self) -> float:
        """The ECE these bins give."""
        filled = self.count > 0
        gap = np.abs(self.accuracy[filled] - self.confidence[filled])
        return float((self.count[filled] * gap).sum() / self.count.sum())


def reliability_table(
    confidence: ArrayLike, correct: ArrayLike, bins: int = 15, strategy: BinStrategy = "equal_width"
) -> ReliabilityTable:
    """What a reliability diagram shows: edges, count, mean confidence and accuracy of every bin.

    Raises:
        ValueError: As for `expected_calibration_error`, or an unknown strategy.
    """
    confidence_n, correct_n = checks.outcomes(confidence, correct)
    checks.bin_count(bins)
    if strategy == "equal_width":
        bin_n = equal_width_bins(confidence_n, bins)
        edges = np.linspace(0.0, 1.0, bins + 1)
        lower, upper = edges[:-1], edges[1:]
    elif strategy == "equal_mass":
        bin_n = _equal_mass_bin_of_each(confidence_n, bins)
        lower, upper = _extent(confidence_n, bin_n, bins)
    else:
        raise ValueError(f"strategy is '{strategy}', but must be 'equal_width' or 'equal_mass'")
    count = np.bincount(bin_n, minlength=bins)
    if count.sum() != len(confidence_n):
        raise AssertionError(f"bins hold {count.sum()} questions of {len(confidence_n)}")
    with np.errstate(invalid="ignore"):
        mean_confidence = np.bincount(bin_n, weights=confidence_n, minlength=bins) / count
        accuracy = np.bincount(bin_n, weights=correct_n, minlength=bins) / count
    return ReliabilityTable(lower, upper, count.astype(np.int64), mean_confidence, accuracy)


def _once(values: FloatArray | IntArray) -> FloatArray:
    """Counts [1, n] of the sample itself: every question once."""
    return np.ones((1, len(values)))


def _one_hot(bin_n: IntArray, bins: int) -> FloatArray:
    """Membership matrix [n, bins]; every row has exactly one 1, so bins always add up to n."""
    member_nb = np.zeros((len(bin_n), bins))
    member_nb[np.arange(len(bin_n)), bin_n] = 1.0
    return member_nb


def _equal_mass_bin_of_each(confidence: FloatArray, bins: int) -> IntArray:
    groups = TiedGroups.of(confidence)
    size = groups.total(np.ones_like(confidence))
    bin_n = np.empty(len(confidence), dtype=np.int64)
    bin_n[groups.order] = np.repeat(equal_mass_bins(size, bins), size.astype(np.int64))
    return bin_n


def _extent(confidence: FloatArray, bin_n: IntArray, bins: int) -> tuple[FloatArray, FloatArray]:
    """Smallest and largest confidence of each bin, NaN where it is empty."""
    lower, upper = np.full(bins, np.inf), np.full(bins, -np.inf)
    np.minimum.at(lower, bin_n, confidence)
    np.maximum.at(upper, bin_n, confidence)
    return np.where(np.isfinite(lower), lower, np.nan), np.where(np.isfinite(upper), upper, np.nan)
