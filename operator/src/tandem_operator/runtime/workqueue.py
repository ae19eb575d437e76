"""A queue of model keys: each key once, never worked on twice at a time, later when it failed.

An event only says that something about a model changed. However many there are, one look at the present state answers
all of them; events that arrive during that look cause one more.
"""

from __future__ import annotations

import asyncio
import random
from collections import OrderedDict

from tandem_operator.objects.manifests import ModelKey

_FIRST_RETRY_SECONDS = 0.5
_LAST_RETRY_SECONDS = 120.0


class WorkQueue:
    """Keys that are due, in order of arrival, and keys that become due later."""

    def __init__(self) -> None:
        self._due: OrderedDict[ModelKey, None] = OrderedDict()
        self._working: set[ModelKey] = set()
        self._again: set[ModelKey] = set()
        self._timers: dict[ModelKey, asyncio.TimerHandle] = {}
        self._failures: dict[ModelKey, int] = {}
        self._arrived = asyncio.Event()

    def __len__(self) -> int:
        return len(self._due)

    def add(self, key: ModelKey) -> None:
        """Make a key due now."""
        if (timer := self._timers.pop(key, None)) is not None:
            timer.cancel()
        if key in self._working:
            self._again.add(key)
            return
        self._due.setdefault(key)
        self._arrived.set()

    def add_later(self, key: ModelKey, seconds: float) -> None:
        """Make a key due in `seconds`, unless it is due earlier anyway."""
        loop = asyncio.get_running_loop()
        timer = self._timers.get(key)
        if key in self._due or key in self._again or (timer is not None and timer.when() <= loop.time() + seconds):
            return
        if timer is not None:
            timer.cancel()
        self._timers[key] = loop.call_later(seconds, self.add, key)

    async def take(self) -> ModelKey:
        """Wait for a key. It must be handed back with `done`."""
        while not self._due:
            self._arrived.clear()
            await self._arrived.wait()
        key, _ = self._due.popitem(last=False)
        self._working.add(key)
        return key

    def is_due(self, key: ModelKey) -> bool:
        """Whether a key is due, or will be once it is handed back."""
        return key in self._due or key in self._again

    def done(self, key: ModelKey, *, failed: bool = False) -> None:
        """Hand a key back. A failed one is due again after an exponentially growing, jittered delay."""
        self._working.discard(key)
        if not failed:
            self._failures.pop(key, None)
        if key in self._again:
            self._again.discard(key)
            self.add(key)
        elif failed:
            self.add_later(key, self._next_delay(key))

    def failures(self, key: ModelKey) -> int:
        """How often in a row this key has failed."""
        return self._failures.get(key, 0)

    def forget(self, key: ModelKey) -> None:
        """Drop what is remembered of a key whose object is gone."""
        self._failures.pop(key, None)
        if (timer := self._timers.pop(key, None)) is not None:
            timer.cancel()

    def _next_delay(self, key: ModelKey) -> float:
        failures = self.failures(key)
        self._failures[key] = failures + 1
        delay = min(_FIRST_RETRY_SECONDS * 2 ** min(failures, 16), _LAST_RETRY_SECONDS)
        return delay * random.uniform(0.75, 1.25)
