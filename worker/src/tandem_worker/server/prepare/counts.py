"""What becomes of large requests, for metrics."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class PreparationCounts:
    """What became of large requests. Written on the event loop."""

    isolated: int = 0
    """Large requests that are being prepared in a process of their own, or wait for that, now."""
    isolated_total: int = 0
    refused_total: int = 0
    """Refused because as many or as large ones were there as may be, or because one took too much."""
