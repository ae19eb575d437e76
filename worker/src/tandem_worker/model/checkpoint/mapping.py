"""Files as memory."""

from __future__ import annotations

import ctypes
import mmap
import weakref
from typing import IO

import numpy as np
import numpy.typing as npt


def map_file(file: IO[bytes]) -> npt.NDArray[np.uint8]:
    """All bytes of a file that is not empty. Nobody may write to them, although numpy and torch are told otherwise:
    torch takes no other memory without a warning, and a private copy would count against the machine's memory."""
    mapped = np.frombuffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ), np.uint8)
    alias = (ctypes.c_ubyte * len(mapped)).from_address(mapped.ctypes.data)
    weakref.finalize(alias, id, mapped).atexit = False  # lives as long as any view of it
    return np.ctypeslib.as_array(alias)
