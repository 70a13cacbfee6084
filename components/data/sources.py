"""A source of the run file to a set of questions, whatever its kind."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from components.config_data import SourceConfig
from components.data.facts.builder import build_facts
from components.data.files import read_open_questions, read_questions
from components.data.hub import read_hub_open_questions, read_hub_questions
from components.data.presets import SUBJECT_GROUPS
from components.data.rows import make_set
from components.data.sampling import draw
from components.data.schema import AnyQuestion, QuestionSet
from components.errors import DataError


def load_source(config: SourceConfig, seed: int, name: str, base_folder: Path) -> QuestionSet:
    """Read a source, keep its groups, cut it to its limit.

    Args:
        config: The source.
        seed: Fixes the facts' distractors and which questions a limit keeps.
        name: Name of the resulting set.
        base_folder: Where a relative `path` starts.

    Returns:
        Questions in source order. A limit keeps the groups' proportions.

    Raises:
        DataError: The source cannot be read, a row is malformed, or a named group does not occur.
    """
    whole = _read(config, seed, name, base_folder)
    questions = whole.questions
    if config.groups is not None:
        questions = keep_groups(questions, config.groups, whole.source)
    if config.limit is not None:
        questions = draw(questions, config.limit, seed)
    return make_set(name, questions, whole.source)


def _read(config: SourceConfig, seed: int, name: str, base_folder: Path) -> QuestionSet:
    path = base_folder / Path(str(config.path))
    if config.kind == "facts":
        return build_facts(str(config.domain), seed, config.groups)
    if config.sources is not None:
        return _mixture(config.sources, seed, name, base_folder)
    if config.rows == "open":
        from_file = config.kind == "file"
        rows = read_open_questions(path, config.columns, name) if from_file else read_hub_open_questions(config)
        return make_set(name, rows, str(path) if from_file else config.preset or str(config.repository))
    if config.kind == "file":
        return read_questions(path, config.columns, name)
    return read_hub_questions(config, name)


def _mixture(sources: Sequence[SourceConfig], seed: int, name: str, base_folder: Path) -> QuestionSet:
    """The sources one after the other; what two of them call alike is told apart by the source's name."""
    questions: list[AnyQuestion] = []
    read: list[str] = []
    for label, source in zip(_labels(sources), sources, strict=True):
        part = load_source(source, seed, name, base_folder)
        read.append(part.source)
        questions += [
            replace(question, id=f"{label}/{question.id}", group=question.group or label) for question in part
        ]
    return make_set(name, questions, " + ".join(read))


def _labels(sources: Sequence[SourceConfig]) -> list[str]:
    """A short name for each source of a mixture, no two alike."""
    names = [_label(source) for source in sources]
    counted = Counter(names)
    return [f"{name}-{names[:i].count(name) + 1}" if counted[name] > 1 else name for i, name in enumerate(names)]


def _label(source: SourceConfig) -> str:
    if source.path is not None:
        return f"{source.path.parent.name}-{source.path.name.partition('.')[0]}".strip("-")
    return str(source.domain or source.preset or source.repository)


def keep_groups(questions: Sequence[AnyQuestion], groups: Sequence[str], source: str) -> tuple[AnyQuestion, ...]:
    """Questions of the named groups; `cs`, `eng`, `law` and `health` also stand for their MMLU subjects.

    Raises:
        DataError: A name matches no question.
    """
    present = {question.group for question in questions}
    wanted: set[str] = set()
    for name in groups:
        members = {name, *SUBJECT_GROUPS.get(name, ())}
        if not members & present:
            have = ", ".join(sorted(group for group in present if group)) or "none"
            raise DataError(source, None, "groups", f"no question of group {name!r}", f"groups there: {have}")
        wanted |= members
    return tuple(question for question in questions if question.group in wanted)
