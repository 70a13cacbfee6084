"""The run file's `data` section: where questions come from, how they are divided and put into words."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field, model_validator

from components.config_base import Strict

Scoring = Literal["letter", "text"]


class PromptConfig(Strict):
    """How a question becomes text, and how its options are scored."""

    style: Literal["chat", "plain"] = "chat"
    """`chat`: the tokenizer's chat template. `plain`: the template alone."""
    system: str | None = None
    """System message, for `chat`."""
    scoring: Scoring = "text"
    """`text`: sum of the log-probabilities of the option's tokens. `letter`: the options are listed and one letter
    token stands for each."""
    template: str = "{question}"
    """Question text, with `{question}` and, where wanted, `{options}` (one `A. text` a line). With `letter` scoring
    the template must contain `{options}`."""
    answer_prefix: str = ""
    """Put before the answer, in the assistant's turn for `chat`; e.g. `Answer:`."""
    delimiter: str = ""
    """Between prompt and option text or letter, counted with the option; a space for most plain prompts."""

    @model_validator(mode="after")
    def _template_has_fields(self) -> PromptConfig:
        if "{question}" not in self.template:
            raise ValueError("template must contain {question}")
        if self.scoring == "letter" and "{options}" not in self.template:
            raise ValueError("letter scoring needs {options} in the template, else the letters mean nothing")
        return self


class ColumnMapping(Strict):
    """Which columns of a hub data set or local table hold what. Dotted names reach into nested columns."""

    question: str
    """Column with the question's text."""
    choices: str | list[str] | None = None
    """A column with the list of choices, or one column per choice."""
    answer: str | None = None
    """Column with the index, label or text of the right choice."""
    labels: str | None = None
    """Column with the label of each choice, when `answer` is a label such as `A` or `1`."""
    answers: str | None = None
    """Column with the accepted answers, for open-ended rows."""
    id: str | None = None
    """Column with an id of its own for each row; null numbers the rows."""
    group: str | None = None
    """Column whose value groups rows, e.g. an MMLU subject."""


class SourceConfig(Strict):
    """Where questions come from: the built-in facts, a local file, a data set on the hub, or several of these."""

    kind: Literal["facts", "file", "hub", "mixture"]
    """Which of the four; the keys below say what each needs."""
    domain: Literal["geography", "chemistry"] | None = None
    """For `facts`."""
    path: Path | None = None
    """For `file`: .jsonl, .jsonl.gz, .parquet or .csv. Relative paths start at `data.root`, without it at the run
    file's folder."""
    preset: str | None = None
    """For `hub`: a name of `components/data/presets.py`, which declares repository, splits and columns."""
    repository: str | None = None
    """For `hub` without a preset: `owner/name`; then `columns` is required."""
    subset: str | None = None
    """For `hub`: the data set's configuration name."""
    split: str | None = None
    """For `hub`: the split to read."""
    revision: str | None = None
    """For `hub`: branch, tag or commit."""
    rows: Literal["choices", "open"] = Field("choices", exclude_if=lambda value: value == "choices")
    """`choices`: multiple-choice rows. `open`: rows with accepted answers instead, which the model answers in its own
    words; see `generation`. Left at `choices`, it is not part of the resolved file."""
    columns: ColumnMapping | None = None
    """Column mapping; for `file` only when the columns are not the standard ones."""
    sources: list[SourceConfig] | None = Field(None, exclude_if=lambda value: value is None)
    """For `mixture`: the sources, one after the other, each cut to its own `limit`. Ids get the source's name in front;
    a question without a group gets that name as its group, so that splits keep the sources' proportions."""
    groups: list[str] | None = None
    """Keep only these groups (relations of the facts, MMLU subjects or the four named groups of subjects)."""
    limit: int | None = Field(None, ge=1)
    """Keep at most this many questions, drawn with the run's seed."""

    @model_validator(mode="after")
    def _kind_has_its_fields(self) -> SourceConfig:
        if self.kind == "facts" and self.domain is None:
            raise ValueError("kind 'facts' needs 'domain' (geography or chemistry)")
        if self.kind == "facts" and self.rows != "choices":
            raise ValueError("the facts are multiple-choice; 'rows: open' is for kinds 'file' and 'hub'")
        if self.kind == "file" and self.path is None:
            raise ValueError("kind 'file' needs 'path'")
        if self.kind == "hub" and (self.preset is None) == (self.repository is None):
            raise ValueError("kind 'hub' needs either 'preset' or 'repository'")
        if self.kind == "hub" and self.repository is not None and self.columns is None:
            raise ValueError("a hub repository without a preset needs 'columns'")
        if self.kind == "mixture" and not self.sources:
            raise ValueError("kind 'mixture' needs 'sources', a list of sources")
        if self.sources and (self.kind != "mixture" or any(part.kind == "mixture" for part in self.sources)):
            raise ValueError("'sources' belongs to kind 'mixture', and none of them may be a mixture itself")
        if self.sources and any(part.rows != self.rows for part in self.sources):
            raise ValueError(f"a mixture with rows '{self.rows}' needs 'rows: {self.rows}' of all its sources")
        return self


class SplitSizes(Strict):
    """How one source is divided. Whole entities (or groups) go to one split, so no fact leaks from train to test."""

    train: int | None = Field(None, ge=1)
    """Questions in S_T, which fits the weights; null takes what the others leave."""
    calibration: int | None = Field(None, ge=0)
    """Questions in S_V, whose inputs (never labels) raise entropy. Null takes a quarter of the size of train
    (80/20, inferred from AutoBalance's configuration)."""
    validation: int = Field(200, ge=1)
    """Labelled questions that choose the stopping point and fit recalibration."""
    test: int = Field(300, ge=1)
    """Questions for the reported figures, never seen before."""


class DataConfig(Strict):
    """Questions to train on and to be judged by."""

    root: Path | None = Field(None, exclude_if=lambda value: value is None)
    """Folder that relative paths of sources start at, for run files that leave open where the data lie; itself relative
    to the current folder. In the resolved file the paths are absolute and it is gone."""
    source: SourceConfig
    """The in-domain source; divided by `splits`."""
    splits: SplitSizes = SplitSizes()
    heldout_groups: list[str] = []
    """Groups (relations) of the source kept out of train and calibration: they become the split
    `validation_shift`, on which a stop rule can be chosen under shift."""
    test_source: SourceConfig | None = None
    """A separate in-domain test file, when the source has official splits; `splits.test` then limits it."""
    ood: dict[str, SourceConfig] = {}
    """Out-of-domain test sets by name; each is cut to `splits.test` questions."""
    overlap: Literal["report", "drop", "error"] = "report"
    """What to do with questions that stand in two splits: report them, drop them from the earlier split, or fail."""
    prompt: PromptConfig = PromptConfig()
    max_length: int = Field(512, ge=8)
    """Longest row in tokens; a longer one is an error, never cut in silence."""
