"""Runs one of Mooncake's programs, again and again: `python -m tandem_worker.tiers.mooncake.program NAME ARGUMENT...`.

A holder that is told of no master ends at once, and beside a worker that would make the whole pod unready, though the
worker can do without. So this process stays, says what has happened, and tries again.
"""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time
from types import FrameType

from tandem_worker.host.mooncake import find_mooncake_obstacle, find_mooncake_program

_SHORTEST, _LONGEST = 1.0, 15.0
"""Seconds before it is tried again: more with each time that it lasted no longer than that."""


def main() -> None:
    """Until SIGTERM."""
    name, *arguments = sys.argv[1:]
    over = threading.Event()
    running: list[subprocess.Popen[bytes]] = []

    def end(number: int, frame: FrameType | None) -> None:
        over.set()
        for process in running:
            process.terminate()

    signal.signal(signal.SIGTERM, end)
    signal.signal(signal.SIGINT, end)
    pause = _SHORTEST
    while not over.is_set():
        obstacle = find_mooncake_obstacle()
        if obstacle is not None:
            _say(f"{name} cannot run here: {obstacle}")
            over.wait(_LONGEST)
            continue
        began = time.monotonic()
        running[:] = [subprocess.Popen([str(find_mooncake_program(name)), *arguments])]
        if over.is_set():
            running[0].terminate()
        code = running[0].wait()
        if not over.is_set():
            pause = _SHORTEST if time.monotonic() - began > _LONGEST else min(2 * pause, _LONGEST)
            _say(f"{name} has ended with status {code}, and is started again in {pause:g} s")
            over.wait(pause)


def _say(sentence: str) -> None:
    sys.stderr.write(f"{sentence}\n")
    sys.stderr.flush()


if __name__ == "__main__":
    main()
