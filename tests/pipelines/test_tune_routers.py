"""A search for UQ4CT's weights that judges the router confidence instead of the softmax."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from components.run_file import load_run_file
from pipelines.progress import Reporter
from pipelines.tune import tune
from ray_jobs.trial_table import TrialTable

pytestmark = [pytest.mark.distributed, pytest.mark.slow, pytest.mark.timeout(900)]


def test_the_router_confidences_ece_decides(tmp_path, small_run, monkeypatch):
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    config = small_run(
        tmp_path,
        methods=["uq4ct"],
        recalibrate={},
        model={
            "name": small_run(tmp_path).model.name,
            "mixlora": {"r": 3, "num_experts": 4, "router_init_std": 0.3},
        },
        training={"steps": 6, "batch_size": 4, "evaluate_every": 3, "checkpoint_every": 3},
        tune={
            "method": "uq4ct",
            "trials": 2,
            "confidence": "flc",
            "reference_accuracy": 0.0,
            "space": {
                "uq4ct.balance_weight": {"uniform": [0.0, 0.1]},
                "uq4ct.calibration_weight": {"uniform": [0.0, 5.0]},
                "model.mixlora.top_k": {"choice": [1, 2]},
            },
        },
    )
    result = tune(config, Path(), "refuse", Reporter(quiet=True))
    table = TrialTable(config.folder / "tune" / "trials.jsonl")
    finished = [trial for trial in table if trial.state == "finished"]
    assert len(list(table)) == 2
    best = min(finished, key=lambda trial: trial.metrics["validation/flc_ece"])
    assert result["best"]["trial"] == best.number
    assert result["best"]["ece"] == best.metrics["validation/flc_ece"] != best.metrics["validation/ece"]
    assert load_run_file(result["best_run_file"]).uq4ct.balance_weight == best.parameters["uq4ct.balance_weight"]
    load = json.loads((Path(best.folder) / "expert_load.json").read_text())
    assert load["steps"] == [3, 6]
