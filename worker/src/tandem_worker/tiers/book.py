"""Loads under way: how far each has come, and when it is late. Any thread."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from tandem_worker.engine.tiers import LoadOrder, TierEngine
from tandem_worker.tiers.policy import cut_after
from tandem_worker.tiers.stats import Counters


@dataclass(slots=True, eq=False)
class Load:
    order: LoadOrder
    began: float
    lock: threading.Lock = field(default_factory=threading.Lock)
    """Held while blocks are written, which are not any more once it has ended."""
    valid: int = 0
    """Leading blocks that are in memory."""
    ended: bool = False
    cancelled: bool = False
    """It has ended because nobody wants it."""

    @property
    def num_wanted(self) -> int:
        """Blocks that are to come."""
        return len(self.order.names)

    @property
    def cut_at(self) -> float:
        """When it is late, if nothing more comes."""
        return self.began + cut_after(self.valid, self.num_wanted, self.order.seconds_per_block)


AnyLoad = TypeVar("AnyLoad", bound=Load)


class LoadBook(Generic[AnyLoad]):
    """Every load ends once: with all that is wanted, with what can be had, cut, or cancelled."""

    def __init__(self, counters: Counters, clock: Callable[[], float] = time.monotonic) -> None:
        self._counters, self._clock = counters, clock
        self._loads: dict[int, AnyLoad] = {}
        self._changed = threading.Condition()
        self._closed = False
        self.engine: TierEngine | None = None

    def add(self, load: AnyLoad) -> None:
        """It is under way."""
        with self._changed:
            self._loads[load.order.load] = load
            self._changed.notify_all()

    def cancel(self, number: int) -> None:
        """When this returns nothing of the load is written any more."""
        with self._changed:
            load = self._loads.pop(number, None)
        if load is not None:
            with load.lock:
                load.ended = load.cancelled = True

    def end(self, load: AnyLoad, *, cut: bool = False) -> None:
        """What is there stays. One that has ended is left alone."""
        with load.lock:
            if load.ended:
                return
            load.ended = True
            valid = load.valid
        with self._changed:
            self._loads.pop(load.order.load, None)
        if cut:
            self._counters.count_cut()
        self._counters.count_loaded(valid)
        assert self.engine is not None, "the tier is joined with the engine before a load"
        self.engine.load_ended(load.order.load, valid)

    def cut_late(self, idle_seconds: float, find_due: Callable[[], float | None] = lambda: None) -> None:
        """Sleep until a load may be late or one begins, so long at most; then cut what is late. `find_due`: when the
        caller has to look at something besides. It is asked where no `wake` is missed: what changes it wakes."""
        with self._changed:
            if self._closed:
                return
            besides = find_due()
            times = [load.cut_at for load in self._loads.values()] + ([] if besides is None else [besides])
            due = min(times, default=None)
            pause = idle_seconds if due is None else min(idle_seconds, due - self._clock())
            if pause > 0:
                self._changed.wait(pause)
            now = self._clock()
            late = [load for load in self._loads.values() if load.cut_at <= now]
        for load in late:
            self.end(load, cut=True)

    def cut_all(self) -> None:
        """None can go on: what is there stays."""
        for load in self._list():
            self.end(load, cut=True)

    def wake(self) -> None:
        """`cut_late` is to look again."""
        with self._changed:
            self._changed.notify_all()

    def close(self) -> None:
        """Loads end with what is there."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        for load in self._list():
            self.end(load)

    def _list(self) -> list[AnyLoad]:
        with self._changed:
            return list(self._loads.values())
