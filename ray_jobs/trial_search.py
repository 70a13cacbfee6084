"""Optuna's sampler behind Ray Tune's searcher interface, with our table of trials as its memory.

Ray's own wrapper can neither be fed evaluated trials of several objectives nor tell a stopped trial from a finished
one, and a search that is continued needs both.
"""

from __future__ import annotations

import logging
import threading
import warnings
from pathlib import Path
from typing import Any

import optuna
from optuna.distributions import (
    BaseDistribution,
    CategoricalDistribution,
    FloatDistribution,
    IntDistribution,
)
from optuna.trial import TrialState, create_trial
from ray.tune.search import Searcher

from components.config_tune import Dimension, Value
from ray_jobs.trial_choice import Objective
from ray_jobs.trial_table import Trial, TrialTable

RANDOM_TRIALS = 8
"""Trials drawn at random before the sampler models them."""


class TrialSearch(Searcher):
    """Suggests parameters: those of interrupted trials, then `first`, then what the TPE sampler proposes.

    A suggestion is `{"suggestion": {"number": <trial>, "parameters": {...}, "resume": <was interrupted>}}`; the trial
    is in the table from then on.

    Args:
        table: Trials so far; how a trial ended is read from it, so it must be up to date before Tune completes a trial.
        objective: What is looked for.
        trials_folder: Each trial gets a folder in it, by its number.
        seed: Seeds the sampler.
        first: Parameters to try first, where the search has not begun yet.
    """

    def __init__(
        self, table: TrialTable, objective: Objective, trials_folder: Path, seed: int, first: dict[str, Value] | None
    ) -> None:
        super().__init__()
        self.table, self.objective, self.folder = table, objective, trials_folder
        self.space = {key: distribution(dimension) for key, dimension in objective.tune.space.items()}
        closed = table.closed()
        self._study = _study(objective, seed + len(closed))  # a continued search must not draw the same again
        for trial in closed:
            self._study.add_trial(as_evaluated(trial, objective, self.space))
        self._waiting = table.interrupted()
        for trial in self._waiting:
            self._study.enqueue_trial(trial.parameters)
        if first is not None and not closed and not self._waiting:
            self._study.enqueue_trial(first)
        self._asked: dict[int, optuna.Trial] = {}
        self._lock, self._closed = threading.Lock(), False

    def __getstate__(self) -> dict[str, Any]:
        return {}  # Tune pickles its searcher for a restore that we never ask it for

    def close(self) -> None:
        """Ends the search: from now on nothing is suggested, and no trial put into the table."""
        with self._lock:
            self._closed = True

    def suggest(self, trial_id: str) -> dict[str, Any] | None:
        """Parameters for a new trial of Tune's; none once the search is closed."""
        with self._lock:
            return None if self._closed else self._suggest()

    def _suggest(self) -> dict[str, Any]:
        asked = self._study.ask(self.space)
        if self._waiting:
            number, resume = self._waiting.pop(0).number, True
            self.table.change(number, state="running", reason="")
        else:
            number, resume = self.table.next_number, False
            folder = str(self.folder / f"{number:03d}")
            self.table.put(Trial(number, self.objective.tune.method, dict(asked.params), folder=folder))
        self._asked[number] = asked
        return {"suggestion": {"number": number, "parameters": dict(asked.params), "resume": resume}}

    def on_trial_result(self, trial_id: str, result: dict[str, Any]) -> None:
        """Does nothing: only how a trial ends tells the sampler anything."""

    def on_trial_complete(self, trial_id: str, result: dict[str, Any] | None = None, error: bool = False) -> None:
        """Does nothing: Tune calls this before the table can know; see `tell`."""

    def tell(self, trial: Trial) -> None:
        """Tells the sampler how a trial ended."""
        asked = self._asked[trial.number]
        if trial.state == "failed":
            self._study.tell(asked, state=TrialState.FAIL)
        else:
            self._study.tell(asked, self.objective.values(trial))

    def save(self, checkpoint_path: str) -> None:
        """Does nothing: the table is what a search is continued from."""

    def restore(self, checkpoint_path: str) -> None:
        """Does nothing: the table is what a search is continued from."""


def distribution(dimension: Dimension) -> BaseDistribution:
    """A dimension of the search space in Optuna's terms."""
    if dimension.choice is not None:
        return CategoricalDistribution(dimension.choice)
    if dimension.integer is not None:
        return IntDistribution(*dimension.integer)
    if dimension.log_uniform is not None:
        return FloatDistribution(*dimension.log_uniform, log=True)
    low, high = dimension.uniform or (0.0, 1.0)
    return FloatDistribution(low, high)


def as_evaluated(trial: Trial, objective: Objective, space: dict[str, BaseDistribution]) -> optuna.trial.FrozenTrial:
    """A trial of the table as one that Optuna has seen end."""
    values = None if trial.state == "failed" else objective.values(trial)
    state = TrialState.FAIL if values is None else TrialState.COMPLETE
    return create_trial(state=state, params=dict(trial.parameters), distributions=space, values=values)


def importances(trials: list[Trial], objective: Objective) -> dict[str, float]:
    """Share of each searched key in how ECE varies over the finished trials, largest first (fANOVA; they sum to 1).

    Empty where fewer than four were finished, or all gave the same.
    """
    finished = [trial for trial in trials if trial.state == "finished"]
    eces = [objective.figures(trial)[0] for trial in finished]
    if len(finished) < 4 or len(set(eces)) < 2:
        return {}
    space = {key: distribution(dimension) for key, dimension in objective.tune.space.items()}
    study = _study(objective, 0)
    for trial in finished:
        study.add_trial(as_evaluated(trial, objective, space))
    by_ece = {number: ece for number, ece in enumerate(eces)}
    evaluator = optuna.importance.FanovaImportanceEvaluator(seed=0)
    return dict(optuna.importance.get_param_importances(study, evaluator=evaluator, target=lambda t: by_ece[t.number]))


def _study(objective: Objective, seed: int) -> optuna.Study:
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    logging.getLogger("optuna").setLevel(logging.WARNING)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)  # constant_liar
        sampler = optuna.samplers.TPESampler(
            seed=seed, n_startup_trials=RANDOM_TRIALS, constant_liar=objective.tune.concurrency > 1
        )
    return optuna.create_study(directions=objective.directions, sampler=sampler)
