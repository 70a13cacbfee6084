"""Facts about the 118 elements, from periodictable; period, group, block and family follow from the atomic number.

Every question's entity is the element, so a symbol asked forwards and backwards stays in one split.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from itertools import pairwise

from components.data.facts.builder import Fact

NOBLE_GASES = (2, 10, 18, 36, 54, 86, 118)
NEAREST = 6

# Atomic numbers by family. Left out, because tables disagree about them: hydrogen, group 12, selenium, polonium and
# astatine, both ends of the lanthanides and actinides, and the elements from 104 on, whose chemistry is hardly known.
FAMILIES: dict[str, tuple[int, ...]] = {
    "Alkali metals": (3, 11, 19, 37, 55, 87),
    "Alkaline earth metals": (4, 12, 20, 38, 56, 88),
    "Transition metals": (*range(21, 30), *range(39, 48), *range(72, 80)),
    "Lanthanides": tuple(range(58, 71)),
    "Actinides": tuple(range(90, 103)),
    "Metalloids": (5, 14, 32, 33, 51, 52),
    "Post-transition metals": (13, 31, 49, 50, 81, 82, 83),
    "Halogens": (9, 17, 35, 53),
    "Noble gases": (2, 10, 18, 36, 54, 86),
}

BLOCKS = ("The s-block", "The p-block", "The d-block", "The f-block")

# Whether the d-block's third column holds La and Ac or Lu and Lr is disputed; helium is s by electrons, p by column.
NO_CLEAR_BLOCK = frozenset({2, 57, 71, 89, 103})


@dataclass(frozen=True)
class Element:
    """One element.

    Attributes:
        number: Atomic number, 1 to 118.
        name: Capitalised, e.g. `Iron`.
        symbol: E.g. `Fe`.
        mass: Standard atomic weight in g/mol, or None where no isotope is long-lived enough to have one.
    """

    number: int
    name: str
    symbol: str
    mass: float | None

    @property
    def entity(self) -> str:
        """Key that splits keep whole."""
        return f"element:{self.name}"

    @property
    def period(self) -> int:
        """Row of the periodic table, 1 to 7: the first whose noble gas is not before the element."""
        return next(row for row, last in enumerate(NOBLE_GASES, start=1) if self.number <= last)

    @property
    def column(self) -> int | None:
        """IUPAC group, 1 to 18; None for the f-block and the disputed members of group 3."""
        if self.number in (1, 2):
            return 1 if self.number == 1 else 18
        last = NOBLE_GASES[self.period - 1]
        from_start = self.number - NOBLE_GASES[self.period - 2]
        from_end = last - self.number
        if from_start <= 2:
            return from_start
        if self.period in (6, 7) and from_end > 14:
            return None
        return 18 - from_end

    @property
    def block(self) -> str:
        """Block of the periodic table, by the subshell that is being filled."""
        if self.column is None:
            return BLOCKS[3]
        if self.column <= 2:
            return BLOCKS[0]
        return BLOCKS[1] if self.column >= 13 else BLOCKS[2]

    @property
    def family(self) -> str | None:
        """Family name, or None where tables disagree."""
        return next((name for name, members in FAMILIES.items() if self.number in members), None)


@cache
def load_elements() -> tuple[Element, ...]:
    """The elements in order of atomic number."""
    import periodictable

    return tuple(
        Element(entry.number, entry.name.capitalize(), entry.symbol, _weight(entry.number, float(entry.mass)))
        for entry in periodictable.elements
        if entry.number >= 1
    )


def chemistry_facts() -> list[Fact]:
    """All facts, relation by relation; the same on every call."""
    elements = load_elements()
    relations: tuple[Callable[[tuple[Element, ...]], Iterable[Fact]], ...] = (
        _symbols,
        _elements_of_symbols,
        _numbers,
        _elements_of_numbers,
        _successors,
        _families,
        _periods,
        _columns,
        _blocks,
        _weights,
    )
    return [fact for relation in relations for fact in relation(elements)]


def _weight(number: int, mass: float) -> float | None:
    # IUPAC gives no standard weight to Tc, Pm and what follows bismuth, save Th, Pa and U.
    has_standard = number <= 83 and number not in (43, 61)
    return mass if has_standard or number in (90, 91, 92) else None


def _fact(relation: str, element: Element, question: str, answer: str, near: Iterable[str]) -> Fact:
    wrong = tuple(text for text in near if text != answer)
    return Fact(f"{relation}-{element.symbol}", relation, element.entity, question, answer, wrong)


def _alike(element: Element, elements: tuple[Element, ...]) -> list[Element]:
    """Elements easily taken for it: of its family, with its initial, or close in number."""
    return [
        other
        for other in elements
        if other.number != element.number
        and (
            (element.family is not None and other.family == element.family)
            or other.symbol[0] == element.symbol[0]
            or abs(other.number - element.number) <= 2
        )
    ]


def _around(element: Element, elements: tuple[Element, ...]) -> list[Element]:
    return [other for other in elements if 0 < abs(other.number - element.number) <= NEAREST]


def _in_text(element: Element) -> str:
    return element.name.lower()


def _symbols(elements: tuple[Element, ...]) -> Iterator[Fact]:
    for element in elements:
        near = [other.symbol for other in _alike(element, elements)]
        question = f"What is the chemical symbol of {_in_text(element)}?"
        yield _fact("symbol", element, question, element.symbol, near)


def _elements_of_symbols(elements: tuple[Element, ...]) -> Iterator[Fact]:
    for element in elements:
        near = [other.name for other in _alike(element, elements)]
        question = f"Which element has the chemical symbol {element.symbol}?"
        yield _fact("element_of_symbol", element, question, element.name, near)


def _numbers(elements: tuple[Element, ...]) -> Iterator[Fact]:
    for element in elements:
        near = [str(other.number) for other in _around(element, elements)]
        question = f"What is the atomic number of {_in_text(element)}?"
        yield _fact("atomic_number", element, question, str(element.number), near)


def _elements_of_numbers(elements: tuple[Element, ...]) -> Iterator[Fact]:
    for element in elements:
        near = [other.name for other in _around(element, elements)]
        question = f"Which element has the atomic number {element.number}?"
        yield _fact("element_of_number", element, question, element.name, near)


def _successors(elements: tuple[Element, ...]) -> Iterator[Fact]:
    for element, following in pairwise(elements):
        near = [other.name for other in _around(element, elements)]
        question = f"Which element comes right after {_in_text(element)} in the periodic table?"
        yield _fact("next_element", element, question, following.name, near)


def _families(elements: tuple[Element, ...]) -> Iterator[Fact]:
    for element in elements:
        if element.family is not None:
            question = f"To which family of elements does {_in_text(element)} belong?"
            yield _fact("family", element, question, element.family, FAMILIES)


def _periods(elements: tuple[Element, ...]) -> Iterator[Fact]:
    for element in elements:
        near = [f"Period {row}" for row in range(1, 8) if abs(row - element.period) <= 3]
        question = f"In which period of the periodic table is {_in_text(element)}?"
        yield _fact("period", element, question, f"Period {element.period}", near)


def _columns(elements: tuple[Element, ...]) -> Iterator[Fact]:
    for element in elements:
        if element.column is not None:
            near = [f"Group {column}" for column in range(1, 19) if abs(column - element.column) <= NEAREST]
            question = f"In which group of the periodic table is {_in_text(element)}?"
            yield _fact("group", element, question, f"Group {element.column}", near)


def _blocks(elements: tuple[Element, ...]) -> Iterator[Fact]:
    for element in elements:
        if element.number not in NO_CLEAR_BLOCK:
            question = f"To which block of the periodic table does {_in_text(element)} belong?"
            yield _fact("block", element, question, element.block, BLOCKS)


def _weights(elements: tuple[Element, ...]) -> Iterator[Fact]:
    known = {element.number: str(round(element.mass)) for element in elements if element.mass is not None}
    for element in elements:
        if element.number in known:
            # By distance, because thorium, protactinium and uranium have no neighbours with a weight but each other.
            nearest = sorted(known, key=lambda number: abs(number - element.number))[: 2 * NEAREST]
            question = f"What is the atomic weight of {_in_text(element)}, rounded to a whole number?"
            near = [known[number] for number in nearest]
            yield _fact("atomic_weight", element, question, known[element.number], near)
