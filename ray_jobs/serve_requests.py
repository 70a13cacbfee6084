"""Requests to the service: what they may hold, and what they are refused for."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from components.data.rows import Place
from components.errors import DataError

if TYPE_CHECKING:
    from starlette.requests import Request

    from components.registry.abstention_policy import AbstentionPolicy
    from components.registry.predictor import Predictor, Ready

BYTES_PER_CHARACTER = 6
"""Of JSON that escapes everything: a body within the limits on characters may be this much larger."""
QUESTION_SCHEMA: dict[str, Any] = {
    "type": "object",
    "required": ["question"],
    "properties": {
        "id": {"type": "string", "description": "Comes back with the prediction."},
        "question": {"type": "string"},
        "choices": {
            "type": "array",
            "items": {"type": "string"},
            "description": "2 to 26 options; without them the question is open-ended.",
        },
    },
    "example": {"id": "1", "question": "What is the capital of France?", "choices": ["Lima", "Paris"]},
}
BODY_SCHEMA = {"oneOf": [QUESTION_SCHEMA, {"type": "array", "items": QUESTION_SCHEMA}]}


@dataclass(frozen=True)
class Limits:
    """What the service takes.

    Attributes:
        rows: Questions a request.
        characters: Of a question with its choices.
        queue: Questions waiting and in work; more are refused with 503.
        batch_rows: Questions scored together.
    """

    rows: int = 64
    characters: int = 20_000
    queue: int = 1024
    batch_rows: int = 64

    @property
    def body_bytes(self) -> int:
        """Most bytes of a request's body."""
        return BYTES_PER_CHARACTER * self.rows * self.characters


class RefusedError(Exception):
    """A request that is not answered.

    Args:
        status: HTTP status.
        reason: For whoever asked.
    """

    def __init__(self, status: int, reason: str) -> None:
        super().__init__(reason)
        self.status, self.reason = status, reason


async def read_body(request: Request, limits: Limits) -> tuple[list[Any], bool]:
    """The rows of a request, and whether it was a single one rather than a list.

    Raises:
        RefusedError: It is too large, not JSON, empty, or has too many rows.
    """
    body = bytearray()
    async for part in request.stream():
        body += part
        if len(body) > limits.body_bytes:
            raise RefusedError(413, f"the request is larger than {limits.body_bytes} bytes")
    try:
        content = json.loads(body.decode("utf-8"))
    except UnicodeDecodeError as problem:
        raise RefusedError(400, f"the request is not UTF-8 text: {problem.reason} at byte {problem.start}") from None
    except json.JSONDecodeError as problem:
        raise RefusedError(400, f"the request is not JSON: {problem.msg} at character {problem.pos}") from None
    except ValueError as problem:
        raise RefusedError(400, f"the request is JSON with a number that cannot be read: {problem}") from None
    except RecursionError:
        raise RefusedError(400, "the request is JSON nested too deeply") from None
    single = not isinstance(content, list)
    rows = [content] if single else content
    if not rows:
        raise RefusedError(422, "the request has no question")
    if len(rows) > limits.rows:
        raise RefusedError(413, f"the request has {len(rows)} questions; at most {limits.rows} are possible")
    return rows, single


def read_rows(rows: list[Any], predictor: Predictor, policy: AbstentionPolicy | None, limits: Limits) -> list[Ready]:
    """Makes the rows of a request ready; one bad row refuses the request, by name.

    Raises:
        RefusedError: A question is malformed, has too many characters or too many tokens.
    """
    ready = []
    for number, row in enumerate(rows, start=1):
        place = Place("questions", number)
        if (found := _characters(row)) > limits.characters:
            what = f"has {found} characters with its choices"
            raise RefusedError(413, str(place.error(None, what, f"at most {limits.characters} are possible")))
        try:
            ready.append(predictor.read(row, place, f"question-{number - 1}", policy))
        except DataError as problem:
            raise RefusedError(422, str(problem)) from None
    return ready


def _characters(row: object) -> int:
    """Characters of everything that is put into tokens."""
    if not isinstance(row, Mapping):
        return 0
    choices = row.get("choices")
    texts = [row.get("question"), *(choices if isinstance(choices, list) else [])]
    return sum(len(text) for text in texts if isinstance(text, str))
