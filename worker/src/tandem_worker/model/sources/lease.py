"""One of several processes on several machines does a piece of work in a shared folder; the others wait for it.

Locks of the kernel are not dependable on network file systems, so the lease is a file that is created exclusively:
`lease.N`, where the highest N counts. Its holder rewrites it every few seconds. Who sees it unchanged for long, by its
own clock, creates `lease.N+1`: exactly one succeeds. No file is deleted while it matters and no clocks are compared.

Invariant: two holders exist at a time only if one was believed dead and was not; it stops at its next beat. Work under
a lease must therefore be verified before it is declared complete.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import threading
import time
from collections.abc import Callable
from pathlib import Path

logger = logging.getLogger(__name__)

_NAME = re.compile(r"lease\.(\d+)")
_RELEASED = "released"


class Lease:
    """A held lease. `lost` is set when another process has taken over."""

    def __init__(self, folder: Path, number: int, owner: str, beat_seconds: float) -> None:
        self._folder = folder
        self._number = number
        self._owner = owner
        self._beat_seconds = beat_seconds
        self._beats = 0
        self._stop = threading.Event()
        self.lost = threading.Event()
        self._thread = threading.Thread(target=self._run, name="lease", daemon=True)
        self._thread.start()

    def release(self) -> None:
        """Give it up; somebody else may take it at once."""
        self._stop.set()
        self._thread.join()
        with contextlib.suppress(OSError):
            _path(self._folder, self._number).write_text(_RELEASED)

    def _run(self) -> None:
        while not self._stop.wait(self._beat_seconds):
            self._beats += 1
            try:
                if _highest(self._folder) > self._number:
                    self.lost.set()
                    return
                _path(self._folder, self._number).write_text(f"{self._owner} {self._beats}")
            except OSError as error:  # a full disk, a network file system that is away: others may take over
                logger.warning("cannot renew the download lease: %s", error)


def acquire(
    folder: Path,
    owner: str,
    *,
    is_complete: Callable[[], bool],
    stale_seconds: float = 30.0,
    beat_seconds: float = 5.0,
    poll_seconds: float = 1.0,
    on_wait: Callable[[str], None] = lambda holder: None,
) -> Lease | None:
    """The lease, or None once the work is complete. Blocks while another process holds it.

    Raises OSError when the folder cannot be written to.
    """
    seen, seen_at = "", time.monotonic()
    while not is_complete():
        number = _highest(folder)
        content = _read(folder, number)
        if content != seen:
            seen, seen_at = content, time.monotonic()
        if not number or content == _RELEASED or time.monotonic() - seen_at > stale_seconds:
            if _create(folder, number + 1, owner):
                _forget_older(folder, number)
                return Lease(folder, number + 1, owner, beat_seconds)
            continue
        on_wait(content.split(" ")[0])
        time.sleep(poll_seconds)
    return None


def _path(folder: Path, number: int) -> Path:
    return folder / f"lease.{number}"


def _highest(folder: Path) -> int:
    numbers = (_NAME.fullmatch(name) for name in os.listdir(folder))
    return max((int(match[1]) for match in numbers if match), default=0)


def _read(folder: Path, number: int) -> str:
    """What the holder wrote, with its number so that a new holder never looks like the old one."""
    try:
        text = _path(folder, number).read_text()
    except OSError:
        return f"? {number}"
    return text if text == _RELEASED else f"{text} {number}"


def _create(folder: Path, number: int, owner: str) -> bool:
    try:
        with _path(folder, number).open("x") as file:
            file.write(f"{owner} 0")
    except FileExistsError:
        return False
    return True


def _forget_older(folder: Path, below: int) -> None:
    """Keep the last two: a holder that was believed dead must still find that it was superseded."""
    for number in range(max(1, below - 8), below):
        with contextlib.suppress(OSError):
            _path(folder, number).unlink()
