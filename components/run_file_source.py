"""Reads a run file and its overrides into plain data that still knows which line, or which override, each key is from.

YAML 1.2 through ruamel.yaml: `1e-5` is a number, `no` is text, a key given twice is an error.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.comments import CommentedMap, CommentedSeq, TaggedScalar
from ruamel.yaml.error import MarkedYAMLError, YAMLError

from components.errors import RunFileError

KeyPath = tuple[str | int, ...]


def dotted(path: KeyPath) -> str:
    """`("data", "ood", "b", 0)` as `data.ood.b.0`."""
    return ".".join(str(part) for part in path)


@dataclass
class Source:
    """A run file's content with the origin of every key.

    Attributes:
        file: The run file.
        data: Its content with the overrides applied, in plain Python types.
        lines: 1-based line of each key that the file holds.
        overridden: The override that set a key, as it was typed.
        problems: What is wrong with the overrides themselves, one sentence each.
    """

    file: Path
    data: dict[str, Any] = field(default_factory=dict)
    lines: dict[KeyPath, int] = field(default_factory=dict)
    overridden: dict[KeyPath, str] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)

    def where(self, path: KeyPath) -> str:
        """The override or `file:line` that the key at `path`, or the nearest section around it, comes from."""
        for length in range(len(path), 0, -1):
            if path[:length] in self.overridden:
                return f"override '{self.overridden[path[:length]]}'"
            if path[:length] in self.lines:
                return f"{self.file}:{self.lines[path[:length]]}"
        return f"{self.file}:1"

    def override(self, text: str) -> None:
        """Apply one `section.key=value`; what is wrong with it goes to `problems`."""
        key, equals, value = text.partition("=")
        path: KeyPath = tuple(key.strip().split("."))
        if not equals or not all(path):
            self.problems.append(f"override '{text}': expected section.key=value")
            return
        try:
            parsed = _override_value(value)
        except YAMLError as error:
            self.problems.append(f"override '{text}': {dotted(path)}: {_yaml_problem(error)}")
            return
        if parsed is None and not value.strip():
            self.problems.append(f"override '{text}': {dotted(path)}: has no value; write null, or '\"\"' for no text")
            return
        self._put(path, parsed, text)

    def _put(self, path: KeyPath, value: object, text: str) -> None:
        section: dict[str, Any] = self.data
        for depth, part in enumerate(path[:-1], start=1):
            if section.get(str(part)) is None:
                section[str(part)] = {}
                self.overridden[path[:depth]] = text
            inner = section[str(part)]
            if not isinstance(inner, dict):
                name = dotted(path[:depth])
                found = f"a list; give all of it: {name}=[...]" if isinstance(inner, list) else "not a section"
                self.problems.append(f"override '{text}': {name} is {found}")
                return
            section = inner
        section[str(path[-1])] = value
        for known in [known for known in (*self.lines, *self.overridden) if known[: len(path)] == path]:
            self.lines.pop(known, None)
            self.overridden.pop(known, None)
        self.overridden[path] = text


def read_source(path: Path, overrides: Sequence[str] = ()) -> Source:
    """Read a run file and apply overrides, without asking yet whether the result makes a run.

    Raises:
        RunFileError: The file cannot be read, is not YAML, or is not a mapping of sections.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise RunFileError(f"{path}: no such run file") from None
    except (OSError, UnicodeDecodeError) as error:
        raise RunFileError(f"{path}: cannot be read: {error}") from error
    try:
        loaded = YAML(typ="rt").load(text)
    except MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        raise RunFileError(f"{path}:{mark.line + 1 if mark else 1}: {_yaml_problem(error)}") from error
    except YAMLError as error:
        raise RunFileError(f"{path}: {error}") from error
    if not isinstance(loaded, CommentedMap):
        found = "is empty" if loaded is None else "holds no sections"
        raise RunFileError(f"{path}:1: {found}; a run file is a mapping that starts with `run: <name>` and `data:`")
    source = Source(path)
    source.data = _plain(loaded, (), source)
    for override in overrides:
        source.override(override)
    return source


def _override_value(text: str) -> object:
    """A YAML scalar, quoted string, [list] or {mapping}. Anything else, such as `Answer:`, is text as it stands."""
    bracketed = text.strip()[:1] in {"[", "{", '"', "'"}
    try:
        value = YAML(typ="safe", pure=True).load(text)
    except YAMLError:
        if bracketed:
            raise
        return text
    return text if isinstance(value, (dict, list)) and not bracketed else value


def _yaml_problem(error: YAMLError) -> str:
    problem = str(getattr(error, "problem", None) or error).splitlines()[0]
    context = getattr(error, "context", None)
    if "duplicate key" in problem:
        return problem.replace("found duplicate key", "this section already has the key")
    return f"not valid YAML: {problem}" + (f" ({context})" if context else "")


def _plain(node: Any, path: KeyPath, source: Source) -> Any:
    """Plain Python types for ruamel's; notes the line of each key on the way."""
    if isinstance(node, CommentedMap):
        positions = node.lc.data or {}
        for key in node:
            if key in positions:
                source.lines[(*path, key)] = positions[key][0] + 1
        return {key: _plain(value, (*path, key), source) for key, value in node.items()}
    if isinstance(node, CommentedSeq):
        positions = node.lc.data or {}
        for index in range(len(node)):
            if index in positions:
                source.lines[(*path, index)] = positions[index][0] + 1
        return [_plain(value, (*path, index), source) for index, value in enumerate(node)]
    if isinstance(node, TaggedScalar):
        raise RunFileError(f"{source.where(path)}: {dotted(path)}: YAML tags such as {node.tag.value} are not allowed")
    for kind in (bool, int, float, str):  # ruamel's scalars are subclasses that remember how they were written
        if isinstance(node, kind):
            return kind(node)
    return node
