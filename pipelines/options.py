"""Options that several commands have, said once so that they read alike everywhere."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

Config = Annotated[Path, typer.Option("--config", "-c", help="Run file (YAML).", show_default=False)]
Overrides = Annotated[
    list[str] | None,
    typer.Option("--set", help="Override a key, e.g. --set calm.eta=0.3. Repeatable.", show_default=False),
]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Delete this run's folder and start anew.")]
Json = Annotated[bool, typer.Option("--json", help="Print the result as JSON on stdout.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="No progress.")]
