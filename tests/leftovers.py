"""What a test process leaves behind: children that run on, and temporary files and folders that it made itself."""

from __future__ import annotations

import os
import tempfile
import time
from pathlib import Path
from typing import Any

_ENDING_SECONDS = 10.0
"""For children that have been told to end."""
_made: list[str] = []
found: list[str] = []
"""A sentence for each thing that was left behind, by this process and those that share its tests."""


def watch_temporary_files() -> None:
    """Note from now on what `tempfile` makes in this process. Folders of pytest's own are not made by it."""
    for name in ("mkdtemp", "mkstemp"):
        setattr(tempfile, name, _noting(getattr(tempfile, name)))


def forget() -> None:
    """In a process that was forked: what was made before is another one's."""
    _made.clear()


def _noting(make: Any) -> Any:
    def noting(*arguments: Any, **options: Any) -> Any:
        made = make(*arguments, **options)
        _made.append(os.path.abspath(made if isinstance(made, str) else made[1]))
        return made

    return noting


def find_leftovers() -> list[str]:
    """A sentence for each, once children have had time to end."""
    deadline = time.monotonic() + _ENDING_SECONDS
    while (children := _children()) and time.monotonic() < deadline:
        time.sleep(0.1)
    running = [f"process {number} still runs: {command}" for number, command in children.items()]
    return running + [f"{path} was made and not removed" for path in _made if Path(path).exists()]


def _children() -> dict[int, str]:
    """Those that run, with their command lines."""
    found: dict[int, str] = {}
    for thread in Path("/proc/self/task").iterdir():
        try:
            numbers = [int(number) for number in (thread / "children").read_text().split()]
        except (FileNotFoundError, ProcessLookupError):  # the thread has ended
            continue
        for number in numbers:
            try:
                state = Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()[0]
                command = Path(f"/proc/{number}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            except (FileNotFoundError, ProcessLookupError):
                continue
            # Of a zombie nothing runs; the tracker of Python's `multiprocessing` ends with this process.
            if state not in "ZX" and "multiprocessing.resource_tracker" not in command:
                found[number] = command[:200]
    return found
