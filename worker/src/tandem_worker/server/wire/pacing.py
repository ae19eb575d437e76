"""Long work on the event loop, in slices.

A function that may have much to do is a generator that yields wherever others may have their turn. `pace` runs it on
the event loop; `complete` runs what is known to be short.
"""

from __future__ import annotations

import asyncio
from collections.abc import Generator
from typing import TypeVar

T = TypeVar("T")
Steps = Generator[None, None, T]

PAUSE_SECONDS = 0.001
"""A pause and not just a turn: the engine's thread needs the interpreter's lock as often as the event loop does."""


async def pace(steps: Steps[T]) -> T:
    """Run `steps` to their end on the event loop, with a pause after each."""
    while True:
        try:
            next(steps)
        except StopIteration as end:
            return end.value
        await asyncio.sleep(PAUSE_SECONDS)


def complete(steps: Steps[T]) -> T:
    """Run `steps` to their end at once, where nobody else waits."""
    while True:
        try:
            next(steps)
        except StopIteration as end:
            return end.value
