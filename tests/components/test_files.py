"""Files that are either whole or not there."""

from __future__ import annotations

from pathlib import Path

import pytest

from components.errors import CaltuneError
from components.files import read_json, replacing, write_json


def test_what_is_written_is_read_back_in_order(tmp_path: Path) -> None:
    path = tmp_path / "new" / "state.json"
    content = {"b": [1, None, "Lomé"], "a": {"x": 0.5}}
    write_json(path, content)
    assert list(read_json(path, "run again").items()) == list(content.items())
    assert list(path.parent.iterdir()) == [path]
    assert "Lomé" in path.read_text(encoding="utf-8")


def test_a_failure_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "state.json"
    write_json(path, {"value": 1})

    def fail() -> None:
        with replacing(path) as temporary:
            temporary.write_text("half")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fail()
    assert read_json(path, "run again") == {"value": 1}
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_json_does_not_have_never_reaches_a_file(tmp_path: Path, value: float) -> None:
    with pytest.raises(ValueError, match="JSON"):
        write_json(tmp_path / "state.json", {"value": value})
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("content", [None, "{", "[1]", "\xff"])
def test_a_missing_or_damaged_file_is_named_with_what_makes_it_anew(tmp_path: Path, content: str | None) -> None:
    path = tmp_path / "state.json"
    if content is not None:
        path.write_text(content, encoding="latin-1")
    with pytest.raises(CaltuneError, match=r"state\.json.*run again"):
        read_json(path, "run again")
