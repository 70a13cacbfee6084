"""`summary.json`: all methods on all splits side by side, and what the differences between methods are worth."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from components.config import EvaluationConfig
from components.errors import CaltuneError
from components.evaluation.intervals import paired_bootstrap
from components.evaluation.metrics_file import number_or_none
from components.evaluation.predictions import PRIMARY_SOURCE, Predictions

COMPARED = ("ece", "accuracy", "nll")
"""Metrics of every paired comparison."""


def summarise(
    run: str, metrics: Mapping[str, Mapping[str, Mapping[str, Any]]], comparisons: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    """The content of `summary.json`.

    Args:
        run: Name of the run.
        metrics: Content of `metrics.json` by method, then split.
        comparisons: From `compare`.
    """
    return {
        "run": run,
        "methods": {
            method: {split: content["sources"][PRIMARY_SOURCE] for split, content in by_split.items()}
            for method, by_split in metrics.items()
        },
        "comparisons": list(comparisons),
    }


def compare(
    named: Mapping[str, Mapping[str, Predictions]],
    pairs: Sequence[tuple[str, str]],
    config: EvaluationConfig,
    seed: int,
) -> list[dict[str, Any]]:
    """Paired bootstrap of `COMPARED` for each pair of methods on each split that both have.

    Args:
        named: Predictions by method, then split.
        pairs: (a, b); a difference is a minus b, so for ECE and NLL negative means a is better.
        config: Bins, bootstrap draws and level.
        seed: Of the bootstrap.

    Returns:
        Rows `{"split", "metric", "a", "b", "difference", "ci_low", "ci_high", "p_value"}`, None where undefined.

    Raises:
        CaltuneError: A pair names a method without predictions, or the two answered different questions.
    """
    rows: list[dict[str, Any]] = []
    for a, b in pairs:
        for method in (a, b):
            if method not in named:
                raise CaltuneError(f"cannot compare '{method}': there are predictions of {', '.join(named)} only")
        for split in (split for split in named[a] if split in named[b]):
            for metric in COMPARED:
                found = paired_bootstrap(metric, named[a][split], named[b][split], config, seed)
                figures = {name: number_or_none(value) for name, value in vars(found).items()}
                rows.append({"split": split, "metric": metric, "a": a, "b": b, **figures})
    return rows
