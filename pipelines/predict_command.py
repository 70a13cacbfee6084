"""`caltune predict`: answers to a file of questions, with confidence, in its order, none left out."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from components.errors import UsageError
from pipelines.options import Quiet

if TYPE_CHECKING:
    from components.registry.predictor import Predictor
    from pipelines.predict_files import Line, Questions

INTERRUPTED = 130
ROWS = 256
"""Questions between two writes: enough of them to find batches of similar length among."""

Model = Annotated[
    str,
    typer.Option(
        help="Adapter folder, runs:/<run id>/<artifact>, models:/<name>@<alias> or models:/<name>/<version>.",
        show_default=False,
    ),
]
Policy = Annotated[
    str | None, typer.Option(help="Abstention policy of the model; by default its default one.", show_default=False)
]
BaseModel = Annotated[
    str | None, typer.Option(help="Where the base model is, if not where the adapter says.", show_default=False)
]
Uri = Annotated[str | None, typer.Option(help="MLflow server; by default MLFLOW_TRACKING_URI.", show_default=False)]
Device = Annotated[str, typer.Option(help="cpu or cuda.")]


def add_predict_command(app: typer.Typer) -> None:
    """Puts the command into `app`."""
    app.command()(predict)


def predict(
    model: Model,
    questions: Annotated[str, typer.Argument(help="JSON-lines file, or - for stdin.")] = "-",
    policy: Policy = None,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="File instead of stdout; goes on where it was broken off."),
    ] = None,
    base_model: BaseModel = None,
    uri: Uri = None,
    device: Device = "cpu",
    quiet: Quiet = False,
) -> None:
    """Answer questions, one JSON object a line, with calibrated confidence; exit code 1 when some could not be.

    A question is {"question", "choices"}, with an "id" if wanted; without choices it is open-ended. Predictions come in
    the order of the questions, and for a question that cannot be answered its "error".
    """
    from components.registry import load
    from pipelines.predict_files import Answers, Questions
    from pipelines.progress import Reporter

    reporter = Reporter(quiet=quiet)
    asked = Questions(questions)
    predictor = load(model, tracking_uri=uri, base_model=base_model, device=device)
    answers = Answers(
        output, {"input": asked.digest, "model": predictor.identity, "policy": _policy(predictor, policy)}
    )
    if answers.done > asked.count:
        raise UsageError(f"{output} has {answers.done} rows for {asked.count} questions; delete it")
    if answers.done:
        reporter.say(f"{output}: {answers.done} of {asked.count} questions are answered already")
    try:
        with reporter.task("predict", asked.count - answers.done) as advance:
            for lines in _chunks(asked.lines(answers.done)):
                answers.write(_answered(predictor, asked, lines, policy))
                advance(len(lines), "")
    except KeyboardInterrupt:
        print("caltune: interrupted; what is written is whole" + (", the same command goes on" if output else ""),
              file=sys.stderr)  # fmt: skip
        raise SystemExit(INTERRUPTED) from None
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # nobody reads on; nor is it flushed at the end
        raise typer.Exit(1) from None
    if answers.failed:
        reporter.say(f"{answers.failed} of {asked.count} questions could not be answered; their rows say why")
        raise typer.Exit(1)


def _policy(predictor: Predictor, name: str | None) -> dict[str, Any] | None:
    chosen = predictor.policy(name)
    return None if chosen is None else {"source": chosen.source, "threshold": chosen.threshold}


def _chunks(lines: Iterator[Line]) -> Iterator[list[Line]]:
    while chunk := list(islice(lines, ROWS)):
        yield chunk


def _answered(predictor: Predictor, asked: Questions, lines: list[Line], policy: str | None) -> list[dict[str, Any]]:
    """A row for each line: a prediction, or why there is none."""
    from components.data.rows import Place
    from components.registry.prediction import Refusal

    readable = [line for line in lines if line.problem is None]
    places = [(Place(asked.name, line.number), f"{asked.stem}-{line.index}") for line in readable]
    results = predictor.predict_each([line.row for line in readable], policy, places)
    found = {line.number: result for line, result in zip(readable, results, strict=True)}
    rows = []
    for line in lines:
        result = found.get(line.number)
        if result is None:
            rows.append(line.failed(str(line.problem)))
        else:
            rows.append(line.failed(result.reason) if isinstance(result, Refusal) else result.as_row())
    return rows
