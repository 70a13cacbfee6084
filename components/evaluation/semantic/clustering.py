"""Which of the answers to a question mean the same.

Classes are the connected components of a symmetric relation among the answers, so they are a function of the set: the
order of the answers has no say, and none is ever taken from a class that it was given to. (The greedy pass in the code
of Kuhn et al. 2023, arXiv 2302.09664, has neither property.) Components chain: where a is like b and b like c, they
are all one class.

Classes are numbered by their smallest member, in alphabetical order of the normalised texts. "The lowest class", which
breaks ties later, is therefore the same whatever the order.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import combinations
from typing import Protocol

from components.evaluation.semantic.answers import alias_match, normalise_answer, token_f1

SAME_F1 = 0.8
"""Token F1 from which two answers count as the same (inferred)."""


class Clusterer(Protocol):
    """Divides answers into classes of equal meaning."""

    def __call__(self, question: str, aliases: Sequence[str], answers: Sequence[str]) -> tuple[int, ...]:
        """The class of each answer.

        Args:
            question: What was asked.
            aliases: The right answers, any of them.
            answers: What was answered.

        Returns:
            One number an answer, from 0 on and without gaps, numbered as this module says.
        """
        ...


class OfflineClusterer:
    """Equal after normalisation, or naming one of the right answers both, or alike in words (`SAME_F1`).

    No model is needed. Like any clustering by aliases it looks at the right answers, which brings together different
    names of the right thing, but not different names of a wrong one (inferred; the papers ask a judge instead).
    """

    def __call__(self, question: str, aliases: Sequence[str], answers: Sequence[str]) -> tuple[int, ...]:
        """See `Clusterer`; the question has no say."""

        def related(texts: Sequence[str]) -> Iterable[tuple[int, int]]:
            right = [alias_match(text, aliases) for text in texts]
            for i, j in combinations(range(len(texts)), 2):
                if (right[i] and right[j]) or token_f1(texts[i], texts[j]) >= SAME_F1:
                    yield i, j

        return classes(answers, related)


class Related(Protocol):
    """Says which of some texts mean the same; it must not depend on their order."""

    def __call__(self, texts: Sequence[str]) -> Iterable[tuple[int, int]]:
        """Pairs of indices."""
        ...


def classes(answers: Sequence[str], related: Related) -> tuple[int, ...]:
    """Classes of answers that are equal after normalisation or joined by a chain of related pairs.

    Args:
        answers: Any number of them.
        related: Asked once, about one answer for each normalised text, in alphabetical order of these.

    Returns:
        As `Clusterer`.
    """
    shown: dict[str, str] = {}
    for answer in answers:
        key = normalise_answer(answer)
        shown[key] = min(answer, shown.get(key, answer))
    keys = sorted(shown)
    parent = list(range(len(keys)))

    def root(i: int) -> int:
        while parent[i] != i:
            i = parent[i]
        return i

    for i, j in related([shown[key] for key in keys]):
        low, high = sorted((root(i), root(j)))
        parent[high] = low  # so that a root is the smallest member of its class
    number: dict[int, int] = {}
    for i in range(len(keys)):
        number.setdefault(root(i), len(number))
    of_key = {key: number[root(i)] for i, key in enumerate(keys)}
    return tuple(of_key[normalise_answer(answer)] for answer in answers)
