from __future__ import annotations

import asyncio
import contextlib

from tandem_operator.runtime.turns import LoopTurns


async def test_of_many_who_are_ready_one_goes_on_in_each_turn_of_the_loop() -> None:
    loop_turns, order, at_once = LoopTurns(), list[int](), list[int]()

    async def work(number: int) -> None:
        for _ in range(3):
            await loop_turns.next()
            order.append(number)

    async def count() -> None:
        while True:
            before = len(order)
            await asyncio.sleep(0)
            at_once.append(len(order) - before)

    counting = asyncio.create_task(count())
    await asyncio.gather(*(work(number) for number in range(8)))
    counting.cancel()
    assert order == [*range(8)] * 3, "in order of arrival"
    assert max(at_once) == 1


async def test_one_who_goes_away_holds_up_nobody() -> None:
    loop_turns = LoopTurns()
    tasks = [asyncio.create_task(loop_turns.next()) for _ in range(3)]
    await asyncio.sleep(0)
    tasks[0].cancel()
    async with asyncio.timeout(30):
        with contextlib.suppress(asyncio.CancelledError):
            await tasks[0]
        await asyncio.gather(*tasks[1:])
        await loop_turns.next()
