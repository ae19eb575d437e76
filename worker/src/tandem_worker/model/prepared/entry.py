"""The file of one entry: the payload from its first byte on, a sum for each chunk of it, and a trailer.

    payload            `size` bytes
    sums               XXH64 of each chunk, 8 bytes each, little-endian
    trailer            64 bytes: what kind of file this is, the sizes, and a sum of name, sums and trailer

What a trailer says is believed when it agrees with the size of the file and with its own sum, so no length that was
not checked is ever allocated. The sum tells damage, not a forger: whoever may write here may write the model too.
"""

from __future__ import annotations

import os
import stat
import struct
from dataclasses import dataclass
from pathlib import Path

from xxhash import xxh64

from tandem_worker.host.errors import WorkerError

CHUNK = 4 << 20
"""Bytes under one sum."""
_MAGIC = b"tandem prepared\0"
_VERSION = 1
_TRAILER = struct.Struct("<16sIIQQ16x8s")  # magic, version, bytes of a chunk, bytes of payload, chunks, sum
_SUM = 8
assert _TRAILER.size == 64


class DamagedError(WorkerError):
    """An entry is not what was written. The message says how that was seen."""


def num_chunks(size: int) -> int:
    """Chunks of a payload of `size` bytes."""
    return -(-size // CHUNK)


def file_size(size: int) -> int:
    """Bytes of the file that holds a payload of `size` bytes."""
    return size + num_chunks(size) * _SUM + _TRAILER.size


def make_tail(name: str, size: int, sums: bytes) -> bytes:
    """What follows the payload of the entry `name`."""
    head = _TRAILER.pack(_MAGIC, _VERSION, CHUNK, size, num_chunks(size), b"")[:-_SUM]
    return sums + head + xxh64(name.encode() + b"\0" + sums + head).digest()


@dataclass(frozen=True, slots=True)
class Entry:
    """An entry that is open for reading. Its payload is not checked yet; `sums` are."""

    name: str
    path: Path
    descriptor: int
    size: int
    """Bytes of payload, from the file's start."""
    sums: bytes
    """XXH64 of each `CHUNK` bytes of the payload, 8 little-endian bytes each."""

    def close(self) -> None:
        """Close the file."""
        os.close(self.descriptor)

    def read(self) -> bytes:
        """The payload, checked. Raises DamagedError, and OSError when it cannot be read."""
        payload = bytearray(self.size)
        view = memoryview(payload)
        for index, start in enumerate(range(0, self.size, CHUNK)):
            chunk = view[start : start + CHUNK]
            _fill(self.descriptor, chunk, start)
            self.check(index, chunk)
        return bytes(payload)

    def check(self, index: int, chunk: memoryview) -> None:
        """Raises DamagedError when `chunk` is not what was written as the one of that `index`."""
        if sum_of(xxh64(chunk)) != self.sums[index * _SUM : (index + 1) * _SUM]:
            raise DamagedError(f"chunk {index} does not have the sum that was written with it")


def sum_of(hashed: xxh64) -> bytes:
    """A sum as it stands in the file."""
    return hashed.digest()[::-1]


def open_entry(path: Path, name: str, limit: int) -> Entry:
    """Raises FileNotFoundError where there is none, DamagedError for a file that is none of `name` or has a payload of
    more than `limit` bytes, OSError for one that cannot be read."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        size, sums = _read_tail(descriptor, name, limit)
    except BaseException:
        os.close(descriptor)
        raise
    return Entry(name, path, descriptor, size, sums)


def _read_tail(descriptor: int, name: str, limit: int) -> tuple[int, bytes]:
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode):
        raise DamagedError("it is not a file")
    trailer = bytearray(_TRAILER.size)
    _fill(descriptor, memoryview(trailer), status.st_size - _TRAILER.size)
    magic, version, chunk, size, count, _ = _TRAILER.unpack(trailer)
    if (magic, version, chunk) != (_MAGIC, _VERSION, CHUNK):
        raise DamagedError("it does not end as an entry does")
    if count != num_chunks(size) or file_size(size) != status.st_size:
        raise DamagedError(f"it has {status.st_size} bytes, which are not those of a payload of {size}")
    if size > limit:
        raise DamagedError(f"its payload of {size} bytes is larger than an entry may be ({limit})")
    sums = bytearray(count * _SUM)
    _fill(descriptor, memoryview(sums), size)
    if make_tail(name, size, bytes(sums)) != sums + trailer:
        raise DamagedError("its sums are not those that were written under this name")
    return size, bytes(sums)


def _fill(descriptor: int, target: memoryview, offset: int) -> None:
    """Raises DamagedError where the file has no such bytes."""
    if offset < 0:
        raise DamagedError("it is shorter than any entry")
    while target:
        count = os.preadv(descriptor, [target], offset)
        if not count:
            raise DamagedError("it has become shorter while it was read")
        target, offset = target[count:], offset + count
