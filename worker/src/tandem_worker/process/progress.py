"""How far a start has come, and what it took."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tandem_worker.process.graph import Step

logger = logging.getLogger(__name__)

READY, STANDBY = "ready", "standby"


@dataclass(slots=True, kw_only=True)
class StepRecord:
    """What one step took. Seconds since the process was started."""

    began: float
    ended: float | None = None
    """None while it runs."""
    cpu: float = 0.0
    """Processor time of the step's own thread."""
    waited_for: str | None = None
    """The step whose end let this one begin; None: it waited for nothing."""

    @property
    def seconds(self) -> float:
        """How long it took; 0 while it runs."""
        return 0.0 if self.ended is None else self.ended - self.began


@dataclass(frozen=True, slots=True, kw_only=True)
class StartFigure:
    """What a start took, for those who plan by it."""

    seconds: float
    origin: str
    """What it started from: see `WorkerTelemetry.start_from`."""


class StartProgress:
    """What the start is doing, and what each step took. Written by the building thread, read by probes and metrics."""

    def __init__(self, clock: Callable[[], float] = time.monotonic, age: float = 0.0) -> None:
        """`age`: seconds since the process was started (`observe_age`)."""
        self._clock = clock
        self._started = clock() - age
        self._running: dict[str, str] = {}
        self.phase = "starting"
        """What is being waited for, to go on from "it is still"."""
        self.steps: dict[str, StepRecord] = {"process": StepRecord(began=0.0, ended=age)}
        """In the order in which they began. `process` is what came before the first: interpreter, imports, ports."""
        self.total: float | None = None
        """Seconds from the process's start until it was ready, without those on standby; None until then."""
        self.origin = "files"
        """What it starts from, as far as it has come."""
        self._rested: float | None = None
        self._woken: float | None = None

    def begin(self, step: Step, waited_for: str | None) -> None:
        """A step begins now."""
        logger.info("%s", step.what)
        self.steps[step.name] = StepRecord(began=self._now(), waited_for=waited_for)
        self._running[step.name] = step.what
        self._tell()

    def end(self, step: Step, cpu_seconds: float) -> None:
        """A step has ended, well or not."""
        record = self.steps[step.name]
        record.ended, record.cpu = self._now(), cpu_seconds
        del self._running[step.name]
        self._tell()

    def be_ready(self) -> None:
        """Nothing is waited for any more."""
        self.total = self._now() - self._waited
        self.phase = READY

    def rest(self) -> None:
        """It is on standby from now on."""
        self._rested = self._now()

    def wake(self) -> None:
        """It goes on."""
        self._woken, self.origin = self._now(), STANDBY

    def seconds(self) -> dict[str, float]:
        """Seconds by step, `total`, once it is ready, and `wake`: what it took of that after standby."""
        found = {name: record.seconds for name, record in list(self.steps.items())} | {"total": self.total or 0.0}
        return found if self._woken is None else found | {"wake": self._since_wake or 0.0}

    def figure(self) -> StartFigure | None:
        """The whole start in one figure; None until it is ready."""
        if self.total is None:
            return None
        seconds = self.total if self._since_wake is None else self._since_wake
        return StartFigure(seconds=round(seconds, 3), origin=self.origin)

    def describe(self) -> dict[str, dict[str, float | str | None]]:
        """For the log: of every step when it began and ended, its processor time and what it waited for."""
        return {
            name: {
                "began": round(record.began, 3),
                "ended": None if record.ended is None else round(record.ended, 3),
                "cpu": round(record.cpu, 3),
                "waited_for": record.waited_for,
            }
            for name, record in self.steps.items()
        }

    @property
    def _waited(self) -> float:
        return 0.0 if self._rested is None or self._woken is None else self._woken - self._rested

    @property
    def _since_wake(self) -> float | None:
        """From the order until it was ready."""
        if self._woken is None or self._rested is None or self.total is None:
            return None
        return self.total - self._rested

    def _now(self) -> float:
        return self._clock() - self._started

    def _tell(self) -> None:
        if self._running:
            self.phase = ", ".join(self._running.values())


def observe_age(stat: Path = Path("/proc/self/stat"), uptime: Path = Path("/proc/uptime")) -> float:
    """Seconds since this process was started, exec included; 0 where the system does not tell."""
    try:
        began = int(stat.read_text().rsplit(")", 1)[1].split()[19]) / os.sysconf("SC_CLK_TCK")
        return max(0.0, float(uptime.read_text().split()[0]) - began)
    except (OSError, ValueError, IndexError):
        return 0.0


@dataclass(slots=True, kw_only=True)
class Switches:
    """What the process is up to; the HTTP application looks at it."""

    ready: bool = False
    draining: bool = False
