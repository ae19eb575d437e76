"""Blocks between the engine's memory and a tier's buffers: every layer of a block one after another.

On a CPU they are copied straight; on a GPU through pinned memory, on a stream of its own.
"""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

if TYPE_CHECKING:
    from tandem_worker.engine.execute.host_pool import HostPool
    from tandem_worker.model.contract import KVCache


class BlockMemory(Protocol):
    """The engine's blocks. `rows` are `[count, num_bytes]` uint8, `first` is where a block begins in each."""

    layer_bytes: tuple[int, ...]

    def fence(self) -> object:
        """On the engine thread: marks the point at which everything that was launched is written."""
        ...

    def copy_out(self, block_ids: Sequence[int], rows: np.ndarray, first: int, fence: object) -> None:
        """Into `rows`, which have them when this returns."""
        ...

    def copy_in(self, rows: np.ndarray, first: int, block_ids: Sequence[int]) -> None:
        """Into the engine's memory, which has them when this returns."""
        ...


def open_memory(kv_cache: KVCache) -> BlockMemory:
    """For whatever device the blocks are on."""
    return DeviceMemory(kv_cache) if kv_cache.layers[0].is_cuda else HostMemory(kv_cache)


def allocate_rows(count: int, num_bytes: int) -> np.ndarray:
    """`[count, num_bytes]` uint8 that begin at a page."""
    return np.frombuffer(mmap.mmap(-1, count * num_bytes), dtype=np.uint8).reshape(count, num_bytes)


class HostMemory:
    def __init__(self, kv_cache: KVCache) -> None:
        import torch

        self._layers = [layer.view(torch.uint8).reshape(kv_cache.num_blocks, -1).numpy() for layer in kv_cache.layers]
        self.layer_bytes = tuple(layer.shape[1] for layer in self._layers)

    def fence(self) -> object:
        return None

    def copy_out(self, block_ids: Sequence[int], rows: np.ndarray, first: int, fence: object) -> None:
        ids = np.array(block_ids)
        for layer in self._layers:
            end = first + layer.shape[1]
            np.take(layer, ids, axis=0, out=rows[: len(ids), first:end], mode="clip")
            first = end

    def copy_in(self, rows: np.ndarray, first: int, block_ids: Sequence[int]) -> None:
        ids = np.array(block_ids)
        for layer in self._layers:
            end = first + layer.shape[1]
            layer[ids] = rows[: len(ids), first:end]
            first = end


class PooledMemory:
    """Blocks of host memory below a device's, each in one piece: what a tier is offered. What it brings goes to the
    device."""

    def __init__(self, pool: HostPool, device: BlockMemory) -> None:
        self._pool, self._device, self._rows = pool, device, pool.rows.numpy()
        self.layer_bytes = pool.layer_bytes

    def fence(self) -> object:
        return self._pool.fence()

    def copy_out(self, block_ids: Sequence[int], rows: np.ndarray, first: int, fence: object) -> None:
        self._pool.wait(fence)
        end = first + self._rows.shape[1]
        np.take(self._rows, np.array(block_ids), axis=0, out=rows[: len(block_ids), first:end], mode="clip")

    def copy_in(self, rows: np.ndarray, first: int, block_ids: Sequence[int]) -> None:
        self._device.copy_in(rows, first, block_ids)


class DeviceMemory:
    """One thread at a time for each direction."""

    def __init__(self, kv_cache: KVCache) -> None:
        import torch

        self._layers = kv_cache.layers
        self._device = kv_cache.layers[0].device
        self._stream = torch.cuda.Stream(self._device)
        self.layer_bytes = tuple(layer[0].numel() * layer.element_size() for layer in kv_cache.layers)

    def fence(self) -> object:
        import torch

        event = torch.cuda.Event(blocking=True)
        event.record()
        return event

    def copy_out(self, block_ids: Sequence[int], rows: np.ndarray, first: int, fence: object) -> None:
        import torch

        with torch.inference_mode(), torch.cuda.stream(self._stream):
            self._stream.wait_event(_as_event(fence))
            index = torch.tensor(block_ids, device=self._device)
            gathered = [
                layer.index_select(0, index).reshape(len(block_ids), -1).view(torch.uint8) for layer in self._layers
            ]
            joined = torch.cat(gathered, dim=1).cpu()  # waits for this stream alone
        rows[: len(block_ids), first : first + joined.shape[1]] = joined.numpy()

    def copy_in(self, rows: np.ndarray, first: int, block_ids: Sequence[int]) -> None:
        import torch

        count = len(block_ids)
        with torch.inference_mode(), torch.cuda.stream(self._stream):
            host = torch.from_numpy(np.ascontiguousarray(rows[:count, first : first + sum(self.layer_bytes)]))
            joined = host.to(self._device)
            index = torch.tensor(block_ids, device=self._device)
            start = 0
            for layer, size in zip(self._layers, self.layer_bytes, strict=True):
                part = joined[:, start : start + size].contiguous().view(layer.dtype).view(count, *layer.shape[1:])
                layer.index_copy_(0, index, part)
                start += size
            self._stream.synchronize()


def _as_event(fence: object) -> Any:
    import torch

    assert isinstance(fence, torch.cuda.Event), "an offer of blocks on a GPU has a fence"
    return fence
