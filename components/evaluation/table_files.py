"""A table of a suite as Markdown, CSV and LaTeX."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Sequence
from pathlib import Path

from components.evaluation.display import UNDEFINED, Column
from components.evaluation.metrics_file import number_or_none
from components.evaluation.suite_tables import SuiteTable, TableCell
from components.files import replacing

MARKS = {"better": "†", "worse": "‡", "": ""}
_CSV_COLUMNS = (
    *("data", "split", "method", "metric", "seeds", "mean", "std", "best", "reference"),
    *("difference", "ci_low", "ci_high", "p_value", "p_holm"),
)
_LATEX_MARKS = {"better": r"$^{\dagger}$", "worse": r"$^{\ddagger}$", "": ""}
_LATEX = {
    "\\": r"\textbackslash{}",
    "&": r"\&",
    "%": r"\%",
    "$": r"\$",
    "#": r"\#",
    "_": r"\_",
    "{": r"\{",
    "}": r"\}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    "†": r"$\dagger$",
    "‡": r"$\ddagger$",
}


def write_tables(tables: Sequence[SuiteTable], folder: Path) -> list[Path]:
    """Writes `tables.md`, `tables.csv` and `tables.tex`, each with all tables.

    Returns:
        The paths.
    """
    content = {
        "tables.md": "\n".join(markdown(table) for table in tables),
        "tables.csv": as_csv(tables),
        "tables.tex": "% Needs \\usepackage{booktabs}.\n" + "\n".join(latex(table) for table in tables),
    }
    for name, text in content.items():
        with replacing(folder / name) as temporary:
            temporary.write_text(text, encoding="utf-8")
    return [folder / name for name in content]


def markdown(table: SuiteTable) -> str:
    """The table with its title and notes. Best in bold, the best baseline underlined."""
    lines = [f"## {table.title}", "", "| method | " + " | ".join(column.title for column in table.columns) + " |"]
    lines.append("| --- |" + " ---: |" * len(table.columns))
    for row in table.cells:
        cells = [_markdown_cell(table, row, column) for column in table.columns]
        lines.append(f"| `{row}` | " + " | ".join(cells) + " |")
    return "\n".join([*lines, "", *(f"{note}\n" for note in table.notes())])


def latex(table: SuiteTable) -> str:
    """A `table` environment for booktabs, with its notes as the caption."""
    caption = escape(f"{table.title}. " + " ".join(table.notes()))
    lines = [
        r"\begin{table}",
        r"\centering",
        rf"\caption{{{caption}}}",
        r"\begin{tabular}{l" + "r" * len(table.columns) + "}",
        r"\toprule",
        " & ".join(["Method", *(escape(column.title) for column in table.columns)]) + r" \\",
        r"\midrule",
    ]
    for row in table.cells:
        lines.append(" & ".join([escape(row), *(_latex_cell(table, row, c) for c in table.columns)]) + r" \\")
    return "\n".join([*lines, r"\bottomrule", r"\end{tabular}", r"\end{table}", ""])


def as_csv(tables: Sequence[SuiteTable]) -> str:
    """One line for each figure, all digits kept; empty where undefined."""
    stream = io.StringIO()
    writer = csv.writer(stream, lineterminator="\n")
    writer.writerow(_CSV_COLUMNS)
    for table in tables:
        for row, cells in table.cells.items():
            for metric, cell in cells.items():
                writer.writerow([table.data, table.split, row, metric, len(table.seeds[row]), *_csv_figures(cell)])
    return stream.getvalue()


def escape(text: str) -> str:
    """Text in which LaTeX sees no command."""
    return "".join(_LATEX.get(character, character) for character in text)


def _csv_figures(cell: TableCell) -> list[object]:
    tested = cell.difference
    figures: list[object] = [number_or_none(cell.mean), number_or_none(cell.spread), int(cell.best)]
    figures += [int(cell.reference)]
    figures += [None] * 4 if tested is None else [number_or_none(value) for value in vars(tested).values()]
    return [*figures, None if cell.adjusted_p is None else number_or_none(cell.adjusted_p)]


def _figure(cell: TableCell, joint: str) -> str:
    if math.isnan(cell.mean):
        return UNDEFINED
    return f"{cell.mean:.3f}" + ("" if math.isnan(cell.spread) else f"{joint}{cell.spread:.3f}")


def _markdown_cell(table: SuiteTable, row: str, column: Column) -> str:
    cell = table.cells[row][column.metric]
    text = _figure(cell, " ± ")
    if cell.reference:
        text = f"<u>{text}</u>"
    return (f"**{text}**" if cell.best else text) + MARKS[table.verdict(row, column)]


def _latex_cell(table: SuiteTable, row: str, column: Column) -> str:
    cell = table.cells[row][column.metric]
    text = _figure(cell, r" $\pm$ ")
    if cell.reference:
        text = rf"\underline{{{text}}}"
    return (rf"\textbf{{{text}}}" if cell.best else text) + _LATEX_MARKS[table.verdict(row, column)]
