"""Which endpoint has probably cached which prompt prefix, without tokenizing.

A prompt's bytes are cut into chunks of fixed size and hashed as a chain (xxh3, each chunk seeded with its parent's
hash), so that equal entries mean equal prefixes. Equal bytes tokenize equally except around a chunk's border, which is
why this is an estimate that decides *where* a request goes and never *what* is computed.
"""

from __future__ import annotations

from collections import OrderedDict
from itertools import pairwise

from xxhash import xxh3_64_intdigest

CHUNK_BYTES = 1024
"""About 256 tokens of English. Smaller chunks see shorter shared prefixes at a higher price per prompt."""
DEFAULT_CAPACITY = 32_768
"""Entries: 32 MiB of distinct prompt bytes at about 200 bytes each, 7 MB in all."""
MAX_HOLDERS = 4

Holders = tuple[int, ...]


def build_chain(prompt: bytes) -> list[int]:
    """Hashes of the prompt's full chunks, first chunk first. O(len(prompt))."""
    chain: list[int] = []
    if len(prompt) < CHUNK_BYTES:
        return chain
    parent = 0
    for start, end in pairwise(range(0, len(prompt) + 1, CHUNK_BYTES)):
        parent = xxh3_64_intdigest(prompt[start:end], parent)
        chain.append(parent)
    return chain


class PrefixIndex:
    """Least recently used map from chain entry to the endpoints that served it, newest last, at most four of each.

    Endpoints are named by their serial. Neighbouring entries of one prompt share one holders object, which lets
    `match` skip over runs of them.
    """

    __slots__ = ("_capacity", "_entries")

    def __init__(self, capacity: int = DEFAULT_CAPACITY) -> None:
        # Not a plain dict: finding its oldest entry walks over all that were deleted before it.
        self._entries: OrderedDict[int, Holders] = OrderedDict()
        self._capacity = capacity

    def __len__(self) -> int:
        return len(self._entries)

    def match(self, chain: list[int]) -> dict[int, int]:
        """For each endpoint the number of leading chunks it has served without a gap."""
        depths: dict[int, int] = {}
        get = self._entries.get
        alive: Holders = ()
        last: Holders | None = None
        for depth, entry in enumerate(chain):
            holders = get(entry)
            if holders is last and holders is not None:
                continue
            found: Holders = holders or ()
            survivors: Holders = tuple([serial for serial in alive if serial in found]) if depth else found
            for serial in alive:
                if serial not in survivors:
                    depths[serial] = depth
            alive, last = survivors, holders
            if not alive:
                break
        for serial in alive:
            depths[serial] = len(chain)
        return depths

    def record(self, chain: list[int], serials: Holders) -> None:
        """`serials` now serve this prompt. Deepest chunk first, so that leaves are evicted before their roots."""
        entries = self._entries
        get, touch = entries.get, entries.move_to_end
        before: Holders | None = None
        after = serials
        for entry in reversed(chain):
            holders = get(entry)
            if holders is None:
                entries[entry] = serials
                continue
            if holders is not before:
                before, after = holders, _merge(holders, serials)
            if after is not holders:
                entries[entry] = after
            touch(entry)
        while len(entries) > self._capacity:
            entries.popitem(last=False)


def _merge(holders: Holders, serials: Holders) -> Holders:
    """The newest of both; the same object when nothing changes."""
    if holders[-len(serials) :] == serials:
        return holders
    return (*(serial for serial in holders if serial not in serials), *serials)[-MAX_HOLDERS:]
