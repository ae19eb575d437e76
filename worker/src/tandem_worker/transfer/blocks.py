"""Bytes of KV blocks, as the transport reads and writes them.

On the CPU a block, or a slice of it, is sent from and received into the block space itself: no copy in between. On a
GPU both directions pass through pinned host memory: gathered blocks are copied out behind an event on the engine's
stream, received ones are copied in once their checksums are good. Layers are numbered as in the whole model.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol

from tandem_worker.transfer.layout import KVLayout, KVShard
from tandem_worker.transfer.slicing import Piece, Slices, locate

if TYPE_CHECKING:
    import torch

    from tandem_worker.model.contract import KVCache


class Views(NamedTuple):
    """The same bytes twice: block by block, each in its runs, and as few contiguous runs."""

    blocks: list[tuple[memoryview, ...]]
    spans: list[memoryview]


class BlockReader(Protocol):
    """One sender's view of the block space; used by one thread."""

    def views(self, layer: int, block_ids: Sequence[int], fence: object) -> Views:
        """Bytes of these blocks, valid until the next call."""
        ...


class BlockWriter(Protocol):
    """One receiver's view of the block space; used by one thread."""

    def views(self, layer: int, block_ids: Sequence[int]) -> Views:
        """The memory that the bytes of these blocks go to, valid until `commit`."""
        ...

    def commit(self, layer: int, block_ids: Sequence[int], good: Sequence[bool]) -> None:
        """The good ones of the received blocks are to be in the block space when this returns."""
        ...


class BlockSpace:
    """Makes readers and writers for a `KVCache`.

    In a group `shard` says which part of the blocks of `layout` this rank's cache holds; without them it holds all.
    Raises ValueError when the cache is not that part.
    """

    def __init__(self, kv_cache: KVCache, shard: KVShard | None = None, layout: KVLayout | None = None) -> None:
        share = KVLayout.of(kv_cache.spec)
        self.layout = layout or share
        self.shard = shard or self.layout.whole_shard
        if self.layout.share(self.shard) != share:
            raise ValueError(f"a cache of {share.fingerprint} does not hold {self.shard} of {self.layout.fingerprint}")
        self._layers = kv_cache.layers
        self._on_gpu = kv_cache.layers[0].is_cuda
        self._bytes = () if self._on_gpu else tuple(_host_bytes(layer) for layer in kv_cache.layers)

    @property
    def num_slots(self) -> int:
        """Tokens for which there is room: no prompt can be longer."""
        return (self._layers[0].shape[0] - 1) * self.layout.block_size

    def locate(self, slices: Slices) -> dict[int, Piece]:
        """Find where these slices lie in this rank's blocks."""
        return locate(self.layout, self.shard, slices)

    def fence(self) -> object:
        """Called on the engine thread: marks the point of its stream at which the blocks just reported are written."""
        if not self._on_gpu:
            return None
        import torch

        event = torch.cuda.Event(blocking=True)
        event.record()
        return event

    def reader(self, pieces: Mapping[int, Piece]) -> BlockReader:
        """A reader of these pieces (by layer) of the cache's blocks, for what a peer is sent."""
        return _DeviceReader(self._layers, pieces) if self._on_gpu else _HostBlocks(self._bytes, pieces)

    def writer(self, pieces: Mapping[int, Piece]) -> BlockWriter:
        """A writer of these pieces (by layer) of the cache's blocks, for what a peer sends."""
        return _DeviceWriter(self._layers, pieces) if self._on_gpu else _HostBlocks(self._bytes, pieces)


class _HostBlocks:
    """Reader and writer in one: the views are the block space."""

    def __init__(self, layers: Sequence[memoryview], pieces: Mapping[int, Piece]) -> None:
        self._layers = layers
        self._pieces = pieces

    def views(self, layer: int, block_ids: Sequence[int], fence: object = None) -> Views:
        piece = self._pieces[layer]
        size, space = piece.block_bytes, self._layers[piece.layer]
        if piece.narrow is None:
            blocks = [(space[block * size : (block + 1) * size],) for block in block_ids]
            return Views(blocks, [space[first * size : end * size] for first, end in contiguous_runs(block_ids)])
        sliced = [
            tuple(space[block * size + start : block * size + end] for start, end in piece.runs) for block in block_ids
        ]
        return Views(sliced, [run for runs in sliced for run in runs])

    def commit(self, layer: int, block_ids: Sequence[int], good: Sequence[bool]) -> None:
        pass


class _DeviceBlocks:
    def __init__(self, layers: Sequence[torch.Tensor], pieces: Mapping[int, Piece]) -> None:
        import torch

        self._layers, self._pieces = layers, pieces
        self._stream = torch.cuda.Stream(layers[0].device)
        self._staging: torch.Tensor | None = None

    def _slice(self, piece: Piece) -> torch.Tensor:
        """This piece of every block, `[num_blocks, *piece.shape]`: a view."""
        layer = self._layers[piece.layer]
        if piece.narrow is None:
            return layer
        axis, first, count = piece.narrow
        return layer.narrow(axis + 1, first, count)


class _DeviceReader(_DeviceBlocks):
    def views(self, layer: int, block_ids: Sequence[int], fence: object) -> Views:
        import torch

        from tandem_worker.host.uploads import wait_for_launched

        piece = self._pieces[layer]
        size = piece.num_bytes
        self._staging = staging = _pinned(self._staging, size * len(block_ids))
        source = self._slice(piece)
        with torch.inference_mode(), torch.cuda.stream(self._stream):
            if isinstance(fence, torch.cuda.Event):
                self._stream.wait_event(fence)
            index = torch.tensor(block_ids, device=source.device)
            gathered = source.index_select(0, index).reshape(-1).view(torch.uint8)
            staging[: gathered.numel()].copy_(gathered, non_blocking=True)
            wait_for_launched(source.device)
        return _staged_views(staging, size, len(block_ids))


class _DeviceWriter(_DeviceBlocks):
    def views(self, layer: int, block_ids: Sequence[int]) -> Views:
        size = self._pieces[layer].num_bytes
        self._staging = staging = _pinned(self._staging, size * len(block_ids))
        return _staged_views(staging, size, len(block_ids))

    def commit(self, layer: int, block_ids: Sequence[int], good: Sequence[bool]) -> None:
        import torch

        from tandem_worker.host.uploads import wait_for_launched

        assert self._staging is not None, "commit follows views"
        rows = [row for row, intact in enumerate(good) if intact]
        if not rows:
            return
        piece = self._pieces[layer]
        target = self._slice(piece)
        received = self._staging[: piece.num_bytes * len(block_ids)]
        blocks = received.view(target.dtype).view(len(block_ids), *piece.shape)
        with torch.inference_mode(), torch.cuda.stream(self._stream):
            on_device = blocks.to(target.device, non_blocking=True)
            if len(rows) < len(block_ids):
                on_device = on_device[rows]
            index = torch.tensor([block_ids[row] for row in rows], device=target.device)
            target.index_copy_(0, index, on_device)
            wait_for_launched(target.device)


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
    return Views([(view[i * size : (i + 1) * size],) for i in range(count)], [view[: count * size]])


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
