"""Hub data sets by name: repository, subset, splits and columns, declared and not guessed."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

from components.config_data import ColumnMapping
from components.data.rows import Row
from components.errors import DataError

Kind = Literal["multiple_choice", "open", "instruction"]


@dataclass(frozen=True)
class Preset:
    """How to read one hub data set.

    Attributes:
        repository: `owner/name` on the hub.
        kind: What its rows are; `instruction` rows become open-ended questions with one answer.
        splits: Our split name to (subset, hub split). A split whose labels are not published is left out.
        columns: What holds what, after `reshape`.
        reshape: Makes a row fit `columns` where a plain mapping cannot; None from it leaves the row out.
        note: Why a split is missing or a row left out.
    """

    repository: str
    kind: Kind
    splits: Mapping[str, tuple[str | None, str]]
    columns: ColumnMapping
    reshape: Callable[[Row], Row | None] | None = None
    note: str = ""

    def place(self, name: str, split: str | None) -> tuple[str | None, str]:
        """Subset and hub split for one of our split names; None means train, or test where there is no train.

        Raises:
            DataError: The data set has no such split.
        """
        wanted = split or next(each for each in ("train", "test", "validation") if each in self.splits)
        if wanted not in self.splits:
            have = "there are " + ", ".join(self.splits) + (f"; {self.note}" if self.note else "")
            raise DataError(f"preset {name}", None, "split", f"no split {wanted!r}", have)
        return self.splits[wanted]


def _same(subset: str | None, *names: str) -> dict[str, tuple[str | None, str]]:
    return {name: (subset, name) for name in names}


def _lettered_options(row: Row) -> Row | None:
    """ClimaQA: options stand in one text, `a) …` by line; experts rejected the rows with Validation false."""
    if row.get("Validation") in (False, "False"):
        return None
    parts = re.split(
        r"^\s*([a-z])\)\s*", re.sub(r"(?m)^-{3,}\s*$", "", str(row.get("Options", ""))), flags=re.MULTILINE
    )
    letters, texts = parts[1::2], [text.strip() for text in parts[2::2]]
    return {**row, "choices": texts, "labels": letters, "Answer": str(row.get("Answer", "")).strip().lower()}


def _json_answers(row: Row) -> Row:
    """PopQA: the accepted answers are a JSON list in a text column."""
    answers = row.get("possible_answers")
    return {**row, "possible_answers": json.loads(answers)} if isinstance(answers, str) else row


def _instruction_text(row: Row) -> Row:
    """Alpaca: the input, where there is one, follows the instruction after an empty line."""
    parts = [str(row.get(name) or "").strip() for name in ("instruction", "input")]
    return {**row, "question": "\n\n".join(part for part in parts if part)}


_ARC_COLUMNS = ColumnMapping(
    id="id", question="question", choices="choices.text", labels="choices.label", answer="answerKey"
)

PRESETS: Mapping[str, Preset] = MappingProxyType(
    {
        "arc_easy": Preset(
            "allenai/ai2_arc", "multiple_choice", _same("ARC-Easy", "train", "validation", "test"), _ARC_COLUMNS
        ),
        "arc_challenge": Preset(
            "allenai/ai2_arc", "multiple_choice", _same("ARC-Challenge", "train", "validation", "test"), _ARC_COLUMNS
        ),
        "openbookqa": Preset(
            "allenai/openbookqa",
            "multiple_choice",
            _same("main", "train", "validation", "test"),
            ColumnMapping(
                id="id", question="question_stem", choices="choices.text", labels="choices.label", answer="answerKey"
            ),
        ),
        "mmlu": Preset(
            "cais/mmlu",
            "multiple_choice",
            {
                "train": ("all", "auxiliary_train"),
                "dev": ("all", "dev"),
                "validation": ("all", "validation"),
                "test": ("all", "test"),
            },
            ColumnMapping(question="question", choices="choices", answer="answer", group="subject"),
        ),
        "medmcqa": Preset(
            "openlifescienceai/medmcqa",
            "multiple_choice",
            _same(None, "train", "validation"),
            ColumnMapping(
                id="id", question="question", choices=["opa", "opb", "opc", "opd"], answer="cop", group="subject_name"
            ),
            note="the labels of its test split are not published",
        ),
        "climaqa": Preset(
            "UCSD-GENIE/ClimaQA",
            "multiple_choice",
            {"train": ("Silver", "mcq"), "test": ("Gold", "mcq")},
            ColumnMapping(question="Question", choices="choices", labels="labels", answer="Answer"),
            reshape=_lettered_options,
            note="train is the synthetic Silver set, test the Gold set that experts checked",
        ),
        "truthful_qa": Preset(
            "truthfulqa/truthful_qa",
            "open",
            {"test": ("generation", "validation")},
            ColumnMapping(question="question", answers="correct_answers", group="category"),
            note="its one split is for evaluation",
        ),
        "trivia_qa": Preset(
            "mandarjoshi/trivia_qa",
            "open",
            _same("rc.nocontext", "train", "validation"),
            ColumnMapping(id="question_id", question="question", answers="answer.aliases"),
            note="the labels of its test split are not published",
        ),
        "popqa": Preset(
            "akariasai/PopQA",
            "open",
            {"test": (None, "test")},
            ColumnMapping(id="id", question="question", answers="possible_answers", group="prop"),
            reshape=_json_answers,
            note="its one split is for evaluation",
        ),
        "alpaca": Preset(
            "tatsu-lab/alpaca",
            "instruction",
            {"train": (None, "train")},
            ColumnMapping(question="question", answers="output"),
            reshape=_instruction_text,
            note="it has no test split",
        ),
    }
)

# The four out-of-domain groups of MMLU subjects that Laplace-LoRA and BLoB evaluate on; the long names are those of
# the local MMLU files.
SUBJECT_GROUPS: Mapping[str, frozenset[str]] = MappingProxyType(
    {
        "cs": frozenset(
            {
                "computer_science",
                "college_computer_science",
                "high_school_computer_science",
                "computer_security",
                "machine_learning",
            }
        ),
        "eng": frozenset({"engineering", "electrical_engineering"}),
        "law": frozenset({"law", "international_law", "jurisprudence", "professional_law"}),
        "health": frozenset(
            {
                "health",
                "anatomy",
                "clinical_knowledge",
                "college_medicine",
                "human_aging",
                "nutrition",
                "professional_medicine",
                "virology",
            }
        ),
    }
)


def preset(name: str) -> Preset:
    """The preset of that name.

    Raises:
        DataError: There is none.
    """
    if name not in PRESETS:
        raise DataError(f"preset {name}", None, "preset", "no such preset", "there are " + ", ".join(PRESETS))
    return PRESETS[name]
