"""Large tensors on their way from their files to a GPU: threads read pieces into pinned memory, and copies are launched
from there beside whatever else the device does.

Copying from mapped files keeps one thread busy with page faults and copies of copies. Here a tensor is handed out
before it is filled, so that the files are read at a stretch, in the order in which tensors are asked for. Whoever
computes with one waits for all of them: while they are under way, every operation is looked at on its way to torch.
Kernels that are launched past torch are not seen: `settle` comes before those.
"""

from __future__ import annotations

import logging
import mmap
import os
import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, Self, cast

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tandem_worker.host.errors import StartupError
from tandem_worker.model.checkpoint.header import LENGTH, HeaderError, header_length, parse_header
from tandem_worker.model.checkpoint.stored import BF16, F16, F32, Slice, Stored

logger = logging.getLogger(__name__)

PIECE = 16 << 20
"""Bytes that are read at a stretch: the interpreter is needed once or twice for each."""
LEAST = 1 << 20
"""Bytes of a tensor below which copying it at once takes less than telling others to."""
_BUFFERS = 2
"""Of each reader: one is filled while the other is copied from."""
_MOST_READERS = 8
"""One reads 5 to 8 GB/s of what is in the page cache, and a bus takes 50."""
_KINDS = {F32: torch.float32, F16: torch.float16, BF16: torch.bfloat16}


class Copies(Protocol):
    """One reader's way to the device. Made and used on its thread, but for `settle` and `close`."""

    buffers: Sequence[np.ndarray]
    """Bytes in host memory."""

    def launch(self, target: torch.Tensor, number: int, after: Any) -> None:
        """Fill the bytes `target` out of a buffer's first ones, after what `after` stands for."""
        ...

    def wait(self, number: int) -> None:
        """Until a buffer may be written to again."""
        ...

    def settle(self) -> None:
        """Until everything that was launched is there."""
        ...

    def close(self) -> None:
        """Give the buffers back; nothing is launched from them any more."""
        ...


class CudaCopies:
    """On a stream of its own, out of memory that is pinned."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)
        self._done = [torch.cuda.Event(blocking=True) for _ in range(_BUFFERS)]
        whole = np.frombuffer(mmap.mmap(-1, _BUFFERS * PIECE), np.uint8)
        self._address, self._runtime = whole.ctypes.data, cast(Any, torch.cuda.cudart())
        torch.cuda.check_error(int(self._runtime.cudaHostRegister(self._address, whole.nbytes, 0)))
        self.buffers: Sequence[np.ndarray] = np.split(whole, _BUFFERS)

    def launch(self, target: torch.Tensor, number: int, after: torch.cuda.Event) -> None:
        """As `Copies` says; `after` is an event."""
        with torch.cuda.stream(self._stream):
            self._stream.wait_event(after)
            target.copy_(torch.from_numpy(self.buffers[number][: target.nbytes]), non_blocking=True)
            self._done[number].record(self._stream)

    def wait(self, number: int) -> None:
        """As `Copies` says."""
        self._done[number].synchronize()

    def settle(self) -> None:
        """As `Copies` says."""
        self._stream.synchronize()

    def close(self) -> None:
        """As `Copies` says."""
        torch.cuda.check_error(int(self._runtime.cudaHostUnregister(self._address)))


def open_uploads(device: torch.device) -> Uploads:
    """The way onto a GPU, with as many readers as torch has threads, within reason."""

    def mark() -> torch.cuda.Event:
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(device))
        return event

    readers = max(2, min(_MOST_READERS, torch.get_num_threads()))
    return Uploads(lambda: CudaCopies(device), num_readers=readers, mark=mark)


@dataclass(frozen=True, slots=True)
class Span:
    """Bytes of a file."""

    start: int
    size: int

    def cut(self, most: int) -> Iterator[Span]:
        """Pieces of at most `most` bytes, in their order."""
        for start in range(self.start, self.start + self.size, most):
            yield Span(start, min(most, self.start + self.size - start))


def find_span(shape: Sequence[int], piece: Slice | None, whole: Span) -> Span | None:
    """What is taken of a tensor of that shape, which lies at `whole`; None where it has gaps."""
    if piece is None:
        return whole
    if piece.dim or not shape[0]:
        return None
    row = whole.size // shape[0]
    return Span(whole.start + piece.start * row, (piece.stop - piece.start) * row)


class _File:
    """A file that is read by several threads."""

    def __init__(self, path: Path) -> None:
        """Raises StartupError."""
        self._path = path
        try:
            self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise _unreadable(error) from error
        self.spans = self._list_spans()

    def _list_spans(self) -> dict[str, Span]:
        """Where each tensor lies; nothing where the header is not as it should be, for others to say why."""
        size = os.fstat(self._fd).st_size
        try:
            length = header_length(os.pread(self._fd, LENGTH, 0), size)
            first = LENGTH + length
            header = parse_header(os.pread(self._fd, length, LENGTH), size - first)
        except (OSError, HeaderError):
            return {}
        return {entry.name: Span(first + entry.start, entry.nbytes) for entry in header.entries}

    def read(self, span: Span, into: np.ndarray) -> None:
        """Fill the first bytes of `into`. Raises StartupError."""
        view, count = into.data, 0
        while count < span.size:
            try:
                got = os.preadv(self._fd, [view[count : span.size]], span.start + count)
            except OSError as error:
                raise _unreadable(error) from error
            if not got:
                raise StartupError(
                    "WeightsCorrupt",
                    f"{self._path.name} is not a complete safetensors file (it ends at byte {span.start + count}). "
                    "Download the model again.",
                )
            count += got

    def close(self) -> None:
        os.close(self._fd)


@dataclass(frozen=True, slots=True)
class _Piece:
    file: _File
    span: Span
    target: torch.Tensor
    after: Any


class Uploads(TorchDispatchMode):
    """Entered while a model is loaded, on the loading thread; it is left when all that was begun is there."""

    def __init__(
        self,
        open_copies: Callable[[], Copies],
        *,
        num_readers: int,
        mark: Callable[[], Any] = lambda: None,
        piece: int = PIECE,
        least: int = LEAST,
    ) -> None:
        """`mark` stands for what the device was given so far. `piece`: no longer than a buffer."""
        super().__init__()
        self._open_copies, self._mark, self._piece, self._least = open_copies, mark, piece, least
        self._queue: queue.SimpleQueue[_Piece | None] = queue.SimpleQueue()
        self._files: dict[Path, _File] = {}
        self._copies: list[Copies] = []
        self._filling: dict[int, torch.Tensor] = {}
        """Tensors that are not filled yet, by the address of their storage: none is given back until then."""
        self._changed = threading.Condition()
        self._under_way = 0
        self._error: BaseException | None = None
        self._began = self._waited = 0.0
        self._bytes = 0
        self._threads = [
            threading.Thread(target=self._run, name=f"weights-{number}", daemon=True) for number in range(num_readers)
        ]
        for thread in self._threads:
            thread.start()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Nothing is compiled here; the default, True, imports all of torch's compiler."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self._filling and not func.is_view and any(map(self._is_filling, tree_leaves((args, kwargs)))):
            self.settle()
        return func(*args, **(kwargs or {}))

    def _is_filling(self, leaf: Any) -> bool:
        return isinstance(leaf, torch.Tensor) and leaf.untyped_storage().data_ptr() in self._filling

    def fill(self, target: torch.Tensor, stored: Stored, piece: Slice | None) -> bool:
        """Begin to fill `target`, which is contiguous, with a matrix or a piece of it. False: it must be copied, for it
        is small, has gaps, is of another type, or lies in no file as it is.

        Raises StartupError where a file cannot be read, this one or an earlier one.
        """
        if self._error is not None:
            self.settle()
        if stored.place is None or _KINDS.get(stored.kind) is not target.dtype or target.nbytes < self._least:
            return False
        path, name = stored.place
        if path not in self._files:
            self._files[path] = _File(path)
        file = self._files[path]
        whole = file.spans.get(name)
        if whole is None or whole.size != stored.num_bytes:
            return False
        span = find_span((stored.rows, stored.columns), piece, whole)
        if span is None or span.size != target.nbytes:
            return False
        self._filling[target.untyped_storage().data_ptr()] = target
        flat, after, pieces = target.view(-1).view(torch.uint8), self._mark(), list(span.cut(self._piece))
        self._began = self._began or time.perf_counter()
        with self._changed:
            self._under_way += len(pieces)
        for each in pieces:
            first = each.start - span.start
            self._queue.put(_Piece(file, each, flat[first : first + each.size], after))
        self._bytes += span.size
        return True

    def settle(self) -> None:
        """Wait until everything is there that was begun. Raises StartupError where a file cannot be read, and what the
        device raises."""
        began = time.perf_counter()
        with self._changed:
            self._changed.wait_for(lambda: self._error is not None or not self._under_way)
        if self._error is not None:
            raise self._error
        for copies in self._copies:
            copies.settle()
        self._filling.clear()
        self._waited += time.perf_counter() - began

    def _run(self) -> None:
        try:
            with torch.inference_mode():
                copies = self._open_copies()
                with self._changed:
                    self._copies.append(copies)
                self._serve(copies)
        except BaseException as error:
            with self._changed:
                self._error = self._error or error
                self._changed.notify_all()

    def _serve(self, copies: Copies) -> None:
        number = 0
        while (piece := self._queue.get()) is not None and self._error is None:
            copies.wait(number)
            piece.file.read(piece.span, copies.buffers[number])
            copies.launch(piece.target, number, piece.after)
            number = (number + 1) % len(copies.buffers)
            with self._changed:
                self._under_way -= 1
                self._changed.notify_all()

    def __enter__(self) -> Self:
        super().__enter__()
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        super().__exit__(kind, error, trace)
        try:
            if error is None:
                self.settle()
                self._tell()
        finally:
            self._close()

    def _tell(self) -> None:
        if not self._bytes:
            return
        seconds = time.perf_counter() - self._began
        logger.info(
            "weights are on the device",
            extra={
                "bytes": self._bytes, "seconds": round(seconds, 3), "gb_per_s": round(self._bytes / seconds / 1e9, 1),
                "waited_for": round(self._waited, 3), "readers": len(self._threads),
            },
        )  # fmt: skip

    def _close(self) -> None:
        """End the readers: what they have begun is dropped where something failed."""
        self._error = self._error or RuntimeError("the weights' readers have ended")
        for _ in self._threads:
            self._queue.put(None)
        for thread in self._threads:
            thread.join()
        for copies in self._copies:
            copies.settle()
            copies.close()
        for file in self._files.values():
            file.close()
        self._filling.clear()


def _unreadable(error: OSError) -> StartupError:
    return StartupError("WeightsUnreadable", f"A file of the model cannot be read: {error}.")
