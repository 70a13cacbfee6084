"""Does confidence put right answers before wrong ones? AUROC, and what abstaining on the least sure questions buys.

A constant confidence can have a low calibration error and yet order nothing; these metrics see that. Tied confidences
are never told apart by position: they count half (AUROC), enter in random order on average (AURC), or pass a threshold
together (coverage and risk). Shapes and `..._draws` as in `calibration_error.py`.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from components.evaluation import checks
from components.evaluation.binning import TiedGroups
from components.evaluation.checks import FloatArray


def auroc(confidence: ArrayLike, correct: ArrayLike) -> float:
    """Probability that a right answer has more confidence than a wrong one, ties counting half.

    Args:
        confidence: Confidence of the chosen answer, [n], in [0, 1].
        correct: Whether that answer is right, [n].

    Returns:
        A number in [0, 1], 0.5 for no order; NaN when all answers are right or all are wrong.

    Raises:
        ValueError: Lengths differ, NaN, confidence outside [0, 1], no questions.
    """
    confidence_n, correct_n = checks.outcomes(confidence, correct)
    return float(auroc_draws(confidence_n, correct_n, np.ones((1, len(confidence_n))))[0])


def aurc(confidence: ArrayLike, correct: ArrayLike) -> float:
    """Area under the risk-coverage curve: mean over k of the error rate among the k most confident answers.

    Geifman & El-Yaniv 2017 (arXiv 1705.08500). Tied answers enter in random order; the expectation over that order is
    taken exactly.

    Returns:
        A number in [0, 1], lower is better; with nothing ordered it is the error rate itself.

    Raises:
        ValueError: As for `auroc`.
    """
    confidence_n, correct_n = checks.outcomes(confidence, correct)
    return float(aurc_draws(confidence_n, correct_n, np.ones((1, len(confidence_n))))[0])


def risk_coverage_curve(confidence: ArrayLike, correct: ArrayLike) -> tuple[FloatArray, FloatArray, FloatArray]:
    """What each confidence threshold gives when questions below it are left unanswered.

    Returns:
        Thresholds [G], descending; coverage [G] in (0, 1], the share answered; risk [G] in [0, 1], the error rate among
        those answered. G is the number of distinct confidences.

    Raises:
        ValueError: As for `auroc`.
    """
    confidence_n, correct_n = checks.outcomes(confidence, correct)
    groups = TiedGroups.of(confidence_n)
    answered = np.cumsum(groups.total(np.ones_like(confidence_n))[::-1])
    wrong = np.cumsum(groups.total(1 - correct_n)[::-1])
    thresholds = confidence_n[groups.order][groups.starts][::-1]
    return thresholds, answered / len(confidence_n), wrong / answered


def coverage_at_risk(confidence: ArrayLike, correct: ArrayLike, risk: float) -> float:
    """Largest share of questions that one threshold can answer with an error rate of at most `risk`; 0 if none can.

    Raises:
        ValueError: As for `auroc`, or `risk` outside [0, 1].
    """
    checks.unit_interval([risk], "risk")
    _, coverage, risks = risk_coverage_curve(confidence, correct)
    return float(coverage[risks <= risk].max(initial=0.0))


def risk_at_coverage(confidence: ArrayLike, correct: ArrayLike, coverage: float) -> float:
    """Error rate at the highest threshold that answers at least the share `coverage` of the questions.

    Raises:
        ValueError: As for `auroc`, or `coverage` outside [0, 1].
    """
    checks.unit_interval([coverage], "coverage")
    _, coverages, risks = risk_coverage_curve(confidence, correct)
    # The last coverage is 1 exactly, so a threshold is always found.
    return float(risks[np.argmax(coverages >= coverage)])


def auroc_draws(confidence: FloatArray, correct: FloatArray, counts: FloatArray) -> FloatArray:
    """AUROC of each draw, [B], NaN for draws with one class; `counts` [B, n]."""
    groups = TiedGroups.of(confidence)
    right, wrong = groups.total(counts * correct), groups.total(counts * (1 - correct))
    wrong_below = np.cumsum(wrong, axis=1) - wrong
    pairs_won = (right * (wrong_below + 0.5 * wrong)).sum(axis=1)
    pairs = right.sum(axis=1) * wrong.sum(axis=1)
    return np.divide(pairs_won, pairs, out=np.full_like(pairs, np.nan), where=pairs > 0)


def aurc_draws(confidence: FloatArray, correct: FloatArray, counts: FloatArray) -> FloatArray:
    """AURC of each draw, [B]; `counts` [B, n].

    A group of m tied answers, e of them wrong, after b answers with w wrong ones, adds the sum over j = 1..m of
    (w + e j / m) / (b + j), which is e + (w - e b / m) (H(b + m) - H(b)) with harmonic numbers H.
    """
    groups = TiedGroups.of(confidence)
    size = groups.total(counts)[:, ::-1]
    wrong = groups.total(counts * (1 - correct))[:, ::-1]
    through, wrong_through = np.cumsum(size, axis=1), np.cumsum(wrong, axis=1)
    before, wrong_before = through - size, wrong_through - wrong
    n = counts.sum(axis=1)
    harmonic = np.concatenate(([0.0], np.cumsum(1.0 / np.arange(1, int(n.max()) + 1))))
    steps = harmonic[through.astype(np.int64)] - harmonic[before.astype(np.int64)]
    wrong_share = np.divide(wrong, size, out=np.zeros_like(wrong), where=size > 0)
    return (wrong + (wrong_before - wrong_share * before) * steps).sum(axis=1) / n
