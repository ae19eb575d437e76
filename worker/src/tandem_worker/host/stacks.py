"""Tells where the threads of this process are, and how long they waited for a core."""

from __future__ import annotations

import faulthandler
import sys
import threading
import traceback
from pathlib import Path


def read_waited_seconds(thread: threading.Thread) -> float:
    """What a thread of this process has waited for a core, where the kernel counts that."""
    try:
        fields = Path(f"/proc/self/task/{thread.native_id}/schedstat").read_text().split()
        return int(fields[1]) / 1e9
    except (OSError, ValueError, IndexError):
        return 0.0


def find_place(thread: threading.Thread | None) -> str:
    """The function that a thread is in, and the line of it."""
    frames = sys._current_frames()
    frame = None if thread is None or thread.ident is None else frames.get(thread.ident)
    if frame is None:
        return "a thread that has ended"
    (innermost,) = traceback.extract_stack(frame)[-1:]
    return f"{innermost.name} ({Path(innermost.filename).name}:{innermost.lineno})"


def dump_stacks() -> None:
    """Write to the log where every thread of this process is, as plain text: for whoever has to find a hang."""
    sys.stderr.flush()
    faulthandler.dump_traceback(file=sys.stderr, all_threads=True)
