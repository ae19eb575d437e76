"""How far a start has come."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

logger = logging.getLogger(__name__)


class StartProgress:
    """Which phase the start is in, and how long each one took. Written by the building thread, read by probes."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self.phase = "starting"
        self.seconds: dict[str, float] = {}
        self._since = clock()

    def enter(self, phase: str) -> None:
        """End the present phase, note how many seconds it took, and begin this one."""
        now = self._clock()
        self.seconds[self.phase] = round(now - self._since, 3)
        self.phase, self._since = phase, now
        logger.info("%s", phase)


@dataclass(slots=True, kw_only=True)
class Switches:
    """What the process is up to; the HTTP application looks at it."""

    ready: bool = False
    draining: bool = False
