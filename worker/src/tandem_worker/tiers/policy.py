"""When a block is loaded, when a load is cut, and what is written. Pure; the time comes from the caller."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence

GRACE_SHARE = 0.1
"""A load that brings nothing is cut after this share of what computing all of it takes."""
GRACE_SECONDS = 0.02
"""Or after this, where that is more."""
UNKNOWN_SECONDS = 0.5
"""A load that brings nothing is cut after this where nobody knows what computing takes."""
LEAST_GAIN = 2.0
"""A disk is in use where reading is this many times as fast as computing. Gateways send sessions to where their blocks
are; for less than this, what it saves there is not worth the queues."""
CLEAR_GAIN = 1.25 * LEAST_GAIN
"""One that was slower is told as such until reading is this many times as fast: else it would change with each
measurement of one that is as fast as that."""
HEAD_ROOM = 0.05
"""Share of the volume that stays free: what lies beside the blocks, and what a filesystem takes for itself."""
SECOND_USE_SHARE = 0.8
"""Share of the daily writes; once it is spent only blocks that were used twice are written."""
DAY_SECONDS, HOUR_SECONDS = 86_400.0, 3600.0


def is_sooner(load_seconds: float, num_blocks: int, seconds_per_block: float | None) -> bool:
    """Whether loading is sooner than computing. Where nobody knows what computing takes, loading is tried."""
    return seconds_per_block is None or load_seconds < num_blocks * seconds_per_block


def is_slow(rate: float, slot_bytes: int, seconds_per_block: float, gain: float = LEAST_GAIN) -> bool:
    """Whether a disk that is read at `rate` bytes per second is to be left alone: not `gain` times as fast as
    computing."""
    return rate * seconds_per_block < gain * slot_bytes


def cut_after(valid: int, num_blocks: int, seconds_per_block: float | None) -> float:
    """Seconds after its start at which a load of `num_blocks` with `valid` leading ones there is cut.

    What has come must have been worth the wait: until then the request is later than one that computes everything by a
    tenth of that at most, whatever happens next.
    """
    if seconds_per_block is None:
        return UNKNOWN_SECONDS * (1 + valid)
    return valid * seconds_per_block + max(GRACE_SECONDS, GRACE_SHARE * num_blocks * seconds_per_block)


def predict_seconds(num_bytes: int, queued_bytes: int, num_pieces: int, num_readers: int, rate: float | None) -> float:
    """Until `num_bytes` in `num_pieces` are in memory, behind `queued_bytes`; `rate`: bytes per second of one reader.

    0 where the rate is not known: somebody has to be the first.
    """
    if rate is None:
        return 0.0
    return num_bytes / (rate * max(1, min(num_pieces, num_readers))) + queued_bytes / (rate * num_readers)


def plan_limit(size_bytes: int, segment_bytes: int) -> int:
    """Segments that a volume of `size_bytes` may hold; 0: it is too small for any."""
    return int(size_bytes * (1 - HEAD_ROOM)) // segment_bytes


def plan_segment_bytes(size_bytes: int, slot_bytes: int) -> int:
    """Large enough for sequential writes, small enough that giving one up loses little of the volume."""
    wanted = min(64 << 20, max(4 << 20, size_bytes // 256))
    return max(wanted, slot_bytes)


def plan_batch(slot_bytes: int) -> int:
    """Blocks that are copied and written at once: 1 MiB or more, so that writes are sequential, and about 4 MiB."""
    return max(1, (4 << 20) // slot_bytes)


def plan_pieces(places: Sequence[tuple[int, int]], most: int) -> list[tuple[int, int]]:
    """`[first, end)` of stretches of blocks whose (segment, slot) follow one another, at most `most` each."""
    pieces: list[tuple[int, int]] = []
    for index, (segment, slot) in enumerate(places):
        if pieces:
            first, end = pieces[-1]
            if end - first < most and places[index - 1] == (segment, slot - 1):
                pieces[-1] = (first, end + 1)
                continue
        pieces.append((index, index + 1))
    return pieces


class WriteBudget:
    """Bytes that may be written within a day, counted by hours. Any thread."""

    def __init__(self, most: int | None, spent: Sequence[tuple[float, int]] = ()) -> None:
        """`most` None: as many as come. `spent`: (unix seconds, bytes), ascending, of an earlier process."""
        self._most = most
        self._spent: deque[tuple[float, int]] = deque(spent)
        self._lock = threading.Lock()

    @property
    def spent(self) -> list[tuple[float, int]]:
        """What a next process is to be told."""
        with self._lock:
            return list(self._spent)

    def record(self, num_bytes: int, now: float) -> None:
        """So many were written."""
        with self._lock:
            self._forget(now)
            if self._spent and abs(now - self._spent[-1][0]) < HOUR_SECONDS:
                began, before = self._spent[-1]
                self._spent[-1] = began, before + num_bytes
            else:
                self._spent.append((now, num_bytes))

    def admits(self, *, reused: bool, now: float) -> bool:
        """Whether a block may be written that more than one request has used, or that only one has."""
        if self._most is None:
            return True
        with self._lock:
            self._forget(now)
            share = sum(count for _, count in self._spent) / self._most
        return share < 1 and (reused or share < SECOND_USE_SHARE)

    def _forget(self, now: float) -> None:
        """Under the lock. What was written longer than a day ago."""
        while self._spent and abs(now - self._spent[0][0]) >= DAY_SECONDS:  # a clock may have been ahead
            self._spent.popleft()
