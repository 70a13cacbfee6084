"""`caltune monitor`: the prediction log by windows, for as far as labels have arrived."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from components.errors import DataError, UsageError
from pipelines.options import Json

if TYPE_CHECKING:
    from rich.table import Table

    from components.registry.monitoring import Window

HEADINGS = ("answers", "labels", "accuracy", "abstains", "risk (95 %)", "source", "conf.", "ECE", "Brier")


def add_monitor_command(app: typer.Typer) -> None:
    """Puts the command into `app`."""
    app.command()(monitor)


def monitor(
    log: Annotated[Path, typer.Argument(help="Prediction log (JSON lines).", show_default=False)],
    labels: Annotated[
        Path | None,
        typer.Option(
            help="JSON lines with id and either correct (true, false) or the right answer (text, 0-based option).",
            show_default=False,
        ),
    ] = None,
    window: Annotated[int, typer.Option(help="Answers of a window.")] = 500,
    bins: Annotated[int, typer.Option(help="Bins of the ECE.")] = 15,
    json_: Json = False,
) -> None:
    """Say how confidence, accuracy, calibration and abstention went over a prediction log.

    Writes the figures and a picture beside the log: LOG.monitor.json and LOG.monitor.png.
    """
    content, windows = watch(log, labels, window, bins)
    if json_:
        print(json.dumps(content, indent=2))
        return
    from pipelines.progress import stdout_console

    console = stdout_console()
    console.print(_table(windows))
    if content["labels_without_answer"]:
        console.print(f"{content['labels_without_answer']} labels are of questions that the log does not have")
    console.print(f"figures and picture: {_beside(log, 'json')}, {_beside(log, 'png')}", soft_wrap=True)


def watch(log: Path, labels: Path | None, window: int, bins: int) -> tuple[dict[str, Any], list[Window]]:
    """Reads the log and its labels, writes the figures and the picture beside it.

    Args:
        log: Prediction log.
        labels: Labels that came later; None takes those that the log has itself.
        window: Answers of a window.
        bins: Bins of the ECE.

    Returns:
        What is written as JSON, and the windows.

    Raises:
        UsageError: A window or a number of bins below 1.
        DataError: A file cannot be read or holds a bad row.
    """
    from components.evaluation.plot_style import save_png
    from components.files import write_json
    from components.registry.monitoring import read_labels, windows_of, with_labels
    from components.registry.monitoring_plot import monitoring_plot
    from components.registry.prediction_log import read_log

    rows, known = read_log(log), {} if labels is None else read_labels(labels)
    try:
        rows = with_labels(rows, known)
    except ValueError as error:
        raise DataError(labels or log, None, None, str(error), "label it with 'correct' or a text") from error
    try:
        windows = windows_of(rows, window, bins)
    except ValueError as error:
        raise UsageError(str(error)) from error
    content = {
        "log": str(log),
        "labels": None if labels is None else str(labels),
        "window": window,
        "bins": bins,
        "n": len(rows),
        "labels_without_answer": len(known.keys() - {row.id for row in rows}),
        "windows": [found.as_dict() for found in windows],
    }
    write_json(_beside(log, "json"), content)
    save_png(_beside(log, "png"), monitoring_plot(windows))
    return content, windows


def _beside(log: Path, kind: str) -> Path:
    return log.with_name(f"{log.name}.monitor.{kind}")


def _table(windows: Sequence[Window]) -> Table:
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, padding=0)  # all of it within 80 columns
    for heading in HEADINGS:
        table.add_column(heading, justify="left" if heading in ("answers", "source") else "right", no_wrap=True)
    for window in windows:
        risk = "" if window.risk is None else f"{window.risk:.2f} ({window.risk_low:.2f}-{window.risk_high:.2f})"
        figures = (str(window.labelled), _number(window.accuracy), _number(window.abstained), risk)
        of_window = (f"{window.first}-{window.last}", *figures)
        for position, (source, own) in enumerate(window.sources.items()):
            of_source = (_number(value) for value in (own.mean_confidence, own.ece, own.brier))
            table.add_row(*(of_window if position == 0 else [""] * len(of_window)), source, *of_source)
    return table


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.3f}"
