"""The run file's sections `gate` and `drift`: what they refuse, and that a run file without them stays what it was."""

from __future__ import annotations

from pathlib import Path

import pytest

from components.errors import RunFileError
from components.run_file import config_hash, load_run_file, to_yaml

QUICKSTART = Path(__file__).parents[3] / "ray_jobs" / "configs" / "quickstart.yaml"
RULE = "{metric: ece, threshold: 0.1}"


def load(*overrides):
    return load_run_file(QUICKSTART, overrides)


def test_without_the_sections_nothing_of_them_is_in_the_resolved_file_or_its_hash():
    config = load()
    assert config.gate is None
    assert config.drift is None
    assert not {"gate", "drift"} & config.model_dump().keys()
    assert "gate" not in to_yaml(config)


def test_the_sections_survive_the_resolved_file(tmp_path):
    rules = f"[{RULE}, {{metric: accuracy, split: ood, non_inferiority_margin: 0.02, against: sft+temperature}}]"
    config = load(f"gate={{method: calm, rules: {rules}}}", "drift={max_shift: 0.2}")
    (tmp_path / "resolved.yaml").write_text(to_yaml(config))
    again = load_run_file(tmp_path / "resolved.yaml")
    assert again.gate == config.gate
    assert again.drift == config.drift
    assert config_hash(again) == config_hash(config)
    assert [rule.reference for rule in config.gate.rules] == [None, "sft+temperature"]


@pytest.mark.parametrize(
    ("gate", "problem"),
    [
        ("{method: calm, rules: [{metric: ece}]}", "exactly one of threshold"),
        ("{method: calm, rules: [{metric: ece, threshold: 0.1, non_inferiority_margin: 0.1}]}", "exactly one of"),
        ("{method: calm, rules: [{metric: ece, threshold: 0.1, against: sft}]}", "takes no 'against'"),
        ("{method: calm, rules: []}", "at least 1 item"),
        ("{method: calm, rules: [{metric: mean_confidence, threshold: 0.1}]}", "mean_confidence"),
        ("{method: calm, rules: [{metric: nll, source: flc, threshold: 0.1}]}", "does not state"),
        ("{method: calm, rules: [{metric: ece, split: test, threshold: 0.1}]}", "the test splits are id, ood"),
        ("{method: calm, rules: [{metric: ece, against: blob, min_absolute_change: 0}]}", "neither 'champion' nor"),
        ("{method: calm, rules: [{metric: ece, against: calm, min_absolute_change: 0}]}", "with itself"),
        ("{method: calm_uq4ct, rules: [" + RULE + "]}", "which 'methods' does not run"),
        ("{method: base+temperature, rules: [" + RULE + "]}", "trains no adapter"),
        ("{method: calm, registered_model: 'a/b', rules: [" + RULE + "]}", "registered_model"),
        ("{method: calm, ruels: []}", "ruels"),
    ],
)
def test_what_cannot_be_meant_is_refused(gate, problem):
    with pytest.raises(RunFileError, match=problem):
        load(f"gate={gate}")


def test_drift_thresholds_are_bounded():
    with pytest.raises(RunFileError, match="max_shift"):
        load("drift={max_shift: 1.5}")
