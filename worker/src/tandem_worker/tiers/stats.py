"""What a tier has done. Any thread."""

from __future__ import annotations

import threading
from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True, kw_only=True)
class TierStats:
    """Counters since the start, and what is there now."""

    tier: str = "disk"
    reason: str | None = None
    """Why it is off, in a word, or was, and what had failed has not gone through yet; None else."""
    message: str = ""
    failing: tuple[str, ...] = ()
    """Addresses of the workers of whom nothing comes, of peers."""
    capacity_tokens: int = 0
    """For which there is room."""
    stored_tokens: int = 0
    horizon: float = 0.0
    """When the newest block that was given up was last used, in unix seconds; 0 when none was."""
    tokens_read: int = 0
    tokens_written: int = 0
    bytes_read: int = 0
    bytes_written: int = 0
    seconds_reading: float = 0.0
    """Seconds that all readers together spent reading."""
    seconds_writing: float = 0.0
    evictions: int = 0
    """Blocks that were given up for others."""
    integrity_failures: int = 0
    loads_cut: int = 0
    tokens_per_second: float | None = None
    """At which blocks come, while they do; None: not known, or not told."""


class Counters:
    def __init__(self, block_size: int, tier: str = "disk") -> None:
        self._block_size = block_size
        self._lock = threading.Lock()
        self._stats = TierStats(tier=tier)

    def read(self) -> TierStats:
        """All of them, at one moment."""
        return self._stats

    def count_loaded(self, num_blocks: int) -> None:
        """Blocks that a load has brought into memory for its request."""
        self._add(tokens_read=num_blocks * self._block_size)

    def count_read(self, num_bytes: int, seconds: float) -> None:
        """Blocks that were read, verified and copied."""
        self._add(bytes_read=num_bytes, seconds_reading=seconds)

    def count_written(self, num_blocks: int, num_bytes: int, seconds: float) -> None:
        """Blocks that were copied, summed and written."""
        self._add(tokens_written=num_blocks * self._block_size, bytes_written=num_bytes, seconds_writing=seconds)

    def count_damage(self) -> None:
        """A block that was not what it should be."""
        self._add(integrity_failures=1)

    def count_cut(self) -> None:
        """A load that was late."""
        self._add(loads_cut=1)

    def _add(self, **more: float) -> None:
        with self._lock:
            self._stats = replace(
                self._stats, **{name: getattr(self._stats, name) + value for name, value in more.items()}
            )
