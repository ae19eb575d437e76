"""Memory for weights: anonymous, in huge pages where the kernel has them, filled with zeros that cost nothing."""

from __future__ import annotations

import contextlib
import ctypes
import mmap

ALIGNMENT = 64
_CHUNK = 64 << 20
_HUGE = 2 << 20


def map_memory(size: int) -> mmap.mmap:
    """At least `size` bytes. Raises OSError where there is no room for them."""
    whole = mmap.mmap(-1, max(size, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if size >= _HUGE:
        with contextlib.suppress(OSError):  # kernels without huge pages
            whole.madvise(mmap.MADV_HUGEPAGE)
    return whole


def address_of(memory: mmap.mmap) -> int:
    """The address of the first byte."""
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))


class Arena:
    """Hands out pieces of few large maps, so that small matrices lie in huge pages too. A map lives as long as any of
    its pieces; what of it is never handed out is never touched."""

    def __init__(self) -> None:
        self._map: mmap.mmap | None = None
        self._next = 0

    def take(self, size: int) -> tuple[mmap.mmap, int]:
        """A map and where in it `size` bytes of its own begin."""
        if self._map is None or self._next + size > len(self._map):
            self._map, self._next = map_memory(max(size, _CHUNK)), 0
        start = self._next
        self._next = -(-(start + size) // ALIGNMENT) * ALIGNMENT
        return self._map, start
