"""`metrics.json`: every metric of one method on one split with its interval, and how it was computed.

One block for each confidence source, the primary one first. Blocks have the same keys: what a source leaves undefined
is null (see `metrics.py`).
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from components.config import EvaluationConfig
from components.evaluation.binning import EDGE_RULE
from components.evaluation.intervals import Interval, bootstrap_intervals
from components.evaluation.open_predictions import AnyPredictions
from components.files import read_json, write_json

LOW_OPTION_MASS = 0.01
"""Below this mean option mass the softmax over the options renormalises next to nothing (ours)."""


def evaluate_predictions(
    predictions: AnyPredictions, config: EvaluationConfig, seed: int, *, data_hash: str | None = None
) -> dict[str, Any]:
    """The content of `metrics.json`.

    Args:
        predictions: One method's scores of one split.
        config: Bins, bootstrap draws and level.
        seed: Of the bootstrap.
        data_hash: Content hash of the questions; null in the file when not given.

    Returns:
        `n`; `low_option_mass`, true when the mean option mass is under `LOW_OPTION_MASS`; `sources`, a block of
        metrics for each confidence source, the primary one first, each `{"value", "ci_low", "ci_high"}` with None where
        undefined; `computed`, the settings behind the figures.
    """
    sources = {source: _block(bootstrap_intervals(predictions, config, seed, source)) for source in predictions.sources}
    mass = sources[predictions.sources[0]]["option_mass"]["value"]
    return {
        "n": len(predictions),
        "low_option_mass": mass is not None and mass < LOW_OPTION_MASS,
        "sources": sources,
        "computed": {
            "bins": config.bins,
            "edge_rule": EDGE_RULE,
            "norm": "l1",
            "interval": "percentile bootstrap over questions",
            "seed": seed,
            "bootstrap": config.bootstrap,
            "level": config.level,
            "data_hash": data_hash,
        },
    }


def write_metrics(path: Path, metrics: dict[str, Any]) -> None:
    """Writes `metrics.json`, whole or not at all."""
    write_json(path, metrics)


def read_metrics(path: Path) -> dict[str, Any]:
    """Reads `metrics.json`.

    Raises:
        CaltuneError: Missing or damaged.
    """
    return read_json(path, remedy="evaluate again")


def number_or_none(value: float) -> float | None:
    """JSON has no NaN: an undefined figure is null."""
    return None if math.isnan(value) else value


def _block(intervals: dict[str, Interval]) -> dict[str, dict[str, Any]]:
    return {
        metric: {
            "value": number_or_none(interval.value),
            "ci_low": number_or_none(interval.ci_low),
            "ci_high": number_or_none(interval.ci_high),
        }
        for metric, interval in intervals.items()
    }
