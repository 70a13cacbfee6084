"""Classes of equal meaning are a function of the set of answers."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from components.evaluation.semantic.answers import normalise_answer
from components.evaluation.semantic.clustering import OfflineClusterer, classes

FEW = settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.too_slow])

CITIES = ["Paris", "paris!", "City of Paris", "Lutetia", "Rome", "the city of Rome", "", "New York", "New York City"]
WORDS = st.lists(st.sampled_from(["red", "green", "blue", "a", "the", "Rome"]), max_size=4).map(" ".join)


def test_equality_alias_and_f1() -> None:
    """Aliases join Paris, City of Paris and Lutetia; F1 0.8 joins New York and New York City; Rome (F1 0.5) does not
    join the city of Rome. Numbers follow the alphabet: "", city of paris, city of rome, new york, rome."""
    found = OfflineClusterer()("Capital?", ["Paris", "Lutetia"], CITIES)
    assert found == (1, 1, 1, 1, 4, 2, 0, 3, 3)


def test_components_chain() -> None:
    """a-b and b-c are related, a-c is not: one class, whichever comes first."""

    def neighbours(texts: Sequence[str]) -> Iterable[tuple[int, int]]:
        return [(i, j) for i in range(len(texts)) for j in range(i) if abs(ord(texts[i]) - ord(texts[j])) == 1]

    for order in ("xyz", "xzy", "yxz", "zyx"):
        assert classes(list(order), neighbours) == (0, 0, 0)
    assert classes(["x", "z", "q"], neighbours) == (1, 2, 0)


@FEW
@given(st.lists(st.tuples(st.integers(0, 6), st.integers(0, 6)), max_size=9))
def test_classes_are_connected_components(pairs: list[tuple[int, int]]) -> None:
    """Against a closure by brute force; (0, 2), (1, 2) is where a later match would steal 2 from the class of 0."""
    for edges in (pairs, [(0, 2), (1, 2)]):
        label = list(range(7))
        for _ in label:
            for i, j in edges:
                label[i] = label[j] = min(label[i], label[j])
        assert classes(list("abcdefg"), lambda texts, edges=edges: edges) == tuple(
            sorted(set(label)).index(k) for k in label
        )


@FEW
@given(st.lists(WORDS, max_size=8), st.lists(WORDS.filter(bool), min_size=1, max_size=3), st.randoms())
def test_order_has_no_say(answers: list[str], aliases: list[str], shuffler: random.Random) -> None:
    """Each answer's class number is the same in every order, so ties in size are broken alike too."""
    number = dict(zip(answers, OfflineClusterer()("?", aliases, answers), strict=True))
    shuffled = answers.copy()
    shuffler.shuffle(shuffled)
    assert OfflineClusterer()("?", aliases, shuffled) == tuple(number[answer] for answer in shuffled)


@FEW
@given(st.lists(WORDS, min_size=1, max_size=8), st.lists(WORDS.filter(bool), min_size=1, max_size=3))
def test_a_partition_numbered_by_smallest_members(answers: list[str], aliases: list[str]) -> None:
    """Every answer has one class, equal texts have the same, and more answers never divide a class."""
    found = OfflineClusterer()("?", aliases, answers)
    smallest: dict[int, str] = {}
    for answer, number in zip(answers, found, strict=True):
        key = normalise_answer(answer)
        smallest[number] = min(key, smallest.get(number, key))
    assert sorted(smallest) == list(range(len(smallest)))
    assert [smallest[k] for k in sorted(smallest)] == sorted(smallest.values())
    fewer = OfflineClusterer()("?", aliases, answers[:-1])
    for i, a in enumerate(fewer):
        for j, b in enumerate(fewer):
            assert a != b or found[i] == found[j]
