"""Which endpoint has probably cached which prompt prefix, without tokenizing.

A prompt's bytes are cut into chunks of fixed size and hashed as a chain (xxh3, each chunk seeded with its parent's
hash), so that equal entries mean equal prefixes. Equal bytes tokenize equally except around a chunk's border, which is
why this is an estimate that decides *where* a request goes and never *what* is computed.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise

from xxhash import xxh3_64_intdigest

CHUNK_BYTES = 512
"""About 128 tokens of English. Smaller chunks see shorter shared prefixes at a higher price per prompt."""
DEFAULT_CAPACITY = 32_768
"""Entries: 16 MiB of distinct prompt bytes at about 250 bytes each, 8 MB in all."""


def build_chain(prompt: bytes) -> list[int]:
    """Hashes of the prompt's full chunks, first chunk first. O(len(prompt))."""
    chain: list[int] = []
    parent = 0
    view = memoryview(prompt)
    for start, end in pairwise(range(0, len(prompt) + 1, CHUNK_BYTES)):
        parent = xxh3_64_intdigest(view[start:end], parent)
        chain.append(parent)
    return chain


class PrefixIndex:
    """Least recently used map from chain entry to the endpoints that served it, newest last, at most four of each.

    Endpoints are named by their serial."""

    __slots__ = ("_capacity", "_entries")

    def __init__(self, capacity: int = DEFAULT_CAPACITY) -> None:
        self._entries: dict[int, tuple[int, ...]] = {}
        self._capacity = capacity

    def __len__(self) -> int:
        return len(self._entries)

    def match(self, chain: Iterable[int]) -> dict[int, int]:
        """For each endpoint the number of leading chunks it has served without a gap."""
        depths: dict[int, int] = {}
        for depth, entry in enumerate(chain):
            alive = False
            for serial in self._entries.get(entry, ()):
                if depths.get(serial, 0) == depth:
                    depths[serial] = depth + 1
                    alive = True
            if not alive:
                break
        return depths

    def record(self, chain: list[int], serial: int) -> None:
        """`serial` now serves this prompt. Deepest chunk first, so that leaves are evicted before their roots."""
        entries = self._entries
        for entry in reversed(chain):
            holders = entries.pop(entry, None)
            # Re-inserting moves the entry to the young end: a dict keeps insertion order.
            entries[entry] = (serial,) if holders is None or holders == (serial,) else _touch(holders, serial)
        while len(entries) > self._capacity:
            del entries[next(iter(entries))]


def _touch(holders: tuple[int, ...], serial: int) -> tuple[int, ...]:
    return (*(holder for holder in holders if holder != serial), serial)[-4:]
