"""Names of the prompts that this worker has begun, as gateways gave them, for gateways that ask later."""

from __future__ import annotations

import re
import time
from collections import deque
from collections.abc import Callable

from tandem_api.telemetry import MAX_PROMPT_NAME, MAX_PROMPTS

KEPT_SECONDS = 11.0
"""Gateways ask every second, and each of a thousand workers every ten."""
MAX_BYTES = 4 * 1024
"""Most bytes of all names together; the newest are told. The other figures of a sample, those of many ranks among them,
have the rest of what a gateway reads."""
_NAME = re.compile(rf"[0-9A-Za-z._/:\[\]-]{{1,{MAX_PROMPT_NAME}}}")


class PromptNames:
    """Owned by one event loop, read by any thread."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._kept: deque[tuple[float, str]] = deque(maxlen=MAX_PROMPTS)

    def add(self, name: str) -> None:
        """A request with this prompt was taken. What cannot be a name is left out: it says nothing to anybody."""
        if _NAME.fullmatch(name):
            self._kept.append((self._clock(), name))

    def recent(self) -> list[str]:
        """Oldest first."""
        oldest = self._clock() - KEPT_SECONDS
        room, found = MAX_BYTES, list[str]()
        for at, name in reversed(tuple(self._kept)):
            room -= len(name) + 3
            if at < oldest or room < 0:
                break
            found.append(name)
        return found[::-1]
