"""Runs stages: processes with limits, results written as they come.

Nothing here imports torch: a device error, a hang or a crash stays in the process of a lane.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from bench.gpu.item import ItemStatus, Phase, Setting, Stage
from bench.gpu.lane import LOST
from bench.gpu.meter import Meter

ROOT = Path(__file__).parents[2]
_POLL = 0.2
_START_SECONDS = 120.0
"""Until a lane has said what its items are: importing torch, and building nothing yet."""
_TAIL = 1200
"""Characters of a dead process's output that are kept."""

Progress = Callable[[str], None]


class LaneProcess:
    """A lane's process, and those that follow it when it dies."""

    def __init__(self, lane: str, setting: Setting, scratch: Path) -> None:
        self.lane = lane
        self.done = False
        self._setting = setting
        self._own: dict[str, dict[str, Any]] = {}
        """What became of this lane's items, for the next process."""
        self._events = scratch / f"{re.sub(r'[^a-z0-9]+', '-', lane)}.events"
        self._log = self._events.with_suffix(".log")
        self._events.touch()
        self._read = 0
        self._items: list[str] = []
        self._next = 0
        self._current: dict[str, Any] | None = None
        self._started = 0.0
        self._process: subprocess.Popen[bytes] | None = None
        self._start()

    def _start(self) -> None:
        setting = replace(self._setting, results={**self._setting.results, **self._own})
        command = [
            sys.executable, "-u", "-m", "bench.gpu.lane", self.lane, "--events", str(self._events),
            "--setting", json.dumps(asdict(setting)), "--skip", str(self._next),
        ]  # fmt: skip
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                command,
                cwd=ROOT,
                env=child_environment(self._setting.device),
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        self._started, self._current = time.time(), None

    def poll(self) -> list[dict[str, Any]]:
        """Items that have ended since the last call. Starts the process anew where that is needed."""
        assert self._process is not None
        code = self._process.poll()
        ended = self._take_events()
        if code is not None:
            self._reap()
            if code != 0:
                ended += self._bury(code)
            if code == 0 or self._next >= len(self._items):
                self.done = True
            else:
                self._start()
        elif (late := self._overdue()) is not None:
            self._kill()
            ended += self._take_events() or [late]
            self._next += 1 if ended[-1] is late else 0
            self.done = self._next >= len(self._items)
            if not self.done:
                self._start()
        return ended

    def stop(self) -> list[dict[str, Any]]:
        """The stage's time is over: what is left was not run."""
        ended = self._take_events()
        if not self.done:
            self._kill()
            left = self._items[self._next :] if self._items else [self.lane]
            status = {"status": ItemStatus.NOT_RUN, "why": "the time was over"}
            if self._current is not None:
                ended.append(self._ending({"status": ItemStatus.TIMEOUT, "why": "the time was over"}))
                left = left[1:]
            ended += [{"name": name, **status} for name in left]
        self.done = True
        return ended

    def _take_events(self) -> list[dict[str, Any]]:
        with self._events.open("rb") as events:
            events.seek(self._read)
            whole = events.read()
        whole = whole[: whole.rfind(b"\n") + 1]  # the last line may be half written
        self._read += len(whole)
        ended: list[dict[str, Any]] = []
        for line in whole.splitlines():
            event = json.loads(line)
            kind = event.pop("event")
            if kind == "plan":
                self._items = event["items"]
            elif kind == "begin":
                self._current = event
            else:
                began = self._current["at"] if self._current else event["at"]
                ended.append(
                    {key: value for key, value in event.items() if key not in ("item", "at")}
                    | {"span": (began, event["at"])}
                )
                self._next, self._current = event["item"] + 1, None
                self._own[event["name"]] = brief(event)
        return ended

    def _overdue(self) -> dict[str, Any] | None:
        if self._current is None:
            if not self._items and time.time() - self._started > _START_SECONDS:
                return {
                    "name": self.lane,
                    "status": ItemStatus.TIMEOUT,
                    "why": f"did not start in {_START_SECONDS:g} s",
                }
            return None
        limit = self._current["limit"]
        if time.time() - self._current["at"] <= limit:
            return None
        return self._ending(
            {"status": ItemStatus.TIMEOUT, "why": f"took longer than {limit:g} s\n{self._tail()}".strip()}
        )

    def _bury(self, code: int) -> list[dict[str, Any]]:
        """What died with the process."""
        if code == LOST:
            return []  # the item that lost the device has ended with its error
        why = f"its process ended with {code}\n{self._tail()}"
        if self._current is not None:
            ending = self._ending({"status": ItemStatus.DIED, "why": why})
            self._next += 1
            return [ending]
        left, self._next = self._items[self._next :], len(self._items)
        return [{"name": name, "status": ItemStatus.DIED, "why": why} for name in left or [self.lane]]

    def _ending(self, outcome: Mapping[str, Any]) -> dict[str, Any]:
        assert self._current is not None
        began, now = self._current["at"], time.time()
        return {"name": self._current["name"], **outcome, "seconds": round(now - began, 3), "span": (began, now)}

    def _tail(self) -> str:
        return self._log.read_bytes()[-_TAIL:].decode(errors="replace")

    def _kill(self) -> None:
        """The process and what it started: they are a session of their own."""
        assert self._process is not None
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def _reap(self) -> None:
        """What a lane leaves running ends with it."""
        assert self._process is not None
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)


def child_environment(device: str) -> dict[str, str]:
    """The worker is found in this tree whether it is installed or not, and nobody asks a network."""
    paths = [str(ROOT), str(ROOT / "api/src"), str(ROOT / "worker/src"), os.environ.get("PYTHONPATH", "")]
    return os.environ | {
        "PYTHONPATH": os.pathsep.join(path for path in paths if path),
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        **({"OMP_NUM_THREADS": "1"} if device == "cpu" else {}),
    }


def run_stage(
    stage: Stage, setting: Setting, save: Callable[[dict[str, Any]], None], progress: Progress, meter: Meter
) -> dict[str, Any]:
    """The items' outcomes by name. `save` gets them after each one."""
    ends = time.monotonic() + stage.seconds
    results: dict[str, Any] = {}

    def note(outcomes: list[dict[str, Any]]) -> None:
        for outcome in outcomes:
            name, span = outcome.pop("name"), outcome.pop("span", None)
            if span is not None and (seen := meter.between(*span)):
                outcome["gpu"] = seen
            results[name] = outcome
            progress(describe(name, outcome))
        if outcomes:
            save(results)

    with tempfile.TemporaryDirectory(prefix="tandem-gpu-") as scratch:
        for phase in stage.phases:
            told = replace(setting, results={name: brief(outcome) for name, outcome in results.items()})
            limit = min(ends - time.monotonic(), phase.seconds)
            run_phase(phase, told, Path(scratch), limit, note)
    return results


def brief(outcome: Mapping[str, Any]) -> dict[str, Any]:
    """What later phases are told of an item."""
    return {"status": outcome["status"], "failing": (outcome.get("figures") or {}).get("failing", [])}


def run_phase(
    phase: Phase, setting: Setting, scratch: Path, seconds: float, note: Callable[[list[dict[str, Any]]], None]
) -> None:
    """All lanes, `together` at a time, until the time is over."""
    ends = time.monotonic() + seconds
    waiting, running = list(phase.lanes), list[LaneProcess]()
    try:
        while waiting or running:
            while waiting and len(running) < phase.together and time.monotonic() < ends:
                running.append(LaneProcess(waiting.pop(0), setting, scratch))
            for lane in list(running):
                note(lane.poll() if time.monotonic() < ends else lane.stop())
                if lane.done:
                    running.remove(lane)
            if time.monotonic() >= ends and not running:
                note([{"name": lane, "status": ItemStatus.NOT_RUN, "why": "the time was over"} for lane in waiting])
                return
            time.sleep(_POLL)
    finally:
        for lane in running:
            lane.stop()


def describe(name: str, outcome: Mapping[str, Any]) -> str:
    """One line of progress."""
    why = str(outcome.get("why", "")).strip().splitlines()
    seconds = f"{outcome['seconds']:.1f} s" if "seconds" in outcome else ""
    figures = outcome.get("figures") or {}
    told = ", ".join(f"{key} {value:.4g}" for key, value in figures.items() if isinstance(value, float | int))
    return f"{outcome['status']:<8} {name:<64} {seconds:>8}  {told[:100]}{'  ' + why[-1][:150] if why else ''}"
