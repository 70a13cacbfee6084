"""Questions from data sets on the hub, or in a local folder of the same form, through `datasets`."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator

from components.config_data import ColumnMapping, SourceConfig
from components.data.presets import Preset, preset
from components.data.rows import Place, Row, make_set, to_open_questions, to_questions
from components.data.schema import OpenQuestion, Question, QuestionSet
from components.errors import DataError


def read_hub_questions(config: SourceConfig, name: str) -> QuestionSet:
    """Read a multiple-choice data set.

    Args:
        config: A source of kind `hub`. With a preset, `subset`, `split` and `columns` override what it declares.
        name: Name of the resulting set.

    Raises:
        DataError: The data set cannot be loaded, is not multiple-choice, lacks a declared column, or holds a
            malformed row.
    """
    chosen = preset(config.preset) if config.preset else None
    if chosen is not None and chosen.kind != "multiple_choice":
        raise DataError(
            f"preset {config.preset}", None, "preset", f"its rows are of kind {chosen.kind!r}, without choices"
        )
    where, rows = _load(config, chosen)
    return make_set(name, hub_rows_to_questions(rows, where, chosen, config.columns), where)


def read_hub_open_questions(config: SourceConfig) -> tuple[OpenQuestion, ...]:
    """Read an open-ended or instruction data set; arguments and errors as for `read_hub_questions`."""
    chosen = preset(config.preset) if config.preset else None
    if chosen is not None and chosen.kind == "multiple_choice":
        raise DataError(f"preset {config.preset}", None, "preset", "its rows are multiple-choice, not open-ended")
    where, rows = _load(config, chosen)
    return hub_rows_to_open_questions(rows, where, chosen, config.columns)


def hub_rows_to_questions(
    rows: Iterable[Row], where: str, chosen: Preset | None, columns: ColumnMapping | None = None
) -> tuple[Question, ...]:
    """Convert loaded rows; nothing is read.

    Args:
        rows: Table rows as `datasets` yields them.
        where: Name of the data set, for errors and for the ids of rows that have none.
        chosen: The preset; None where `columns` alone describes the table.
        columns: Column mapping; None for the preset's.

    Raises:
        DataError: A declared column is missing, or a row is malformed.
    """
    return to_questions(_placed(rows, where, chosen), columns or (chosen.columns if chosen else None), where)


def hub_rows_to_open_questions(
    rows: Iterable[Row], where: str, chosen: Preset | None, columns: ColumnMapping | None = None
) -> tuple[OpenQuestion, ...]:
    """As `hub_rows_to_questions`, for open-ended and instruction rows."""
    return to_open_questions(_placed(rows, where, chosen), columns or (chosen.columns if chosen else None), where)


def _placed(rows: Iterable[Row], where: str, chosen: Preset | None) -> Iterator[tuple[Place, Row]]:
    for number, row in enumerate(rows, start=1):
        shaped = row if chosen is None or chosen.reshape is None else chosen.reshape(row)
        if shaped is not None:
            yield Place(where, number), shaped


def _load(config: SourceConfig, chosen: Preset | None) -> tuple[str, Iterable[Row]]:
    """The data set's name in words, and its rows."""
    if chosen is not None:
        repository = chosen.repository
        subset, split = chosen.place(str(config.preset), config.split)
        subset = config.subset or subset
    else:
        repository, subset = str(config.repository), config.subset
        if config.split is None:
            raise DataError(repository, None, "split", "not given", "a hub repository without a preset needs 'split'")
        split = config.split
    where = "/".join(part for part in (repository, subset, split) if part)
    from datasets import load_dataset

    try:
        return where, load_dataset(repository, subset, split=split, revision=config.revision)
    except (OSError, ValueError, RuntimeError) as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise DataError(where, None, None, f"cannot be loaded: {reason}", _remedy()) from error


def _remedy() -> str:
    offline = [name for name in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE") if os.environ.get(name)]
    local = "or use a local file with kind 'file'"
    if offline:
        return f"{offline[0]} is set, so only data already in the cache is found; unset it, {local}"
    return f"check name, subset and split and the connection to the hub, {local}"
