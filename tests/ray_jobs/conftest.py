"""One Ray on this machine for all tests of this folder, and jobs small enough for it."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from components.config import RunConfig
from components.data.prepare import prepare
from components.models.base import resolve_model
from components.training.job import TrainingJob

WORDS = ["iron", "tin", "zinc", "gold", "lead", "neon", "argon", "xenon", "lima", "oslo", "rome", "cairo"]


@pytest.fixture(scope="session")
def ray_here() -> Iterator[None]:
    """Ray as a run starts it."""
    from ray_jobs.cluster import connect

    connect()
    yield
    import ray

    ray.shutdown()


@pytest.fixture(scope="session")
def make_job(tmp_path_factory: pytest.TempPathFactory, tiny_model_folder: Path) -> Callable[..., TrainingJob]:
    """Jobs on made-up questions; keyword arguments replace sections of the run file."""
    folder = tmp_path_factory.mktemp("jobs")
    rows = [
        {
            "id": str(i),
            "question": f"What is number {i}?",
            "choices": [WORDS[(i + k) % 12] for k in range(4)],
            "answer": i % 4,
        }
        for i in range(80)
    ]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    def make(name: str, method: str = "calm", **sections: Any) -> TrainingJob:
        tree = {
            "run": "small",
            "methods": [method],
            "model": {
                "name": str(tiny_model_folder),
                "adapter": {"r": 3},
                "mixlora": {"r": 3, "num_experts": 4, "router_init_std": 0.3},
            },
            "data": {
                "source": {"kind": "file", "path": str(folder / "rows.jsonl")},
                "splits": {"train": 32, "calibration": 16, "validation": 10, "test": 10},
                "prompt": {"style": "plain", "delimiter": " "},
            },
            "training": {"steps": 3, "batch_size": 4, "evaluate_every": 10, "checkpoint_every": 10},
            "calm": {"inner_steps": 2},
        }
        config = RunConfig.model_validate(tree | sections)
        if not (folder / "data").exists():
            prepare(config, folder / "data", folder)
        return TrainingJob(config, method, folder / "data", folder / name / method, resolve_model(config.model))

    return make
