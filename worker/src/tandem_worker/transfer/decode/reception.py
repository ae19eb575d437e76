"""Decode side bookkeeping of one order on one connection: which blocks are still missing. Pure.

A block is missing until it arrived with a good checksum. A frame with a block that is not missing is a duplicate and is
not written anywhere: what was verified stays as it was verified.
"""

from __future__ import annotations

from collections.abc import Sequence

from tandem_worker.transfer.errors import TransferError
from tandem_worker.transfer.protocol import MAX_BLOCKS_PER_FRAME, BlockRange


class Reception:
    """What has arrived of the blocks behind the ones that were cached here."""

    def __init__(self, block_ids: Sequence[int], first: int, layers: Sequence[int]) -> None:
        """`block_ids` are reserved for the prompt; those from index `first` on are to be filled in these layers."""
        self._block_ids = tuple(block_ids)
        self._first = first
        self._layers = tuple(layers)
        self._rows = {layer: row for row, layer in enumerate(self._layers)}
        self._per_layer = len(block_ids) - first
        self._arrived = bytearray(len(self._layers) * self._per_layer)
        self._num_missing = len(self._arrived)

    @property
    def complete(self) -> bool:
        """Whether every block of every layer has arrived."""
        return self._num_missing == 0

    def expected(self, blocks: BlockRange) -> tuple[int, ...] | None:
        """Ids of the local blocks to write; None for a duplicate.

        Raises:
            TransferError: the order has no such blocks.
        """
        if blocks.layer not in self._rows or not (
            self._first <= blocks.first and blocks.first + blocks.count <= len(self._block_ids)
        ):
            raise TransferError(
                f"the peer sent blocks {blocks.first} to {blocks.first + blocks.count - 1} of layer {blocks.layer}; "
                f"ordered were {self._first} to {len(self._block_ids) - 1} of {len(self._layers)} layers"
            )
        start = self._offset(blocks)
        if any(self._arrived[start : start + blocks.count]):
            return None
        return self._block_ids[blocks.first : blocks.first + blocks.count]

    def record(self, blocks: BlockRange, good: Sequence[bool]) -> None:
        """Note which of the `expected` blocks arrived intact."""
        start = self._offset(blocks)
        self._arrived[start : start + blocks.count] = bytes(good)
        self._num_missing -= sum(good)

    def missing(self) -> list[BlockRange]:
        """Runs of blocks that have not arrived intact, each short enough for one frame."""
        runs: list[BlockRange] = []
        for number, layer in enumerate(self._layers):
            row = self._arrived[number * self._per_layer : (number + 1) * self._per_layer]
            start = row.find(0)
            while start >= 0:
                end = row.find(1, start)
                end = min(len(row) if end < 0 else end, start + MAX_BLOCKS_PER_FRAME)
                runs.append(BlockRange(layer, self._first + start, end - start))
                start = row.find(0, end)
        return runs

    def _offset(self, blocks: BlockRange) -> int:
        return self._rows[blocks.layer] * self._per_layer + blocks.first - self._first
