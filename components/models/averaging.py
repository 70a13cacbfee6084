"""Several scorings of the same questions to one: the mean of their probabilities, or of their logits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from components.models.score_questions import SplitScores

Combine = Callable[[Sequence[SplitScores]], SplitScores]


def mean_of_probabilities(samples: Sequence[SplitScores]) -> SplitScores:
    """Mean over samples of the probabilities of the options, each sample renormalised over them first.

    Computed in log space, so that options of very small probability keep their order. A single sample comes back as it
    is.

    Args:
        samples: S >= 1 scorings of the same n questions.

    Returns:
        `log_probs` up to the questions' own constants, -inf where there is no such option; mean mass and mean router
        confidence.

    Raises:
        ValueError: No samples, or not of the same questions.
    """
    _check(samples)
    if len(samples) == 1:
        return samples[0]
    totals = np.stack([_log_sum(sample.log_probs, axis=1) for sample in samples])
    normalised = np.stack([sample.log_probs for sample in samples]) - totals[:, :, None]
    return _mean(samples, _log_mean(normalised), _log_mean(totals))


def mean_of_logits(samples: Sequence[SplitScores]) -> SplitScores:
    """Softmax over the options of the samples' mean scores: the mean of their logits where an option is one token.

    Normalisers of a sample (over the vocabulary, over the options) are constants of a question and leave this softmax
    as it is. A single sample comes back as it is.

    Args:
        samples: S >= 1 scorings of the same n questions.

    Returns:
        As `mean_of_probabilities`.

    Raises:
        ValueError: No samples, or not of the same questions.
    """
    _check(samples)
    if len(samples) == 1:
        return samples[0]
    mean = np.mean([sample.log_probs for sample in samples], axis=0)
    totals = np.stack([_log_sum(sample.log_probs, axis=1) for sample in samples])
    return _mean(samples, mean - _log_sum(mean, axis=1)[:, None], _log_mean(totals))


COMBINE: dict[Literal["probabilities", "logits"], Combine] = {
    "probabilities": mean_of_probabilities,
    "logits": mean_of_logits,
}


def _mean(
    samples: Sequence[SplitScores], normalised: NDArray[np.float64], log_mass: NDArray[np.float64]
) -> SplitScores:
    """Scores whose options hold together what they hold on average, `log_mass` [n]."""
    flcs = [sample.flc for sample in samples if sample.flc is not None]
    return SplitScores(
        normalised + log_mass[:, None],
        np.mean([sample.mass for sample in samples], axis=0),
        samples[0].answers,
        np.mean(flcs, axis=0) if len(flcs) == len(samples) else None,
    )


def _log_mean(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Log of the mean over axis 0 of exp(values); -inf where all are."""
    return _log_sum(values, axis=0) - np.log(len(values))


def _log_sum(values: NDArray[np.float64], axis: int) -> NDArray[np.float64]:
    """Log of the sum of exp(values) over an axis; -inf where all are."""
    largest = values.max(axis=axis, keepdims=True)
    shift = np.where(np.isneginf(largest), 0.0, largest)
    with np.errstate(divide="ignore"):
        return np.log(np.exp(values - shift).sum(axis=axis)) + shift.squeeze(axis)


def _check(samples: Sequence[SplitScores]) -> None:
    if not samples:
        raise ValueError("there is no sample to take a mean of")
    first = samples[0]
    for sample in samples[1:]:
        if sample.log_probs.shape != first.log_probs.shape or not np.array_equal(sample.answers, first.answers):
            raise ValueError("the samples are not of the same questions")
