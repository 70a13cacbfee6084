"""How figures are put into words, the same in the terminal and in the report."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

UNDEFINED = "n/a"


@dataclass(frozen=True)
class Column:
    """A figure of the main table: its name in `summary.json`, its heading, and which end is good."""

    metric: str
    title: str
    better: Literal["higher", "lower"] | None


COLUMNS = (
    Column("accuracy", "Accuracy", "higher"),
    Column("mean_confidence", "Confidence", None),
    Column("ece", "ECE", "lower"),
    Column("nll", "NLL", "lower"),
)
_BETTER = {column.metric: column.better for column in COLUMNS}
_TITLES = {column.metric: column.title for column in COLUMNS}


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
    """Heading of a metric of the main table."""
    return _TITLES[metric]


def is_best(summary: Mapping[str, Any], method: str, split: str, column: Column) -> bool:
    """Whether no method does better on this split; equals are best together, a lone method never is."""
    if column.better is None:
        return False
    sign = 1 if column.better == "higher" else -1
    values = {
        name: sign * by_split[split][column.metric]["value"]
        for name, by_split in summary["methods"].items()
        if split in by_split and by_split[split][column.metric]["value"] is not None
    }
    return len(values) > 1 and method in values and values[method] == max(values.values())


def verdict(comparison: Mapping[str, Any]) -> str:
    """Which of the two methods is better, as far as the interval of the difference allows to say."""
    low, high = comparison["ci_low"], comparison["ci_high"]
    if low is None or low <= 0 <= high:
        return "no clear difference"
    a_is_higher = low > 0
    a_wins = a_is_higher == (_BETTER[comparison["metric"]] == "higher")
    return f"{comparison['a'] if a_wins else comparison['b']} better"
