"""Whether a tier is in use, and what is told of it. Any thread.

A tier that was switched off is tried again while it is still told as failing: only what has failed before, and goes
through now, ends that. So what is told does not change with every try for as long as a failure lasts.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum, auto

from tandem_worker.tiers.errors import TierError

logger = logging.getLogger(__name__)

STARTING = "Starting"


class Work(Enum):
    """What a tier does."""

    LOOK = auto()
    """It is looked at: a probe is written and read, among others."""
    READ = auto()
    """Blocks are read."""
    WRITE = auto()
    """Blocks are written."""
    SPEED = auto()
    """Blocks are read fast enough."""


@dataclass(frozen=True, slots=True)
class Cause:
    reason: str
    """CamelCase."""
    message: str
    since: float = field(default=0.0, compare=False)
    """When it failed first since it was well, in unix seconds."""

    def describe(self) -> str:
        """For people."""
        if self.reason == STARTING:
            return self.message
        return f"{self.message} (since {time.strftime('%Y-%m-%dT%H:%M:%SZ', time.gmtime(self.since))})"


class TierHealth:
    """Off until it is first switched on. A tier that is off is no source and no sink."""

    def __init__(
        self, tier: str = "disk", on_off: Callable[[], None] = lambda: None, wall: Callable[[], float] = time.time
    ) -> None:
        """`on_off`: called when it goes off, on the thread that found out why."""
        self._lock, self._tier, self._wall = threading.Lock(), tier, wall
        self._on = False
        self._cause: Cause | None = Cause(STARTING, f"the {tier} is being looked at")
        self._owed: set[Work] = set()
        """What has failed since it was well last, and has not gone through again."""
        self.on_off = on_off

    @property
    def cause(self) -> Cause | None:
        """What is told: why it is off, or was off and has not shown yet that it does what had failed; None while it is
        well."""
        return self._cause

    @property
    def on(self) -> bool:
        """Whether it is in use."""
        return self._on

    def owes(self, work: Work) -> bool:
        """Whether this has failed, and not gone through since."""
        return work in self._owed

    def fail(self, error: TierError, work: Work = Work.LOOK) -> None:
        """Switch it off, or note another cause. `work`: what has failed."""
        with self._lock:
            was_on, known = self._on, self._cause
            self._on = False
            self._owed.add(work)
            is_new = known is None or known.reason != error.reason  # words that alternate would be told each time
            if is_new:
                since = self._wall() if known is None or known.reason == STARTING else known.since
                self._cause = Cause(error.reason, str(error), since)
        if is_new:
            logger.error(
                "the %s of the KV cache is switched off: %s", self._tier, error, extra={"reason": error.reason}
            )
        if was_on:
            self.on_off()

    def recover(self, *shown: Work) -> None:
        """A look has found nothing wrong: it is used again. It is told as failing until what else had failed has gone
        through, but for what the look has `shown`."""
        with self._lock:
            self._on = True
            self._owed -= {Work.LOOK, *shown}
            known = self._end()
        self._tell(known)

    def passed(self, work: Work) -> None:
        """This went through."""
        if work not in self._owed:
            return
        with self._lock:
            if not self._on:  # it had begun before that failed
                return
            self._owed.discard(work)
            known = self._end()
        self._tell(known)

    def _end(self) -> Cause | None:
        """What was told until now, if that has ended; under the lock."""
        if self._owed:
            return None
        known, self._cause = self._cause, None
        return known

    def _tell(self, known: Cause | None) -> None:
        if known is not None:
            logger.info("the %s of the KV cache is in use", self._tier, extra={"before": known.reason})
