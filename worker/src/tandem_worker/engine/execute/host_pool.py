"""The bytes of blocks in host memory, each one piece over all layers, and the copies between them and the device's.

Copies go layer by layer: out behind everything that was launched before, in behind that, and out again behind what has
come in. What is launched later waits for a layer's copies before it reads or writes that layer (`before_layer`), so the
copy of layer N + 1 and the computation of layer N share the time. On a GPU each direction has a stream; on a CPU, where
there is nothing to share, a layer's copies are made when it is waited for.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol, cast

import numpy as np
import torch

from tandem_worker.engine.schedule.host_cache import Moves
from tandem_worker.host.memory import reserve_zeroed
from tandem_worker.host.uploads import upload
from tandem_worker.kernels import copy_rows
from tandem_worker.model.contract import KVCache

_MEASURED_BLOCKS = 32
_PORTABLE, _MAPPED = 1, 2
"""Flags of cudaHostRegister: for every context, and within the device's address space."""
_WORDS = ((8, torch.int64), (4, torch.int32), (2, torch.int16), (1, torch.uint8))


class Copies(Protocol):
    """One copy for each layer, in one direction."""

    @property
    def done(self) -> bool:
        """Whether all are made. Does not wait."""
        ...

    @property
    def seconds(self) -> float:
        """What they took, once they are done."""
        ...

    def reach(self, layer: int) -> None:
        """What is launched from now on is behind the copies up to this layer's."""
        ...

    def finish(self) -> None:
        """Return when all are made. Blocks the thread; any thread on a GPU, the engine's on a CPU."""
        ...


Submit = Callable[[Sequence[Callable[[], None]], "Copies | None"], Copies]
"""Have copies made, each behind the one of its layer of earlier ones, where there are any."""


class LateCopies:
    """On a CPU: made when they are waited for."""

    def __init__(self, copies: Sequence[Callable[[], None]], after: Copies | None) -> None:
        self._copies, self._after, self._made = copies, after, 0
        self.seconds = 0.0

    @property
    def done(self) -> bool:
        return self._made == len(self._copies)

    def reach(self, layer: int) -> None:
        if self._after is not None:
            self._after.reach(layer)
        began = time.perf_counter()
        while self._made <= min(layer, len(self._copies) - 1):
            self._copies[self._made]()
            self._made += 1
        self.seconds += time.perf_counter() - began
        if self.done:
            self._after = None

    def finish(self) -> None:
        self.reach(len(self._copies))


class StreamCopies:
    """On a GPU: made on a stream of its own, one event for each layer."""

    def __init__(self, stream: Any, copies: Sequence[Callable[[], None]], after: Copies | None, cuda: Any) -> None:
        self._cuda, self._copies = cuda, copies  # whose arguments the device still reads
        stream.wait_stream(cuda.current_stream())
        self._began = cuda.Event(enable_timing=True)
        self._began.record(stream)
        self._events: list[Any] = []
        with cuda.stream(stream):
            for layer, copy in enumerate(copies):
                if isinstance(after, StreamCopies):
                    stream.wait_event(after._events[layer])
                copy()
                event = cuda.Event(enable_timing=layer == len(copies) - 1, blocking=True)
                event.record(stream)
                self._events.append(event)

    @property
    def done(self) -> bool:
        return self._events[-1].query()

    @property
    def seconds(self) -> float:
        return self._began.elapsed_time(self._events[-1]) / 1000

    def reach(self, layer: int) -> None:
        self._cuda.current_stream().wait_event(self._events[min(layer, len(self._events) - 1)])

    def finish(self) -> None:
        self._events[-1].synchronize()


def open_direction(device: torch.device, cuda: Any = torch.cuda) -> Submit:
    """Copies of one direction, for a cache on this device. `cuda`: what stands in for `torch.cuda` where there is no
    device."""
    if device.type != "cuda":
        return LateCopies
    stream = cuda.Stream(device)
    return lambda copies, after: StreamCopies(stream, copies, after, cuda)


class HostPool:
    """On the engine thread. Raises MemoryError where the system has no such memory, and what the device raises."""

    def __init__(self, kv_cache: KVCache, num_blocks: int, directions: tuple[Submit, Submit] | None = None) -> None:
        """`num_blocks`: block 0 included. `directions`: out and in; None: those of the cache's device."""
        self._device = kv_cache.layers[0].device
        self.num_blocks = num_blocks
        self.layer_bytes = tuple(layer[0].numel() * layer.element_size() for layer in kv_cache.layers)
        word, dtype = next(each for each in _WORDS if not math.gcd(*self.layer_bytes) % each[0])
        self._widths = [size // word for size in self.layer_bytes]
        self._columns = [sum(self._widths[:index]) for index in range(len(self._widths))]
        self._layers = [layer.view(layer.shape[0], -1).view(dtype) for layer in kv_cache.layers]
        memory = reserve_zeroed(num_blocks * sum(self.layer_bytes))
        self.rows = torch.frombuffer(memory, dtype=torch.uint8).view(num_blocks, -1)
        """`[num_blocks, bytes]`: every layer of a block one after another."""
        self._words = self.rows.view(dtype)
        if self._device.type == "cuda":
            # Not torch's own pinned memory: that comes in powers of two, up to twice what was planned.
            runtime, flags = cast(Any, torch.cuda.cudart()), _PORTABLE | _MAPPED
            torch.cuda.check_error(int(runtime.cudaHostRegister(self.rows.data_ptr(), self.rows.nbytes, flags)))
        self._submit_out, self._submit_in = directions or (open_direction(self._device), open_direction(self._device))
        self._pending: list[Copies] = []
        """Those that the engine has not waited for in every layer."""
        self._out: Copies | None = None
        self._in: Copies | None = None
        """The last ones of each direction: those before them are made earlier."""
        self._untimed: tuple[deque[Copies], deque[Copies]] = deque(), deque()
        self._seconds = [0.0, 0.0]

    def launch(self, moves: Moves) -> None:
        """Copy out, then in, layer by layer, behind all that was launched before. Nothing is waited for."""
        layers = range(len(self._layers))
        if moves.out:
            pairs = self._upload(moves.out)
            self._out = self._submit_out([partial(self._copy_out, pairs, layer) for layer in layers], self._in)
            self._untimed[0].append(self._out)
            self._pending.append(self._out)
        if moves.into:
            pairs = self._upload(moves.into)
            self._in = self._submit_in([partial(self._copy_in, pairs, layer) for layer in layers], self._out)
            self._untimed[1].append(self._in)
            self._pending.append(self._in)

    def before_layer(self, layer: int) -> None:
        """What is launched from now on finds this layer of all that was fetched, and overwrites nothing of it that is
        on its way out."""
        for copies in self._pending:
            copies.reach(layer)
        if layer == len(self._layers) - 1:
            self._pending.clear()

    @property
    def is_pending(self) -> bool:
        """Whether `before_layer` has something to wait for."""
        return bool(self._pending)

    def await_all(self) -> None:
        """As `before_layer`, of every layer."""
        for copies in self._pending:
            copies.reach(len(self._layers) - 1)
        self._pending.clear()

    def settle(self) -> None:
        """Return when all copies are made: others than the engine's steps may read and write what they concern."""
        self.await_all()
        for copies in (self._out, self._in):
            if copies is not None:
                copies.finish()

    def count_seconds(self) -> tuple[float, float]:
        """Seconds that the copies took which are made by now: out, and in."""
        for direction, untimed in enumerate(self._untimed):
            while untimed and untimed[0].done:
                self._seconds[direction] += untimed.popleft().seconds
        return self._seconds[0], self._seconds[1]

    def fence(self) -> object:
        """For `wait`: behind all copies to the host that were launched."""
        if isinstance(self._out, LateCopies):
            self._out.finish()  # nobody else may
        return self._out

    @staticmethod
    def wait(fence: object) -> None:
        """Return when the host has what was on its way at the fence. Any thread."""
        if isinstance(fence, (LateCopies, StreamCopies)):
            fence.finish()

    def measure_fetch_seconds(self) -> float:
        """Seconds in which a block comes in. Copies blocks onto themselves: to be called while no step is under way."""
        count = min(_MEASURED_BLOCKS, self.num_blocks, self._layers[0].shape[0]) - 1
        blocks = range(1, count + 1)
        seconds = 0.0
        for _ in range(2):  # the first time touches memory that the second one only copies
            self.launch(Moves(out=tuple(zip(blocks, blocks, strict=True)), into=()))
            self.settle()
            began = time.perf_counter()
            self.launch(Moves(out=(), into=tuple(zip(blocks, blocks, strict=True))))
            self.settle()
            seconds = time.perf_counter() - began
        return seconds / count

    def _copy_out(self, pairs: torch.Tensor, layer: int) -> None:
        copy_rows(pairs, self._layers[layer], 0, self._words, self._columns[layer], self._widths[layer])

    def _copy_in(self, pairs: torch.Tensor, layer: int) -> None:
        copy_rows(pairs, self._words, self._columns[layer], self._layers[layer], 0, self._widths[layer])

    def _upload(self, pairs: Sequence[tuple[int, int]]) -> torch.Tensor:
        return upload(np.array(pairs, dtype=np.int64), self._device)
