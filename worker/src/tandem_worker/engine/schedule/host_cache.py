"""Blocks in host memory, below the device's: what those have given up, by its name, and what goes to and fro.

What the device's prefix cache evicts gets a block here, in place of the one that was used longest ago. What a sequence
finds here is copied into blocks of its own, and stays here besides, as used as on the day it was copied. Where bytes
are is not known here: copies are collected until `take_moves`, and whoever makes them does so before anything else is
written to the blocks that they read.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tandem_worker.engine.schedule.block_manager import BlockManager


@dataclass(frozen=True, slots=True, kw_only=True)
class Moves:
    """Copies to be made, `out` before `into`; no block of the host is a target of two."""

    out: tuple[tuple[int, int], ...]
    """(block, host block)."""
    into: tuple[tuple[int, int], ...]
    """(host block, block)."""

    def __bool__(self) -> bool:
        return bool(self.out or self.into)


NO_MOVES = Moves(out=(), into=())


@dataclass(slots=True)
class HostCounts:
    """Since the start."""

    blocks_out: int = 0
    """Blocks that were copied to the host."""
    blocks_in: int = 0
    """Blocks that came back."""
    evictions: int = 0
    """Blocks that were given up for others."""


class HostCache:
    """A block manager over the host's blocks, on the engine thread."""

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        prefers_fetch: Callable[[], bool] = lambda: True,
    ) -> None:
        """`num_blocks` counts block 0, which is not used. `prefers_fetch`: whether copying a block back is sooner than
        computing it."""
        self.blocks = BlockManager(num_blocks, block_size)
        self.counts = HostCounts()
        self.prefers_fetch = prefers_fetch
        self._out: dict[int, int] = {}
        """The block that each host block is to be copied from."""
        self._into: list[tuple[int, int]] = []

    def keep(self, block: int, name: bytes, last_use: float) -> None:
        """The device gives up `block`, whose content has this name: it is to be copied here, unless it is here. Where
        every block is held it is lost."""
        blocks = self.blocks
        known = blocks.cache.find(name)
        if known:
            if not blocks.num_holders(known):
                blocks.cache.touch(known, last_use)
            return
        if not blocks.num_available:
            return
        full = blocks.num_available == blocks.cache.num_idle
        (host_block,) = blocks.allocate(1)
        self.counts.evictions += full
        blocks.cache.register(name, host_block)
        blocks.release([host_block], (), last_use)
        self._out[host_block] = block

    def find(self, names: Sequence[bytes]) -> list[int]:
        """Blocks of the longest known beginning of `names`; none where computing them is sooner. Holds nothing yet."""
        found = self.blocks.match_prefix(names, len(names))
        return found if found and self.prefers_fetch() else []

    def fetch(self, host_blocks: Sequence[int], blocks: Sequence[int]) -> None:
        """Copy held blocks of the host, which are let go of when the copies are taken, to blocks of the device."""
        self._into.extend(zip(host_blocks, blocks, strict=True))

    @property
    def has_moves(self) -> bool:
        """Whether there are copies that were not taken."""
        return bool(self._out or self._into)

    def take_moves(self, now: float) -> Moves:
        """The copies that nobody has taken yet, to be made behind those that were taken before, block by block: what
        is read here now may be what is written next."""
        moves = Moves(out=tuple((block, host) for host, block in self._out.items()), into=tuple(self._into))
        self._out.clear()
        self._into.clear()
        self.blocks.release([host_block for host_block, _ in moves.into], (), now)
        self.counts.blocks_out += len(moves.out)
        self.counts.blocks_in += len(moves.into)
        return moves


def is_fetching_sooner(block_size: int, *, seconds_per_block: float, prefill_tokens_per_second: float | None) -> bool:
    """Whether blocks should come from the host rather than be computed again.

    A worker that never prefills (its rate is unknown) has least time to begin.
    """
    if prefill_tokens_per_second is None:
        return True
    return seconds_per_block * prefill_tokens_per_second < block_size
