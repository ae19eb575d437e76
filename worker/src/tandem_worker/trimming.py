"""Gives memory that was freed back to the system."""

from __future__ import annotations

import ctypes


def trim_memory() -> None:
    """Some milliseconds, without the interpreter's lock. Only glibc has it; others' allocators do it unasked, or not
    at all. What threads free into arenas of their own stays there otherwise, however little of it is used."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
