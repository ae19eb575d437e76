"""One long computation per turn of the event loop.

A turn runs everything that is ready, however much that is. Looks at several models are often ready together, and would
hold up timers, probes and the lease for as long as all of them take.
"""

from __future__ import annotations

import asyncio
from collections import deque


class LoopTurns:
    """A queue for turns of one event loop: those who wait go on in order of arrival, each in a turn of its own."""

    def __init__(self) -> None:
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._running = False

    async def next(self) -> None:
        """Wait for a turn. What is computed then should take a few milliseconds, until the next wait for anything."""
        loop = asyncio.get_running_loop()
        waiter = loop.create_future()
        self._waiting.append(waiter)
        if not self._running:
            self._running = True
            loop.call_soon(self._next)
        await waiter

    def _next(self) -> None:
        while self._waiting:
            waiter = self._waiting.popleft()
            if not waiter.done():
                waiter.set_result(None)
                asyncio.get_running_loop().call_soon(self._next)
                return
        self._running = False
