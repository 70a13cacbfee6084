"""How figures are put into words, the same in the terminal and in the report."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from components.evaluation.open_predictions import SEMANTIC
from components.evaluation.predictions import SOFTMAX

UNDEFINED = "n/a"
PRIMARY = (SOFTMAX, SEMANTIC)
"""Sources that stand for a method, among options and in its own words."""


@dataclass(frozen=True)
class Column:
    """A figure of a table: its name in `summary.json`, its heading, and which end is good."""

    metric: str
    title: str
    better: Literal["higher", "lower"] | None


COLUMNS = (
    Column("accuracy", "Accuracy", "higher"),
    Column("mean_confidence", "Confidence", None),
    Column("ece", "ECE", "lower"),
    Column("nll", "NLL", "lower"),
)
"""Of the main table."""

SOURCE_COLUMNS = (
    Column("mean_confidence", "Mean", None),
    Column("confidence_std", "Spread", None),
    Column("ece", "ECE", "lower"),
    Column("top_label_brier_score", "Brier", "lower"),
    Column("auroc", "AUROC", "higher"),
)
"""Of the table that sets the confidence sources of one method side by side."""

_ALL = {column.metric: column for column in (*SOURCE_COLUMNS, *COLUMNS)}


@dataclass(frozen=True)
class Row:
    """A row of the main table.

    Attributes:
        name: The method, with its source in brackets where that is not the primary one.
        blocks: Metrics by split.
        chosen: Its source was chosen, on validation data, among several of the method.
    """

    name: str
    blocks: Mapping[str, Mapping[str, Any]]
    chosen: bool = False


def row_name(method: str, source: str) -> str:
    """What a method's row is called when judged by this source."""
    return method if source in PRIMARY else f"{method} ({source})"


def rows_of(summary: Mapping[str, Any]) -> list[Row]:
    """Rows of the main table: every method, and below it every further source that it has."""
    rows: list[Row] = []
    for method, by_split in summary["methods"].items():
        if method not in summary["sources"]:
            rows.append(Row(method, by_split))
            continue
        rows += _merged([replace(row, name=row_name(method, row.name)) for row in source_rows(summary, method)])
    return rows


def _merged(rows: list[Row]) -> list[Row]:
    """Rows of one name as one: of a method judged among options on some splits and in its own words on others."""
    merged: dict[str, Row] = {}
    for row in rows:
        before = merged.get(row.name, Row(row.name, {}))
        merged[row.name] = Row(row.name, {**before.blocks, **row.blocks}, row.chosen or before.chosen)
    return list(merged.values())


def source_rows(summary: Mapping[str, Any], method: str) -> list[Row]:
    """One row for each confidence source of a method that has several, by the source's name."""
    chosen = summary["chosen_sources"].get(method)
    return [Row(source, blocks, source == chosen) for source, blocks in summary["sources"][method].items()]


def splits_of(summary: Mapping[str, Any]) -> list[str]:
    """Splits that any method was judged on, in order of appearance."""
    return list(dict.fromkeys(split for by_split in summary["methods"].values() for split in by_split))


def number(value: float | None) -> str:
    """Three decimals, or `n/a` for an undefined figure."""
    return UNDEFINED if value is None else f"{value:.3f}"


def signed(value: float | None) -> str:
    """Three decimals with a sign."""
    return UNDEFINED if value is None else f"{value:+.3f}"


def interval(figure: Mapping[str, Any]) -> str:
    """`[low, high]` of a figure with `ci_low` and `ci_high`, or `n/a`."""
    if figure["ci_low"] is None:
        return UNDEFINED
    return f"[{figure['ci_low']:.3f}, {figure['ci_high']:.3f}]"


def short_interval(figure: Mapping[str, Any]) -> str:
    """`low-high` with two decimals, for the terminal; only for figures that are never negative."""
    if figure["ci_low"] is None:
        return UNDEFINED
    return f"{figure['ci_low']:.2f}-{figure['ci_high']:.2f}"


def metric_title(metric: str) -> str:
    """Heading of a metric that is shown."""
    return _ALL[metric].title


def is_best(rows: list[Row], row: Row, split: str, column: Column) -> bool:
    """Whether no row does better on this split; equals are best together, a lone row never is."""
    if column.better is None:
        return False
    sign = 1 if column.better == "higher" else -1
    values = {
        other.name: sign * other.blocks[split][column.metric]["value"]
        for other in rows
        if split in other.blocks and other.blocks[split][column.metric]["value"] is not None
    }
    return len(values) > 1 and row.name in values and values[row.name] == max(values.values())


def verdict(comparison: Mapping[str, Any]) -> str:
    """Which of the two rows is better, as far as the interval of the difference allows to say."""
    low, high = comparison["ci_low"], comparison["ci_high"]
    if low is None or low <= 0 <= high:
        return "no clear difference"
    a_is_higher = low > 0
    a_wins = a_is_higher == (_ALL[comparison["metric"]].better == "higher")
    return f"{comparison['a'] if a_wins else comparison['b']} better"
