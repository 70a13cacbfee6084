"""Both pipelines to their end through Kubeflow's local runner, on a tiny model, with real Ray, MLflow and registry."""

from __future__ import annotations

import json

import pytest

from components.registry.client import Connection
from components.registry.promotion import history
from components.registry.registry import Registry
from pipelines.kubeflow.local_run import run_locally
from pipelines.kubeflow.settings import Settings
from pipelines.kubeflow.shipping import registry_of

pytestmark = [pytest.mark.slow, pytest.mark.distributed, pytest.mark.timeout(3600)]

SETTINGS = Settings("python")


@pytest.fixture(scope="module")
def ended(towns_run):
    """The life of a model: trained for want of one, kept while nothing changes, replaced when the answers change."""
    first = run_locally("retrain", towns_run("Paris"), SETTINGS)
    same = run_locally("retrain", towns_run("Paris"), SETTINGS)
    changed = run_locally("retrain", towns_run("Lima"), SETTINGS)
    calibrated = run_locally("calibrate", towns_run("Oslo"), SETTINGS)
    return {"first": first, "same": same, "changed": changed, "calibrated": calibrated}


def test_without_a_champion_one_is_made(ended):
    assert ended["first"].outcome == "promoted"
    assert "before it: none" in ended["first"].reason


def test_undrifted_data_stop_the_pipeline_with_a_reason(ended):
    """The champion answers its own test questions once more, so nothing is worse by anything."""
    assert ended["same"].outcome == "stopped"
    assert ended["same"].reason.startswith("no drift on 40 labelled fresh questions: ece")
    assert "+0.000 [+0.000, +0.000]" in ended["same"].reason
    assert not (ended["same"].folder / "sft").exists()


def test_drifted_data_retrain_gate_and_promote(ended):
    found = ended["changed"]
    assert found.outcome == "promoted"
    stages = json.loads((found.folder / "run.json").read_text())["stages"]
    assert stages["drift"]["drifted"] is True
    assert "accuracy" in stages["drift"]["reason"]
    assert stages["gate"]["passed"] is True
    assert {"train/sft", "evaluate/sft", "recalibrate/sft+temperature", "report"} <= stages.keys()


def test_champion_and_candidate_answered_the_same_questions(ended, towns_run):
    registry = registry_of(towns_run("Lima"))
    decisions = history(registry, "towns").entries
    assert [decision.action for decision in decisions] == ["promote", "promote"]
    challenger = registry.champion("towns")
    with registry.files(challenger, "audit") as audit:
        verdict = json.loads(next(audit.rglob("decision.json")).read_text())["verdict"]
    compared = next(rule for rule in verdict["rules"] if rule["against"])
    assert verdict["champion"] == decisions[0].version
    assert "paired" in compared["reason"]


def test_calibrate_registers_what_passes_and_leaves_the_champion(ended, towns_run):
    assert ended["calibrated"].outcome == "registered"
    config = towns_run("Oslo")
    registry = Registry(Connection(f"sqlite:///{config.output_dir / 'mlflow.db'}"))
    assert registry.champion("towns").tags["caltune.run"] == ended["changed"].folder.name
    assert registry.by_alias("towns", "challenger").tags["caltune.run"] == ended["calibrated"].folder.name
    assert (ended["calibrated"].folder / "report" / "index.html").is_file()


def test_artifacts_are_copies_of_what_the_folder_holds(ended):
    folder = ended["calibrated"].folder
    artifacts = folder.with_name(f"{folder.name}.artifacts")
    (page,) = artifacts.rglob("report")
    assert page.read_text() == (folder / "report" / "index.html").read_text()
    (verdict,) = artifacts.rglob("verdict")
    assert "passed the gate" in verdict.read_text()
    (adapter,) = (path for path in artifacts.rglob("adapter") if path.is_dir())
    assert (adapter / "adapter_model.safetensors").is_file()
