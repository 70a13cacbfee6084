"""Files that are either whole or not there: written beside their place, then moved into it."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from components.errors import CaltuneError


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yields a temporary path in the same folder; it replaces `path` when the block ends well, else it is removed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        yield temporary
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Writes strict JSON (no NaN, no Infinity), indented, in the order given.

    Raises:
        ValueError: `content` holds NaN or an infinity; callers turn undefined figures into None first.
    """
    with replacing(path) as temporary:
        temporary.write_text(json_text(content), encoding="utf-8")


def json_text(content: Mapping[str, Any]) -> str:
    """What `write_json` writes; errors likewise."""
    return json.dumps(content, indent=2, ensure_ascii=False, allow_nan=False) + "\n"


def read_json(path: Path, remedy: str) -> dict[str, Any]:
    """Reads a JSON object.

    Args:
        path: The file.
        remedy: What makes it anew, for the error: `evaluate again`.

    Raises:
        CaltuneError: The file is missing or is not a JSON object.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CaltuneError(f"{path} does not exist; {remedy}") from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise CaltuneError(f"{path} is not JSON: {error}; delete it and {remedy}") from error
    if not isinstance(content, dict):
        raise CaltuneError(f"{path} holds {type(content).__name__}, not a JSON object; delete it and {remedy}")
    return content
