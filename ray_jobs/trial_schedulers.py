"""Ray Tune's schedulers, set up for a search."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from ray.tune.schedulers import ASHAScheduler, PopulationBasedTraining, TrialScheduler

from components.config import RunConfig
from components.config_population import PbtConfig
from components.config_tune import AshaConfig
from ray_jobs.trial_outcome import NLL, evaluations, judged
from ray_jobs.trial_table import Trial, TrialTable

Exchange = Callable[[int, int, int, tuple[float, float]], Trial]
"""Lets a trial take over from another: its number, the other's, the step, the NLL of both there; gives its new row."""


def asha(config: RunConfig, asha: AshaConfig, table: TrialTable) -> ASHAScheduler:
    """ASHA on the NLL of the data that decides; it stops trials for good and never takes one up again (E24).

    What ended trials of a search that is continued have reported is told to it first, so that it judges as if there had
    been no break.
    """
    assert config.tune is not None
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
        for row in evaluations(Path(trial.folder)):
            scheduler.on_trial_result(None, earlier, judged(row, config.tune))
    return scheduler


def number_of(trial: Any) -> int:
    """Our number of a trial of Tune's."""
    return int(trial.config["suggestion"]["number"])


class Population(PopulationBasedTraining):
    """Ray's population based training, synchronous: all trials are compared at the same step.

    Ray's own waits for ever when a trial fails while the others wait for it, leaves the searched ranges, draws from the
    process's random numbers, and would take up trials again that have come to their end; all this is put right here.

    Args:
        config: The run.
        pbt: The scheduler's section.
        exchanged: Step of the last exchange before a search was broken off; 0 where there was none.
        exchange: Does a trial's taking over, all but what Ray needs to know.
    """

    def __init__(self, config: RunConfig, pbt: PbtConfig, exchanged: int, exchange: Exchange) -> None:
        super().__init__(
            time_attr="step",
            metric=NLL,
            mode="min",
            perturbation_interval=pbt.interval_steps,
            quantile_fraction=pbt.fraction,
            custom_explore_fn=dict,  # Ray wants one; `_get_new_config` does its work
            log_config=False,
            synch=True,
        )
        self._steps, self._seed, self._exchange = config.training.steps, config.seed, exchange
        self._next_perturbation_sync = exchanged + pbt.interval_steps
        self._gone: set[Any] = set()

    def on_trial_result(self, tune_controller: Any, trial: Any, result: dict[str, Any]) -> str:
        """Has a trial wait at the step of an exchange; the last one to come sets it off."""
        if result["step"] >= self._steps or result["step"] < self._next_perturbation_sync:
            return TrialScheduler.CONTINUE
        for gone in self._gone:
            self._trial_state[gone].last_train_time = int(self._next_perturbation_sync)
        return str(super().on_trial_result(tune_controller, trial, result))

    def on_trial_error(self, tune_controller: Any, trial: Any) -> None:
        """Goes on without a trial that has failed."""
        self._go_on_without(tune_controller, trial)

    def on_trial_complete(self, tune_controller: Any, trial: Any, result: dict[str, Any]) -> None:
        """Goes on without a trial that has come to its end."""
        self._go_on_without(tune_controller, trial)

    def on_trial_remove(self, tune_controller: Any, trial: Any) -> None:
        """Goes on without a trial."""
        self._go_on_without(tune_controller, trial)

    def _go_on_without(self, tune_controller: Any, trial: Any) -> None:
        self._gone.add(trial)
        self._trial_state[trial].last_score = None
        left = [t for t in self._trial_state if t not in self._gone]
        if left and all(self._trial_state[t].last_train_time >= self._next_perturbation_sync for t in left):
            self.on_trial_result(tune_controller, left[0], dict(self._trial_state[left[0]].last_result or {}))

    def _checkpoint_or_exploit(self, trial: Any, tune_controller: Any, upper: list[Any], lower: list[Any]) -> None:
        if trial in lower:
            donors = sorted(upper, key=number_of)
            chance = random.Random(f"{self._seed}/{number_of(trial)}/{self._trial_state[trial].last_train_time}")
            upper = [chance.choice(donors)]
        super()._checkpoint_or_exploit(trial, tune_controller, upper, lower)

    def _get_new_config(self, trial: Any, trial_to_clone: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        own, donor = self._trial_state[trial], self._trial_state[trial_to_clone]
        scores = (-float(own.last_score or 0.0), -float(donor.last_score or 0.0))  # Ray keeps them larger-is-better
        row = self._exchange(number_of(trial), number_of(trial_to_clone), int(donor.last_train_time), scores)
        suggestion = {**trial.config["suggestion"], "parameters": dict(row.parameters)}
        return {**trial.config, "suggestion": suggestion}, {}


def last_exchange(table: TrialTable) -> int:
    """Step of the last exchange of a population whose trials were broken off; 0 where there was none."""
    if not table.interrupted():
        return 0
    return max((int(event["step"]) for trial in table for event in trial.perturbations), default=0)
