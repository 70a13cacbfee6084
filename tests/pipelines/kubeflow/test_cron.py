"""Cron expressions, against a reading of the six fields that is written here from robfig/cron's documentation.

There: a field is a list of numbers, ranges and steps; a star is the whole range; where neither day field is a star,
either may match, else both must.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime, timedelta, timezone

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from components.errors import UsageError
from pipelines.kubeflow.cron import next_runs, shown, six_fields

RANGES = ((0, 59), (0, 59), (0, 23), (1, 31), (1, 12), (0, 6))
START = datetime(2026, 11, 30, 19, 7, 30, tzinfo=UTC)
DAY = [START.replace(second=0) + timedelta(minutes=i) for i in range(1, 24 * 60)]


def values(field: str, low: int, high: int) -> set[int]:
    found: set[int] = set()
    for part in field.split(","):
        body, _, step = part.partition("/")
        first, _, last = (f"{low}-{high}" if body == "*" else body).partition("-")
        assert low <= int(first) <= int(last or first) <= high, f"{field} is out of range"
        found |= set(range(int(first), int(last or first) + 1, int(step or 1)))
    return found


def matcher(six: str) -> Callable[[datetime], bool]:
    """Whether six fields come true at a time."""
    fields = six.split()
    second, minute, hour, day, month, weekday = (
        values(field, *limits) for field, limits in zip(fields, RANGES, strict=True)
    )
    both = "*" in (fields[3][0], fields[5][0])

    def comes_true(moment: datetime) -> bool:
        days = [moment.day in day, moment.isoweekday() % 7 in weekday]
        clock = moment.second in second and moment.minute in minute and moment.hour in hour
        return clock and moment.month in month and (all(days) if both else any(days))

    return comes_true


def numbers(low: int, high: int, *, stars: bool = True) -> st.SearchStrategy[str]:
    one = st.integers(low, high).map(str)
    span = st.tuples(st.integers(low, high), st.integers(low, high)).map(sorted)
    between = span.map(lambda ends: f"{ends[0]}-{ends[1]}")
    wide = span.filter(lambda ends: ends[0] < ends[1]).map(lambda ends: f"{ends[0]}-{ends[1]}")
    stepped = st.tuples(wide, st.integers(1, 9)).map(lambda pair: f"{pair[0]}/{pair[1]}")
    lists = st.lists(st.one_of(one, between, stepped), min_size=1, max_size=3).map(",".join)
    return st.one_of(lists, st.just("*"), st.integers(2, 9).map("*/{}".format)) if stars else lists


@st.composite
def expressions(draw: st.DrawFn) -> str:
    """Expressions that are possible: no day beyond 28, which every month has."""
    star = st.just("*")
    days = draw(st.one_of(star, numbers(1, 28, stars=False)))
    weekdays = draw(st.one_of(star, numbers(0, 7, stars=False)))
    months = draw(numbers(1, 12))
    return f"{draw(numbers(0, 59))} {draw(numbers(0, 23))} {days} {months} {weekdays}"


@settings(max_examples=50, deadline=None)
@given(expressions())
def test_six_fields_come_true_when_the_next_runs_are(expression):
    six = six_fields(expression)
    assert len(six.split()) == 6
    assert six.startswith("0 ")
    runs = next_runs(expression, START, 3)
    assert sorted(set(runs)) == runs
    assert runs[0] > START
    assert all(map(matcher(six), runs))


@settings(max_examples=20, deadline=None)
@given(expressions())
def test_no_run_is_left_out(expression):
    """Every minute of the first day after the start is a run or does not come true."""
    expected = list(filter(matcher(six_fields(expression)), DAY))
    runs = next_runs(expression, START, max(len(expected), 1))
    assert [moment for moment in runs if moment <= DAY[-1]] == expected


@pytest.mark.parametrize(
    ("five", "six"),
    [
        ("0 3 * * 1", "0 0 3 * * 1"),
        ("*/15 * * * *", "0 */15 * * * *"),
        ("0 3 1 * *", "0 0 3 1 * *"),
        ("0 3 * * 7", "0 0 3 * * 0"),
        ("0 3 * * 5-7", "0 0 3 * * 0,5,6"),
        ("0 3 * * MON-WED", "0 0 3 * * 1,2,3"),
        ("0 3 * JUL *", "0 0 3 * JUL *"),
    ],
)
def test_known_conversions(five, six):
    assert six_fields(five) == six


def test_next_runs_of_every_monday():
    """1 December 2026 is a Tuesday, so the Mondays after 30 November, 19:07, begin with the 7th."""
    runs = next_runs("0 3 * * MON", START)
    assert [f"{moment:%Y-%m-%d %H:%M}" for moment in runs[:2]] == ["2026-12-07 03:00", "2026-12-14 03:00"]
    assert len(runs) == 5


def test_runs_are_counted_in_utc_wherever_one_is():
    """23:30 five hours west of Greenwich is 4:30 there, past that day's 3:00."""
    west = datetime(2026, 11, 29, 23, 30, tzinfo=timezone(timedelta(hours=-5)))
    assert next_runs("0 3 * * *", west, 1) == [datetime(2026, 12, 1, 3, tzinfo=UTC)]
    assert shown(datetime(2026, 12, 1, 3, tzinfo=UTC)).startswith("Tue 2026-12-01 03:00 UTC")


@pytest.mark.parametrize(
    ("expression", "problem"),
    [
        ("0 0 3 * * 1", "6 fields"),
        ("0 3 * *", "4 fields"),
        ("60 3 * * *", "Bad minute"),
        ("0 3 31 2 *", "never comes true|Bad day"),
        ("0 3 L * *", "common form"),
        ("0 3 * * MON#1", "common form"),
        ("0 3 ? * 1", "common form"),
        ("5/10 * * * *", "write the range"),
        ("5-5/10 * * * *", "write the range"),
        ("0 3 */2 * 1", "and"),
        ("0 3 1 * */2", "and"),
        ("0 3 1,* * *", "stands alone"),
        ("22-2 * * * *", "Bad minute"),
        ("0 3 * * MO", "Bad day-of-week"),
        ("@daily", "1 fields"),
    ],
)
def test_what_programs_read_differently_is_refused(expression, problem):
    with pytest.raises(UsageError, match=problem):
        six_fields(expression)
