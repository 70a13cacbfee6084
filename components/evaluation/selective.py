"""Selective prediction: from which confidence on to answer, chosen on labelled questions that nothing was trained on.

**Target risk.** The selective risk R(t) is the error rate among the questions whose confidence is t at least: a ratio,
so its test is made among the answered questions only. Given that k of the n labelled questions lie above t, these k are
independent draws from the questions above t, and the errors among them are Binomial(k, R(t)); so the p-value
P(Binomial(k, alpha) <= errors) of "R(t) > alpha" is valid whatever k is. A threshold must be picked among many, and
that takes one more step, Learn then Test with fixed-sequence testing (Angelopoulos et al. 2021, arXiv 2110.01052):
thresholds are tested in an order fixed beforehand, from few answers to many, each at level delta, until the first
test fails; the last one that passed is taken.

The order is one of *counts*, not of confidences (ours): the threshold tested at count a lies just above the (a + 1)-th
highest confidence, so that a grid need not be fitted to where a model's confidences happen to lie. Given that order
statistic the a questions above it are independent draws from those above it (as in Geifman and El-Yaniv 2017, arXiv
1705.08500, who pay with a union bound), so every single test stays exact. For the sequence: let the thresholds with
R > alpha be finitely many intervals. Where R is continuous, it is alpha at every end of one, so that the error rate
between two such ends, and above the first of them, is alpha exactly; the errors above the interval that holds the first
wrong threshold tested are therefore Binomial(., alpha) whatever was tested before, and those within it more likely than
alpha. Hence P(R(threshold) > alpha) <= delta, over the draw of the labelled questions, where no two questions share a
confidence; and where some do, if R does not fall as more is answered.

Counts are the smallest at which 0, 1, 2 ... errors still pass, from `LEAST_COVERAGE` of the questions on. Starting
lower would let one or two chance errors among the first few end the sequence.

**Target coverage.** The threshold is a conformal quantile: the j-th lowest of n confidences, j = floor((n + 1)(1 - c)).
A new question from the same source reaches it with probability 1 - j / (n + 1) >= c at least, over the draw of the
labelled questions and of the new one.

Neither says anything of questions from elsewhere. MAPIE's `BinaryClassificationController`, with the precision of "is
right" as its risk, has the first guarantee too, over a grid of confidences; `tests/benchmarks/risk_guarantee.py` sets
it beside: on the project's confidences, which crowd near 1, it answers fewer questions or none.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from components.evaluation.checks import FloatArray, outcomes, unit_interval
from components.evaluation.ranking import risk_coverage_curve

LEAST_COVERAGE = 0.2
"""Share of the labelled questions that the first threshold tested answers, at least (ours)."""
LEVEL = 0.95
"""Of the intervals of achieved risk and coverage."""


@dataclass(frozen=True)
class Achieved:
    """What a threshold does on labelled questions.

    Attributes:
        n: Questions.
        answered: Of these, how many have that confidence.
        wrong: Of those answered, how many are answered wrongly.
        risk: wrong / answered; None where nothing is answered.
        risk_low: Lower end of its Clopper-Pearson interval; None likewise.
        risk_high: Upper end.
        coverage_low: Lower end of the coverage's.
        coverage_high: Upper end.
    """

    n: int
    answered: int
    wrong: int
    risk: float | None
    risk_low: float | None
    risk_high: float | None
    coverage_low: float
    coverage_high: float

    @property
    def coverage(self) -> float:
        """Share of the questions that are answered."""
        return self.answered / self.n


def threshold_for_risk(confidence: ArrayLike, correct: ArrayLike, risk: float, delta: float) -> float | None:
    """The lowest threshold that is shown to keep the share of wrong answers at `risk`, with confidence 1 - delta.

    Args:
        confidence: Confidence in each answer, [n], in [0, 1].
        correct: Whether it is right, [n].
        risk: Error rate allowed among the answers, in (0, 1).
        delta: Probability of choosing a threshold that does not keep to it, in (0, 1).

    Returns:
        Answer where confidence >= threshold; None where no threshold could be shown to keep to `risk`.

    Raises:
        ValueError: Lengths differ, a confidence outside [0, 1], `risk` or `delta` outside (0, 1).
    """
    confidence_n, correct_n = outcomes(confidence, correct)
    descending = -np.sort(-confidence_n)
    chosen = None
    for count in counts_tested(len(confidence_n), risk, delta):
        threshold = _just_above_next(descending, count)
        right = correct_n[confidence_n >= threshold]
        if len(right) == 0:  # all the most confident ones are tied: a threshold above them answers nothing
            continue
        if p_value(int((1 - right).sum()), len(right), risk) > delta:
            break
        chosen = threshold
    return chosen


def counts_tested(n: int, risk: float, delta: float) -> list[int]:
    """Numbers of answers at which thresholds are tested, rising; they depend on nothing that is seen.

    Args:
        n: Labelled questions.
        risk: Error rate allowed, in (0, 1).
        delta: Level of each test, in (0, 1).

    Returns:
        The smallest counts that pass with 0, 1, 2 ... errors, from `LEAST_COVERAGE` n on, then n itself. Empty where
        even n answers without an error would not pass: n must be log(delta) / log(1 - risk) at least.

    Raises:
        ValueError: `risk` or `delta` outside (0, 1).
    """
    _open_unit(risk, "risk")
    _open_unit(delta, "delta")
    from scipy.stats import binom

    counts = np.arange(1, n + 1)
    quantile = binom.ppf(delta, counts, risk)
    most_errors = quantile - (binom.cdf(quantile, counts, risk) > delta)  # that pass; -1 where none do
    smallest = counts[np.diff(most_errors, prepend=-1.0) > 0]
    if smallest.size == 0:
        return []
    return sorted({*smallest[smallest >= LEAST_COVERAGE * n].tolist(), n})


def p_value(wrong: int, answered: int, risk: float) -> float:
    """P(Binomial(answered, risk) <= wrong): of the hypothesis that the answers' error rate exceeds `risk`."""
    from scipy.stats import binom

    return float(binom.cdf(wrong, answered, risk))


def threshold_for_coverage(confidence: ArrayLike, coverage: float) -> float:
    """The conformal quantile that a new question's confidence reaches with probability `coverage` at least.

    Args:
        confidence: Confidence in each answer, [n], in [0, 1].
        coverage: Share of questions to be answered, in (0, 1].

    Returns:
        Answer where confidence >= threshold; 0 where n is too small to leave any question unanswered.

    Raises:
        ValueError: A confidence outside [0, 1], or `coverage` outside (0, 1].
    """
    if not 0.0 < coverage <= 1.0:
        raise ValueError(f"coverage is {coverage}, but must be above 0 and at most 1")
    ascending = np.sort(unit_interval(confidence, "confidence"))
    left_out = math.floor((len(ascending) + 1) - coverage * (len(ascending) + 1))
    return float(ascending[left_out - 1]) if left_out else 0.0


def naive_threshold(confidence: ArrayLike, correct: ArrayLike, risk: float) -> float | None:
    """The lowest threshold at which the labelled questions themselves keep to `risk`; it guarantees nothing.

    Chance made some threshold look better than it is, and this picks it.

    Returns:
        Answer where confidence >= threshold; None where even the most confident answers are wrong too often.

    Raises:
        ValueError: As for `threshold_for_risk`.
    """
    _open_unit(risk, "risk")
    thresholds, _, risks = risk_coverage_curve(confidence, correct)
    kept = np.flatnonzero(risks <= risk)
    return float(thresholds[kept[-1]]) if kept.size else None


def answered_at(confidence: ArrayLike, threshold: float | None) -> np.ndarray:
    """Which questions are answered, bool [n]: those of at least that confidence, none for a threshold of None."""
    values = np.asarray(confidence, dtype=np.float64)
    return np.zeros(values.shape, np.bool_) if threshold is None else values >= threshold


def achieved(confidence: ArrayLike, correct: ArrayLike, threshold: float | None) -> Achieved:
    """What a threshold does on labelled questions, with Clopper-Pearson intervals of level `LEVEL`.

    Args:
        confidence: Confidence in each answer, [n], in [0, 1].
        correct: Whether it is right, [n].
        threshold: As the functions above return it; None answers nothing.

    Raises:
        ValueError: Lengths differ, or a confidence outside [0, 1].
    """
    confidence_n, correct_n = outcomes(confidence, correct)
    right = correct_n[answered_at(confidence_n, threshold)]
    answered, wrong = len(right), int((1 - right).sum())
    coverage_low, coverage_high = share_interval(answered, len(confidence_n))
    risk_low, risk_high = share_interval(wrong, answered) if answered else (None, None)
    risk = wrong / answered if answered else None
    return Achieved(len(confidence_n), answered, wrong, risk, risk_low, risk_high, coverage_low, coverage_high)


def share_interval(successes: int, trials: int) -> tuple[float, float]:
    """Clopper and Pearson's (1934) exact interval of a share, of level `LEVEL`, for at least one trial."""
    from scipy.stats import binomtest

    interval = binomtest(successes, trials).proportion_ci(LEVEL, method="exact")
    return float(interval.low), float(interval.high)


def _just_above_next(descending: FloatArray, count: int) -> float:
    """The smallest number above the (count + 1)-th highest confidence; 0, which answers all, after the last one."""
    return float(np.nextafter(descending[count], 2.0)) if count < len(descending) else 0.0


def _open_unit(value: float, name: str) -> None:
    if not 0.0 < value < 1.0:
        raise ValueError(f"{name} is {value}, but must lie between 0 and 1")
