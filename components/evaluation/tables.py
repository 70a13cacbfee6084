"""The summary as tables for the terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from components.evaluation import display
from components.evaluation.metrics_file import LOW_OPTION_MASS

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table


def print_summary(summary: Mapping[str, Any], console: Console) -> None:
    """Prints accuracy, confidence, ECE and NLL with intervals, best in bold, then the paired comparisons.

    Splits stand side by side where the console is wide enough, else one below the other.
    """
    splits = display.splits_of(summary)
    together = _main_table(summary, splits)
    if _natural_width(together, console) <= console.width:
        console.print(together)
    else:
        for split in splits:
            console.print(_main_table(summary, [split]))
    for warning in low_mass_warnings(summary):
        console.print(f"[yellow]{warning}[/yellow]")
    if summary["comparisons"]:
        console.print(_comparison_table(summary["comparisons"]))


def low_mass_warnings(summary: Mapping[str, Any]) -> list[str]:
    """A sentence for every method and split where the options together have next to no probability."""
    return [
        f"{method} on {split}: the options hold {by_split[split]['option_mass']['value']:.2g} of the probability on "
        "average; confidence among them says little about what the model would answer freely"
        for method, by_split in summary["methods"].items()
        for split in by_split
        if by_split[split]["option_mass"]["value"] < LOW_OPTION_MASS
    ]


def _main_table(summary: Mapping[str, Any], splits: Sequence[str]) -> Table:
    from rich import box
    from rich.markup import escape
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, title=", ".join(splits), title_justify="left", show_lines=False)
    table.add_column("method", no_wrap=True)
    for split in splits:
        for column in display.COLUMNS:
            heading = column.title if len(splits) == 1 else f"{split}\n{column.title}"
            table.add_column(heading, justify="right", no_wrap=True)
    for method, by_split in summary["methods"].items():
        cells = [
            _cell(summary, method, split, column) if split in by_split else ""
            for split in splits
            for column in display.COLUMNS
        ]
        table.add_row(escape(method), *cells)
    return table


def _natural_width(table: Table, console: Console) -> int:
    """Columns the table takes when nothing is squeezed."""
    from rich.measure import Measurement

    return Measurement.get(console, console.options.update(max_width=10_000), table).maximum


def _cell(summary: Mapping[str, Any], method: str, split: str, column: display.Column) -> str:
    figure = summary["methods"][method][split][column.metric]
    value = display.number(figure["value"])
    if display.is_best(summary, method, split, column):
        value = f"[bold]{value}[/bold]"
    return f"{value}\n[dim]{display.short_interval(figure)}[/dim]"


def _comparison_table(comparisons: Sequence[Mapping[str, Any]]) -> Table:
    from rich import box
    from rich.markup import escape
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, title="paired differences, first minus second", title_justify="left")
    for heading in ("split", "metric", "methods"):
        table.add_column(heading)
    for heading in ("difference", "interval", "p"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("verdict", no_wrap=True)
    for row in comparisons:
        table.add_row(
            escape(row["split"]),
            display.metric_title(row["metric"]),
            escape(f"{row['a']} - {row['b']}"),
            display.signed(row["difference"]),
            escape(display.interval(row)),
            display.number(row["p_value"]),
            escape(display.verdict(row)),
        )
    return table
