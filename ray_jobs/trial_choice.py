"""Which trial of a search is best: the least ECE at sufficient accuracy, or a point of the Pareto front."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from components.config_tune import TuneConfig
from components.errors import CaltuneError
from ray_jobs.trial_table import Trial

WORST = (1.0, 0.0)
"""ECE and accuracy that no trial goes below."""


@dataclass(frozen=True)
class Objective:
    """What the search looks for.

    Attributes:
        tune: The search.
        floor: Least accuracy on validation data, in [0, 1]; None where accuracy is an objective of its own.
    """

    tune: TuneConfig
    floor: float | None

    @property
    def directions(self) -> list[Literal["minimize", "maximize"]]:
        """Optuna's direction of each of `values`."""
        return ["minimize"] if self.floor is not None else ["minimize", "maximize"]

    def figures(self, trial: Trial) -> tuple[float, float]:
        """ECE and accuracy of a trial that has been evaluated; one that is not a number counts as the worst."""
        ece, accuracy = self.tune.figure(trial.metrics, "ece"), self.tune.figure(trial.metrics, "accuracy")
        return (ece, accuracy) if math.isfinite(ece) and math.isfinite(accuracy) else WORST

    def values(self, trial: Trial) -> list[float]:
        """What the sampler is told; it only ranks trials.

        With a floor one number: the ECE where accuracy suffices, else 1 plus what it lacks, so that every trial that
        suffices ranks before every one that does not (Deb's rule, doi:10.1016/S0045-7825(99)00389-8). A stopped trial
        ranks behind both: its ECE is that of weights hardly trained, so it says nothing of the end.
        """
        if trial.state == "stopped":
            return [2.0] if self.floor is not None else [*WORST]
        ece, accuracy = self.figures(trial)
        if self.floor is None:
            return [ece, accuracy]
        return [ece if self.suffices(trial) else 1.0 + self.floor - accuracy]

    def suffices(self, trial: Trial) -> bool:
        """Whether its accuracy is not below the floor."""
        return self.floor is None or self.figures(trial)[1] >= self.floor - 1e-9


def pareto_front(trials: Iterable[Trial], objective: Objective) -> list[Trial]:
    """Finished trials that no other one beats in ECE or accuracy without losing in the other, from least ECE on."""
    finished = [trial for trial in trials if trial.state == "finished"]
    front, best = [], -math.inf
    for trial in sorted(finished, key=lambda t: (objective.figures(t)[0], -objective.figures(t)[1], t.number)):
        accuracy = objective.figures(trial)[1]
        if accuracy > best:
            front.append(trial)
            best = accuracy
    return front


def choose_best(trials: Sequence[Trial], objective: Objective) -> Trial:
    """The result of a search.

    Constrained: the least ECE among trials whose accuracy suffices, at equal ECE the higher accuracy; if none suffices,
    the highest accuracy. Pareto: the point of the front nearest to its best ECE and best accuracy, both scaled to the
    front's range.

    Raises:
        CaltuneError: No trial was finished.
    """
    front = pareto_front(trials, objective)
    if not front:
        reasons = sorted({f"trial {t.number} {t.state}: {t.reason}" for t in trials if t.state == "failed"})
        raise CaltuneError("no trial was finished" + (f"; {reasons[0]}" if reasons else ""))
    if objective.floor is not None:
        return next((trial for trial in front if objective.suffices(trial)), front[-1])
    (low, _), (high, most) = objective.figures(front[0]), objective.figures(front[-1])
    least = objective.figures(front[0])[1]

    def distance(trial: Trial) -> float:
        ece, accuracy = objective.figures(trial)
        return math.hypot((ece - low) / ((high - low) or 1.0), (most - accuracy) / ((most - least) or 1.0))

    return min(front, key=distance)
