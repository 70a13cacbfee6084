"""What is asked of a training from outside: to stop, or to leave a checkpoint because a node is about to go."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
import torch.distributed as dist

from components.training.job import Process, Request

PREEMPTION_SECONDS = 10.0
"""Between two questions whether a node is to be taken away; each makes all ranks wait for one another in Ray."""

_NOTHING, _ASK_RAY, _STOP = 0, 1, 2


class AgreedRequests:
    """Asked by every rank after every step; every rank gets the same answer.

    Args:
        stop_requested: Whether the driver wants training to stop; only rank 0 looks.
        process: Which rank this is.
    """

    def __init__(self, stop_requested: Callable[[], bool], process: Process) -> None:
        self.stop_requested, self.process = stop_requested, process
        self._asked, self._warned = time.monotonic(), False

    def __call__(self) -> Request | None:
        """See `components.training.loop.Requests`."""
        word = self._agreed(self._word() if self.process.rank == 0 else _NOTHING)
        if word == _STOP:
            return "stop"
        if word == _ASK_RAY and self._preempted() and not self._warned:
            self._warned = True
            return "checkpoint"
        return None

    def _word(self) -> int:
        if self.stop_requested():
            return _STOP
        if time.monotonic() - self._asked >= PREEMPTION_SECONDS:
            self._asked = time.monotonic()
            return _ASK_RAY
        return _NOTHING

    def _agreed(self, word: int) -> int:
        if self.process.world_size == 1:
            return word
        box = torch.tensor([word], device=self.process.device)
        dist.all_reduce(box, op=dist.ReduceOp.MAX)
        return int(box)

    def _preempted(self) -> bool:
        import ray.train

        return ray.train.get_preemption_info() is not None
