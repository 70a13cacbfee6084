"""Follows Ray Tune's trials and keeps our table of them up to date."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from typing import Any

from ray.tune import Callback

from components.config_population import PbtConfig
from components.errors import CaltuneError
from ray_jobs.trial_lineage import take_over, varied
from ray_jobs.trial_outcome import failed, outcome
from ray_jobs.trial_schedulers import number_of
from ray_jobs.trial_search import TrialSearch
from ray_jobs.trial_table import Trial, TrialTable


class TrialWatcher(Callback):
    """Ray Tune's callback.

    Args:
        table: Where every change goes first.
        search: Told how each trial ended.
        on_change: Told of each trial that starts, is evaluated or ends.
        seed: Of the values that a trial goes on with when it takes over from another.
    """

    def __init__(self, table: TrialTable, search: TrialSearch, on_change: Callable[[Trial], None], seed: int) -> None:
        self.table, self.search, self.on_change, self.seed = table, search, on_change, seed
        self._begun: dict[int, float] = {}
        self._lock, self._closed = threading.Lock(), False

    def __getstate__(self) -> dict[str, Any]:
        return {}  # Tune pickles its callbacks for a restore that we never ask it for

    def close(self) -> None:
        """Ends the watch: what is running now counts as interrupted, and nothing later is taken down."""
        self.search.close()  # first, so that no trial begins behind the search's back
        with self._lock:
            self._closed = True
            self.table.interrupt()

    def take_over(self, number: int, donor: int, step: int, scores: tuple[float, float]) -> Trial:
        """Lets a trial go on from another one's checkpoint with values near that one's, drawn anew for each step.

        Args:
            number: The trial; paused, as the other is.
            donor: The other.
            step: Where both stand.
            scores: NLL of both there.

        Raises:
            CaltuneError: The search has ended meanwhile, or the other has no checkpoint of this step.
        """
        section = self.search.objective.tune
        assert isinstance(section.scheduler, PbtConfig)
        values = {key: self.table[donor].parameters[key] for key in section.scheduler.keys}
        changed = varied(values, section.space, random.Random(f"{self.seed}/{number}/{step}/values"))
        with self._lock:
            if self._closed:
                raise CaltuneError("the search has ended")
            trial = take_over(self.table, number, donor, step, changed, scores)
            self.on_change(trial)
        return trial

    def on_trial_start(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        """Notes the time."""
        number = number_of(trial)
        self._begun.setdefault(number, time.monotonic())  # one that was paused starts again
        self._change(number)

    def on_trial_result(
        self, iteration: int, trials: list[Any], trial: Any, result: dict[str, Any], **info: Any
    ) -> None:
        """Notes an evaluation."""
        metrics = {name: float(value) for name, value in result.items() if name.startswith("validation")}
        self._change(number_of(trial), step=int(result["step"]), metrics=metrics)

    def on_trial_complete(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        """Notes the end of a trial that finished or was stopped."""
        number = number_of(trial)
        self._end(number, outcome(self.table[number], self.search.objective.tune))

    def on_trial_error(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        """Notes a failure."""
        number = number_of(trial)
        self._end(number, failed(self.table[number]))

    def _end(self, number: int, changes: dict[str, Any]) -> None:
        seconds = round(time.monotonic() - self._begun.get(number, time.monotonic()), 1)
        with self._lock:
            if not self._closed:
                trial = self.table.change(number, seconds=seconds, **changes)
                self.search.tell(trial)
                self.on_change(trial)

    def _change(self, number: int, **changes: Any) -> None:
        with self._lock:
            if not self._closed:
                self.on_change(self.table.change(number, **changes) if changes else self.table[number])
