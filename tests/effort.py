"""What pure Python does, counted instead of timed: the count is the same on a busy machine as on an idle one."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any


def count_instructions(work: Callable[[], object]) -> int:
    """Bytecode instructions that one call executes in this thread.

    What C does in one of them (a regular expression, a sort, JSON) counts as one, so a bound on what such work costs
    needs a clock and a wide margin instead.
    """
    count = 0

    def inside(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal count
        if event == "opcode":
            count += 1
        return inside

    def enter(frame: FrameType, event: str, _: Any) -> Any:
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        return inside

    earlier, collects = sys.gettrace(), gc.isenabled()
    gc.disable()  # who is told of collections (hypothesis is) would be counted, now and then
    sys.settrace(enter)
    try:
        work()
    finally:
        sys.settrace(earlier)
        if collects:
            gc.enable()
    return count
