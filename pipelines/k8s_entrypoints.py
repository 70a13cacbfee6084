"""Whether what a container or a Ray job is told to run exists: a command of `caltune`, or a module."""

from __future__ import annotations

import functools
import importlib.util
import re
import shlex
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from pipelines.k8s_pod_rules import containers, pod_specs

Document = Mapping[str, Any]

_DATE = re.compile(r"\$\(date [^()]*\)")
"""The one substitution that a scheduled entrypoint may leave to the shell."""
_OUR_IMAGE = re.compile(r"(^|[/-])(trainer|pipeline|mlflow)([:@]|$)")


def entrypoint_problems(document: Document) -> list[str]:
    """What is wrong with the commands that a manifest names: of Ray jobs, and of containers with an image of ours.

    Other images bring their own programs, which cannot be looked at from here.
    """
    found = []
    for path, entrypoint in _entrypoints(document):
        found += [f"{path}: {problem}" for problem in command_problems(_DATE.sub("0", entrypoint))]
    for path, spec in pod_specs(document):
        for container in containers(spec):
            words = [*(container.get("command") or []), *(container.get("args") or [])]
            if words and container.get("command") and _is_ours(str(container.get("image"))):
                where = f"{path} container '{container.get('name')}'"
                found += [f"{where}: {problem}" for problem in words_problems(words)]
    return found


def command_problems(entrypoint: str) -> list[str]:
    """What is wrong with a command line.

    KubeRay pastes it into the submitter's shell, so it may hold nothing that a shell reads in another way.
    """
    words = shlex.split(entrypoint)
    if shlex.join(words) != entrypoint.strip():
        return [f"'{entrypoint}' has characters that a shell would read; the submitter's shell does"]
    return words_problems(words)


def words_problems(words: Sequence[str]) -> list[str]:
    """What is wrong with a command and its arguments."""
    program, *arguments = words
    if program == "caltune":
        return _caltune_problems(arguments)
    if program == "python" and arguments[:1] == ["-m"]:
        return _module_problems(arguments[1:])
    if program == "python" and arguments[:1] == ["-c"]:
        return _code_problems("\n".join(arguments[1:2]))
    if shutil.which(program, path=str(Path(sys.executable).parent)) is None:
        return [f"'{program}' is neither caltune, nor python -m <module>, nor installed with caltune"]
    return []


def _caltune_problems(arguments: Sequence[str]) -> list[str]:
    commands = _commands()
    verb = next(iter(arguments), "")
    if verb not in commands:
        return [f"caltune has no command '{verb}'; it has {', '.join(sorted(commands))}"]
    try:
        commands[verb].make_context(f"caltune {verb}", list(arguments[1:]))
    except Exception as problem:
        if not hasattr(problem, "format_message"):
            raise
        return [f"caltune {verb}: {problem.format_message()}"]
    return []


@functools.cache
def _commands() -> dict[str, Any]:
    import typer

    from pipelines.cli import app

    group: Any = typer.main.get_command(app)
    return dict(group.commands)


def _module_problems(arguments: Sequence[str]) -> list[str]:
    module = next(iter(arguments), "")
    try:
        found = importlib.util.find_spec(module) if module else None
    except ModuleNotFoundError:
        found = None
    return [] if found is not None else [f"there is no module '{module}'"]


def _code_problems(code: str) -> list[str]:
    try:
        compile(code, "<manifest>", "exec")
    except SyntaxError as problem:
        return [f"python -c: {problem}"]
    return []


def _entrypoints(document: Document) -> Iterator[tuple[str, str]]:
    spec = document.get("spec") or {}
    if document.get("kind") == "RayJob":
        yield "spec.entrypoint", str(spec.get("entrypoint") or "")
    elif document.get("kind") == "RayCronJob":
        yield "spec.jobTemplate.entrypoint", str((spec.get("jobTemplate") or {}).get("entrypoint") or "")


def _is_ours(image: str) -> bool:
    return _OUR_IMAGE.search(image) is not None
