"""Rows that somebody asks to have answered, as questions: each on its own, so that a bad one spoils no other."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from components.data.rows import Place, Row, to_open_questions, to_questions
from components.data.schema import AnyQuestion

ASKED = ("id", "question")
"""Fields that are read of every row, beside `choices`; a label may stand beside them and is not looked at."""
UNLABELLED = 0


@dataclass(frozen=True)
class Asked:
    """A row that was asked.

    Attributes:
        place: Where it stands.
        question: What it says; the right answer in it means nothing.
    """

    place: Place
    question: AnyQuestion


def read_asked(row: object, place: Place, default_id: str) -> Asked:
    """Reads a row `{"id", "question", "choices"}`; without `choices` (or null) it is open-ended.

    Args:
        row: The row.
        place: Where it stands, for errors.
        default_id: Id of a row without one.

    Raises:
        DataError: It is malformed; names place and field.
    """
    if not isinstance(row, Mapping):
        raise place.error(None, f"is {type(row).__name__}, not an object", 'as {"question": ..., "choices": [...]}')
    fields: dict[str, object] = {name: row[name] for name in ASKED if name in row}
    if fields.get("id") in (None, ""):
        fields["id"] = default_id
    if isinstance(fields["id"], str) and any("\ud800" <= character <= "\udfff" for character in fields["id"]):
        raise place.error("id", "holds half a surrogate pair, which is no character")
    if row.get("choices") is None:
        return Asked(place, to_open_questions([(place, _open(fields))], None, default_id)[0])
    labelled = {**fields, "choices": row["choices"], "answer": UNLABELLED}
    return Asked(place, to_questions([(place, labelled)], None, default_id)[0])


def _open(fields: Row) -> Row:
    """With an accepted answer, which the data contract wants and nobody reads."""
    return {**fields, "answers": ["-"]}
