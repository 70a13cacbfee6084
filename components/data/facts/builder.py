"""Facts become four-way questions: distractors drawn, positions balanced, everything fixed by the seed."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from components.data.schema import Question, QuestionSet
from components.errors import DataError

CHOICES = 4


@dataclass(frozen=True, slots=True)
class Fact:
    """One thing that is true, with answers that are plausible and wrong.

    Attributes:
        id: Unique within the domain.
        relation: What is asked, e.g. `capital`; the question's group.
        entity: What it is asked about, e.g. `country:France`.
        question: A complete English question that names the entity or describes it without doubt.
        answer: The right answer, as a reader would say it.
        near: Wrong answers of the same continent or family; drawn first.
        far: Further wrong answers, drawn only when `near` has too few.
    """

    id: str
    relation: str
    entity: str
    question: str
    answer: str
    near: tuple[str, ...]
    far: tuple[str, ...] = ()


def build_facts(domain: str, seed: int, groups: Sequence[str] | None = None) -> QuestionSet:
    """The built-in questions of a domain.

    The seed fixes distractors and the position of the right answer; what is asked does not depend on it. Relations
    draw from independent streams, so leaving one out changes no other question.

    Args:
        domain: `geography` or `chemistry`.
        seed: Any non-negative integer.
        groups: Relations to keep; None keeps all.

    Returns:
        Four-way questions with `group` and `entity`, ordered by relation, then as the package lists its entries.

    Raises:
        DataError: For an unknown domain or relation.
    """
    by_relation = _relations(domain)
    wanted = list(by_relation) if groups is None else list(groups)
    unknown = [name for name in wanted if name not in by_relation]
    if unknown:
        raise DataError(
            f"facts:{domain}", None, "groups", f"no relation {unknown[0]!r}", "there are " + ", ".join(by_relation)
        )
    questions = [
        question
        for relation, facts in by_relation.items()
        if relation in wanted
        for question in _ask(facts, random.Random(f"{seed}/{domain}/{relation}"))
    ]
    return QuestionSet(name=domain, questions=tuple(questions), source=f"built-in {domain} facts, seed {seed}")


def _relations(domain: str) -> dict[str, list[Fact]]:
    # The packages take up to a second to load, so they are imported by those who ask for their domain only.
    if domain == "geography":
        from components.data.facts.geography import geography_facts

        facts: Iterable[Fact] = geography_facts()
    elif domain == "chemistry":
        from components.data.facts.chemistry import chemistry_facts

        facts = chemistry_facts()
    else:
        raise DataError(f"facts:{domain}", None, "domain", "no such domain", "there are geography and chemistry")
    by_relation: dict[str, list[Fact]] = {}
    for fact in facts:
        by_relation.setdefault(fact.relation, []).append(fact)
    return by_relation


def _ask(facts: Sequence[Fact], rng: random.Random) -> list[Question]:
    positions = _balanced_positions(len(facts), rng)
    return [_question(fact, position, rng) for fact, position in zip(facts, positions, strict=True)]


def _balanced_positions(n: int, rng: random.Random) -> list[int]:
    """Each position equally often, give or take one, in random order."""
    positions = [index % CHOICES for index in range(n)]
    rng.shuffle(positions)
    return positions


def _question(fact: Fact, position: int, rng: random.Random) -> Question:
    wrong = _draw(fact.near, CHOICES - 1, rng)
    if len(wrong) < CHOICES - 1:
        wrong += _draw([text for text in fact.far if text not in wrong], CHOICES - 1 - len(wrong), rng)
    choices = [*wrong[:position], fact.answer, *wrong[position:]]
    return Question(
        id=fact.id,
        question=fact.question,
        choices=tuple(choices),
        answer=position,
        group=fact.relation,
        entity=fact.entity,
    )


def _draw(pool: Sequence[str], n: int, rng: random.Random) -> list[str]:
    distinct = list(dict.fromkeys(pool))
    return rng.sample(distinct, min(n, len(distinct)))
