"""The folder of a tier, at the boundary to the system: everything that touches the volume is here.

Files are read and written past the page cache where the filesystem allows it, which is asked once: what is read comes
into memory anyway, and pages that the kernel keeps besides count to the container.
"""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import time
from pathlib import Path

import numpy as np

from tandem_worker.tiers.errors import VOLUME_IN_USE, TierError
from tandem_worker.tiers.format import PAGE, pad
from tandem_worker.tiers.memory import allocate_rows

_LOCK, _PROBE = "lock", "probe"
_FLAGS = os.O_CLOEXEC | os.O_NOFOLLOW
"""A link that somebody else has put in the folder must not have this process write elsewhere."""


class Volume:
    """Raises OSError, but for `lock`."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._direct = 0
        self._lock = -1

    @property
    def is_direct(self) -> bool:
        """Whether the page cache is passed by."""
        return bool(self._direct)

    @property
    def free_bytes(self) -> int:
        """Bytes that this process may still write."""
        found = os.statvfs(self.root)
        return found.f_bavail * found.f_frsize

    def lock(self) -> None:
        """Keep other processes out, as long as this one lives. Raises TierError where one is in, and OSError."""
        self.root.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(self.root / _LOCK, os.O_RDWR | os.O_CREAT | _FLAGS, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:  # a filesystem may know no locks: each look would leave a descriptor open
            os.close(descriptor)
            if not isinstance(error, BlockingIOError):
                raise
            raise TierError(
                VOLUME_IN_USE, f"another process uses {self.root}; give every worker a volume of its own"
            ) from error
        self._lock = descriptor

    def unlock(self) -> None:
        """Let others in."""
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def probe(self, num_bytes: int) -> float:
        """Write and read `num_bytes` once, and find out whether the page cache can be passed by. Seconds of reading."""
        path = self.root / _PROBE
        rows = allocate_rows(1, num_bytes)
        rows[:] = 0x5A
        for self._direct in (getattr(os, "O_DIRECT", 0), 0):
            try:
                descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | _FLAGS | self._direct, 0o600)
            except OSError:
                if not self._direct:
                    raise
                continue
            try:
                write(descriptor, rows[0].data, 0)
                began = time.perf_counter()
                read(descriptor, rows[0].data, 0)
                return time.perf_counter() - began
            except OSError as error:
                if not self._direct or error.errno != errno.EINVAL:  # this filesystem has no such files
                    raise
            finally:
                os.close(descriptor)
                path.unlink(missing_ok=True)
        raise AssertionError("the last try returns or raises")

    def create(self, path: Path, header: np.ndarray) -> int:
        """A file that begins with `header`, there as a whole or not at all; its descriptor."""
        fresh = path.with_suffix(".new")
        descriptor = os.open(fresh, os.O_RDWR | os.O_CREAT | os.O_TRUNC | _FLAGS | self._direct, 0o600)
        try:
            write(descriptor, header.data, 0)
            os.rename(fresh, path)
        except OSError:
            os.close(descriptor)
            raise
        return descriptor

    def save(self, path: Path, text: str) -> None:
        """A small file, there as a whole or not at all; blanks follow the text. It has reached the device when this
        returns, where the page cache is passed by."""
        data = text.encode()
        rows = allocate_rows(1, pad(len(data)))
        rows[:] = ord(" ")
        rows[0, : len(data)] = np.frombuffer(data, np.uint8)
        os.close(self.create(path, rows[0]))

    def open(self, path: Path) -> int:
        """For reading."""
        return os.open(path, os.O_RDONLY | _FLAGS | self._direct)

    def remove(self, path: Path) -> None:
        """A file or folder, if it is there."""
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)


def write(descriptor: int, data: memoryview[int], offset: int) -> None:
    """All of it. Raises OSError."""
    data = data.cast("B")
    done = 0
    while done < len(data):
        count = os.pwrite(descriptor, data[done:], offset + done)
        if done + count < len(data):
            count -= count % PAGE  # direct writes begin at a page
        if count == 0:
            raise OSError(errno.ENOSPC, "nothing more can be written")
        done += count


def read(descriptor: int, target: memoryview[int], offset: int) -> int:
    """Bytes that were read: fewer than wanted where the file ends. Raises OSError."""
    target = target.cast("B")
    done = 0
    while done < len(target):
        count = os.preadv(descriptor, [target[done:]], offset + done)
        if count == 0:
            break
        done += count
        if done % PAGE:
            break
    return done
