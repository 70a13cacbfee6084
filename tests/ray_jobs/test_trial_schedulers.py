"""Population based training in Ray Tune itself, on trials that only report numbers."""

from __future__ import annotations

import json
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest

from components.config_population import PbtConfig
from ray_jobs.trial_schedulers import Population
from ray_jobs.trial_table import Trial

pytestmark = [pytest.mark.distributed, pytest.mark.slow, pytest.mark.timeout(900)]


def test_trials_that_wait_are_compared_without_one_that_fails(ray_here, make_job, tmp_path):
    """Of three trials, whose NLL is their value all the way, 1 (.1) and 2 (.9) wait at step 2, and 3 fails before.

    2 takes over 1 there and goes on with .2, which is still worse at step 4; at the end, step 5, nobody waits.
    """
    from ray import tune

    def train(task: dict[str, Any]) -> None:
        value, checkpoint = task["suggestion"]["parameters"]["eta"], tune.get_checkpoint()
        done = 0
        if checkpoint is not None:
            with checkpoint.as_directory() as folder:
                done = json.loads((Path(folder) / "step.json").read_text())
        for step in range(done + 1, 6):
            if task["suggestion"]["number"] == 3:
                time.sleep(5)  # until the others wait
                raise ValueError("diverged")
            with tempfile.TemporaryDirectory() as folder:
                (Path(folder) / "step.json").write_text(json.dumps(step))
                tune.report({"step": step, "nll": value}, checkpoint=tune.Checkpoint.from_directory(folder))

    told: list[tuple[Any, ...]] = []

    def exchange(number: int, donor: int, step: int, scores: tuple[float, float]) -> Trial:
        told.append((number, donor, step, scores))
        return Trial(number, "calm", {"eta": 0.2})

    config = make_job("population", training={"steps": 5}).config
    pbt = PbtConfig(kind="pbt", keys=["eta"], interval_steps=2, fraction=0.5)
    values = {1: 0.1, 2: 0.9, 3: 0.5}
    suggestions = [{"number": number, "parameters": {"eta": value}} for number, value in values.items()]
    results = tune.Tuner(
        tune.with_resources(train, {"CPU": 0.5}),
        param_space={"suggestion": tune.grid_search(suggestions)},
        tune_config=tune.TuneConfig(scheduler=Population(config, pbt, 0, exchange)),
        run_config=tune.RunConfig(storage_path=str(tmp_path), verbose=0),
    ).fit()
    assert told == [(2, 1, 2, (0.9, 0.1)), (2, 1, 4, (0.2, 0.1))]
    assert sorted(result.metrics["step"] for result in results if result.error is None) == [5, 5]
    assert [str(error).count("diverged") > 0 for error in results.errors] == [True]
