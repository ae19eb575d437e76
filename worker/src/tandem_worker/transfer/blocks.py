"""Bytes of KV blocks, as the transport reads and writes them.

On the CPU a block is sent from and received into the block space itself: no copy in between. On a GPU both directions
pass through pinned host memory: gathered blocks are copied out behind an event on the engine's stream, received ones
are copied in once their checksums are good.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol

from xxhash import xxh3_64_intdigest

from tandem_worker.transfer.base import KVLayout

if TYPE_CHECKING:
    import torch

    from tandem_worker.models.base import KVCache


class Views(NamedTuple):
    """The same bytes twice: block by block, and as few contiguous runs."""

    blocks: list[memoryview]
    spans: list[memoryview]


class BlockReader(Protocol):
    """One sender's view of the block space; used by one thread."""

    def views(self, layer: int, block_ids: Sequence[int], fence: object) -> Views:
        """Bytes of these blocks, valid until the next call."""
        ...


class BlockWriter(Protocol):
    """One receiver's view of the block space; used by one thread."""

    def views(self, layer: int, block_ids: Sequence[int]) -> Views:
        """Where the bytes of these blocks go, valid until `commit`."""
        ...

    def commit(self, layer: int, block_ids: Sequence[int], good: Sequence[bool]) -> None:
        """The good ones of the received blocks are to be in the block space when this returns."""
        ...


class BlockSpace:
    """Makes readers and writers for a `KVCache`."""

    def __init__(self, kv_cache: KVCache) -> None:
        self.layout = KVLayout.of(kv_cache.spec)
        self._layers = kv_cache.layers
        self._on_gpu = kv_cache.layers[0].is_cuda
        self._bytes = () if self._on_gpu else tuple(_host_bytes(layer) for layer in kv_cache.layers)

    def fence(self) -> object:
        """Called on the engine thread: marks the point of its stream at which the blocks just reported are written."""
        if not self._on_gpu:
            return None
        import torch

        event = torch.cuda.Event(blocking=True)
        event.record()
        return event

    def reader(self) -> BlockReader:
        if self._on_gpu:
            return _DeviceReader(self._layers, self.layout)
        return _HostBlocks(self._bytes, self.layout)

    def writer(self) -> BlockWriter:
        if self._on_gpu:
            return _DeviceWriter(self._layers, self.layout)
        return _HostBlocks(self._bytes, self.layout)


class _HostBlocks:
    """Reader and writer in one: the views are the block space."""

    def __init__(self, layers: Sequence[memoryview], layout: KVLayout) -> None:
        self._layers = layers
        self._block_bytes = layout.block_bytes

    def views(self, layer: int, block_ids: Sequence[int], fence: object = None) -> Views:
        size, space = self._block_bytes[layer], self._layers[layer]
        blocks = [space[block * size : (block + 1) * size] for block in block_ids]
        spans = [space[first * size : end * size] for first, end in contiguous_runs(block_ids)]
        return Views(blocks, spans)

    def commit(self, layer: int, block_ids: Sequence[int], good: Sequence[bool]) -> None:
        pass


class _DeviceReader:
    def __init__(self, layers: Sequence[torch.Tensor], layout: KVLayout) -> None:
        import torch

        self._layers, self._layout = layers, layout
        self._stream = torch.cuda.Stream(layers[0].device)
        self._staging: torch.Tensor | None = None

    def views(self, layer: int, block_ids: Sequence[int], fence: object) -> Views:
        import torch

        size = self._layout.block_bytes[layer]
        self._staging = staging = _pinned(self._staging, size * len(block_ids))
        source = self._layers[layer]
        with torch.inference_mode(), torch.cuda.stream(self._stream):
            if isinstance(fence, torch.cuda.Event):
                self._stream.wait_event(fence)
            index = torch.tensor(block_ids, device=source.device)
            gathered = source.index_select(0, index).reshape(-1).view(torch.uint8)
            staging[: gathered.numel()].copy_(gathered, non_blocking=True)
            _wait_without_spinning(self._stream)
        return _staged_views(staging, size, len(block_ids))


class _DeviceWriter:
    def __init__(self, layers: Sequence[torch.Tensor], layout: KVLayout) -> None:
        import torch

        self._layers, self._layout = layers, layout
        self._stream = torch.cuda.Stream(layers[0].device)
        self._staging: torch.Tensor | None = None

    def views(self, layer: int, block_ids: Sequence[int]) -> Views:
        size = self._layout.block_bytes[layer]
        self._staging = staging = _pinned(self._staging, size * len(block_ids))
        return _staged_views(staging, size, len(block_ids))

    def commit(self, layer: int, block_ids: Sequence[int], good: Sequence[bool]) -> None:
        import torch

        assert self._staging is not None, "commit follows views"
        rows = [row for row, intact in enumerate(good) if intact]
        if not rows:
            return
        target = self._layers[layer]
        received = self._staging[: self._layout.block_bytes[layer] * len(block_ids)]
        blocks = received.view(target.dtype).view(len(block_ids), *target.shape[1:])
        with torch.inference_mode(), torch.cuda.stream(self._stream):
            on_device = blocks.to(target.device, non_blocking=True)
            if len(rows) < len(block_ids):
                on_device = on_device[rows]
            index = torch.tensor([block_ids[row] for row in rows], device=target.device)
            target.index_copy_(0, index, on_device)
            _wait_without_spinning(self._stream)


def contiguous_runs(block_ids: Sequence[int]) -> list[tuple[int, int]]:
    """`[first, end)` of each run of neighbouring ids: `(4, 5, 9)` gives `(4, 6), (9, 10)`."""
    runs: list[tuple[int, int]] = []
    for block in block_ids:
        if runs and runs[-1][1] == block:
            runs[-1] = (runs[-1][0], block + 1)
        else:
            runs.append((block, block + 1))
    return runs


def _staged_views(staging: torch.Tensor, size: int, count: int) -> Views:
    view = staging.numpy().data
    return Views([view[i * size : (i + 1) * size] for i in range(count)], [view[: count * size]])


def _wait_without_spinning(stream: torch.cuda.Stream) -> None:
    import torch

    event = torch.cuda.Event(blocking=True)
    event.record(stream)
    event.synchronize()


def _pinned(buffer: torch.Tensor | None, num_bytes: int) -> torch.Tensor:
    """`buffer` when it is large enough, else a larger one. Frames are bounded, so this settles at once."""
    import torch

    if buffer is None or buffer.numel() < num_bytes:
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)
    return buffer


def _host_bytes(layer: torch.Tensor) -> memoryview:
    import torch

    assert layer.is_contiguous(), "a block is one contiguous run of bytes"
    return layer.view(torch.uint8).reshape(-1).numpy().data


def checksum(view: memoryview) -> int:
    return xxh3_64_intdigest(view)
