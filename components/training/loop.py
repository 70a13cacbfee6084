"""The loop that every trained method shares: step, evaluate, keep, checkpoint, resume.

What a step does is the step's business (`steps.py`), how validation data is judged the evaluator's, which both are
handed in; the loop knows neither models nor metrics.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch.distributed as dist
from torch import Tensor

from components.config import TrainingConfig
from components.training.checkpoints import Checkpoints
from components.training.parameter_space import ParameterSpace, Rate
from components.training.steps import TrainingStep
from components.training.stopping import SplitMetrics, StopRule, StopState

Evaluate = Callable[[], Mapping[str, SplitMetrics]]
"""Judges the present weights on the labelled validation splits; called by every rank at the same time."""

OnStep = Callable[[int, Mapping[str, float]], None]
"""Told of every step: steps taken so far (0 before the first) and the trace values; called by every rank equally often
(E3)."""


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
    ) -> None:
        self.space, self.step, self.config, self.rates_at = space, step, config, rates_at
        self.stop, self.checkpoints, self.evaluate, self.on_step = stop, checkpoints, evaluate, on_step
        self.taken = 0

    def resume(self) -> int:
        """Takes the newest checkpoint over, if there is one.

        Returns:
            Steps already taken.

        Raises:
            CheckpointError: The checkpoint is of another run or none can be read.
        """
        newest = self.checkpoints.newest()
        if newest is not None:
            self.space.load_state_dict(newest.state)
            self.stop.state = StopState(**newest.stop)  # type: ignore[arg-type]
            self.taken = newest.step
        return self.taken

    def run(self) -> LoopResult:
        """Runs to the end of the budget or of the stop rule.

        Raises:
            CheckpointError: The state to keep cannot be read back.
            FloatingPointError: Training diverged.
        """
        if self.taken == 0:
            self._evaluate_and_judge({})
        while self.taken < self.config.steps and not self.stop.state.ended:
            self._one_step()
        return self._result()

    def _one_step(self) -> None:
        self.space.set_learning_rates(self.rates_at(self.taken))
        values = dict(self.step(self.taken))
        self.taken += 1
        last = self.taken == self.config.steps
        if last or self.taken % self.config.evaluate_every == 0:
            self._evaluate_and_judge(values)
        else:
            self.on_step(self.taken, values)
        if last or self.stop.state.ended or self.taken % self.config.checkpoint_every == 0:
            self._checkpoint()

    def _evaluate_and_judge(self, values: dict[str, float]) -> None:
        metrics = self.evaluate()
        keep = self.stop.judge(self.taken, metrics)
        if keep:
            state = self.space.state_dict()
            if _publishes():
                self.checkpoints.save_kept(self.taken, state)
            _barrier()
        values |= {f"{split}/{name}": value for split, of in metrics.items() for name, value in of.items()}
        self.on_step(self.taken, values)

    def _checkpoint(self) -> None:
        state = self.space.state_dict()
        if _publishes():
            self.checkpoints.save(self.taken, state, self.stop.as_dict())
        _barrier()

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
