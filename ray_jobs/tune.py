"""A search over the run file's keys through Ray Tune.

Tune runs the trials and the scheduler; Optuna proposes parameters (`trial_search.py`); what became of each trial
stands in our own table (`trial_table.py`), from which a search that was broken off is continued.
"""

from __future__ import annotations

import os
import threading
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from components.config import ResourcesConfig, RunConfig
from components.config_population import PbtConfig
from components.config_tune import AshaConfig, TuneConfig, value_at
from components.errors import UsageError
from components.training.job import TrainingJob
from ray_jobs.cluster import connect
from ray_jobs.trial_choice import Objective
from ray_jobs.trial_lineage import settle
from ray_jobs.trial_table import Trial, TrialTable
from ray_jobs.trial_worker import as_message, run_trial

POLL_SECONDS = 0.2
WAITING_BYTES = 2**20


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


def room_for(tune: TuneConfig, resources: ResourcesConfig, nodes: Sequence[Mapping[str, float]]) -> Room:
    """The arithmetic of a search's resources, done before anything is started (E1, E21).

    Args:
        tune: The search.
        resources: What one trial asks for; each of its workers needs all of its cores on one node.
        nodes: Resources of each node, `CPU` and `GPU`.

    Raises:
        UsageError: Not even one trial fits; it would wait for ever.
    """
    workers = resources.workers
    cores, gpus = (sum(int(node.get(name, 0)) for node in nodes) for name in ("CPU", "GPU"))

    def fitting(cpus: int) -> int:
        """Trials whose workers, of so many cores each, the nodes take."""
        places = [(int(node.get("CPU", 0)) // cpus, int(node.get("GPU", 0))) for node in nodes]
        return sum(min(place) if resources.use_gpu else place[0] for place in places) // workers

    most = max(cores // (workers * tune.concurrency), 1)
    cpus = resources.cpus_per_worker or max(range(1, most + 1), key=lambda n: (min(fitting(n), tune.concurrency), n))
    fit = fitting(cpus)
    needs = f"{workers} x " * (workers > 1) + f"{cpus} CPU core{'s' * (cpus > 1)}"
    needs += f" and {workers} GPU{'s' * (workers > 1)}" * resources.use_gpu
    has = f"{cores} CPU cores" + f" and {gpus} GPUs" * resources.use_gpu + f" on {len(nodes)} nodes" * (len(nodes) > 1)
    if fit < 1:
        raise UsageError(
            f"a trial needs {needs}, Ray has {has}: none fits; lower resources.workers or resources.cpus_per_worker"
        )
    if isinstance(tune.scheduler, PbtConfig):
        return Room(cpus, fit, min(fit, tune.trials), _population_sentence(tune, tune.scheduler, needs, has, fit))
    at_once = min(fit, tune.concurrency)
    sentence = f"each trial takes {needs}; Ray has {has}, which fits {fit} at once"
    if at_once < tune.concurrency:
        sentence += f": {at_once} at a time will run, not the {tune.concurrency} of tune.concurrency"
    else:
        sentence += f"; {at_once} at a time will run"
    return Room(cpus, fit, at_once, sentence)


def _population_sentence(tune: TuneConfig, pbt: PbtConfig, needs: str, has: str, fit: int) -> str:
    sentence = f"each trial takes {needs}; Ray has {has}, which fits {fit} at once"
    every = f"are paused every {pbt.interval_steps} steps, compared, and started anew from their checkpoints"
    if fit >= tune.trials:
        return f"{sentence}: all {tune.trials} train side by side and {every}"
    return f"{sentence}: the {tune.trials} trials train {fit} at a time, each to the next exchange, and {every}"


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
    connect(dashboard=is_nested(config.resources))
    for trial in table.interrupted():
        settle(trial)
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


def is_nested(resources: ResourcesConfig) -> bool:
    """Whether each trial starts workers of Ray Train instead of training in its own process."""
    return resources.workers > 1 or resources.deepspeed is not None


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
    watcher = TrialWatcher(table, searcher, on_change, config.seed)
    nested = is_nested(config.resources)
    schedule = _schedule(config, table, searcher, watcher, missing, room)  # before trials are taken up again
    # Workers of Ray Train take their own place; the trial that waits for them takes next to none, but Tune wants some.
    own: dict[str, float] = {"CPU": room.cpus, "GPU": int(config.resources.use_gpu)}
    bundle: dict[str, float] = {"memory": WAITING_BYTES} if nested else own
    return (
        tune.Tuner(
            tune.with_resources(run_trial, bundle),
            param_space={
                "message": as_message(config, job),
                "folder": str(folder),
                "cpus": room.cpus,
                **_population(config, searcher, missing),
            },
            tune_config=tune.TuneConfig(
                **schedule,
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


def _population(config: RunConfig, searcher: Any, missing: int) -> dict[str, Any]:
    """For population based training, whose trials must all be there from the start, what each of them tries."""
    from ray import tune

    if config.tune is None or not isinstance(config.tune.scheduler, PbtConfig):
        return {}
    return {"suggestion": tune.grid_search([searcher.suggest(str(i))["suggestion"] for i in range(missing)])}


def _schedule(
    config: RunConfig, table: TrialTable, searcher: Any, watcher: Any, missing: int, room: Room
) -> dict[str, Any]:
    """Who proposes trials, how many of them there are, and what becomes of them on the way."""
    from ray_jobs.trial_schedulers import Population, asha, last_exchange

    assert config.tune is not None
    scheduler = config.tune.scheduler
    if isinstance(scheduler, PbtConfig):
        # Processes kept for other trials would draw other random numbers than fresh ones.
        warnings.filterwarnings("ignore", message="Consider boosting PBT performance by enabling `reuse_actors`")
        return {"scheduler": Population(config, scheduler, last_exchange(table), watcher.take_over), "num_samples": 1}
    by_nll = asha(config, scheduler, table) if isinstance(scheduler, AshaConfig) else None
    return {
        "scheduler": by_nll,
        "search_alg": searcher,
        "num_samples": missing,
        "max_concurrent_trials": room.at_once,
    }
