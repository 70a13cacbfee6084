"""Right or wrong, for free answers."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from components.evaluation.semantic.answers import (
    JUDGES,
    alias_match,
    best_token_f1,
    exact_match,
    normalise_answer,
    token_f1,
)

FEW = settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.too_slow])


@pytest.mark.parametrize(
    ("text", "normal"),
    [
        ("The  Beatles!", "beatles"),
        ("an apple, a pear", "apple pear"),
        ("theatre", "theatre"),
        ("U.S.A.", "usa"),
        ("A", "a"),
        ("?", "?"),
        (" ", ""),
    ],
)
def test_normal_form(text: str, normal: str) -> None:
    assert normalise_answer(text) == normal


def test_exact_match_is_up_to_the_normal_form() -> None:
    assert exact_match("the Eiffel tower.", ["Big Ben", "Eiffel Tower"])
    assert not exact_match("Eiffel Tower in Paris", ["Eiffel Tower"])
    assert not exact_match("", ["Eiffel Tower", "..."])


def test_alias_match_wants_whole_words() -> None:
    assert alias_match("The capital is Paris.", ["Lutetia", "paris"])
    assert not alias_match("parishioner", ["Paris"])
    assert not alias_match("", ["Paris"])
    assert alias_match("A", ["A"])
    assert not alias_match("B", ["A"])


def test_token_f1_by_hand() -> None:
    """Words {new, york, city} and {new, york}: precision 2/3, recall 1, F1 0.8. Repetition counts: x x y, x z: 2/5."""
    assert token_f1("New York City", "new york") == pytest.approx(0.8)
    assert token_f1("x x y", "x z") == pytest.approx(2 / 5)
    assert token_f1("", "x") == token_f1("", "") == 0.0
    assert best_token_f1("New York City", ["Boston", "New York"]) == pytest.approx(0.8)


@FEW
@given(st.text(max_size=20), st.text(max_size=20))
def test_token_f1_is_symmetric_and_a_share(a: str, b: str) -> None:
    assert token_f1(a, b) == token_f1(b, a)
    assert 0 <= token_f1(a, b) <= 1


@FEW
@given(st.text(max_size=20), st.lists(st.text(min_size=1, max_size=20), min_size=1, max_size=4))
def test_whatever_matches_exactly_matches_in_every_way(answer: str, aliases: list[str]) -> None:
    if exact_match(answer, aliases):
        assert all(judge(answer, aliases) for judge in JUDGES.values())
