"""Questions of many requests as batches for one model: whatever has come while it worked is the next batch.

Ray Serve's own `@serve.batch` closes a batch by the clock, before the model is free for it: under load a few rows each
(2.7 of 90 waiting were seen), which then queue. Here the first question starts at once, and none waits for a clock.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Generic, TypeVar

Asked = TypeVar("Asked")
Answer = TypeVar("Answer")


class Batches(Generic[Asked, Answer]):
    """Belongs to the event loop that asks.

    Args:
        answer: Answers a batch in its order; runs in a thread of its own, one batch at a time.
        rows: Most questions of a batch.
        on_batch: Told of the size of each.
    """

    def __init__(
        self, answer: Callable[[Sequence[Asked]], Sequence[Answer]], rows: int, on_batch: Callable[[int], object]
    ) -> None:
        self._answer, self._rows, self._on_batch = answer, rows, on_batch
        self._waiting: deque[tuple[Asked, asyncio.Future[Answer]]] = deque()
        self._thread = ThreadPoolExecutor(1)
        self._worker: asyncio.Task[None] | None = None

    async def ask(self, asked: Asked) -> Answer:
        """Answers one question, in the batch that comes.

        Raises:
            Exception: Whatever `answer` raised for its batch.
        """
        future: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self._waiting.append((asked, future))
        if self._worker is None or self._worker.done():
            self._worker = asyncio.create_task(self._work())
        return await future

    async def _work(self) -> None:
        loop = asyncio.get_running_loop()
        while self._waiting:
            await asyncio.sleep(0)  # the other questions of the same request come in
            batch = [self._waiting.popleft() for _ in range(min(self._rows, len(self._waiting)))]
            wanted = [(asked, future) for asked, future in batch if not future.done()]  # a client may have gone
            if not wanted:
                continue
            self._on_batch(len(wanted))
            try:
                found = await loop.run_in_executor(self._thread, self._answer, [asked for asked, _ in wanted])
            except Exception as problem:
                for _, future in wanted:
                    if not future.done():
                        future.set_exception(problem)
                continue
            for (_, future), answer in zip(wanted, found, strict=True):
                if not future.done():
                    future.set_result(answer)
