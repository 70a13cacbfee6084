"""`caltune compare`: methods of one or several run folders side by side."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations
from pathlib import Path
from typing import Any

from components.errors import UsageError
from components.evaluation.metrics_file import read_metrics
from components.evaluation.open_predictions import AnyPredictions, read_any_predictions
from components.evaluation.summary import compare, summarise
from components.run_file import load_run_file
from pipelines.run_folder import RUN_FILE

VALIDATION = ("validation", "validation_shift")


def compare_runs(folders: Sequence[Path]) -> dict[str, Any]:
    """Content of a `summary.json` over run folders.

    With several folders a method is called `<run>/<method>`. Every pair of methods that answered the same test
    questions is compared by paired bootstrap, with the bins and draws of the first run.

    Args:
        folders: Run folders.

    Raises:
        UsageError: A folder is no run or holds no evaluation.
    """
    predictions: dict[str, dict[str, AnyPredictions]] = {}
    metrics: dict[str, dict[str, Any]] = {}
    for folder in folders:
        for method, splits in _evaluations(folder).items():
            name = method if len(folders) == 1 else f"{folder.name}/{method}"
            predictions[name] = {s: read_any_predictions(path / "predictions.parquet") for s, path in splits.items()}
            metrics[name] = {s: read_metrics(path / "metrics.json") for s, path in splits.items()}
    config = load_run_file(folders[0] / RUN_FILE)
    rows = []
    for pair in combinations(predictions, 2):
        shared = _same_questions(predictions, *pair)
        if shared:
            both = {name: {s: predictions[name][s] for s in shared} for name in pair}
            rows += compare(both, [pair], config.evaluation, config.seed)
    return summarise(" + ".join(folder.name for folder in folders), metrics, rows)


def _evaluations(folder: Path) -> dict[str, dict[str, Path]]:
    """Test evaluations of a run by method, then split, methods in the order they were made."""
    if not (folder / RUN_FILE).is_file():
        raise UsageError(f"{folder} is not a run folder (it has no {RUN_FILE})")
    found: dict[str, dict[str, Path]] = {}
    for path in sorted(folder.glob("*/evaluation/*/metrics.json"), key=lambda p: p.stat().st_mtime):
        if path.parent.name not in VALIDATION:
            found.setdefault(path.parts[-4], {})[path.parent.name] = path.parent
    if not found:
        raise UsageError(f"{folder} holds no evaluation; run 'caltune run' or 'caltune evaluate' first")
    return found


def _same_questions(predictions: dict[str, dict[str, AnyPredictions]], a: str, b: str) -> list[str]:
    both = {s: (predictions[a][s], predictions[b][s]) for s in predictions[a] if s in predictions[b]}
    return [s for s, (one, other) in both.items() if type(one) is type(other) and one.ids == other.ids]
