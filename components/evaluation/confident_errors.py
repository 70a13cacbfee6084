"""Which questions the methods get wrong with most confidence."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from components.data.schema import Question, QuestionSet
from components.evaluation.predictions import Predictions

SHOWN = 10
"""Questions of each split."""


@dataclass(frozen=True)
class GivenAnswer:
    """What a method answered: the option's number from 0, the confidence in it, and whether it is right."""

    option: int
    confidence: float
    correct: bool


@dataclass(frozen=True)
class ConfidentError:
    """A question that is answered wrongly with much confidence.

    Attributes:
        id: The question's.
        group: Its relation or subject, where the source has any.
        gold: Number of the right option, from 0.
        answers: By method.
        question: Its text, where the data were given.
        choices: Texts of its options, where the data were given.
    """

    id: str
    group: str | None
    gold: int
    answers: Mapping[str, GivenAnswer]
    question: str | None = None
    choices: tuple[str, ...] = ()

    def option(self, number: int) -> str:
        """The option's text, or its letter where the data were not given."""
        return self.choices[number] if self.choices else chr(ord("A") + number)


def confident_errors(
    by_method: Mapping[str, Predictions], questions: QuestionSet | None = None, shown: int = SHOWN
) -> list[ConfidentError]:
    """The questions with the highest mean over methods of the confidence put into a wrong answer.

    A right answer counts as 0, so that errors which most methods share stand first. Ties keep the order of the data.

    Args:
        by_method: Predictions of one split; only questions that all methods answered count.
        questions: The split's questions, for their texts.
        shown: Most questions returned; those that every method got right never are.
    """
    if not by_method:
        return []
    first = next(iter(by_method.values()))
    places = {name: {id_: i for i, id_ in enumerate(found.ids)} for name, found in by_method.items()}
    shared = [id_ for id_ in first.ids if all(id_ in place for place in places.values())]
    scores = np.zeros(len(shared))
    confidences = {name: found.confidence() for name, found in by_method.items()}
    for name, found in by_method.items():
        rows = [places[name][id_] for id_ in shared]
        scores += np.where(found.correct[rows], 0.0, confidences[name][rows]) / len(by_method)
    texts = {question.id: question for question in questions} if questions is not None else {}
    worst = [shared[i] for i in np.argsort(-scores, kind="stable")[:shown] if scores[i] > 0]
    errors = []
    for id_ in worst:
        answers = {
            name: GivenAnswer(int(found.answer[row]), float(confidences[name][row]), bool(found.correct[row]))
            for name, found in by_method.items()
            for row in [places[name][id_]]
        }
        row, text = places[next(iter(by_method))][id_], texts.get(id_)
        known = (text.question, text.choices) if isinstance(text, Question) else (None, ())
        errors.append(ConfidentError(id_, first.groups[row], int(first.gold[row]), answers, *known))
    return errors
