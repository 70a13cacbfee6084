"""`summary.json`: all methods on all splits side by side, and what the differences between methods are worth.

A method with several confidence sources has a row for each: one under its own name for the softmax, one named
`<method> (<source>)` for every other.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from components.config import EvaluationConfig
from components.errors import CaltuneError
from components.evaluation.display import row_name
from components.evaluation.intervals import paired_bootstrap
from components.evaluation.metrics_file import number_or_none
from components.evaluation.predictions import SOFTMAX, Predictions

COMPARED = ("ece", "accuracy", "nll")
"""Metrics of a paired comparison of two softmax confidences."""

COMPARED_SOURCES = ("ece", "top_label_brier_score", "auroc")
"""Metrics of a paired comparison with any other confidence: it has no NLL, and its answers are the softmax's. ECE alone
rewards a constant, hence the other two."""

CHOSEN_BY = "top_label_brier_score"

Metrics = Mapping[str, Mapping[str, Mapping[str, Any]]]
"""Content of `metrics.json` by method, then split."""


def summarise(
    run: str,
    metrics: Metrics,
    comparisons: Sequence[Mapping[str, Any]],
    chosen_sources: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """The content of `summary.json`.

    Args:
        run: Name of the run.
        metrics: Of the test splits.
        comparisons: From `compare`.
        chosen_sources: From `choose_sources`.

    Returns:
        `run`; `methods`, by method and split the block of the softmax; `sources`, for methods with several, by
        method, source and split the block of each; `chosen_sources`; `comparisons`.
    """
    return {
        "run": run,
        "methods": {
            method: {split: content["sources"][SOFTMAX] for split, content in by_split.items()}
            for method, by_split in metrics.items()
        },
        "sources": {
            method: {source: {s: content["sources"][source] for s, content in by_split.items()} for source in sources}
            for method, by_split in metrics.items()
            if len(sources := _sources(by_split)) > 1
        },
        "chosen_sources": dict(chosen_sources or {}),
        "comparisons": list(comparisons),
    }


def choose_sources(validation: Metrics) -> dict[str, str]:
    """The source to rely on, for each method that has several: the lowest Brier score on labelled validation data.

    That is the answer's alone, the mean of (confidence - correct)^2, which every source has. It is a proper score: a
    constant near the accuracy, whose ECE is next to nothing, does not win by it. Test data has no say. With several
    validation splits their scores are averaged; of equals the first source is taken.

    Args:
        validation: Content of `metrics.json` by method, then labelled validation split.
    """
    chosen = {}
    for method, by_split in validation.items():
        sources = _sources(by_split)
        if len(sources) > 1:
            blocks = {source: [content["sources"][source] for content in by_split.values()] for source in sources}
            chosen[method] = min(sources, key=lambda s: float(np.mean([b[CHOSEN_BY]["value"] for b in blocks[s]])))
    return chosen


def compare(
    named: Mapping[str, Mapping[str, Predictions]],
    pairs: Sequence[tuple[str, str]],
    config: EvaluationConfig,
    seed: int,
) -> list[dict[str, Any]]:
    """Paired bootstrap of each pair of rows on each split that both have.

    Two softmax confidences are compared by `COMPARED`, any other pair by `COMPARED_SOURCES`.

    Args:
        named: Predictions by method, then split.
        pairs: (a, b), names of rows: a method, or `<method> (<source>)` for a source other than the softmax. A
            difference is a minus b, so for ECE, NLL and Brier score negative means a is better.
        config: Bins, bootstrap draws and level.
        seed: Of the bootstrap.

    Returns:
        Rows `{"split", "metric", "a", "b", "difference", "ci_low", "ci_high", "p_value"}`, None where undefined.

    Raises:
        CaltuneError: A pair names a row without predictions, or the two answered different questions.
    """
    sides = {
        name: (method, source)
        for method, by_split in named.items()
        for found in by_split.values()
        for name, source in rows_of_predictions(method, found)
    }
    rows: list[dict[str, Any]] = []
    for a, b in pairs:
        for name in (a, b):
            if name not in sides:
                raise CaltuneError(f"cannot compare '{name}': there are predictions of {', '.join(sides)} only")
        (method_a, source_a), (method_b, source_b) = sides[a], sides[b]
        metrics = COMPARED if source_a == source_b == SOFTMAX else COMPARED_SOURCES
        for split in (split for split in named[method_a] if split in named[method_b]):
            both = named[method_a][split], named[method_b][split]
            for metric in metrics:
                found = paired_bootstrap(metric, *both, config, seed, source_a, source_b)
                figures = {name: number_or_none(value) for name, value in vars(found).items()}
                rows.append({"split": split, "metric": metric, "a": a, "b": b, **figures})
    return rows


def rows_of_predictions(method: str, predictions: Predictions) -> list[tuple[str, str]]:
    """Names of a method's rows in tables and figures, and the confidence source of each; the softmax first."""
    return [(row_name(method, source), source) for source in predictions.sources]


def _sources(by_split: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Sources of a method's `metrics.json` files; the same for every split."""
    return list(next(iter(by_split.values()))["sources"]) if by_split else []
