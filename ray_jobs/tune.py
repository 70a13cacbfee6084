"""A search over the run file's keys through Ray Tune.

Tune runs the trials and the scheduler; Optuna proposes parameters (`trial_search.py`); what became of each trial
stands in our own table (`trial_table.py`), from which a search that was broken off is continued.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from components.config import ResourcesConfig, RunConfig
from components.config_tune import TuneConfig, value_at
from components.errors import UsageError
from components.files import read_json
from components.training.session import TrainingJob
from components.training.trace import read_trace
from ray_jobs.cluster import connect
from ray_jobs.trial_choice import Objective
from ray_jobs.trial_table import Trial, TrialTable
from ray_jobs.trial_worker import NLL, as_message, judged, last_words, run_trial
from ray_jobs.worker import RESULT, TRACE

POLL_SECONDS = 0.2


@dataclass(frozen=True)
class Room:
    """How many trials a cluster has room for.

    Attributes:
        cpus: CPU cores of each of a trial's workers.
        fit: Trials that fit at once.
        at_once: Trials that will run at once.
        sentence: All of it, for a person.
    """

    cpus: int
    fit: int
    at_once: int
    sentence: str


def room_for(tune: TuneConfig, resources: ResourcesConfig, cluster: dict[str, float]) -> Room:
    """The arithmetic of a search's resources, done before anything is started (E1, E21).

    Args:
        tune: The search.
        resources: What one trial asks for.
        cluster: Ray's `cluster_resources()`.

    Raises:
        UsageError: Not even one trial fits; it would wait for ever.
    """
    cores, gpus, workers = int(cluster.get("CPU", 0)), int(cluster.get("GPU", 0)), resources.workers
    cpus = resources.cpus_per_worker or max(cores // (workers * tune.concurrency), 1)
    fit = cores // (cpus * workers)
    if resources.use_gpu:
        fit = min(fit, gpus // workers)
    needs = f"{workers} x " * (workers > 1) + f"{cpus} CPU core{'s' * (cpus > 1)}"
    needs += f" and {workers} GPU{'s' * (workers > 1)}" * resources.use_gpu
    has = f"{cores} CPU cores" + f" and {gpus} GPUs" * resources.use_gpu
    if fit < 1:
        raise UsageError(
            f"a trial needs {needs}, Ray has {has}: none fits; lower resources.workers or resources.cpus_per_worker"
        )
    at_once = min(fit, tune.concurrency)
    sentence = f"each trial takes {needs}; Ray has {has}, which fits {fit} at once"
    if at_once < tune.concurrency:
        sentence += f": {at_once} at a time will run, not the {tune.concurrency} of tune.concurrency"
    else:
        sentence += f"; {at_once} at a time will run"
    return Room(cpus, fit, at_once, sentence)


def search(
    config: RunConfig,
    job: TrainingJob,
    table: TrialTable,
    objective: Objective,
    *,
    trials: int,
    room: Room,
    on_change: Callable[[Trial], None],
) -> None:
    """Runs trials until the table has as many as were asked for. A failed trial is one row and ends nothing.

    Args:
        config: The run; `config.tune` is the search.
        job: Its method, prepared data and base model; a trial gets a folder in `job.folder`.
        table: The trials so far; every change goes into it.
        objective: What is looked for.
        trials: How many the table is to have at the end.
        room: How many run at once, with how many cores.
        on_change: Told, in another thread, of each trial that starts, is evaluated, or ends.
    """
    connect()
    missing = trials - len(table.closed())
    if missing <= 0:
        return
    tuner, watcher = _tuner(config, job, table, objective, missing, room, on_change)
    failure: list[BaseException] = []

    def fit() -> None:
        try:
            tuner.fit()
        except BaseException as problem:  # handed over to the thread that waits
            failure.append(problem)

    # In a thread of its own, so that Ctrl-C reaches us at once instead of being Tune's to handle.
    thread = threading.Thread(target=fit, name="ray-tune", daemon=True)
    thread.start()
    try:
        while thread.is_alive():
            thread.join(POLL_SECONDS)
    finally:
        watcher.close()
    if failure:
        raise failure[0]


def first_parameters(config: RunConfig) -> dict[str, Any] | None:
    """The run file's own values of the searched keys, where all of them lie in the search space."""
    assert config.tune is not None
    tree = config.model_dump(mode="json", exclude={"tune"})
    own = {key: value_at(tree, key) for key in config.tune.space}
    return own if all(dimension.holds(own[key]) for key, dimension in config.tune.space.items()) else None


def _tuner(
    config: RunConfig,
    job: TrainingJob,
    table: TrialTable,
    objective: Objective,
    missing: int,
    room: Room,
    on_change: Callable[[Trial], None],
) -> tuple[Any, Any]:
    # Ours are the progress lines; and Tune's table of trials would go to stdout, where only results belong.
    os.environ["RAY_AIR_NEW_OUTPUT"] = "0"
    from ray import tune

    from ray_jobs.trial_search import TrialSearch
    from ray_jobs.trial_watcher import TrialWatcher

    assert config.tune is not None
    folder = job.folder.resolve()
    searcher = TrialSearch(table, objective, folder, config.seed, first_parameters(config))
    watcher = TrialWatcher(table, searcher, on_change)
    nested = config.resources.workers > 1 or config.resources.deepspeed is not None
    # Workers of Ray Train take their own place; the trial that waits for them takes none.
    bundle: dict[str, float] = {"CPU": 0} if nested else {"CPU": room.cpus, "GPU": int(config.resources.use_gpu)}
    return (
        tune.Tuner(
            tune.with_resources(run_trial, bundle),
            param_space={"message": as_message(config, job), "folder": str(folder), "cpus": room.cpus},
            tune_config=tune.TuneConfig(
                search_alg=searcher,
                scheduler=_scheduler(config, table),
                num_samples=missing,
                max_concurrent_trials=room.at_once,
                trial_dirname_creator=str,  # else made of all that a trial is told
                reuse_actors=False,  # in a process of its own a trial draws the same numbers whatever ran before
            ),
            run_config=tune.RunConfig(
                # A name of its own for every attempt: what is continued is our table, never Ray's earlier state (E2).
                name=time.strftime("%Y%m%d-%H%M%S"),
                storage_path=str(folder.parent / "ray"),
                callbacks=[watcher],
                verbose=0,
            ),
        ),
        watcher,
    )


def _scheduler(config: RunConfig, table: TrialTable) -> Any:
    """ASHA on the NLL of the data that decides; it stops trials for good and never takes one up again (E24).

    What ended trials of a search that is continued have reported is told to it first, so that it judges as if there had
    been no break.
    """
    from ray.tune.schedulers import ASHAScheduler

    assert config.tune is not None
    asha = config.tune.scheduler
    if asha is None:
        return None
    scheduler: Any = ASHAScheduler(
        time_attr="step",
        metric=NLL,
        mode="min",
        max_t=config.training.steps,
        grace_period=min(asha.grace_steps or config.training.evaluate_every, config.training.steps),
        reduction_factor=asha.reduction_factor,
        stop_last_trials=False,
    )
    for trial in table.closed():
        earlier: Any = SimpleNamespace(trial_id=f"earlier-{trial.number}")
        scheduler.on_trial_add(None, earlier)
        for row in _evaluations(trial):
            scheduler.on_trial_result(None, earlier, judged(row, config.tune))
    return scheduler


def outcome(trial: Trial, tune: TuneConfig) -> dict[str, Any]:
    """What a trial's folder says of its end: attributes of its row.

    A trial that has left `training.json` was finished; one without was stopped at its last evaluation.
    """
    folder = Path(trial.folder)
    rows = _evaluations(trial)
    if not (folder / RESULT).exists():
        last = rows[-1]
        nll = tune.figure(last, "nll")
        reason = f"stopped by asha at step {int(last['step'])}: validation NLL {nll:.3f} is worse than most"
        return {"state": "stopped", "reason": reason, **_evaluation(last)}
    result = read_json(folder / RESULT, remedy="search again")
    kept = next(row for row in reversed(rows) if row["step"] <= result["kept_step"])
    return {"state": "finished", "reason": f"kept step {result['kept_step']}", **_evaluation(kept)}


def failed(trial: Trial) -> dict[str, Any]:
    """Attributes of the row of a trial that failed."""
    return {"state": "failed", "reason": last_words(Path(trial.folder))}


def _evaluations(trial: Trial) -> list[dict[str, float]]:
    """Rows of a trial's trace that hold an evaluation; none where the trial failed before its first step."""
    trace = Path(trial.folder) / TRACE
    return [row for row in read_trace(trace) if "validation/nll" in row] if trace.exists() else []


def _evaluation(row: dict[str, float]) -> dict[str, Any]:
    return {"step": int(row["step"]), "metrics": {name: value for name, value in row.items() if "/" in name}}
