"""`caltune plan`: what a run would take, before any GPU is asked for."""

from __future__ import annotations

import json
import sys
from typing import Annotated

import typer

from pipelines.options import Config, Json, Overrides


def add_plan_command(app: typer.Typer) -> None:
    """Puts the command into `app`."""
    app.command()(plan)


def plan(
    config: Config,
    set_: Overrides = None,
    gpu_memory: Annotated[float, typer.Option(help="GiB of memory of one GPU.")] = 80.0,
    max_gpus: Annotated[int, typer.Option(help="Plan for 1, 2, 4 ... up to this many.")] = 64,
    tflops: Annotated[float, typer.Option(help="TFLOP/s that a GPU gets through in practice.")] = 150.0,
    tokens: Annotated[
        int | None, typer.Option(help="Tokens of a row; else data.max_length.", show_default=False)
    ] = None,
    options: Annotated[int, typer.Option(help="Options of a question.")] = 4,
    answer_tokens: Annotated[
        int | None, typer.Option(help="Tokens of an option; else 1 by letter, 8 by text.", show_default=False)
    ] = None,
    json_: Json = False,
) -> None:
    """Say what a run would take: memory by part for each layout, FLOPs, GPU-hours, the cheapest layout that fits.

    The model's weights are not read: a folder or hub id with config.json is enough.
    """
    from components.planning.run_plan import Machine, as_dict, make_plan, rows_of
    from components.run_file import load_run_file
    from pipelines.plan_tables import print_plan
    from pipelines.progress import Reporter, stdout_console

    loaded = load_run_file(config, set_ or [])
    machine, rows = Machine(gpu_memory, max_gpus, tflops), rows_of(loaded, tokens, answer_tokens, options)
    result = make_plan(loaded, machine, rows, Reporter(quiet=json_).say)
    if json_:
        json.dump(as_dict(result), sys.stdout, indent=2)
        print()
    else:
        print_plan(result, stdout_console())
