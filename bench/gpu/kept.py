"""`tandem_worker` that keeps kernels in a cache folder on any file system, and may tell where its time goes.

In a pod a folder of the container's own layer or of memory ends with it, so that keeping anything there is for nothing;
the folder of a benchmark lies there and outlives its workers. With `BENCH_STACKS` every thread's stack is looked at 50
times a second, and the file of that name says how often each call was under way. With `BENCH_POSTPONED` parts of torch
are left for later though its release is none of those that this was checked with.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections import Counter
from pathlib import Path
from types import FrameType

_STACKS, _POSTPONED = "BENCH_STACKS", "BENCH_POSTPONED"
_SECONDS, _PAUSE, _LEAST = 30.0, 0.02, 3
_OWN = "importlib"


def describe(frame: FrameType | None) -> list[str]:
    """A stack from its bottom: files' last two parts and functions, without the import system's own."""
    found: list[str] = []
    while frame is not None:
        code = frame.f_code
        if _OWN not in code.co_filename and "threading" not in code.co_filename:
            place = "/".join(code.co_filename.rsplit("/", 2)[-2:])
            found.append(f"{place}:{code.co_name}")
        frame = frame.f_back
    return found[::-1]


def watch(path: Path) -> None:
    """Count calls by thread until the time is over; the file is written once a second."""
    counts: dict[str, Counter[str]] = {}
    began = written = time.monotonic()
    while (now := time.monotonic()) - began < _SECONDS:
        names = {thread.ident: thread.name for thread in threading.enumerate()}
        for number, frame in sys._current_frames().items():
            name = names.get(number, "?")
            if name.startswith(("start-", "engine", "MainThread", "build")):
                stack = describe(frame)
                counter = counts.setdefault(name, Counter())
                counter.update({" > ".join(stack[: depth + 1][-2:]) for depth in range(len(stack))})
        if now - written > 1.0:
            kept = {
                name: [[call, round(count * _PAUSE, 2)] for call, count in counter.most_common(60) if count >= _LEAST]
                for name, counter in counts.items()
            }
            path.write_text(json.dumps(kept))
            written = now
        time.sleep(_PAUSE)


if __name__ == "__main__":
    if _STACKS in os.environ:
        threading.Thread(target=watch, args=(Path(os.environ[_STACKS]),), daemon=True, name="watch").start()
    from tandem_worker.__main__ import main
    from tandem_worker.host import environment, postponed

    if _POSTPONED in os.environ:
        postponed.CHECKED = (*postponed.CHECKED, str(postponed._observe_release()))
    environment.dies_with_container = lambda *_: False
    main()
