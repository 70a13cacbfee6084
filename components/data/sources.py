"""A source of the run file to a set of questions, whatever its kind."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from components.config_data import SourceConfig
from components.data.facts.builder import build_facts
from components.data.files import read_questions
from components.data.hub import read_hub_questions
from components.data.presets import SUBJECT_GROUPS
from components.data.rows import make_set
from components.data.sampling import draw
from components.data.schema import Question, QuestionSet
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
    if config.kind == "facts":
        whole = build_facts(str(config.domain), seed, config.groups)
    elif config.kind == "file":
        whole = read_questions(base_folder / Path(str(config.path)), config.columns, name)
    elif config.sources is not None:
        whole = _mixture(config.sources, seed, name, base_folder)
    else:
        whole = read_hub_questions(config, name)
    questions = whole.questions
    if config.groups is not None:
        questions = keep_groups(questions, config.groups, whole.source)
    if config.limit is not None:
        questions = draw(questions, config.limit, seed)
    return make_set(name, questions, whole.source)


def _mixture(sources: Sequence[SourceConfig], seed: int, name: str, base_folder: Path) -> QuestionSet:
    """The sources one after the other; what two of them call alike is told apart by the source's name."""
    questions: list[Question] = []
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


def keep_groups(questions: Sequence[Question], groups: Sequence[str], source: str) -> tuple[Question, ...]:
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
