"""Memory of a process: zeros that take none until they are written, and what is free goes back to the system.

An anonymous private map is zero by itself: the kernel gives each page when it is first touched, in large pages where it
can, which costs 0.2 s per GiB then and nothing before. Filling the same with zeros costs that at once.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap

LARGE_PAGE = 2 << 20
"""Bytes that the kernel gives at a time where it may: x86-64's and most of Arm's."""


def reserve_zeroed(num_bytes: int) -> mmap.mmap:
    """`num_bytes` of zeros, writable, given back when nobody refers to it. Raises OSError when there is no such range.

    Whoever writes more than the process may have is ended by the system then, not here: plan what is reserved.
    """
    space = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # a kernel without large pages: small ones then
        space.madvise(mmap.MADV_HUGEPAGE)
    return space


def trim_memory() -> None:
    """Give freed memory back to the system, some milliseconds. Releases the interpreter's lock.

    The C library's allocator keeps what lies between things that stay. Only glibc's can be asked; others do it
    unasked, or not at all.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
