"""What a process offers of one model: chunks that it has, with their sums, and what it is about to get."""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from xxhash import xxh3_128_digest

from tandem_worker.host.files.layout import Layout
from tandem_worker.host.files.wire import GONE, MAX_IN_FLIGHT, UNKNOWN


@dataclass(frozen=True, slots=True)
class Offered:
    """The place of a chunk, and the XXH3-128 of its bytes when they were last known to be right."""

    fd: int
    offset: int
    size: int
    sum: bytes


class SharedFiles:
    """Any thread. Descriptors stay open for the life of the process, and so outlive a file's renaming."""

    def __init__(self, layout: Layout, paths: Mapping[int, Path]) -> None:
        """`paths`: of each file of the layout that has bytes, where it is now."""
        self.layout = layout
        self._paths = dict(paths)
        self._lock = threading.Lock()
        self._fds: dict[int, int] = {}
        self._sums: dict[int, bytes] = {}
        self._log: list[int] = []
        """Chunks in the order in which they came or went."""
        self._in_flight: frozenset[int] = frozenset()
        self.starting = False
        """This process fetches the model itself."""
        self.idle = False
        """It has nothing left to ask a hub for."""

    def add(self, index: int, digest: bytes = UNKNOWN) -> None:
        """A chunk is there. Without a sum it is computed when the chunk is first asked for."""
        with self._lock:
            self._sums[index] = digest
            self._log.append(index)

    def retract(self, index: int) -> None:
        """A chunk was not right."""
        with self._lock:
            if self._sums.pop(index, None) is not None:
                self._log.append(index)

    def move(self, file: int, path: Path) -> None:
        """Rename a file to where it is from now on. Raises OSError."""
        with self._lock:
            self._paths[file].replace(path)
            self._paths[file] = path

    def set_in_flight(self, chunks: frozenset[int]) -> None:
        """What this process is getting from the hub."""
        self._in_flight = chunks

    @property
    def in_flight(self) -> list[int]:
        """What this process is getting from the hub, as much of it as one answer may name."""
        return sorted(self._in_flight)[:MAX_IN_FLIGHT]

    def news(self, since: int) -> tuple[int, list[tuple[int, bytes]]]:
        """The version now, and what became of chunks since another: their sums, GONE for what is there no longer."""
        with self._lock:
            changed = dict.fromkeys(self._log[since:])
            return len(self._log), [(index, self._sums.get(index, GONE)) for index in changed]

    def locate(self, index: int) -> Offered | None:
        """None where the chunk is not there. Raises OSError where its file cannot be read."""
        with self._lock:
            digest = self._sums.get(index)
            if digest is None:
                return None
            chunk = self.layout.chunk(index)
            if (fd := self._fds.get(chunk.file)) is None:
                fd = self._fds[chunk.file] = os.open(self._paths[chunk.file], os.O_RDONLY | os.O_CLOEXEC)
        if digest == UNKNOWN:
            digest = xxh3_128_digest(os.pread(fd, chunk.size, chunk.offset))
            with self._lock:
                if self._sums.get(index) == UNKNOWN:
                    self._sums[index] = digest
        return Offered(fd, chunk.offset, chunk.size, digest)

    def close(self) -> None:
        """Offer nothing any more."""
        with self._lock:
            self._sums.clear()
            for fd in self._fds.values():
                os.close(fd)
            self._fds.clear()
