"""Bytes of files on their way to addresses of a device: threads read pieces into pinned memory, and have them copied.

One thread that copies from a mapped file is kept busy by page faults and by copies of copies. The interpreter is needed
for a moment before and after each piece, so that all of this goes on beside threads that import or compute. No torch.
"""

from __future__ import annotations

import contextlib
import os
import queue
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from tandem_worker.host.errors import StartupError
from tandem_worker.model.checkpoint.header import LENGTH, Header, HeaderError, header_length, parse_header

PIECE = 16 << 20
"""Bytes that are read at a stretch."""
MOST_READERS = 8
"""One reads 5 to 8 GB/s of what is in the page cache, and a bus takes 50."""


class Lane(Protocol):
    """One reader's way to the device."""

    buffer: memoryview

    def carry(self, address: int, size: int) -> None:
        """Copy the buffer's first bytes to the device; they are there when this returns."""
        ...


@dataclass(frozen=True, slots=True)
class Span:
    """Bytes of a file."""

    start: int
    size: int

    def cut(self, most: int) -> Iterator[Span]:
        """Pieces of at most `most` bytes, in their order."""
        for start in range(self.start, self.start + self.size, most):
            yield Span(start, min(most, self.start + self.size - start))


class WeightFile:
    """A safetensors file that is read by several threads."""

    def __init__(self, path: Path) -> None:
        """Raises StartupError where it cannot be opened."""
        self.path = path
        try:
            self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise _unreadable(error) from error
        self.first, self.header = self._read_header()
        self.spans = {
            entry.name: Span(self.first + entry.start, entry.nbytes)
            for entry in (() if self.header is None else self.header.entries)
        }
        """Places of tensors, by their names."""

    def _read_header(self) -> tuple[int, Header | None]:
        """The place where data begins, and the header; None if it is not as it should be, for others to say why."""
        try:
            size = os.fstat(self._fd).st_size
            length = header_length(os.pread(self._fd, LENGTH, 0), size)
            first = LENGTH + length
            return first, parse_header(os.pread(self._fd, length, LENGTH), size - first)
        except (OSError, HeaderError):
            return 0, None

    def read(self, span: Span, into: memoryview) -> None:
        """Fill the first bytes of `into`. Raises StartupError."""
        count = 0
        while count < span.size:
            try:
                got = os.preadv(self._fd, [into[count : span.size]], span.start + count)
            except OSError as error:
                raise _unreadable(error) from error
            if not got:
                raise StartupError(
                    "WeightsCorrupt",
                    f"{self.path.name} is not a complete safetensors file (it ends at byte {span.start + count}). "
                    "Download the model again.",
                )
            count += got

    def close(self) -> None:
        """Nothing is read any more."""
        os.close(self._fd)


@dataclass(frozen=True, slots=True)
class _Piece:
    file: WeightFile
    span: Span
    address: int


class Carriers:
    """Threads that carry what they are given, in that order."""

    def __init__(
        self, open_lane: Callable[[int], AbstractContextManager[Lane]], num_readers: int, piece: int = PIECE
    ) -> None:
        """`open_lane` is given the bytes of a buffer, on the thread that uses the lane."""
        self._open_lane, self._size = open_lane, piece
        self._queue: queue.SimpleQueue[_Piece | None] = queue.SimpleQueue()
        self._changed = threading.Condition()
        self._under_way = 0
        self._ended = False
        self._error: BaseException | None = None
        self.num_bytes, self.waited = 0, 0.0
        """Bytes that were given, and seconds in which they were waited for."""
        self.threads = [
            threading.Thread(target=self._run, name=f"weights-{number}", daemon=True) for number in range(num_readers)
        ]
        for thread in self.threads:
            thread.start()

    def carry(self, file: WeightFile, span: Span, address: int) -> None:
        """Begin to fill the device's memory at `address`. Nobody frees it before `settle` or `close` returns."""
        pieces = list(span.cut(self._size))
        with self._changed:
            self._under_way += len(pieces)
        for each in pieces:
            self._queue.put(_Piece(file, each, address + each.start - span.start))
        self.num_bytes += span.size

    def check(self) -> None:
        """Raises what a reader has failed with."""
        if self._error is not None:
            raise self._error

    def settle(self) -> None:
        """Wait until everything is there that was begun. Raises StartupError where a file cannot be read, and what the
        device raises."""
        began = time.perf_counter()
        with self._changed:
            self._changed.wait_for(lambda: self._error is not None or not self._under_way)
        self.waited += time.perf_counter() - began
        self.check()

    def close(self) -> None:
        """End the readers; what is still to be carried is dropped."""
        self._ended = True
        for _ in self.threads:
            self._queue.put(None)
        for thread in self.threads:
            thread.join()
        self._error = None  # its frames hold this, and memory of the device

    def describe(self, seconds: float) -> dict[str, float]:
        """For the log: what was carried in so many seconds."""
        rate = round(self.num_bytes / max(seconds, 1e-9) / 1e9, 1)
        figures = {"bytes": self.num_bytes, "seconds": round(seconds, 3), "gb_per_s": rate}
        return figures | {"waited_for": round(self.waited, 3), "readers": len(self.threads)}

    def _run(self) -> None:
        try:
            with self._open_lane(self._size) as lane:
                while (piece := self._queue.get()) is not None and not self._ended and self._error is None:
                    piece.file.read(piece.span, lane.buffer)
                    lane.carry(piece.address, piece.span.size)
                    with self._changed:
                        self._under_way -= 1
                        if not self._under_way:
                            self._changed.notify_all()
        except BaseException as error:
            with self._changed:
                self._error = self._error or error
                self._changed.notify_all()


@contextlib.contextmanager
def opened(paths: list[Path]) -> Iterator[list[WeightFile]]:
    """Files, closed at the end. Raises StartupError."""
    with contextlib.ExitStack() as stack:
        files = []
        for path in paths:
            files.append(WeightFile(path))
            stack.callback(files[-1].close)
        yield files


def _unreadable(error: OSError) -> StartupError:
    return StartupError("WeightsUnreadable", f"A file of the model cannot be read: {error}.")
