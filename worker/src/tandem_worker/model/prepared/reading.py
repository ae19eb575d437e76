"""Reads an entry into memory on native threads, which neither wait for the interpreter's lock nor need torch.

The code is in the library of the CPU kernels (`backends/native/read.cpp`): who has no use for those has none for packed
weights, and reads nothing.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import weakref
from functools import cache
from pathlib import Path

from tandem_worker.host.environment import wants_native_kernels
from tandem_worker.model.prepared.entry import CHUNK, DamagedError, Entry, num_chunks
from tandem_worker.model.prepared.memory import address_of, map_memory

_LIBRARY = Path(__file__).parents[1] / "backends" / "native" / "libtandem_cpu.so"
_FLAGS = frozenset({"avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512_bf16", "fma"})
_AMX = "amx_bf16"
_NUM_THREADS = 2
"""More would take cores from what the start computes meanwhile; two read the page cache at some GB/s."""
_WRONG = -1
_FAILED = -1000


@cache
def cpu_features() -> frozenset[str]:
    """What the kernel says of the first CPU; nothing where it cannot be asked."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return frozenset()
    lines = (line.partition(":") for line in text.splitlines())
    return frozenset(next((values.split() for key, _, values in lines if key.strip() == "flags"), []))


@cache
def open_library() -> ctypes.CDLL | None:
    """The library, where this CPU has everything that it was compiled for and multiplies the layout of packed weights
    itself: with AMX oneDNN does, in a layout of its own."""
    features = cpu_features()
    if not wants_native_kernels() or not features >= _FLAGS or _AMX in features:
        return None
    try:
        library = ctypes.CDLL(str(_LIBRARY))
        begin, wait, end = library.tandem_read_begin, library.tandem_read_wait, library.tandem_read_end
    except (OSError, AttributeError):  # not built, or from other sources: `find_obstacle` tells it
        return None
    address, index = ctypes.c_void_p, ctypes.c_ssize_t
    begin.argtypes, begin.restype = [ctypes.c_int, address, index, index, address, index], address
    wait.argtypes, wait.restype = [address, index, index], ctypes.c_int
    end.argtypes, end.restype = [address], None
    return library


class Reading:
    """An entry on its way into memory. Use from one thread at a time."""

    def __init__(self, library: ctypes.CDLL, entry: Entry) -> None:
        """Takes over the entry. Raises OSError where there is no memory for it."""
        self.entry = entry
        self.memory: mmap.mmap = map_memory(entry.size)
        self._library = library
        self._sums = ctypes.create_string_buffer(entry.sums, len(entry.sums))
        self._handle: int = library.tandem_read_begin(
            entry.descriptor, address_of(self.memory), entry.size, CHUNK, ctypes.addressof(self._sums), _NUM_THREADS
        )
        # However this ends, the threads do so before the memory that they write to.
        self.end = weakref.finalize(self, _end, library, self._handle, entry, self.memory, self._sums)
        """Stop reading, which a reading that nobody has any more does by itself. What was waited for stays in memory
        for as long as somebody uses it."""

    def wait(self, start: int, stop: int) -> None:
        """Bytes `start` to `stop` are in memory as they were written. Raises DamagedError when they were not, OSError
        when they cannot be read."""
        assert self.end.alive, "it is over"
        first, last = start // CHUNK, min(num_chunks(stop), num_chunks(self.entry.size))
        state = self._library.tandem_read_wait(self._handle, first, last)
        if state == _WRONG:
            raise DamagedError("its bytes do not have the sums that were written with them")
        if state:
            code = _FAILED - state
            raise OSError(code or errno.EIO, os.strerror(code))


def _end(library: ctypes.CDLL, handle: int, entry: Entry, *_memory: object) -> None:
    library.tandem_read_end(handle)
    entry.close()
