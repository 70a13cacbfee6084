"""Turns pydantic's errors about a run file into sentences: `file:line: dotted.field: problem`."""

from __future__ import annotations

import difflib
import types
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel

from components.run_file_source import KeyPath, Source, dotted

_WORDS = {
    str: "text",
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    Path: "a path",
    dict: "a section",
}
_PLURALS = {"text": "texts", "a whole number": "whole numbers", "a number": "numbers"}


def describe_errors(model: type[BaseModel], source: Source, errors: Sequence[Mapping[str, Any]]) -> list[str]:
    """One line for each thing that is wrong, in the order of the schema.

    Args:
        model: The schema's root.
        source: What was read.
        errors: `pydantic.ValidationError.errors()`.

    Returns:
        Lines such as `run.yaml:7: calm.etta: unknown key, did you mean 'eta'?`.
    """
    lines: list[str] = []
    for error in errors:
        path, annotation = _field_path(model, error["loc"])
        if len(_members(annotation)) > 1:
            error = {**error, "input": _value_at(source.data, path)}
        line = f"{source.where(path)}: {dotted(path) or 'run file'}: {_problem(model, path, annotation, error)}"
        if line not in lines:  # a union gives one error per member, all at one field
            lines.append(line)
    return lines


def boolean_errors(model: type[BaseModel], source: Source) -> list[str]:
    """Lines for `true` or `false` where a number belongs, which pydantic would quietly read as 1 or 0."""
    lines = []
    for path, value in _leaves(source.data, ()):
        annotation = _annotation_at(model, path)
        members = _members(annotation)
        if isinstance(value, bool) and bool not in members and {int, float} & set(members):
            lines.append(f"{source.where(path)}: {dotted(path)}: expected {describe(annotation)}, got {_shown(value)}")
    return lines


def describe(annotation: Any) -> str:
    """A type in a user's words: `int | None` is `a whole number or null`."""
    if get_origin(annotation) in {Union, types.UnionType}:
        return " or ".join(describe(member) for member in get_args(annotation))
    if annotation is type(None):
        return "null"
    if get_origin(annotation) is Literal:
        return _listed(get_args(annotation))
    if get_origin(annotation) is list:
        inner = describe(get_args(annotation)[0])
        return f"a list of {_PLURALS.get(inner, inner)}"
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return "a section"
    return _WORDS.get(get_origin(annotation) or annotation, str(annotation))


def _problem(model: type[BaseModel], path: KeyPath, annotation: Any, error: Mapping[str, Any]) -> str:
    kind, message, value = error["type"], str(error["msg"]), error.get("input")
    if kind == "extra_forbidden":
        return f"unknown key{_key_hint(model, path)}"
    if kind == "missing":
        return f"is required ({describe(annotation)})"
    if kind == "value_error":
        return message.removeprefix("Value error, ")
    if kind == "literal_error":
        choices = get_args(annotation) if get_origin(annotation) is Literal else ()
        expected = _listed(choices) if choices else str(error["ctx"]["expected"])
        return f"must be {expected}, got {_shown(value)}{_meant(str(value), [str(choice) for choice in choices])}"
    if kind == "string_pattern_mismatch":
        return f"got {_shown(value)}. {_description(model, path)}"
    if len(_members(annotation)) > 1 or kind.endswith(("_type", "_parsing")) or kind == "int_from_float":
        return f"expected {describe(annotation)}, got {_shown(value)}"
    return f"{message.replace('Input should', 'should', 1)}, got {_shown(value)}"


def _key_hint(model: type[BaseModel], path: KeyPath) -> str:
    """A near name in the same section, else the same name in another section, else what the section has."""
    section = _section_at(model, path[:-1])
    names = list(section.model_fields) if section else []
    name = str(path[-1])
    near = _meant(name, names)
    if near:
        return near
    elsewhere = [other for other in _all_fields(model, ()) if other[-1] == name]
    if elsewhere:
        return f", did you mean '{dotted(elsewhere[0])}'?"
    return f"; this section has {', '.join(names)}"


def _meant(name: str, names: Sequence[str]) -> str:
    near = difflib.get_close_matches(name, names, n=1)
    return f", did you mean '{near[0]}'?" if near else ""


def _listed(choices: Sequence[object]) -> str:
    shown = [_shown(choice) for choice in choices]
    return shown[0] if len(shown) == 1 else f"{', '.join(shown[:-1])} or {shown[-1]}"


def _shown(value: object) -> str:
    words = {None: "null", True: "true", False: "false"}
    text = words[value] if value is None or isinstance(value, bool) else repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _members(annotation: Any) -> tuple[Any, ...]:
    """The alternatives of a type, null left out."""
    if get_origin(annotation) in {Union, types.UnionType}:
        return tuple(member for member in get_args(annotation) if member is not type(None))
    return (annotation,)


def _step(annotation: Any, part: str | int) -> Any:
    """The type of what stands under `part` of a value of type `annotation`; None where nothing can."""
    for member in _members(annotation):
        if isinstance(member, type) and issubclass(member, BaseModel) and part in member.model_fields:
            return member.model_fields[str(part)].annotation
        if get_origin(member) is list and isinstance(part, int):
            return get_args(member)[0]
        if get_origin(member) is dict and part != "[key]":
            return get_args(member)[1]
    return None


def _field_path(model: type[BaseModel], location: KeyPath) -> tuple[KeyPath, Any]:
    """The key path in the file for pydantic's location, which also names union members and `[key]`, and its type."""
    annotation: Any = model
    path: list[str | int] = []
    for part in location:
        if part == "[key]":
            return tuple(path), get_args(_annotation_at(model, tuple(path[:-1])))[0]
        inner = _step(annotation, part)
        if inner is None and len(_members(annotation)) > 1:
            return tuple(path), annotation
        path.append(part)
        annotation = inner
    return tuple(path), annotation


def _annotation_at(model: type[BaseModel], path: KeyPath) -> Any:
    annotation: Any = model
    for part in path:
        annotation = _step(annotation, part)
    return annotation


def _section_at(model: type[BaseModel], path: KeyPath) -> type[BaseModel] | None:
    sections = [m for m in _members(_annotation_at(model, path)) if isinstance(m, type) and issubclass(m, BaseModel)]
    return sections[0] if sections else None


def _description(model: type[BaseModel], path: KeyPath) -> str:
    section = _section_at(model, path[:-1])
    return str(section.model_fields[str(path[-1])].description or "") if section else ""


def _all_fields(model: type[BaseModel], path: KeyPath) -> Iterator[KeyPath]:
    for name, info in model.model_fields.items():
        yield (*path, name)
        for member in _members(info.annotation):
            if isinstance(member, type) and issubclass(member, BaseModel):
                yield from _all_fields(member, (*path, name))


def _value_at(data: Any, path: KeyPath) -> object:
    for part in path:
        data = data[part]
    return data


def _leaves(data: object, path: KeyPath) -> Iterator[tuple[KeyPath, object]]:
    if isinstance(data, dict):
        for key, value in data.items():
            yield from _leaves(value, (*path, key))
    elif isinstance(data, list):
        for index, value in enumerate(data):
            yield from _leaves(value, (*path, index))
    else:
        yield path, data
