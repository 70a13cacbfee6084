"""One source to disjoint splits, whole entities at a time, and a search for questions that stand in two of them."""

from __future__ import annotations

import random
from collections import Counter, OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from components.config_data import SplitSizes
from components.data.rows import make_set, normalise
from components.data.sampling import draw_by_shares
from components.data.schema import AnyQuestion, Question, QuestionSet
from components.errors import DataError

CALIBRATION_PER_TRAIN = 0.25
LARGEST_SHIFT_SHARE = 0.25
SPLIT_ORDER = ("train", "calibration", "validation", "validation_shift", "test")


@dataclass(frozen=True)
class Overlap:
    """Questions that stand in two splits.

    Attributes:
        first: The earlier split.
        second: The later split.
        questions: Distinct question texts, equal up to case and spaces, that both hold.
        same_choices: Those of them with the same set of choices (of accepted answers, if open-ended), too.
        pairs: Ids of the rows, (in first, in second), every combination.
    """

    first: str
    second: str
    questions: int
    same_choices: int
    pairs: tuple[tuple[str, str], ...]


@dataclass
class _Entity:
    """Questions that must stay together."""

    inside: list[AnyQuestion]
    heldout: list[AnyQuestion]


def entity_of(question: AnyQuestion) -> str:
    """What must not stand in two splits: the entity, or the text (up to case and spaces) where there is none."""
    return question.entity if question.entity is not None else f"text:{normalise(question.question)}"


def divide(
    questions: QuestionSet,
    sizes: SplitSizes,
    heldout_groups: Sequence[str],
    seed: int,
    *,
    with_test: bool = True,
) -> dict[str, QuestionSet]:
    """Divide a source; no entity stands in two splits.

    Entities are assigned first, in a seeded order that spreads every group evenly; then each split is cut to its size
    with the groups in the source's proportions. Test is filled before validation, validation before calibration and
    train, so test and validation do not change with the size of train.

    Args:
        questions: The source.
        sizes: Questions per split. `train: null` takes what the others leave; `calibration: null` is a quarter of
            train.
        heldout_groups: Groups kept out of all splits but `validation_shift`. It takes at most `sizes.validation`
            questions, from entities that no other split needs; with `train: null`, from at most a quarter of those
            that test and validation leave.
        seed: Fixes the division.
        with_test: False where the test questions come from elsewhere.

    Returns:
        `train`, `calibration`, `validation`, `test` (with `with_test`), and `validation_shift` (with
        `heldout_groups`), each in a seeded random order.

    Raises:
        DataError: A held-out group does not occur, or there are too few questions; the counts are named.
    """
    _check_groups(questions, heldout_groups)
    entities = _ordered_entities(questions.questions, set(heldout_groups), random.Random(f"{seed}/divide"))
    shares = Counter(question.group for question in questions if question.group not in heldout_groups)
    plan = _plan(sizes, with_test)
    splits: dict[str, list[AnyQuestion]] = {}
    for name, size in plan.items():
        splits[name] = _take(entities, size, name, plan, questions)
    shift: list[AnyQuestion] = []
    if heldout_groups:
        room = len(entities) if sizes.train is not None else int(len(entities) * LARGEST_SHIFT_SHARE)
        shift = _take_shift(entities, sizes.validation, room, questions, plan)
    if sizes.train is None:
        if sizes.calibration is None:
            left = sum(len(entity.inside) for entity in entities.values())
            plan["calibration"] = int(left * CALIBRATION_PER_TRAIN / (1 + CALIBRATION_PER_TRAIN))
            splits["calibration"] = _take(entities, plan["calibration"], "calibration", plan, questions)
        splits["train"] = [question for entity in entities.values() for question in entity.inside]
        plan["train"] = len(splits["train"])
        if not splits["train"]:
            raise _too_few("train", 1, 0, plan, questions)
    if heldout_groups:
        splits["validation_shift"] = shift
        plan["validation_shift"] = sizes.validation
        shares += Counter(question.group for question in shift)
    result = {}
    for name in SPLIT_ORDER:
        if name in splits:
            # A stream of its own, so that one split's size does not change another.
            own = random.Random(f"{seed}/divide/{name}")
            cut = list(draw_by_shares(splits[name], plan[name], shares, own))
            own.shuffle(cut)
            result[name] = make_set(name, cut, questions.source)
    return result


def find_overlaps(sets: Mapping[str, QuestionSet]) -> list[Overlap]:
    """Questions in two sets, for every pair of sets that shares any, in the sets' order."""
    index = {name: _by_text(questions) for name, questions in sets.items()}
    names = list(sets)
    found = []
    for position, first in enumerate(names):
        for second in names[position + 1 :]:
            shared = [text for text in index[first] if text in index[second]]
            if not shared:
                continue
            rows = [(index[first][text], index[second][text]) for text in shared]
            same = sum(bool(_choice_sets(one) & _choice_sets(other)) for one, other in rows)
            pairs = tuple((a.id, b.id) for one, other in rows for a in one for b in other)
            found.append(Overlap(first, second, len(shared), same, pairs))
    return found


def _by_text(questions: QuestionSet) -> dict[str, list[AnyQuestion]]:
    texts: dict[str, list[AnyQuestion]] = {}
    for question in questions:
        texts.setdefault(normalise(question.question), []).append(question)
    return texts


def _choice_sets(questions: Sequence[AnyQuestion]) -> set[frozenset[str]]:
    # Of open-ended questions the accepted answers take the place of the choices.
    return {
        frozenset(normalise(text) for text in (q.choices if isinstance(q, Question) else q.answers)) for q in questions
    }


def _check_groups(questions: QuestionSet, heldout_groups: Sequence[str]) -> None:
    counts = Counter(question.group for question in questions)
    for name in heldout_groups:
        if name not in counts:
            have = ", ".join(f"{group} ({count})" for group, count in counts.items() if group) or "none"
            raise DataError(
                questions.source, None, "heldout_groups", f"no question of group {name!r}", f"groups there: {have}"
            )


def _ordered_entities(
    questions: Sequence[AnyQuestion], heldout: set[str], rng: random.Random
) -> OrderedDict[str, _Entity]:
    """Entities in random order, those that cover the same groups spread evenly over it."""
    entities: dict[str, _Entity] = {}
    for question in questions:
        entity = entities.setdefault(entity_of(question), _Entity([], []))
        (entity.heldout if question.group in heldout else entity.inside).append(question)
    strata: dict[frozenset[str | None], list[str]] = {}
    for name, entity in entities.items():
        strata.setdefault(frozenset(question.group for question in entity.inside), []).append(name)
    place: dict[str, float] = {}
    for names in strata.values():
        rng.shuffle(names)
        offset = rng.random()
        for rank, name in enumerate(names):
            place[name] = (rank + offset) / len(names)
    return OrderedDict((name, entities[name]) for name in sorted(place, key=lambda name: place[name]))


def _plan(sizes: SplitSizes, with_test: bool) -> dict[str, int]:
    """Sizes that are known beforehand, in the order of filling."""
    plan = {"test": sizes.test} if with_test else {}
    plan["validation"] = sizes.validation
    if sizes.calibration is not None:
        plan["calibration"] = sizes.calibration
    elif sizes.train is not None:
        plan["calibration"] = round(sizes.train * CALIBRATION_PER_TRAIN)
    if sizes.train is not None:
        plan["train"] = sizes.train
    return plan


def _take(
    entities: OrderedDict[str, _Entity], size: int, name: str, plan: Mapping[str, int], source: QuestionSet
) -> list[AnyQuestion]:
    """Whole entities with at least `size` questions together, as few questions more as the order allows."""
    taken: list[AnyQuestion] = []
    while len(taken) < size:
        best = _next_entity(entities, size - len(taken))
        if best is None:
            raise _too_few(name, size, len(taken), plan, source)
        taken += entities.pop(best).inside
    return taken


def _next_entity(entities: OrderedDict[str, _Entity], need: int) -> str | None:
    """The first entity that fits into what is needed, else the smallest; None where none has a question."""
    smallest: str | None = None
    for name, entity in entities.items():
        if 0 < len(entity.inside) <= need:
            return name
        if entity.inside and (smallest is None or len(entity.inside) < len(entities[smallest].inside)):
            smallest = name
    return smallest


def _take_shift(
    entities: OrderedDict[str, _Entity], size: int, room: int, source: QuestionSet, plan: Mapping[str, int]
) -> list[AnyQuestion]:
    """Held-out questions of entities that are left; at most `room` entities whose other questions are lost by it."""
    taken: list[AnyQuestion] = []
    for name, entity in list(entities.items()):
        costs = bool(entity.inside)
        if len(taken) < size and entity.heldout and costs <= room:
            taken += entities.pop(name).heldout
            room -= costs
    if not taken:
        raise _too_few("validation_shift", size, 0, plan, source)
    return taken


def _too_few(name: str, size: int, got: int, plan: Mapping[str, int], source: QuestionSet) -> DataError:
    wanted = ", ".join(f"{split} {count}" for split, count in plan.items())
    return DataError(
        source.source,
        None,
        "splits",
        f"{name} needs {size} questions and gets {got}: the source has {len(source)} questions about "
        f"{len({entity_of(question) for question in source})} entities, asked for are {wanted}",
        "entities go to one split whole; ask for less or add questions",
    )
