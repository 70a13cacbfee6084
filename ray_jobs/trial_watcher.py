"""Follows Ray Tune's trials and keeps our table of them up to date."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

from ray.tune import Callback

from ray_jobs.trial_search import TrialSearch
from ray_jobs.trial_table import Trial, TrialTable
from ray_jobs.tune import failed, outcome


class TrialWatcher(Callback):
    """Ray Tune's callback.

    Args:
        table: Where every change goes first.
        search: Told how each trial ended.
        on_change: Told of each trial that starts, is evaluated or ends.
    """

    def __init__(self, table: TrialTable, search: TrialSearch, on_change: Callable[[Trial], None]) -> None:
        self.table, self.search, self.on_change = table, search, on_change
        self._begun: dict[int, float] = {}
        self._lock, self._closed = threading.Lock(), False

    def __getstate__(self) -> dict[str, Any]:
        return {}  # Tune pickles its callbacks for a restore that we never ask it for

    def close(self) -> None:
        """Ends the watch: what is running now counts as interrupted, and nothing later is taken down."""
        with self._lock:
            self._closed = True
            self.table.interrupt()

    def on_trial_start(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        """Notes the time."""
        number = self.search.number_of(trial.trial_id)
        self._begun[number] = time.monotonic()
        self._change(number)

    def on_trial_result(
        self, iteration: int, trials: list[Any], trial: Any, result: dict[str, Any], **info: Any
    ) -> None:
        """Notes an evaluation."""
        metrics = {name: float(value) for name, value in result.items() if name.startswith("validation")}
        self._change(self.search.number_of(trial.trial_id), step=int(result["step"]), metrics=metrics)

    def on_trial_complete(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        """Notes the end of a trial that finished or was stopped."""
        number = self.search.number_of(trial.trial_id)
        self._end(number, outcome(self.table[number], self.search.objective.tune))

    def on_trial_error(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        """Notes a failure."""
        number = self.search.number_of(trial.trial_id)
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
