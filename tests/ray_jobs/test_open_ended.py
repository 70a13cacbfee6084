"""Open-ended questions: each method trains on them, and its adapter answers them in its own words."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from components.config import RunConfig
from components.data.prepare import load_prepared, prepare
from components.evaluation.open_predictions import OpenPredictions
from components.evaluation.predictions import Predictions
from components.evaluation.score_split import traced_metrics
from components.models.base import resolve_model
from components.models.generate import Generator
from components.training.job import Process, TrainingJob
from components.training.session import Session
from ray_jobs.evaluate import EvaluationJob, evaluate

ROWS = [{"id": f"o{i}", "question": f"Who wrote book {i}?", "answers": [f"Ann {i}", "Bo"]} for i in range(40)]


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory, tiny_model_folder: Path) -> Callable[[str], TrainingJob]:
    """Jobs on forty made-up questions."""
    folder = tmp_path_factory.mktemp("open")
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))

    def make(method: str) -> TrainingJob:
        tree = {
            "run": "open",
            "methods": [method],
            "model": {
                "name": str(tiny_model_folder),
                "adapter": {"r": 3},
                "mixlora": {"r": 3, "num_experts": 4, "router_init_std": 0.3},
            },
            "data": {
                "source": {"kind": "file", "path": str(folder / "rows.jsonl"), "rows": "open"},
                "splits": {"train": 16, "calibration": 4, "validation": 4, "test": 5},
                "prompt": {"style": "plain", "delimiter": " "},
                "ood": {"choices": {"kind": "facts", "domain": "geography", "limit": 5}},
            },
            "training": {"steps": 4, "batch_size": 4, "evaluate_every": 2, "checkpoint_every": 4},
            "calm": {"inner_steps": 1, "entropy_over": "vocabulary"},
            "uq4ct": {"correctness": "token_f1"},
            "generation": {"samples": 3, "max_new_tokens": 5, "rows": 8},
        }
        config = RunConfig.model_validate(tree)
        if not (folder / "data").exists():
            prepare(config, folder / "data", folder)
        return TrainingJob(config, method, folder / "data", folder / method, resolve_model(config.model))

    return make


def evaluated(job: TrainingJob, adapter: Path | None, kept: Path | None = None) -> dict:
    data = load_prepared(job.data)
    done: list[int] = []
    found = evaluate(EvaluationJob(job.config, data, job.resolved, adapter, ["id", "choices"], kept), done.append)
    assert sum(done) == 10
    assert list(found) == ["id", "choices"]
    assert found["id"].ids == tuple(q.id for q in data.splits["id"])
    return found


@pytest.mark.parametrize(
    "method", ["calm", pytest.param("sft", marks=pytest.mark.slow), pytest.param("uq4ct", marks=pytest.mark.slow)]
)
def test_train_and_answer(job: Callable[[str], TrainingJob], method: str) -> None:
    """Nothing is said of options that are not there, and routers add a source."""
    training, rows = job(method), []
    judge = lambda scores: traced_metrics(scores, 10)  # noqa: E731
    session = Session(training, Process(), judge, on_step=lambda step, row: rows.append(row))
    session.train()
    told = {key for row in rows for key in row}
    assert not {"accuracy", "mean_confidence", "validation/ece", "validation/accuracy"} & told
    found = evaluated(training, training.folder / "adapter")["id"]
    assert isinstance(found, OpenPredictions)
    assert ("flc" in found.sources) == (method == "uq4ct")
    assert all(len(own) == 3 for own in found.samples)


def test_splits_of_both_kinds_and_going_on(
    job: Callable[[str], TrainingJob], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second evaluation takes every answer from the folder, and gives the same."""
    first = evaluated(job("base"), None, tmp_path)
    assert isinstance(first["choices"], Predictions)
    monkeypatch.setattr(Generator, "_rows", None)
    second = evaluated(job("base"), None, tmp_path)
    assert second["id"].samples == first["id"].samples
    np.testing.assert_array_equal(second["id"].log_probs, first["id"].log_probs)
