"""From generated answers to predictions: which samples mean the same, and what is right."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np

from components.config_generation import GenerationConfig
from components.data.schema import OpenQuestion
from components.evaluation.checks import FloatArray
from components.evaluation.open_predictions import OpenPredictions
from components.evaluation.semantic.answers import JUDGES, normalise_answer
from components.evaluation.semantic.clustering import Clusterer, OfflineClusterer
from components.evaluation.semantic.confidence import modal_class
from components.evaluation.semantic.nli import NliClusterer
from components.models.generate import Answer, Answers


def clusterer_of(config: GenerationConfig, device: str = "cpu") -> Clusterer:
    """The clusterer that the run file asks for; a model it needs is loaded at the first question."""
    return OfflineClusterer() if config.nli_model is None else NliClusterer(config.nli_model, device)


def judge_answers(
    questions: Sequence[OpenQuestion],
    answers: Sequence[Answers],
    config: GenerationConfig,
    clusterer: Clusterer,
    flc: FloatArray | None = None,
) -> OpenPredictions:
    """Predictions of questions from their generated answers, in the same order.

    Args:
        questions: n questions.
        answers: Of the same n questions.
        config: Says what is right.
        clusterer: Says what is the same.
        flc: Router confidence in each prompt, [n], or None.
    """
    right = JUDGES[config.correctness]
    samples = [tuple(sample.text for sample in own.samples) for own in answers]
    classes = [clusterer(q.question, q.answers, own) for q, own in zip(questions, samples, strict=True)]
    modes = [modal_answer(*own) for own in zip(samples, classes, strict=True)]
    return OpenPredictions(
        ids=tuple(q.id for q in questions),
        groups=tuple(q.group for q in questions),
        questions=tuple(q.question for q in questions),
        answers=tuple(own.greedy.text for own in answers),
        log_probs=np.array([_log_prob(own.greedy) for own in answers]),
        tokens=np.array([own.greedy.tokens for own in answers]),
        samples=tuple(samples),
        sample_log_probs=tuple(tuple(_log_prob(sample) for sample in own.samples) for own in answers),
        sample_tokens=tuple(tuple(sample.tokens for sample in own.samples) for own in answers),
        classes=tuple(classes),
        answer_right=np.array([right(own.greedy.text, q.answers) for q, own in zip(questions, answers, strict=True)]),
        samples_right=np.array([right(mode, q.answers) for q, mode in zip(questions, modes, strict=True)]),
        flc=flc,
    )


def modal_answer(samples: Sequence[str], classes: Sequence[int]) -> str:
    """The wording that stands for the class with most samples: its most frequent, of equals the first by alphabet.

    Only this class is graded (Wang et al. 2026, arXiv 2605.08432). Whatever the order of the samples, it is the same.
    """
    mode = modal_class(classes)
    wordings = [text for text, of in zip(samples, classes, strict=True) if of == mode]
    counts = Counter(normalise_answer(text) for text in wordings)
    wanted = min(counts, key=lambda key: (-counts[key], key))
    return min(text for text in wordings if normalise_answer(text) == wanted)


def _log_prob(answer: Answer) -> float:
    """Of a certain token rounding makes a log-probability just above 0."""
    return min(answer.log_prob, 0.0)
