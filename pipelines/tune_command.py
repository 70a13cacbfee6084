"""`caltune tune`: the command; the search itself is in `tune.py`, whose imports take their time."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer

from components.errors import UsageError
from pipelines.options import Config, Json, Overrides, Overwrite, Quiet


def add_tune_command(app: typer.Typer) -> None:
    """Puts the command into `app`."""
    app.command()(tune)


def tune(
    config: Config,
    set_: Overrides = None,
    trials: Annotated[
        int | None,
        typer.Option(
            min=1, help="Trials in all, instead of tune.trials; may be raised with --resume.", show_default=False
        ),
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on with this search; no ended trial is repeated.")
    ] = False,
    overwrite: Overwrite = False,
    json_: Json = False,
    quiet: Quiet = False,
) -> None:
    """Search for settings of a method with low ECE at good accuracy; leave the best as a run file.

    What is searched stands in the run file's section `tune`. tune.scheduler of kind `asha` stops a trial at a step
    where the NLL of the data in tune.split is worse than most; a stopped trial is not taken up again. Kind `pbt` trains
    all trials side by side: every interval_steps they wait for each other, and the worst go on from the best ones'
    checkpoints with other values of the named keys.

    Ctrl-C ends the search; --resume goes on with the trials that were running, from their newest checkpoints, and
    repeats none that ended. With `pbt` they are then compared at the same steps as if there had been no break; trials
    that --trials adds to a search that is further on only exchange with those that are still training.
    """
    from components.run_file import load_run_file
    from pipelines.progress import Reporter, stdout_console
    from pipelines.tune import tune as run_search
    from pipelines.tune_result import print_result

    if resume and overwrite:
        raise UsageError("--resume and --overwrite exclude each other")
    existing: Any = "resume" if resume else "overwrite" if overwrite else "refuse"
    loaded = load_run_file(config, set_ or [])
    result = run_search(loaded, config.parent, existing, Reporter(quiet=quiet or json_), trials)
    if json_:
        print(json.dumps(result, indent=2))
    else:
        print_result(result, stdout_console())
