"""`caltune suite`: the command; the work itself is in `suite.py`, whose imports take their time."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from components.errors import Interrupted
from pipelines.options import Json, Overrides, Quiet

INTERRUPTED = 130

SuiteFile = Annotated[Path, typer.Option("--config", "-c", help="Suite file (YAML).", show_default=False)]
Output = Annotated[Path | None, typer.Option("--output", help="Parent of the suite's folder, instead of output_dir.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Say which cells there are and how they stand; run none.")]


def add_suite_command(app: typer.Typer) -> None:
    """Puts the command into `app`."""
    app.command()(suite)


def suite(
    config: SuiteFile,
    set_: Overrides = None,
    output: Output = None,
    dry_run: DryRun = False,
    json_: Json = False,
    quiet: Quiet = False,
) -> None:
    """Run a list of run files with several methods and seeds as one job; finished cells are skipped.

    A cell is one method of one run file with one seed. A cell that fails is listed with its reason, stops no other and
    is tried again by the next call; then the exit code is 1. A suite that is broken off goes on where it stood when it
    is called again. Methods, seeds and run files may be added later. --set overrides a key in every run file.

    `caltune compare DIR` over the suite's folder makes its tables.
    """
    from components.suite_file import load_suite_file
    from pipelines.progress import Reporter
    from pipelines.suite import run_suite
    from pipelines.suite_state import SuiteState

    plan = load_suite_file(config, set_ or [], output)
    reporter = Reporter(quiet=quiet or json_)
    if dry_run:
        state = SuiteState(plan)
    else:
        try:
            state = run_suite(plan, reporter)
        except (KeyboardInterrupt, Interrupted) as stop:
            SuiteState(plan).print(reporter.console)
            print("caltune: interrupted; the same command goes on where it stood", file=sys.stderr)
            sys.exit(stop.exit_code if isinstance(stop, Interrupted) else INTERRUPTED)
    if json_:
        print(json.dumps(state.as_dict(), indent=2))
    elif dry_run:
        for cell in state.cells.values():
            print(f"{cell.folder} {cell.method}: {cell.state}")
    else:
        state.print(reporter.console)
        reporter.say(f"tables: caltune compare {state.folder}")
    if not dry_run and state.counts["failed"]:
        raise typer.Exit(1)
