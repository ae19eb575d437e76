from __future__ import annotations

import asyncio
import itertools

import pytest
from tandem_operator.objects.manifests import ModelKey
from tandem_operator.runtime.workqueue import WorkQueue

A, B = ModelKey("n", "a"), ModelKey("n", "b")


async def take(queue: WorkQueue) -> ModelKey:
    return await asyncio.wait_for(queue.take(), timeout=30)


async def test_many_events_are_one_look() -> None:
    queue = WorkQueue()
    for key in (A, A, B, A):
        queue.add(key)
    assert [await take(queue), await take(queue)] == [A, B]
    assert len(queue) == 0


async def test_an_event_during_the_work_causes_one_more_look_after_it() -> None:
    queue = WorkQueue()
    queue.add(A)
    await take(queue)
    queue.add(A)
    queue.add(A)
    assert len(queue) == 0
    queue.done(A)
    assert await take(queue) == A
    queue.done(A)
    assert len(queue) == 0


async def test_a_waiting_taker_is_woken() -> None:
    queue = WorkQueue()
    taker = asyncio.create_task(take(queue))
    await asyncio.sleep(0)
    queue.add(A)
    assert await taker == A


async def test_failures_come_back_later_and_later(monkeypatch: pytest.MonkeyPatch) -> None:
    queue, delays = WorkQueue(), list[float]()
    monkeypatch.setattr(queue, "add_later", lambda key, seconds: delays.append(seconds))
    for _ in range(12):
        queue.add(A)
        await take(queue)
        queue.done(A, failed=True)
    assert 0.3 < delays[0] < 0.7
    assert all(later < 2 * 1.25 / 0.75 * earlier for earlier, later in itertools.pairwise(delays))
    assert 90 <= delays[-1] <= 150
    queue.add(A)
    await take(queue)
    queue.done(A)
    queue.add(A)
    await take(queue)
    queue.done(A, failed=True)
    assert delays[-1] < 0.7


async def test_the_earliest_time_wins() -> None:
    queue = WorkQueue()
    queue.add_later(A, 60)
    queue.add_later(A, 0.01)
    queue.add_later(A, 60)
    assert await take(queue) == A


async def test_a_forgotten_key_does_not_come_back() -> None:
    queue = WorkQueue()
    queue.add_later(A, 0.01)
    queue.forget(A)
    await asyncio.sleep(0.05)
    assert len(queue) == 0
