"""Whether a tier is in use, and if not, why. Any thread."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass

from tandem_worker.tiers.errors import TierError

logger = logging.getLogger(__name__)

STARTING = "Starting"


@dataclass(frozen=True, slots=True)
class Cause:
    reason: str
    """CamelCase."""
    message: str


class TierHealth:
    """Off until it is first switched on. A tier that is off is no source and no sink."""

    def __init__(self, tier: str = "disk", on_off: Callable[[], None] = lambda: None) -> None:
        """`on_off`: called when it goes off, on the thread that found out why."""
        self._lock, self._tier = threading.Lock(), tier
        self._cause: Cause | None = Cause(STARTING, f"the {tier} is being looked at")
        self.on_off = on_off

    @property
    def cause(self) -> Cause | None:
        """Why it is off; None while it is on."""
        return self._cause

    @property
    def on(self) -> bool:
        """Whether it is in use."""
        return self._cause is None

    def fail(self, error: TierError) -> None:
        """Switch it off, or note another cause."""
        with self._lock:
            known = self._cause
            if known is None or known.reason != error.reason:  # words that alternate would be told each time
                self._cause = Cause(error.reason, str(error))
        if known is None or known.reason != error.reason:
            logger.error(
                "the %s of the KV cache is switched off: %s", self._tier, error, extra={"reason": error.reason}
            )
        if known is None:
            self.on_off()

    def recover(self) -> None:
        """It works."""
        with self._lock:
            known, self._cause = self._cause, None
        if known is not None:
            logger.info("the %s of the KV cache is in use", self._tier, extra={"before": known.reason})
