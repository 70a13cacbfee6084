"""What the doctor says of a search: how many of its trials fit on this machine, or that none does."""

from __future__ import annotations

import os

import pytest

from components.run_file import to_yaml
from pipelines.doctor import Finding, examine

CORES = os.cpu_count() or 1
SPACE = {"calm.alpha_learning_rate": {"log_uniform": [1e-3, 1e-1]}}


@pytest.fixture
def say(tmp_path, small_run, monkeypatch):
    """What the doctor says of a search with some resources."""
    monkeypatch.delenv("RAY_ADDRESS", raising=False)

    def look(resources, training=None, **search) -> Finding:
        sections = {"training": training} if training else {}
        config = small_run(tmp_path, resources=resources, tune={"space": SPACE, **search}, **sections)
        path = tmp_path / "small.yaml"
        path.write_text(to_yaml(config))
        return next(finding for finding in examine(path) if finding.what == "search")

    return look


def test_it_says_how_many_trials_fit(say):
    found = say({"cpus_per_worker": 1}, concurrency=1)
    assert found.ok
    assert f"Ray has {CORES} CPU cores, which fits {CORES} at once; 1 at a time will run" in found.found
    found = say({"cpus_per_worker": 1}, concurrency=CORES + 1)
    assert f"{CORES} at a time will run, not the {CORES + 1} of tune.concurrency" in found.found


def test_it_says_that_none_fits(say):
    found = say({"workers": 2, "cpus_per_worker": CORES})
    assert not found.ok
    assert f"a trial needs 2 x {CORES} CPU cores, Ray has {CORES} CPU cores: none fits" in found.found


def test_it_says_how_a_population_takes_turns(say):
    pbt = {"kind": "pbt", "keys": list(SPACE), "interval_steps": 3}
    training = {"steps": 6, "evaluate_every": 3, "checkpoint_every": 3}
    found = say({"cpus_per_worker": 1}, training=training, trials=CORES + 1, scheduler=pbt)
    assert f"the {CORES + 1} trials train {CORES} at a time, each to the next exchange" in found.found
    assert "paused every 3 steps" in found.found


def test_a_cluster_that_does_not_answer_is_named(say, monkeypatch):
    monkeypatch.setenv("RAY_ADDRESS", "http://127.0.0.1:1")
    found = say({"cpus_per_worker": 1})
    assert not found.ok
    assert "the cluster at http://127.0.0.1:1 (RAY_ADDRESS) cannot be asked" in found.found
