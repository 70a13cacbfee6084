"""Confidence and uncertainty from the classes of sampled answers.

Every function takes the classes of one question's samples, numbered from 0 as `clustering.py` does it, and gives the
same for every order of them. Sem1 and Sem2 are the two estimators of Sem-ECE (Wang et al. 2026, arXiv 2605.08432);
semantic entropy is that of Kuhn et al. 2023 (arXiv 2302.09664) and Farquhar et al. 2024.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike

from components.evaluation.calibration_error import expected_calibration_error
from components.evaluation.checks import FloatArray, IntArray

SEM_ECE_BINS = 10
"""Bins of equal width (found: Sem-ECE's code)."""
HALVES = 10
"""R, how many random halves Sem2 averages over (found)."""
HALVES_SEED = 0
"""Found."""


def modal_class(classes: ArrayLike) -> int:
    """The class with most samples; of equals the lowest."""
    return int(_counts(classes).argmax())


def sem1(classes: ArrayLike) -> float:
    """Sem1: the share of the modal class, max_k n_k / n, in [1 / n, 1]. [0, 0, 1, 2] gives 0.5."""
    counts = _counts(classes)
    return float(counts.max() / counts.sum())


def sem2(classes: ArrayLike) -> float:
    """Sem2: the modal class of one random half of the samples, and its share of the other half; the mean over `HALVES`.

    It lacks Sem1's upward bias, which comes from choosing and measuring on the same samples. The samples are sorted
    before they are halved, so only the sizes of the classes matter. Of an odd number the second half is the larger.

    Raises:
        ValueError: Fewer than two samples.
    """
    counts = _counts(classes)
    n = int(counts.sum())
    if n < 2:
        raise ValueError("Sem2 needs at least two samples: it chooses on one half and measures on the other")
    ordered = np.repeat(np.arange(len(counts)), counts)
    generator = np.random.default_rng(HALVES_SEED)
    shares = []
    for _ in range(HALVES):
        drawn = ordered[generator.permutation(n)]
        mode = np.bincount(drawn[: n // 2]).argmax()
        shares.append((drawn[n // 2 :] == mode).mean())
    return float(np.mean(shares))


def semantic_entropy(classes: ArrayLike) -> float:
    """Discrete semantic entropy in nats, - sum_k (n_k / n) ln(n_k / n), in [0, ln K]."""
    counts = _counts(classes)
    return _entropy(counts / counts.sum())


def likelihood_entropy(classes: ArrayLike, log_probs: ArrayLike) -> float:
    """Semantic entropy in nats over likelihoods (Rao): a class weighs what its samples' likelihoods add up to.

    The likelihoods are normalised over the samples. Equal ones give the discrete entropy.

    Args:
        classes: Of n samples.
        log_probs: Length-normalised log-probability of each sample in nats, [n], finite.

    Raises:
        ValueError: Lengths differ, or a log-probability is not finite.
    """
    counts, values = _counts(classes), np.asarray(log_probs, dtype=np.float64)
    if values.shape != (int(counts.sum()),) or not np.isfinite(values).all():
        raise ValueError(f"log_probs must be {int(counts.sum())} finite numbers, one a sample")
    weights = np.exp(values - values.max())
    return _entropy(np.bincount(np.asarray(classes, dtype=np.int64), weights=weights) / weights.sum())


def miller_madow_entropy(classes: ArrayLike) -> float:
    """Discrete semantic entropy with the Miller-Madow correction of its downward bias, + (K - 1) / 2n, in nats."""
    counts = _counts(classes)
    return semantic_entropy(classes) + (len(counts) - 1) / (2 * int(counts.sum()))


def exponential_certainty(entropy: float) -> float:
    """exp(-SE), in (0, 1]: 1 for a single class, 1 / K for K equally likely ones. A score, not a probability."""
    return float(np.exp(-entropy))


def relative_certainty(classes: ArrayLike) -> float:
    """1 - SE / ln K over the K classes seen, in [0, 1]; 1 for a single class. A score, not a probability."""
    seen = len(_counts(classes))
    return 1.0 if seen == 1 else float(np.clip(1.0 - semantic_entropy(classes) / np.log(seen), 0.0, 1.0))


def semantic_calibration_error(
    classes: Sequence[ArrayLike],
    correct: ArrayLike,
    bins: int = SEM_ECE_BINS,
    estimator: Literal["sem1", "sem2"] = "sem1",
) -> float:
    """Sem-ECE: the expected calibration error of a question's modal class.

    Args:
        classes: Classes of the samples of each of n questions.
        correct: Whether the answer of each question's modal class is right, [n].
        bins: Bins of equal width.
        estimator: Which confidence.

    Returns:
        A number in [0, 1].

    Raises:
        ValueError: Lengths differ, there are no questions, or a question has too few samples.
    """
    confidence = [(sem1 if estimator == "sem1" else sem2)(of_question) for of_question in classes]
    return expected_calibration_error(confidence, correct, bins)


def _counts(classes: ArrayLike) -> IntArray:
    """Samples of each class, [K].

    Raises:
        ValueError: No samples, or classes that are not numbered from 0 without gaps.
    """
    found = np.asarray(classes)
    if found.ndim != 1 or found.size == 0 or not np.issubdtype(found.dtype, np.integer) or found.min() < 0:
        raise ValueError("classes must be a vector of at least one whole number from 0 on")
    counts = np.bincount(found)
    if (counts == 0).any():
        raise ValueError(f"classes are numbered without gaps, but there is no {int((counts == 0).argmax())}")
    return counts.astype(np.int64)


def _entropy(shares: FloatArray) -> float:
    held = shares[shares > 0]
    return float(max(0.0, -(held * np.log(held)).sum()))
