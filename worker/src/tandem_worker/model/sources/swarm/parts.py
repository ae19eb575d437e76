"""Files that arrive in chunks of any order: FOLDER/.parts/NAME.part, and NAME.sums beside it.

A sum is written after its chunk. Whoever takes over from a killed process believes a chunk whose sum is the one written
down, and fetches the others: no order of writes is relied upon. Sums stay when a file is complete; those who serve it
tell them to others, so what storage damages later is noticed before it is believed.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import threading
from collections.abc import Iterator
from pathlib import Path

from xxhash import xxh3_128_digest

from tandem_worker.host.files.layout import Layout

PARTS = ".parts"
_SUM_BYTES = 16


class PartFiles:
    """Any thread, for different chunks."""

    def __init__(self, layout: Layout, folder: Path) -> None:
        """Raises OSError when the folder cannot be written to."""
        self._layout, self._folder = layout, folder
        self._home = folder / PARTS
        self._home.mkdir(exist_ok=True)
        self._fds: dict[int, tuple[int, int]] = {}
        """Descriptors of a file's bytes and of its sums."""
        self._lock = threading.Lock()
        self._writers, self._closed = 0, False

    def target(self, file: int) -> Path:
        """The file's path when it is complete."""
        return self._folder / self._layout.files[file].path

    def sums_of_target(self, file: int) -> Iterator[tuple[int, bytes]]:
        """Every chunk of a file that is complete, and its sum. Raises OSError."""
        with self.target(file).open("rb") as source:
            for index in self._layout.chunks_of(file):
                source.seek(self._layout.chunk(index).offset)
                yield index, xxh3_128_digest(source.read(self._layout.chunk(index).size))

    def part(self, file: int) -> Path:
        """Its path until it is complete."""
        return self._home / f"{_name(self._layout, file)}.part"

    def resume(self, file: int) -> Iterator[tuple[int, bytes]]:
        """Open a part; the chunks that an earlier process has left there, and their sums. Raises OSError."""
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
        fd = os.open(self.part(file), flags, 0o644)
        sums = os.open(self._sums_path(file), flags, 0o644)
        self._fds[file] = fd, sums
        os.ftruncate(fd, self._layout.files[file].size)
        for place, index in enumerate(self._layout.chunks_of(file)):
            known = os.pread(sums, _SUM_BYTES, place * _SUM_BYTES)
            if len(known) == _SUM_BYTES and any(known):
                chunk = self._layout.chunk(index)
                if xxh3_128_digest(os.pread(fd, chunk.size, chunk.offset)) == known:
                    yield index, known

    def write(self, index: int, data: memoryview | bytes | bytearray, digest: bytes) -> None:
        """Nothing after `close`. Raises OSError."""
        with self._lock:
            if self._closed:
                return
            self._writers += 1
        try:
            self._write(index, data, digest)
        finally:
            with self._lock:
                self._writers -= 1
                self._close_unused()

    def _write(self, index: int, data: memoryview | bytes | bytearray, digest: bytes) -> None:
        chunk = self._layout.chunk(index)
        fd, sums = self._fds[chunk.file]
        view, offset = memoryview(data), chunk.offset
        while view:
            count = os.pwrite(fd, view, offset)
            view, offset = view[count:], offset + count
        os.pwrite(sums, digest, (index - self._layout.chunks_of(chunk.file).start) * _SUM_BYTES)

    def close(self) -> None:
        """Write no more. Descriptors are closed when no thread writes to them: their numbers may go to others."""
        with self._lock:
            self._closed = True
            self._close_unused()

    def _close_unused(self) -> None:
        if self._closed and not self._writers:
            for pair in self._fds.values():
                for fd in pair:
                    os.close(fd)
            self._fds.clear()

    def _sums_path(self, file: int) -> Path:
        return self._home / f"{_name(self._layout, file)}.sums"


def read_sums(layout: Layout, folder: Path, file: int) -> list[bytes] | None:
    """The sums that were kept of a complete file; None where they were not."""
    num_chunks = len(layout.chunks_of(file))
    with contextlib.suppress(OSError):
        text = (folder / PARTS / f"{_name(layout, file)}.sums").read_bytes()
        if len(text) == num_chunks * _SUM_BYTES:
            return [text[place : place + _SUM_BYTES] for place in range(0, len(text), _SUM_BYTES)]
    return None


def _name(layout: Layout, file: int) -> str:
    """The name of a part: files in folders, and of other digests, have others."""
    entry = layout.files[file]
    text = f"{entry.path} {entry.size} {entry.digest} {layout.chunk_bytes}"
    return hashlib.sha256(text.encode()).hexdigest()[:32]
