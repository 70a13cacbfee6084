"""The loop that every trained method shares: step, evaluate, keep, checkpoint, resume.

What a step does is the step's business (`steps.py`), how validation data is judged the evaluator's, which both are
handed in; the loop knows neither models nor metrics.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch.distributed as dist
from torch import Tensor

from components.config import TrainingConfig
from components.training.checkpoints import Checkpoints
from components.training.job import Requests, StopRequested, nothing_asked
from components.training.parameter_space import ParameterSpace, Rate
from components.training.resumption import Resumption
from components.training.steps import TrainingStep
from components.training.stopping import SplitMetrics, StopRule, StopState

Evaluate = Callable[[], Mapping[str, SplitMetrics]]
"""Judges the present weights on the labelled validation splits; called by every rank at the same time."""

OnStep = Callable[[int, Mapping[str, float]], None]
"""Told of every step: steps taken so far (0 before the first) and the trace values; called by every rank equally often
(E3)."""


OnMilestone = Callable[[int, Mapping[str, float], Path | None], None]
"""Told of every step with an evaluation or a checkpoint: steps taken, the trace values (empty without an evaluation),
and the checkpoint's folder on the rank that wrote it; called by every rank equally often (E3)."""


def nothing_told(step: int, values: Mapping[str, float], checkpoint: Path | None) -> None:
    """For a run whose milestones nobody follows."""


RatesAt = Callable[[int], Mapping[Rate, float]]
"""Learning rates of a step, counted from 0."""


@dataclass(frozen=True)
class LoopResult:
    """How a run ended.

    Attributes:
        kept_step: Optimiser steps at the state that is kept.
        last_step: Optimiser steps taken.
        state: The kept state; whole tensors.
    """

    kept_step: int
    last_step: int
    state: Mapping[str, Tensor]


class TrainingLoop:
    """Runs a method's steps.

    Args:
        space: What the steps move.
        step: One training step.
        config: Steps and intervals.
        rates_at: Learning rates.
        stop: The stop rule.
        checkpoints: Where to keep states.
        evaluate: Judges validation data.
        on_step: Reporter.
        resumption: Describes where the run stands and checks that it goes on from there; None checks nothing.
        on_milestone: Told of evaluations and checkpoints.
        requests: Asked after every step.
    """

    def __init__(
        self,
        space: ParameterSpace,
        step: TrainingStep,
        config: TrainingConfig,
        *,
        rates_at: RatesAt,
        stop: StopRule,
        checkpoints: Checkpoints,
        evaluate: Evaluate,
        on_step: OnStep,
        resumption: Resumption | None = None,
        on_milestone: OnMilestone = nothing_told,
        requests: Requests = nothing_asked,
    ) -> None:
        self.space, self.step, self.config, self.rates_at = space, step, config, rates_at
        self.stop, self.checkpoints, self.evaluate, self.on_step = stop, checkpoints, evaluate, on_step
        self.resumption, self.on_milestone, self.requests = resumption, on_milestone, requests
        self.taken = 0

    def resume(self) -> int:
        """Takes the newest checkpoint over, if there is one.

        Returns:
            Steps already taken.

        Raises:
            CheckpointError: The checkpoint is of another run, cannot be continued exactly, does not give the loss that
                it was saved with, or none can be read.
        """
        newest = self.checkpoints.newest()
        if newest is None:
            return 0
        if self.resumption is not None:
            self.resumption.check_before_loading(newest.step, newest.written)
        self.space.load_state_dict(newest.state)
        if self.resumption is not None:
            self.resumption.check_loaded(newest.step, newest.written)
        self.stop.state = StopState(**newest.stop)  # type: ignore[arg-type]
        self.taken = newest.step
        return self.taken

    def run(self) -> LoopResult:
        """Runs to the end of the budget or of the stop rule.

        Raises:
            CheckpointError: The state to keep cannot be read back.
            FloatingPointError: Training diverged.
            StopRequested: It was asked to stop.
        """
        if self.taken == 0:
            self.on_milestone(0, self._evaluate_and_judge({}), None)
        while self.taken < self.config.steps and not self.stop.state.ended:
            self._one_step()
        return self._result()

    def _one_step(self) -> None:
        self.space.set_learning_rates(self.rates_at(self.taken))
        values = dict(self.step(self.taken))
        self.taken += 1
        last = self.taken == self.config.steps
        evaluated = last or self.taken % self.config.evaluate_every == 0
        if evaluated:
            values = self._evaluate_and_judge(values)
        else:
            self.on_step(self.taken, values)
        ended = last or self.stop.state.ended
        request = self.requests()
        due = ended or request is not None or self.taken % self.config.checkpoint_every == 0
        written = self._checkpoint() if due else None
        if evaluated or due:
            self.on_milestone(self.taken, values if evaluated else {}, written)
        if request == "stop" and not ended:
            raise StopRequested(self.taken)

    def _evaluate_and_judge(self, values: dict[str, float]) -> dict[str, float]:
        metrics = self.evaluate()
        keep = self.stop.judge(self.taken, metrics)
        if keep:
            state = self.space.state_dict()
            if _publishes():
                self.checkpoints.save_kept(self.taken, state)
            _barrier()
        values |= {f"{split}/{name}": value for split, of in metrics.items() for name, value in of.items()}
        self.on_step(self.taken, values)
        return values

    def _checkpoint(self) -> Path | None:
        state = self.space.state_dict()
        written = self.resumption.describe(self.taken) if self.resumption is not None else {}
        path = self.checkpoints.save(self.taken, state, self.stop.as_dict(), written) if _publishes() else None
        _barrier()
        return path

    def _result(self) -> LoopResult:
        kept = self.stop.state.kept_step
        if kept is None or kept == self.taken:
            return LoopResult(self.taken, self.taken, self.space.state_dict())
        return LoopResult(kept, self.taken, self.checkpoints.kept(kept).state)


def _publishes() -> bool:
    return not dist.is_initialized() or dist.get_rank() == 0


def _barrier() -> None:
    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.barrier()
