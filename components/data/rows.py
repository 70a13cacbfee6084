"""One table row to one question, by a declared mapping of columns. Pure; files and hub data sets both end here."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from components.config_data import ColumnMapping
from components.data.schema import AnyQuestion, OpenQuestion, Question, QuestionSet
from components.errors import DataError

MAX_CHOICES = 26
USUAL_CHOICES = 4
Row = Mapping[str, object]

_STANDARD_QUESTION = ColumnMapping(question="question", choices="choices", answer="answer")
_STANDARD_OPEN = ColumnMapping(question="question", answers="answers")


@dataclass(frozen=True, slots=True)
class Place:
    """Where a row stands, for error messages: file or data set, and 1-based line or row."""

    path: str
    line: int

    def error(self, field: str | None, problem: str, remedy: str = "") -> DataError:
        """The error to raise for this row."""
        return DataError(self.path, self.line, field, problem, remedy)


def normalise(text: str) -> str:
    """Text up to case and spaces: folded, outer spaces removed, inner runs of white space made one."""
    return " ".join(text.split()).casefold()


def to_questions(rows: Iterable[tuple[Place, Row]], columns: ColumnMapping | None, stem: str) -> tuple[Question, ...]:
    """Convert rows to multiple-choice questions.

    Args:
        rows: Rows with their places, in source order.
        columns: Which column holds what. None is the standard schema `id`, `question`, `choices`, `answer` (an
            integer), with `group` or `subject`, and `entity`, where present.
        stem: A row without id is called `<stem>-<row>`, rows counted from 0.

    Raises:
        DataError: For the first malformed row, naming place and field.
    """
    ids = _Ids(stem)
    questions = []
    for index, (place, row) in enumerate(rows):
        text = _text(row, (columns or _STANDARD_QUESTION).question, place)
        choices = _choices(row, columns or _STANDARD_QUESTION, place)
        answer = _standard_answer(row, place) if columns is None else _mapped_answer(row, columns, choices, place)
        if not 0 <= answer < len(choices):
            field = "answer" if columns is None else columns.answer
            raise place.error(field, f"{answer} is out of range", f"the row has choices 0 to {len(choices) - 1}")
        questions.append(
            Question(
                id=ids.take(row, columns, index, place),
                question=text,
                choices=choices,
                answer=answer,
                group=_group(row, columns, place),
                entity=_optional_text(row, "entity", place) if columns is None else None,
            )
        )
    return tuple(questions)


def to_open_questions(
    rows: Iterable[tuple[Place, Row]], columns: ColumnMapping | None, stem: str
) -> tuple[OpenQuestion, ...]:
    """Convert rows to open-ended questions; arguments and errors as for `to_questions`, with column `answers`.

    The answers column may hold a list of texts or a single text.
    """
    ids = _Ids(stem)
    mapping = columns or _STANDARD_OPEN
    questions = []
    for index, (place, row) in enumerate(rows):
        if mapping.answers is None:
            raise place.error(None, "the column mapping names no 'answers'", "open-ended rows need it")
        answers = _value(row, mapping.answers, place)
        if columns is not None and isinstance(answers, str):
            answers = [answers]
        questions.append(
            OpenQuestion(
                id=ids.take(row, columns, index, place),
                question=_text(row, mapping.question, place),
                answers=_texts(answers, mapping.answers, place, at_least=1),
                group=_group(row, columns, place),
                entity=_optional_text(row, "entity", place) if columns is None else None,
            )
        )
    return tuple(questions)


def count_oddities(questions: Iterable[AnyQuestion]) -> dict[str, int]:
    """Rows that are legal but unusual, by kind; kinds that do not occur are left out.

    "Equal" is up to case and spaces (`normalise`) unless the kind says exactly. `3 choices`, `5 choices` and so on
    count the rows whose number of choices is not four. Of open-ended rows, which name a thing in many ways, only outer
    spaces and repeated questions are counted.
    """
    counts: Counter[str] = Counter()
    seen: set[tuple[str, ...]] = set()
    for question in questions:
        if isinstance(question, OpenQuestion):
            key: tuple[str, ...] = (normalise(question.question),)
            counts["outer spaces"] += question.question != question.question.strip()
            counts["repeated question"] += key in seen
            seen.add(key)
            continue
        plain = [normalise(text) for text in question.choices]
        texts = (question.question, *question.choices)
        key = (normalise(question.question), *plain)
        counts[f"{len(plain)} choices"] += len(plain) != USUAL_CHOICES
        counts["exactly equal choices"] += len(set(question.choices)) < len(question.choices)
        counts["choices equal up to case and spaces"] += len(set(plain)) < len(plain)
        counts["right choice has an equal twin"] += plain.count(plain[question.answer]) > 1
        counts["outer spaces"] += any(text != text.strip() for text in texts)
        counts["repeated row"] += key in seen
        seen.add(key)
    return {kind: count for kind, count in sorted(counts.items()) if count}


def make_set(name: str, questions: Iterable[AnyQuestion], source: str) -> QuestionSet:
    """A set with its oddities counted."""
    kept = tuple(questions)
    return QuestionSet(name=name, questions=kept, oddities=count_oddities(kept), source=source)


class _Ids:
    """Gives each row its id and refuses one that was given before."""

    def __init__(self, stem: str) -> None:
        self.stem = stem
        self.lines: dict[str, int] = {}

    def take(self, row: Row, columns: ColumnMapping | None, index: int, place: Place) -> str:
        field = "id" if columns is None else columns.id
        value = None
        if columns is None:
            value = row.get("id")
        elif columns.id is not None:
            value = _value(row, columns.id, place)
        if value is None or value == "":
            value = f"{self.stem}-{index}"
        if isinstance(value, bool) or not isinstance(value, str | int):
            raise place.error(field, f"is {_kind(value)}, not text")
        name = str(value)
        if name in self.lines:
            raise place.error(field, f"{name!r} stands in line {self.lines[name]} already", "ids must be unique")
        self.lines[name] = place.line
        return name


def _value(row: Row, column: str, place: Place) -> object:
    """The value of a column; a dotted name reaches into nested columns unless a column has the whole name."""
    if column in row:
        return row[column]
    value: object = row
    for part in column.split("."):
        if not isinstance(value, Mapping) or part not in value:
            raise place.error(column, "the column is missing", "there are " + ", ".join(sorted(map(str, row))))
        value = value[part]
    return value


def _kind(value: object) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "a boolean"
    if isinstance(value, float):
        return "NaN" if math.isnan(value) else "a fraction"
    names = {int: "a number", str: "text", list: "a list", dict: "an object"}
    return names.get(type(value), type(value).__name__)


def _checked_text(value: object, field: str, place: Place) -> str:
    if not isinstance(value, str):
        raise place.error(field, f"is {_kind(value)}, not text")
    if not value.strip():
        raise place.error(field, "is empty")
    if any("\ud800" <= character <= "\udfff" for character in value):
        raise place.error(field, "holds half a surrogate pair, which is no character")
    return value


def _text(row: Row, column: str, place: Place) -> str:
    return _checked_text(_value(row, column, place), column, place)


def _optional_text(row: Row, column: str, place: Place) -> str | None:
    value = row.get(column)
    return None if value is None or value == "" else _checked_text(value, column, place)


def _texts(value: object, field: str, place: Place, at_least: int) -> tuple[str, ...]:
    if not isinstance(value, Sequence) or isinstance(value, str):
        raise place.error(field, f"is {_kind(value)}, not a list")
    texts = tuple(_checked_text(item, f"{field}[{index}]", place) for index, item in enumerate(value))
    if len(texts) < at_least:
        raise place.error(field, f"has {len(texts)} entries", f"at least {at_least} needed")
    return texts


def _choices(row: Row, columns: ColumnMapping, place: Place) -> tuple[str, ...]:
    if columns.choices is None:
        raise place.error(None, "the column mapping names no 'choices'", "multiple-choice rows need it")
    if isinstance(columns.choices, list):
        choices = tuple(_text(row, column, place) for column in columns.choices)
        field = ", ".join(columns.choices)
    else:
        field = columns.choices
        choices = _texts(_value(row, field, place), field, place, at_least=0)
    if not 2 <= len(choices) <= MAX_CHOICES:
        raise place.error(field, f"has {len(choices)} choices", f"2 to {MAX_CHOICES} are possible")
    return choices


def _standard_answer(row: Row, place: Place) -> int:
    value = _value(row, "answer", place)
    if isinstance(value, bool) or not isinstance(value, int):
        raise place.error("answer", f"is {_kind(value)}, not an integer", "a 0-based index into choices")
    return value


def _mapped_answer(row: Row, columns: ColumnMapping, choices: tuple[str, ...], place: Place) -> int:
    """Index of the right choice, given as a label, an index, or the choice's text or letter."""
    if columns.answer is None:
        raise place.error(None, "the column mapping names no 'answer'", "multiple-choice rows need it")
    field = columns.answer
    value = _value(row, field, place)
    if columns.labels is not None:
        return _labelled(value, _value(row, columns.labels, place), len(choices), columns, place)
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    text = _checked_text(value, field, place)
    found = {choices.index(text)} if text in choices else set()
    letter = text.strip().upper()
    if len(letter) == 1 and "A" <= letter <= "Z" and ord(letter) - ord("A") < len(choices):
        found.add(ord(letter) - ord("A"))
    if len(found) != 1:
        problem = "is neither a choice nor the letter of one" if not found else "is a choice and the letter of another"
        raise place.error(field, f"{text!r} {problem}")
    return found.pop()


def _labelled(value: object, labels: object, n_choices: int, columns: ColumnMapping, place: Place) -> int:
    names = [str(label).strip() for label in labels] if isinstance(labels, Sequence) else []
    if len(names) != n_choices:
        raise place.error(columns.labels, f"has {len(names)} labels for {n_choices} choices")
    answer = str(value).strip()
    if names.count(answer) != 1:
        raise place.error(columns.answer, f"{answer!r} is not one of the labels {json.dumps(names)}")
    return names.index(answer)


def _group(row: Row, columns: ColumnMapping | None, place: Place) -> str | None:
    if columns is None:
        return _optional_text(row, "group", place) or _optional_text(row, "subject", place)
    if columns.group is None:
        return None
    value = _value(row, columns.group, place)
    return None if value is None or value == "" else _checked_text(value, columns.group, place)
