"""Matrices of 12 bits in full for products of many rows, the next one while this one is multiplied.

cuBLAS multiplies plain matrices. Widening one is bound by memory and multiplying it by arithmetic, so both go at once:
there are two buffers of the largest matrix, and a second stream fills one while the other is read. Which matrix comes
next is what came next the last time; a first step, and whatever comes out of turn, is widened in order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from tandem_worker import kernels
from tandem_worker.kernels.quantized import SplitByteWeight

NUM_BUFFERS = 2


@dataclass(frozen=True, slots=True)
class Turn:
    """What one matrix needs."""

    buffer: int
    is_there: bool
    """Whether it was widened ahead to that buffer; otherwise it has to be now."""
    following: int | None
    """The matrix to widen to the other buffer meanwhile; None: nobody knows, or the step ends."""


class Turns:
    """Which buffer holds which matrix, and which one comes next. Matrices are numbers. Pure."""

    def __init__(self) -> None:
        self._held: list[int | None] = [None] * NUM_BUFFERS
        self._after: dict[int, int] = {}
        self._first: int | None = None
        self._last: int | None = None

    def take(self, matrix: int) -> Turn:
        """The turn of `matrix`. The product of the one before was asked for already."""
        if self._first is None:
            self._first = matrix
        if self._last is not None:
            self._after[self._last] = matrix
        held = matrix in self._held
        # The buffer that the product before reads is left alone by what is widened beside it.
        buffer = self._held.index(matrix) if held else self._other(self._last)
        self._held[buffer] = matrix
        self._last = matrix
        following = self._after.get(matrix)
        if following in {self._first, matrix}:
            following = None
        if following is not None and following not in self._held:
            self._held[1 - buffer] = following
            return Turn(buffer, held, following)
        return Turn(buffer, held, None)

    def _other(self, matrix: int | None) -> int:
        return 1 - self._held.index(matrix) if matrix is not None and matrix in self._held else 0


class Lane(Protocol):
    """The stream of work beside the stream that products are on."""

    def start(self, work: Callable[[], None]) -> Any:
        """`work` after everything that was asked for so far, beside what is asked for from now on."""
        ...

    def join(self, started: Any) -> None:
        """What is asked for from now on comes after what `start` returned this for."""
        ...


class InOrder:
    """Satisfies `Lane` where there is one stream."""

    def start(self, work: Callable[[], None]) -> None:
        work()

    def join(self, started: None) -> None:
        return None


class SideStream:
    """Satisfies `Lane` on a CUDA device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)

    def start(self, work: Callable[[], None]) -> torch.cuda.Event:
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            work()
            done = torch.cuda.Event()
            done.record(self._stream)
        return done

    def join(self, started: torch.cuda.Event) -> None:
        torch.cuda.current_stream(self._device).wait_event(started)


class WidenAhead:
    """The matrices of one model, numbered in the order of `weights`.

    Its two buffers are made when the first matrix is asked for, and stay.
    """

    def __init__(self, weights: Sequence[SplitByteWeight], lane: Lane) -> None:
        self._weights = weights
        self._lane = lane
        self._turns = Turns()
        self._buffers: list[torch.Tensor] = []
        self._started: list[Any] = [None] * NUM_BUFFERS

    def take(self, matrix: int, like: torch.Tensor) -> torch.Tensor:
        """Matrix `[N, K]` in the type of `like`, always the same; to be multiplied before the next one is asked for."""
        if _is_recorded(like.device):  # a recording has memory of its own
            return kernels.widen(like, self._weights[matrix])
        try:
            return self._take(matrix, like)
        except Exception:  # there was no memory, say: the buffers have not what the turns hold to be in them
            self._turns = Turns()
            raise

    def _take(self, matrix: int, like: torch.Tensor) -> torch.Tensor:
        turn = self._turns.take(matrix)
        self._join(turn.buffer)
        if not turn.is_there:
            self._widen(matrix, turn.buffer, like)
        following = turn.following
        if following is not None:
            other = 1 - turn.buffer
            self._join(other)
            self._started[other] = (self._lane.start(lambda: self._widen(following, other, like)),)
        return self._view(matrix, turn.buffer, like)

    def _join(self, buffer: int) -> None:
        started, self._started[buffer] = self._started[buffer], None
        if started is not None:
            self._lane.join(*started)

    def _widen(self, matrix: int, buffer: int, like: torch.Tensor) -> None:
        kernels.widen(like, self._weights[matrix], out=self._view(matrix, buffer, like))

    def _view(self, matrix: int, buffer: int, like: torch.Tensor) -> torch.Tensor:
        if not self._buffers:
            largest = max(2 * weight.low.numel() for weight in self._weights)
            self._buffers = [like.new_empty(largest) for _ in range(NUM_BUFFERS)]
        rows, columns = self._weights[matrix].shape
        return self._buffers[buffer][: rows * columns].view(rows, columns)


def _is_recorded(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()
