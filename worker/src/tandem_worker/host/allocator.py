"""The C library's allocator, which keeps what lies between things that stay."""

from __future__ import annotations

import ctypes


def trim_memory() -> None:
    """Give freed memory back to the system, some milliseconds. Releases the interpreter's lock.

    Only glibc has it; others' allocators do it unasked, or not at all.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
