"""The main job from a run file to a report, with real Ray, real MLflow and a tiny model."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from mlflow import MlflowClient

from components.errors import UsageError
from components.models.adapter_files import verify_adapter
from pipelines.compare import compare_runs
from pipelines.progress import Reporter
from pipelines.run import run

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(900)]

METHODS = [
    "base",
    "base+temperature",
    "base+temperature@both",
    "sft",
    "sft+temperature",
    "sft+temperature@both",
    "calm",
]


def test_summary_has_every_method_on_both_test_sets(finished):
    assert list(finished.summary["methods"]) == METHODS
    for by_split in finished.summary["methods"].values():
        assert list(by_split) == ["id", "ood"]
        for block in by_split.values():
            for metric in ("accuracy", "mean_confidence", "ece", "nll"):
                assert block[metric]["ci_low"] <= block[metric]["value"] <= block[metric]["ci_high"]


def test_run_folder_is_laid_out_as_promised(finished):
    expected = [
        "config.resolved.yaml",
        "run.json",
        "data/manifest.json",
        "base/evaluation/id/metrics.json",
        "base/evaluation/ood/predictions.parquet",
        "sft+temperature/temperature.json",
        "sft/adapter/adapter_model.safetensors",
        "calm/adapter/calibration_head.safetensors",
        "calm/trace.jsonl",
        "report/index.html",
        "report/summary.json",
    ]
    assert [name for name in expected if not (finished.folder / name).exists()] == []
    assert not list(finished.folder.rglob("*.bin"))
    assert verify_adapter(finished.folder / "calm" / "adapter")["method"] == "calm"


def test_trace_has_every_step_and_every_quantity(finished):
    rows = [json.loads(line) for line in (finished.folder / "calm" / "trace.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == list(range(7))
    wanted = {"f", "g", "residual", "lambda", "mean_tau", "offset_norm", "mean_confidence", "accuracy"}
    assert all(wanted <= row.keys() for row in rows[1:])
    assert [row["step"] for row in rows if "validation/nll" in row] == [0, 3, 6]


def test_report_is_self_contained(finished):
    page = (finished.folder / "report" / "index.html").read_text()
    assert page.count("data:image/png;base64,") >= len(METHODS)
    assert "http://" not in page.replace("http://www.w3.org", "")
    assert 'src="http' not in page


def test_tracked_runs_are_nested_with_figures_and_adapter(finished):
    config = finished.config
    client = MlflowClient(f"sqlite:///{config.output_dir.resolve() / 'mlflow.db'}")
    experiment = client.get_experiment_by_name("caltune")
    runs = {r.info.run_name: r for r in client.search_runs([experiment.experiment_id])}
    parent = runs.pop("small")
    assert parent.info.status == "FINISHED"
    assert {r.data.tags["mlflow.parentRunId"] for r in runs.values()} == {parent.info.run_id}
    assert {"train-sft", "train-calm", "evaluate-base", "evaluate-calm"} <= runs.keys()
    steps = client.get_metric_history(runs["train-calm"].info.run_id, "f")
    assert sorted(m.step for m in steps) == list(range(1, 7))
    shown = runs["evaluate-calm"].data.metrics["ood/ece"]
    assert shown == pytest.approx(finished.summary["methods"]["calm"]["ood"]["ece"]["value"])
    assert "adapter" in {a.path for a in client.list_artifacts(runs["train-calm"].info.run_id)}


def test_a_folder_in_use_is_refused_and_resume_does_no_work_twice(finished):
    config = finished.config
    with pytest.raises(UsageError, match="--resume"):
        run(config, Path(), "refuse", Reporter(quiet=True))
    adapter = finished.folder / "calm" / "adapter" / "adapter_model.safetensors"
    before = adapter.stat().st_mtime_ns
    again = run(config, Path(), "resume", Reporter(quiet=True))
    assert adapter.stat().st_mtime_ns == before
    assert again.summary == finished.summary


def test_resume_with_other_settings_is_refused(finished):
    config = finished.config
    with pytest.raises(UsageError, match="other settings"):
        run(config.model_copy(update={"seed": 1}), Path(), "resume", Reporter(quiet=True))


def test_compare_reads_the_folder_back(finished):
    summary = compare_runs([finished.folder])
    assert set(summary["methods"]) == set(METHODS)
    row = next(r for r in summary["comparisons"] if {r["a"], r["b"]} == {"base", "calm"} and r["metric"] == "ece")
    blocks = summary["methods"]
    expected = blocks[row["a"]][row["split"]]["ece"]["value"] - blocks[row["b"]][row["split"]]["ece"]["value"]
    assert row["difference"] == pytest.approx(expected)


def test_compare_sets_runs_side_by_side(finished, tmp_path):
    twin = tmp_path / "twin"
    shutil.copytree(finished.folder, twin)
    summary = compare_runs([finished.folder, twin])
    assert summary["run"] == "small + twin"
    assert set(summary["methods"]) == {f"{run}/{method}" for run in ("small", "twin") for method in METHODS}
    rows = [r for r in summary["comparisons"] if {r["a"], r["b"]} == {"small/calm", "twin/calm"}]
    assert {(r["split"], r["metric"]) for r in rows} == {
        (s, m) for s in ("id", "ood") for m in ("ece", "accuracy", "nll")
    }
    assert {r["difference"] for r in rows} == {0.0}
