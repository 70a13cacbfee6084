"""Splits: disjoint in entities, of the sizes asked for, fixed by the seed, proportional in groups."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from itertools import combinations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from components.config_data import SplitSizes
from components.data.facts.builder import build_facts
from components.data.rows import make_set, normalise
from components.data.sampling import apportion, draw
from components.data.schema import Question, QuestionSet
from components.data.splits import divide, entity_of, find_overlaps
from components.errors import DataError

SIZES = SplitSizes(train=640, calibration=160, validation=200, test=300)


def assert_disjoint(splits: Mapping[str, QuestionSet]) -> None:
    for one, other in combinations(splits.values(), 2):
        assert not {entity_of(q) for q in one} & {entity_of(q) for q in other}


@st.composite
def sources(draw_: st.DrawFn) -> QuestionSet:
    """Sets with entities of unequal size, some questions without entity, repeated texts, three groups.

    Thirty entities with one question each are always there, so that any division has enough to pack with.
    """
    rows = draw_(
        st.lists(
            st.tuples(st.sampled_from([None, *"abcdefghijklmnopqrst"]), st.sampled_from("xyz"), st.integers(0, 25)),
            max_size=120,
        )
    )
    rows += [(f"single {i}", "xyz"[i % 3], 100 + i) for i in range(30)]
    questions = [
        Question(str(i), f"Text {text}?", ("a", "b"), 0, group, entity) for i, (entity, group, text) in enumerate(rows)
    ]
    return make_set("source", questions, "generated")


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(source=sources(), seed=st.integers(0, 10), heldout=st.sampled_from([(), ("x",)]), given_train=st.booleans())
def test_divide_keeps_its_promises(source: QuestionSet, seed: int, heldout: tuple[str, ...], given_train: bool) -> None:
    sizes = SplitSizes(train=4 if given_train else None, calibration=3 if given_train else None, validation=2, test=3)
    splits = divide(source, sizes, heldout, seed)
    assert list(splits) == ["train", "calibration", "validation", *["validation_shift"] * len(heldout), "test"]
    assert_disjoint(splits)
    assert len(splits["validation"]) == 2
    assert len(splits["test"]) == 3
    if given_train:
        assert (len(splits["train"]), len(splits["calibration"])) == (4, 3)
    ids = [q.id for split in splits.values() for q in split]
    assert len(set(ids)) == len(ids)
    for name, split in splits.items():
        assert all((q.group in heldout) == (name == "validation_shift") for q in split)
    if heldout:
        assert 1 <= len(splits["validation_shift"]) <= 2
    assert divide(source, sizes, heldout, seed) == splits


def test_the_facts_divide_as_the_quickstart_needs() -> None:
    source = build_facts("geography", 0)
    splits = divide(source, SIZES, ["currency"], 0)
    assert {name: len(split) for name, split in splits.items() if name != "validation_shift"} == {
        "train": 640,
        "calibration": 160,
        "validation": 200,
        "test": 300,
    }
    assert_disjoint(splits)
    assert 80 <= len(splits["validation_shift"]) <= 200
    whole = Counter(q.group for q in source if q.group != "currency")
    n = sum(whole.values())
    for split in (splits["train"], splits["test"]):
        for group, count in Counter(q.group for q in split).items():
            assert abs(count / len(split) - whole[group] / n) < 0.05


def test_shift_takes_whole_entities_from_an_open_ended_train() -> None:
    """With `train: null` the shift gives up at most a quarter of the entities that validation and test leave."""
    source = build_facts("chemistry", 0)
    splits = divide(source, SplitSizes(validation=50, test=50), ["symbol"], 0)
    assert_disjoint(splits)
    assert 20 <= len(splits["validation_shift"]) <= 118 // 4
    assert len(splits["train"]) > 400


def test_another_seed_divides_otherwise() -> None:
    source = build_facts("chemistry", 0)
    sizes = SplitSizes(train=200, validation=50, test=50)
    assert divide(source, sizes, [], 0)["test"] != divide(source, sizes, [], 1)["test"]


def test_test_and_validation_do_not_depend_on_train() -> None:
    source = build_facts("geography", 0)
    small = divide(source, SplitSizes(train=100, validation=60, test=80), [], 3)
    large = divide(source, SplitSizes(train=None, validation=60, test=80), [], 3)
    assert small["test"] == large["test"]
    assert small["validation"] == large["validation"]


def test_train_null_takes_what_is_left(question: Callable[..., Question]) -> None:
    """100 questions, 10 + 20 for validation and test; of the 70 left a fifth is calibration: 14 and 56."""
    source = make_set("s", [question(str(i)) for i in range(100)], "s")
    splits = divide(source, SplitSizes(validation=10, test=20), [], 0)
    assert {name: len(split) for name, split in splits.items()} == {
        "train": 56,
        "calibration": 14,
        "validation": 10,
        "test": 20,
    }


def test_all_questions_can_be_used_up(question: Callable[..., Question]) -> None:
    """Sizes that only fit if whole entities are packed: 20 entities of 3 into 30 + 9 + 9 + 12."""
    source = make_set("s", [question(str(i), entity=str(i // 3)) for i in range(60)], "s")
    splits = divide(source, SplitSizes(train=30, calibration=9, validation=9, test=12), [], 0)
    assert sum(map(len, splits.values())) == 60


def test_groups_keep_their_proportions(question: Callable[..., Question]) -> None:
    """300 of one group and 100 of another: any split of 40 has 30 and 10."""
    source = make_set("s", [question(str(i), group="a" if i % 4 else "b") for i in range(400)], "s")
    splits = divide(source, SplitSizes(train=120, calibration=40, validation=40, test=40), [], 2)
    for split in splits.values():
        counts = Counter(q.group for q in split)
        assert abs(counts["a"] - 3 * counts["b"]) <= 4


def test_too_few_questions_is_said_with_counts(question: Callable[..., Question]) -> None:
    source = make_set("s", [question(str(i), entity=str(i // 10)) for i in range(40)], "s")
    with pytest.raises(DataError, match=r"train needs 20 questions and gets 10: the source has 40 .* 4 entities"):
        divide(source, SplitSizes(train=20, calibration=5, validation=5, test=5), [], 0)
    with pytest.raises(DataError, match=r"no question of group 'z' .*none"):
        divide(source, SplitSizes(train=1, validation=1, test=1), ["z"], 0)


def test_repeated_questions_without_entity_stay_together(question: Callable[..., Question]) -> None:
    source = make_set(
        "s", [question(str(i), f"  Same {i // 2} " if i % 2 else f"same {i // 2}") for i in range(80)], ""
    )
    assert find_overlaps(divide(source, SplitSizes(train=20, validation=10, test=10), [], 1)) == []


def test_overlaps_are_counted_by_text_and_by_choices(question_set: Callable[..., QuestionSet]) -> None:
    """Three texts are shared; of these one has the same choices in another order, one in another case."""
    first = question_set(
        "a", [("One?", ("x", "y")), ("Two?", ("x", "y")), ("Three?", ("x", "y")), ("Four?", ("x", "y"))]
    )
    second = question_set(
        "b", [("one? ", ("y", "x")), ("TWO?", ("x", "z")), ("Three?", (" X", "Y")), ("Five?", ("x", "y"))]
    )
    (overlap,) = find_overlaps({"a": first, "b": second, "c": question_set("c", [("Six?", ("x", "y"))])})
    assert (overlap.first, overlap.second, overlap.questions, overlap.same_choices) == ("a", "b", 3, 2)
    assert overlap.pairs == (("a-0", "b-0"), ("a-1", "b-1"), ("a-2", "b-2"))


def test_seats_by_largest_remainder() -> None:
    """10 seats for 53, 24 and 23: exact 5.3, 2.4, 2.3; the seat left goes to the remainder .4.

    With room for 2 in the first, 3 seats are left over; of these 24 and 23 get 1.53 and 1.47, so 2 and 1 more.
    """
    shares = {"a": 53, "b": 24, "c": 23}
    assert apportion(10, shares, {"a": 99, "b": 99, "c": 99}) == {"a": 5, "b": 3, "c": 2}
    assert apportion(10, shares, {"a": 2, "b": 99, "c": 99}) == {"a": 2, "b": 5, "c": 3}
    assert apportion(3, {}, {"a": 2, "b": 2}) == {"a": 2, "b": 1}


@given(
    available=st.dictionaries(st.text("abcdef", min_size=1, max_size=1), st.integers(0, 20), min_size=1),
    weights=st.lists(st.integers(0, 50), min_size=6, max_size=6),
    data=st.data(),
)
def test_seats_sum_up_and_fit(available: dict[str, int], weights: list[int], data: st.DataObject) -> None:
    n = data.draw(st.integers(0, sum(available.values())))
    seats = apportion(n, dict(zip("abcdef", weights, strict=True)), available)
    assert sum(seats.values()) == n
    assert all(0 <= seats[group] <= available[group] for group in available)


def test_draw_keeps_order_and_proportion(question: Callable[..., Question]) -> None:
    questions = [question(f"{i:03}", group="a" if i % 4 else "b") for i in range(100)]
    drawn = draw(questions, 20, 5)
    assert Counter(q.group for q in drawn) == {"a": 15, "b": 5}
    assert [q.id for q in drawn] == sorted(q.id for q in drawn)
    assert draw(questions, 20, 5) == drawn
    assert draw(questions, 20, 6) != drawn
    assert draw(questions, 500, 5) == tuple(questions)


def test_normalise_is_up_to_case_and_spaces() -> None:
    assert normalise("  New\tYork \n City") == normalise("new york city")
    assert normalise("newyork") != normalise("new york")
