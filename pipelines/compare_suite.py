"""`caltune compare` over a suite's folder: its tables and figures, in `<suite>/tables/`."""

from __future__ import annotations

import csv
import io
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from components.config import RunConfig
from components.errors import UsageError
from components.evaluation.open_predictions import OpenPredictions, read_any_predictions
from components.evaluation.plot_style import save_png
from components.evaluation.seed_bootstrap import Side
from components.evaluation.suite_plots import RANKED, accuracy_ece_plot, rank_plot
from components.evaluation.suite_tables import COLUMNS, DRAWS, SuiteTable, build_table
from components.evaluation.summary import rows_of_predictions
from components.evaluation.table_files import as_csv, markdown, write_tables
from components.files import read_json
from components.run_file import load_run_file
from pipelines.run_folder import RUN_FILE
from pipelines.suite_state import SUITE_FILE

TABLES = "tables"


@dataclass(frozen=True)
class SuiteComparison:
    """What `compare_suite` made.

    Attributes:
        tables: One for each split of each data set.
        files: Tables and figures.
        missing: Cells that are not done, `<run> <method>: <state>`.
    """

    tables: list[SuiteTable]
    files: list[Path]
    missing: list[str]


def is_suite(folder: Path) -> bool:
    """Whether a folder is a suite's."""
    return (folder / SUITE_FILE).is_file()


def compare_suite(folder: Path, say: Callable[[str], None], draws: int = DRAWS) -> SuiteComparison:
    """Makes the tables and figures of a suite, of the cells that are done.

    Bins and level are the first run's, and must be the same throughout.

    Args:
        folder: The suite's folder.
        say: Told of each table that is made.
        draws: Bootstrap draws.

    Raises:
        UsageError: No cell is done, or runs were evaluated with different bins or levels.
    """
    cells: list[dict[str, Any]] = read_json(folder / SUITE_FILE, "run 'caltune suite' again")["cells"]
    done = [cell for cell in cells if cell["state"] == "done"]
    if not done:
        raise UsageError(f"{folder}: no cell of this suite is done; run 'caltune suite' first")
    configs = {cell["folder"]: load_run_file(folder / cell["folder"] / RUN_FILE) for cell in done}
    bins, level = _judged_alike(configs)
    tables = []
    for data in dict.fromkeys(cell["name"] for cell in done):
        own = [cell for cell in done if cell["name"] == data]
        for split in ("id", *configs[own[0]["folder"]].data.ood):
            say(f"table: {data}, {split}")
            sides = _sides(folder, own, split)
            answered = next(iter(next(iter(sides.values())).predictions.values()))
            used = bins.of_free_answers if isinstance(answered, OpenPredictions) else bins.among_options
            tables.append(build_table(data, split, sides, bins=used, level=level, draws=draws))
    files = write_tables(tables, folder / TABLES) + _figures(tables, folder / TABLES)
    missing = [f"{cell['folder']} {cell['method']}: {cell['state']}" for cell in cells if cell["state"] != "done"]
    return SuiteComparison(tables, files, missing)


def print_suite(folder: Path, as_json: bool) -> None:
    """Makes the tables of a suite; prints them as Markdown, or their figures as JSON, and where the files are."""
    made = compare_suite(folder, lambda text: print(text, file=sys.stderr))
    if as_json:
        content = {
            "suite": folder.name,
            "rows": list(csv.DictReader(io.StringIO(as_csv(made.tables)))),
            "missing": made.missing,
            "files": [str(file) for file in made.files],
        }
        print(json.dumps(content, indent=2))
        return
    print("\n".join(markdown(table) for table in made.tables), end="")
    for cell in made.missing:
        print(f"not in the tables: {cell}", file=sys.stderr)
    print(f"tables and figures: {folder / TABLES}", file=sys.stderr)


class _Bins(NamedTuple):
    among_options: int
    of_free_answers: int


def _judged_alike(configs: dict[str, RunConfig]) -> tuple[_Bins, float]:
    found = {
        (_Bins(config.evaluation.bins, config.generation.bins), config.evaluation.level): run
        for run, config in configs.items()
    }
    if len(found) > 1:
        told = "; ".join(f"{run}: bins {bins[0]} and {bins[1]}, level {level}" for (bins, level), run in found.items())
        raise UsageError(
            f"the runs of the suite were judged differently ({told}); set evaluation.bins and generation.bins for all "
            "of them"
        )
    return next(iter(found))


def _sides(folder: Path, cells: list[dict[str, Any]], split: str) -> dict[str, Side]:
    """Rows of a table, in the order of the methods; a method's recalibrations follow it."""
    found: dict[str, dict[int, Any]] = {}
    sources: dict[str, str] = {}
    for method in dict.fromkeys(cell["method"] for cell in cells):
        for cell in (cell for cell in cells if cell["method"] == method):
            for name in _with_recalibrations(folder / cell["folder"], method):
                path = folder / cell["folder"] / name / "evaluation" / split / "predictions.parquet"
                predictions = read_any_predictions(path)
                for row, source in rows_of_predictions(name, predictions):
                    found.setdefault(row, {})[cell["seed"]] = predictions
                    sources[row] = source
    return {row: Side(by_seed, sources[row]) for row, by_seed in found.items()}


def _with_recalibrations(run: Path, method: str) -> list[str]:
    """The method and what was made of it, as the run's stages name it."""
    stages = json.loads((run / "run.json").read_text(encoding="utf-8"))["stages"]
    prefix = f"recalibrate/{method}+"
    made = [stage.removeprefix("recalibrate/") for stage, of in stages.items() if of["state"] == "done"]
    return [method, *(name for name in made if f"recalibrate/{name}".startswith(prefix))]


def _figures(tables: list[SuiteTable], folder: Path) -> list[Path]:
    images = {f"pareto_{table.data}_{table.split}.png": accuracy_ece_plot(table) for table in tables}
    for column in COLUMNS:
        ranks = rank_plot(tables, column) if column.metric in RANKED else None
        if ranks is not None:
            images[f"ranks_{column.metric}.png"] = ranks
    for name, image in images.items():
        save_png(folder / name, image)
    return [folder / name for name in images]
