"""Seeded draws that keep the proportions of groups."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Mapping, Sequence

from components.data.schema import AnyQuestion


def draw(questions: Sequence[AnyQuestion], n: int, seed: int) -> tuple[AnyQuestion, ...]:
    """At most n questions, each group in proportion to its size, in the order given.

    The draw depends on seed, questions and n only.
    """
    return draw_by_shares(
        questions, n, Counter(question.group for question in questions), random.Random(f"{seed}/draw")
    )


def draw_by_shares(
    questions: Sequence[AnyQuestion], n: int, shares: Mapping[str | None, int], rng: random.Random
) -> tuple[AnyQuestion, ...]:
    """At most n questions, groups in proportion to `shares` as far as there are enough, in the order given."""
    if n >= len(questions):
        return tuple(questions)
    members: dict[str | None, list[int]] = {}
    for index, question in enumerate(questions):
        members.setdefault(question.group, []).append(index)
    quotas = apportion(n, shares, {group: len(indices) for group, indices in members.items()})
    kept = sorted(index for group, indices in members.items() for index in rng.sample(indices, quotas[group]))
    return tuple(questions[index] for index in kept)


def apportion(n: int, shares: Mapping[str | None, int], available: Mapping[str | None, int]) -> dict[str | None, int]:
    """Divide n seats among groups by largest remainder (Hamilton's method), none above what is available.

    What a group cannot fill goes to the others by the same rule. Ties go to the group that comes first.

    Args:
        n: Seats, at most the sum of `available`.
        shares: Weight of each group; a group without one counts as 0 and gets seats only when others are full.
        available: Most seats a group can fill.

    Returns:
        Seats by group, for every group in `available`; they sum to n.
    """
    seats = dict.fromkeys(available, 0)
    left = n
    while left:
        hungry = [group for group in available if seats[group] < available[group]]
        weights = {group: shares.get(group, 0) for group in hungry}
        if not any(weights.values()):
            weights = dict.fromkeys(hungry, 1)
        total = sum(weights.values())
        exact = {group: left * weights[group] / total for group in hungry}
        given = {group: int(exact[group]) for group in hungry}
        by_remainder = sorted(hungry, key=lambda group: given[group] - exact[group])
        for group in by_remainder[: left - sum(given.values())]:
            given[group] += 1
        for group in hungry:
            seats[group] += min(given[group], available[group] - seats[group])
        left = n - sum(seats.values())
    return seats
