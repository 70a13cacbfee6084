"""`summary.json`: all methods on all splits side by side, and what the differences between methods are worth.

A method with several confidence sources has a row for each: one under its own name for the primary one (the softmax
among options, Sem1 for answers in its own words), one named `<method> (<source>)` for every other.
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
from components.evaluation.open_predictions import AnyPredictions, OpenPredictions
from components.evaluation.predictions import SOFTMAX

COMPARED = ("ece", "accuracy", "nll")
"""Metrics of a paired comparison of two softmax confidences."""

COMPARED_SOURCES = ("ece", "top_label_brier_score", "auroc")
"""Metrics of a paired comparison with any other confidence: it has no NLL, and its answers are the softmax's. ECE alone
rewards a constant, hence the other two."""

COMPARED_OPEN = (*COMPARED_SOURCES, "accuracy")
"""Metrics of a paired comparison on open-ended questions, where sources differ in the answer too."""

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
        `run`; `methods`, by method and split the block of the primary source; `sources`, for methods with several, by
        method, source and split the block of each; `chosen_sources`; `comparisons`.
    """
    return {
        "run": run,
        "methods": {
            method: {split: _primary(content) for split, content in by_split.items()}
            for method, by_split in metrics.items()
        },
        "sources": {
            method: {
                source: {s: of["sources"][source] for s, of in by_split.items() if source in of["sources"]}
                for source in sources
            }
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
            blocks = {source: [of["sources"][source] for of in by_split.values()] for source in sources}
            chosen[method] = min(sources, key=lambda s: float(np.mean([b[CHOSEN_BY]["value"] for b in blocks[s]])))
    return chosen


def compare(
    named: Mapping[str, Mapping[str, AnyPredictions]],
    pairs: Sequence[tuple[str, str]],
    config: EvaluationConfig,
    seed: int,
) -> list[dict[str, Any]]:
    """Paired bootstrap of each pair of rows on each split that both have.

    Two softmax confidences are compared by `COMPARED`, any other pair by `COMPARED_SOURCES`, on open-ended questions by
    `COMPARED_OPEN`.

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
    sides: dict[str, dict[str, tuple[AnyPredictions, str]]] = {}
    for method, by_split in named.items():
        for split, predictions in by_split.items():
            for name, source in rows_of_predictions(method, predictions):
                sides.setdefault(name, {})[split] = predictions, source
    rows: list[dict[str, Any]] = []
    for a, b in pairs:
        for name in (a, b):
            if name not in sides:
                raise CaltuneError(f"cannot compare '{name}': there are predictions of {', '.join(sides)} only")
        for split in (split for split in sides[a] if split in sides[b]):
            (of_a, source_a), (of_b, source_b) = sides[a][split], sides[b][split]
            for metric in _compared(of_a, source_a, source_b):
                found = paired_bootstrap(metric, of_a, of_b, config, seed, source_a, source_b)
                figures = {name: number_or_none(value) for name, value in vars(found).items()}
                rows.append({"split": split, "metric": metric, "a": a, "b": b, **figures})
    return rows


def _compared(predictions: AnyPredictions, source_a: str, source_b: str) -> tuple[str, ...]:
    if isinstance(predictions, OpenPredictions):
        return COMPARED_OPEN
    return COMPARED if source_a == source_b == SOFTMAX else COMPARED_SOURCES


def _primary(content: Mapping[str, Any]) -> Any:
    """The block of a `metrics.json` that stands for its method."""
    return next(iter(content["sources"].values()))


def rows_of_predictions(method: str, predictions: AnyPredictions) -> list[tuple[str, str]]:
    """Names of a method's rows in tables and figures, and the confidence source of each; the primary one first."""
    return [(row_name(method, source), source) for source in predictions.sources]


def _sources(by_split: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Sources of a method's `metrics.json` files; those of options and of free answers one after the other."""
    return list(dict.fromkeys(source for content in by_split.values() for source in content["sources"]))
