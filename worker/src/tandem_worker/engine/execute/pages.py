"""Memory for the blocks of a CPU's block space, a little before they are written.

The space is reserved whole and takes memory as it is touched (`host.memory`). A step that touches it first pays for
clearing it, and where memory is fragmented for the system's search for a large page, 0.2 s once seen. So a thread stays
a stretch ahead of the blocks that were ever given out.
"""

from __future__ import annotations

import ctypes
import logging
import os
import threading
from collections.abc import Callable

import torch

from tandem_worker.host.memory import LARGE_PAGE
from tandem_worker.host.vitals import Vitals
from tandem_worker.model.contract import KVCache

logger = logging.getLogger(__name__)

AHEAD_BYTES = 128 << 20
"""Bytes over all layers that lie ready. A prompt that takes more at once touches the rest itself."""
_PERIOD_SECONDS = 0.25
_MADV_POPULATE_WRITE = 23  # Linux 5.14
_SLICE_BYTES = 8 << 20
"""Cleared in one call, some milliseconds: others of this process that need new memory wait for no longer."""


class BlockPages:
    """`num_touched`: how many blocks were ever given out, block 0 included; they are given out in their order."""

    def __init__(self, cache: KVCache, num_touched: Callable[[], int], ahead_bytes: int = AHEAD_BYTES) -> None:
        self._cache = cache
        self._num_touched = num_touched
        self._ahead = ahead_bytes // cache.spec.bytes_per_block
        self._populated = 0
        """Blocks from the first on that have their memory, as far as this knows."""
        self._stop = threading.Event()
        self._madvise = ctypes.CDLL(None, use_errno=True).madvise
        self._madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]

    @property
    def resident_bytes(self) -> int:
        """What the blocks that were touched or made ready take, but for what large pages round up to."""
        return max(self._populated, self._num_touched()) * self._cache.spec.bytes_per_block

    def start(self, vitals: Vitals) -> None:
        """Go on until `stop`, on a thread of its own. Nothing is done on a GPU, whose memory is there."""
        if self._cache.layers[0].device.type == "cpu":
            vitals.start_thread("kv-pages", self._run)

    def stop(self) -> None:
        """The thread ends by itself soon after."""
        self._stop.set()

    def advance(self) -> bool:
        """Make ready what is not yet. False where the system cannot: steps touch their memory themselves then."""
        last = min(self._cache.num_blocks, self._num_touched() + self._ahead)
        while self._populated < last and not self._stop.is_set():
            some = max(1, _SLICE_BYTES // self._cache.spec.bytes_per_block)
            end = min(last, self._populated + some)
            if not all(self._populate(layer, self._populated, end) for layer in self._cache.layers):
                return False
            self._populated = end
        return True

    def _run(self) -> None:
        while not self._stop.is_set():
            if not self.advance():
                return
            self._stop.wait(_PERIOD_SECONDS)

    def _populate(self, layer: torch.Tensor, first: int, end: int) -> bool:
        start, stop = find_pages(layer.data_ptr(), layer.stride(0) * layer.element_size(), first, end)
        if layer.nbytes < LARGE_PAGE or stop <= start:  # those have theirs
            return True
        if self._madvise(start, stop - start, _MADV_POPULATE_WRITE) == 0:
            return True
        logger.info("memory of KV blocks is taken when they are first used: %s", os.strerror(ctypes.get_errno()))
        return False


def find_pages(
    address: int, block_bytes: int, first: int, end: int, page: int = os.sysconf("SC_PAGESIZE")
) -> tuple[int, int]:
    """First byte and end of the pages that begin within blocks `first` to `end` of a layer at `address`."""
    start, stop = (-(-(address + block * block_bytes) // page) * page for block in (first, end))
    return start, stop
