"""How fast files are sent: a bucket of bytes that fills at a rate which may change at any time. Pure."""

from __future__ import annotations

_BURST_SECONDS = 0.02
_MIN_BURST = 64 << 10


class ByteBucket:
    """Holds what 20 ms of its rate give, 64 KiB at least: sending pauses often and briefly."""

    def __init__(self, now: float) -> None:
        self._filled_at = now
        self._bytes = 0.0

    def take(self, wanted: int, rate: float, now: float) -> int:
        """How many of `wanted` bytes may be sent now, at `rate` bytes per second."""
        burst = self._burst(rate)
        self._bytes = min(burst, self._bytes + max(0.0, now - self._filled_at) * rate)
        self._filled_at = now
        granted = min(wanted, int(self._bytes))
        if granted < min(wanted, _MIN_BURST):  # small pieces cost more than they bring
            return 0
        self._bytes -= granted
        return granted

    def give_back(self, count: int) -> None:
        """Bytes that were granted and not sent."""
        self._bytes += count

    def wait(self, rate: float) -> float:
        """Seconds until the bucket holds half of what it can."""
        return max(0.0, (max(_MIN_BURST, self._burst(rate) / 2) - self._bytes) / max(rate, 1.0))

    @staticmethod
    def _burst(rate: float) -> float:
        return max(_MIN_BURST, rate * _BURST_SECONDS)
