"""The summary as tables for the terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from components.evaluation import display
from components.evaluation.metrics_file import LOW_OPTION_MASS

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

COMPARED_HERE = ("ece", "accuracy")
"""Metrics of the comparisons shown in the terminal; the report has them all."""

CHOSEN_MARK = " *"


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
    for split in splits:
        rows = [row for row in summary["comparisons"] if row["split"] == split and row["metric"] in COMPARED_HERE]
        if rows:
            console.print(_comparison_table(split, rows))


def low_mass_warnings(summary: Mapping[str, Any]) -> list[str]:
    """A sentence for every split on which the options together have next to no probability under some methods."""
    warnings = []
    for split in display.splits_of(summary):
        masses = {
            method: mass
            for method, by_split in summary["methods"].items()
            if split in by_split
            and (mass := by_split[split]["option_mass"]["value"]) is not None  # free answers have no options
            and mass < LOW_OPTION_MASS
        }
        if masses:
            warnings.append(
                f"{', '.join(masses)} on {split}: the options hold {min(masses.values()):.2g} of the probability on "
                "average; confidence among them says little about what the model would answer freely"
            )
    return warnings


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
    rows = display.rows_of(summary)
    for row in rows:
        cells = [
            _cell(rows, row, split, column) if split in row.blocks else ""
            for split in splits
            for column in display.COLUMNS
        ]
        table.add_row(escape(row.name + CHOSEN_MARK * row.chosen), *cells)
    if any(row.chosen for row in rows):
        table.caption = f"{CHOSEN_MARK.strip()} the method's confidence with the lowest Brier score on validation data"
        table.caption_justify = "left"
    return table


def _natural_width(table: Table, console: Console) -> int:
    """Columns the table takes when nothing is squeezed."""
    from rich.measure import Measurement

    return Measurement.get(console, console.options.update(max_width=10_000), table).maximum


def _cell(rows: list[display.Row], row: display.Row, split: str, column: display.Column) -> str:
    figure = row.blocks[split][column.metric]
    value = display.number(figure["value"])
    if figure["value"] is None:
        return f"[dim]{value}[/dim]"
    if display.is_best(rows, row, split, column):
        value = f"[bold]{value}[/bold]"
    return f"{value}\n[dim]{display.short_interval(figure)}[/dim]"


def _comparison_table(split: str, comparisons: Sequence[Mapping[str, Any]]) -> Table:
    """Narrow enough for 80 columns: what is left out stands in the report."""
    from rich import box
    from rich.markup import escape
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, title=f"{split}: first minus second, paired", title_justify="left")
    table.add_column("methods", overflow="fold")
    table.add_column("", no_wrap=True)
    for heading in ("difference", "interval"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("first is", no_wrap=True)
    for row in comparisons:
        verdict = display.verdict(row)
        clear = {f"{row['a']} better": "better", f"{row['b']} better": "worse"}.get(verdict, "")
        table.add_row(
            escape(f"{row['a']} - {row['b']}"),
            display.metric_title(row["metric"]),
            display.signed(row["difference"]),
            escape(display.interval(row)),
            clear,
        )
    return table
