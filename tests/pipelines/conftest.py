"""A run small enough for tests: the real pipeline, Ray and MLflow on a tiny random model and built-in facts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from components.config import RunConfig


@pytest.fixture
def small_run(tmp_path: Path, tiny_model_folder: Path) -> Callable[..., RunConfig]:
    """Builds a run's configuration; keyword arguments replace whole sections."""

    def build(**sections: Any) -> RunConfig:
        tree: dict[str, Any] = {
            "run": "small",
            "output_dir": str(tmp_path / "outputs"),
            "methods": ["base", "sft", "calm"],
            "recalibrate": {"base": ["temperature"], "sft": ["temperature"]},
            "model": {"name": str(tiny_model_folder), "adapter": {"r": 4, "alpha": 8}},
            "data": {
                "source": {"kind": "facts", "domain": "geography"},
                "splits": {"train": 48, "calibration": 16, "validation": 16, "test": 24},
                "heldout_groups": ["currency"],
                "ood": {"ood": {"kind": "facts", "domain": "chemistry"}},
                "prompt": {"style": "plain", "template": "Question: {question}\nAnswer:", "delimiter": " "},
            },
            "training": {"steps": 6, "batch_size": 4, "evaluate_every": 3, "checkpoint_every": 2},
            "calm": {"inner_steps": 2, "stop": {"rule": "keep_best", "split": "both"}},
            "evaluation": {"bootstrap": 100},
        }
        return RunConfig.model_validate(tree | sections)

    return build
