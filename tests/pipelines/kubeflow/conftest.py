"""Compiled pipelines as plain data, and runs whose questions a tiny model learns to answer, or no longer can."""

from __future__ import annotations

import functools
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from components.config import RunConfig
from pipelines.kubeflow.dags import compile_pipeline
from pipelines.kubeflow.settings import Settings

TOWNS = ("Paris", "Lima", "Oslo", "Rome")
RUN: dict[str, Any] = {
    "run": "quick",
    "output_dir": "/data/runs",
    "methods": ["base", "sft", "calm_uq4ct"],
    "recalibrate": {"calm_uq4ct": ["temperature"]},
    "data": {
        "source": {"kind": "facts", "domain": "geography"},
        "heldout_groups": ["currency"],
        "ood": {"ood": {"kind": "facts", "domain": "chemistry"}},
    },
    "resources": {"workers": 2, "cpus_per_worker": 3},
    "gate": {"method": "sft", "rules": [{"metric": "accuracy", "min_absolute_change": 0.0}]},
    "drift": {},
}


@pytest.fixture(scope="session")
def run_file() -> Callable[..., RunConfig]:
    """A run that would go to a cluster; keyword arguments replace whole sections, None takes one out."""

    def make(**sections: Any) -> RunConfig:
        return RunConfig.model_validate({key: value for key, value in (RUN | sections).items() if value is not None})

    return make


@pytest.fixture(scope="session")
def text(tmp_path_factory, run_file) -> Callable[..., str]:
    """A compiled pipeline as it is written; each is compiled once, because that takes a second or two."""
    target = tmp_path_factory.mktemp("compiled") / "pipeline.yaml"

    @functools.cache
    def write(which: Any, content: str, settings: tuple[tuple[str, Any], ...]) -> str:
        config = RunConfig.model_validate_json(content)
        compile_pipeline(which, config, Settings(**({"image": "registry/steps:1"} | dict(settings))), target)
        return target.read_text()

    def make(which: Any, config: RunConfig | None = None, **settings: Any) -> str:
        return write(which, (config or run_file()).model_dump_json(), tuple(settings.items()))

    return make


@pytest.fixture(scope="session")
def compiled(text) -> Callable[..., list[dict[str, Any]]]:
    """The documents of a compiled pipeline: its specification, and what is particular to Kubernetes."""

    @functools.cache
    def load(content: str) -> list[dict[str, Any]]:
        return list(yaml.load_all(content, Loader=yaml.CSafeLoader))

    def make(which: Any, config: RunConfig | None = None, **settings: Any) -> list[dict[str, Any]]:
        return load(text(which, config, **settings))

    return make


@pytest.fixture(scope="session")
def towns_run(tmp_path_factory, tiny_model_folder) -> Callable[[str], RunConfig]:
    """Runs that share a registry; each one's questions have one and the same town for an answer.

    A model that has learnt one town is always right on its questions and never on another's: drift beyond doubt.
    """
    base = tmp_path_factory.mktemp("towns")

    def questions(town: str, n: int, name: str) -> str:
        order, path = random.Random(name), base / f"{name}.jsonl"
        rows = []
        for i in range(n):
            choices = order.sample(TOWNS, len(TOWNS))
            row = {"id": f"{name}{i}", "question": f"Question {i}: which town?", "choices": choices}
            rows.append(json.dumps(row | {"answer": choices.index(town)}))
        path.write_text("\n".join(rows) + "\n")
        return str(path)

    def make(town: str) -> RunConfig:
        return RunConfig.model_validate(
            {
                "run": "towns",
                "output_dir": str(base / "outputs"),
                "methods": ["sft"],
                "recalibrate": {"sft": ["temperature"]},
                "model": {"name": str(tiny_model_folder), "adapter": {"r": 4, "alpha": 8}},
                "data": {
                    "source": {"kind": "file", "path": questions(town, 150, town)},
                    "splits": {"train": 60, "calibration": 10, "validation": 30, "test": 40},
                    "ood": {"ood": {"kind": "file", "path": questions(town, 40, f"ood-{town}")}},
                    "prompt": {"style": "plain", "template": "{question}", "delimiter": " "},
                },
                "training": {
                    "steps": 30,
                    "batch_size": 8,
                    "learning_rate": 0.02,
                    "evaluate_every": 15,
                    "checkpoint_every": 15,
                },
                "evaluation": {"bootstrap": 100},
                "gate": {
                    "method": "sft+temperature",
                    "registered_model": "towns",
                    "rules": [
                        {"metric": "accuracy", "threshold": 0.6},
                        {"metric": "accuracy", "split": "ood", "threshold": 0.6},
                        {"metric": "accuracy", "min_absolute_change": 0.0},
                    ],
                },
                "drift": {},
            }
        )

    return make


@pytest.fixture
def artifact(tmp_path: Path) -> Callable[[str], Any]:
    """What a step needs of one of Kubeflow's artifacts."""
    from kfp.dsl import Metrics

    def make(name: str) -> Any:
        return Metrics(name=name, uri=str(tmp_path / name))

    return make
