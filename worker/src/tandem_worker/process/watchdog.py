"""A step of the engine that does not end: the worker is taken out of service, then ends with the cause.

A device that hangs, a rank that does not answer or a deadlock leaves the engine's thread inside a step for good, and
nothing else in the process notices. The engine says when its present turn began; this thread looks at that, so a step
costs one store. Time counts only while the process could have computed: what stops the whole process (SIGSTOP, a paused
virtual machine) stops this thread's ticks too, and what the engine's thread waited for a core is taken off.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from tandem_worker.host.stacks import dump_stacks, find_place, read_waited_seconds
from tandem_worker.host.vitals import Vitals

DEFAULT_SECONDS = 15.0
"""Limit where the configuration does not say. A step takes up to 0.5 s by plan on a CPU, and less on a GPU."""
LEARNED_FACTOR = 3.0
"""A step may take this many times what the longest one before took: kernels are compiled, contexts grow."""
LEARNED_MAX_SECONDS = 300.0
END_FACTOR = 2.0
"""Unready at the bound, ended at this many times the bound: whoever routes requests has gone elsewhere by then."""
_TICK_SECONDS = 0.25
_NOTICED_SECONDS = 0.5
"""Turns shorter than this are nobody's concern."""

logger = logging.getLogger(__name__)


class StepLoop(Protocol):
    """The engine, as any thread may see it."""

    @property
    def turn_began(self) -> float:
        """When the present turn began, by any clock; 0 while there is nothing to do. Differs from turn to turn."""
        ...

    @property
    def thread(self) -> threading.Thread | None:
        """The thread that runs the loop; None before it is started."""
        ...

    def describe_turn(self) -> str:
        """What it computes."""
        ...


@dataclass(slots=True)
class TurnAge:
    """How long the present turn has been at it, added up from looks. Pure."""

    tick_seconds: float = _TICK_SECONDS
    seconds: float = 0.0
    longest: float = 0.0
    """The longest of the turns that have ended."""
    _began: float = 0.0
    _looked: float | None = None
    _waited: float = 0.0

    def look(self, began: float, *, now: float, waited: float) -> float:
        """Seconds of the turn that `began`. `waited` are all that its thread ever waited for a core."""
        passed = 0.0 if self._looked is None else min(now - self._looked, 2 * self.tick_seconds)
        passed = max(0.0, passed - max(0.0, waited - self._waited))
        self._looked, self._waited = now, waited
        if began != self._began:
            self.longest = max(self.longest, self.seconds)
            self._began, self.seconds = began, 0.0
        elif began:
            self.seconds += passed
        return self.seconds

    def bound(self, configured: float | None) -> float | None:
        """Seconds after which the turn counts as hung; None: never. `configured` None is the default, 0 is never."""
        if configured == 0:
            return None
        floor = DEFAULT_SECONDS if configured is None else configured
        return max(floor, min(LEARNED_FACTOR * self.longest, LEARNED_MAX_SECONDS))


class StepWatchdog:
    """Looks at one engine from a thread of its own."""

    def __init__(
        self, loop: StepLoop, *, configured: Callable[[], float | None], on_hung: Callable[[str], None]
    ) -> None:
        """`configured` is asked once for each late turn. `on_hung` gets the cause, once, when the process is to end; it
        is called on the watchdog's thread."""
        self._loop, self._configured, self._on_hung = loop, configured, on_hung
        self._age = TurnAge()
        self._bound: float | None = None
        self._stop = threading.Event()
        self.problem: str | None = None
        """Why the worker is not to get requests now."""

    def start(self, vitals: Vitals) -> None:
        """Raises ThreadStartError."""
        vitals.start_thread("watchdog", self._run, is_over=self._stop.is_set)

    def stop(self) -> None:
        """Look no more. Returns at once; the watchdog's thread ends after its present look."""
        self._stop.set()

    def _run(self) -> None:
        is_late = False
        while not self._stop.wait(_TICK_SECONDS):
            thread = self._loop.thread
            waited = 0.0 if thread is None else read_waited_seconds(thread)
            seconds = self._age.look(self._loop.turn_began, now=time.monotonic(), waited=waited)
            if seconds < _NOTICED_SECONDS:
                is_late = False
                self._recover()
                continue
            if not is_late:
                is_late, self._bound = True, self._age.bound(self._configured())
            if self._bound is None or seconds < self._bound:
                continue
            if self.problem is None:
                logger.error("%s; the stacks of all threads follow", self._describe(seconds))
                dump_stacks()
            self.problem = self._describe(seconds)
            if seconds >= END_FACTOR * self._bound:
                self._stop.set()
                self._on_hung(self.problem)

    def _recover(self) -> None:
        if self.problem is not None:
            logger.warning("the step has ended after all: %s", self.problem)
            self.problem = None

    def _describe(self, seconds: float) -> str:
        place = find_place(self._loop.thread)
        return f"a step of the engine has not ended for {seconds:.0f} s: {self._loop.describe_turn()}, in {place}"
