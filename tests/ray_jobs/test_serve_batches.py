"""What comes while the model works is one batch; what a batch's model says reaches who asked."""

from __future__ import annotations

import asyncio
import threading

import pytest

from ray_jobs.serve_batches import Batches


def test_what_waits_is_the_next_batch():
    """The first of 21 starts alone; the other 20 come while it works and make batches of 8, 8 and 4."""
    free, started, sizes = threading.Event(), threading.Event(), []

    def answer(asked):
        started.set()
        assert free.wait(10)
        return [value * 2 for value in asked]

    async def ask() -> list[int]:
        batches = Batches(answer, 8, sizes.append)
        first = asyncio.create_task(batches.ask(0))
        while not started.is_set():
            await asyncio.sleep(0.001)
        rest = [asyncio.create_task(batches.ask(value)) for value in range(1, 21)]
        await asyncio.sleep(0.01)
        free.set()
        return await asyncio.gather(first, *rest)

    assert asyncio.run(ask()) == [2 * value for value in range(21)]
    assert sizes == [1, 8, 8, 4]


def test_questions_of_one_request_go_together():
    sizes: list[int] = []

    async def ask() -> list[int]:
        batches = Batches(list, 64, sizes.append)
        return await asyncio.gather(*(batches.ask(value) for value in range(5)))

    assert asyncio.run(ask()) == [0, 1, 2, 3, 4]
    assert sizes == [5]


def test_a_failed_batch_fails_alone_and_who_has_gone_is_not_answered():
    seen: list[list[int]] = []

    def answer(asked):
        seen.append(list(asked))
        if 1 in asked:
            raise FloatingPointError("NaN")
        return asked

    async def ask() -> None:
        batches = Batches(answer, 2, lambda size: None)
        tasks = [asyncio.create_task(batches.ask(value)) for value in range(6)]
        await asyncio.sleep(0)
        tasks[4].cancel()
        found = await asyncio.gather(*tasks, return_exceptions=True)
        assert [type(one) for one in found[:2]] == [FloatingPointError] * 2
        assert found[2:4] + found[5:] == [2, 3, 5]
        assert isinstance(found[4], asyncio.CancelledError)
        assert await batches.ask(7) == 7, "it goes on"

    asyncio.run(ask())
    assert seen == [[0, 1], [2, 3], [5], [7]]
    with pytest.raises(FloatingPointError):
        asyncio.run(Batches(answer, 2, lambda size: None).ask(1))
