"""The operator's program, watched from inside: how long its event loop is held, and what it weighs.

usage: watched.py REPORT [arguments of tandem-operator]

REPORT is rewritten once a second with one JSON object. A hold is the processor time that the loop's thread spends
between the moment a timer is due and the moment it runs: a machine that gives the thread no time counts for nothing.
"""

from __future__ import annotations

import asyncio
import gc
import json
import resource
import sys
import time
from pathlib import Path

from tandem_operator.process.app import run_operator
from tandem_operator.process.logs import set_up_logging
from tandem_operator.process.settings import parse_settings

PERIOD = 0.005
KEPT = 20
"""Longest holds that are reported."""


class Watch:
    def __init__(self, report: Path) -> None:
        self.report = report
        self.holds: list[float] = []
        self.collections: list[float] = []
        self.collecting = 0.0
        gc.callbacks.append(self.note_collection)
        self.started = time.monotonic()

    def note_collection(self, phase: str, info: dict[str, int]) -> None:
        if phase == "start":
            self.collecting = time.thread_time()
        else:
            took = time.thread_time() - self.collecting
            self.collections = sorted([*self.collections, took], reverse=True)[:KEPT]

    async def run(self) -> None:
        written = 0.0
        while True:
            due, cpu = time.monotonic() + PERIOD, time.thread_time()
            await asyncio.sleep(PERIOD)
            late = time.monotonic() - due
            if late > PERIOD:
                self.holds = sorted([*self.holds, min(late, time.thread_time() - cpu)], reverse=True)[:KEPT]
            if time.monotonic() - written > 1.0:
                written = time.monotonic()
                self.write()

    def write(self) -> None:
        usage = resource.getrusage(resource.RUSAGE_SELF)
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        text = json.dumps(
            {
                "holds_ms": [round(hold * 1e3, 1) for hold in self.holds],
                "collections_ms": [round(took * 1e3, 1) for took in self.collections[:3]],
                "cpu_seconds": usage.ru_utime + usage.ru_stime,
                "rss_mib": pages * resource.getpagesize() / 2**20,
                "up_seconds": time.monotonic() - self.started,
            }
        )
        unfinished = self.report.with_suffix(".unfinished")
        unfinished.write_text(text)
        unfinished.rename(self.report)


async def main(report: Path, arguments: list[str]) -> int:
    settings = parse_settings(arguments)
    set_up_logging(settings.log_level)
    watching = asyncio.create_task(Watch(report).run())
    try:
        return await run_operator(settings)
    finally:
        watching.cancel()


if __name__ == "__main__":
    sys.exit(asyncio.run(main(Path(sys.argv[1]), sys.argv[2:])))
