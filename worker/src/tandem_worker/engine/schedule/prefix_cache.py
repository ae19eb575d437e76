"""Which blocks hold which tokens: names of full blocks, and the order in which idle ones are given up.

A full block is named by a hash chain over (parent, token ids), rooted in (model digest, adapter, salt). The hash is
BLAKE2b, so that a name is the same on every machine and nobody can craft a prompt that collides with another tenant's.

Idle blocks (named, held by no request) stand in one list from least to most recently used. A request gives its blocks
back deepest first, so a parent is never older than its children: the list is leaf-first without knowing the tree.
Every operation is O(1); the state is kept in flat arrays that the garbage collector does not walk.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Callable, Sequence
from hashlib import blake2b

NAME_BYTES = 16
_TOKEN_BYTES = 4


def build_chain_root(model_digest: str, adapter: str = "", salt: str = "") -> bytes:
    """Name of the empty prefix. Every part is preceded by its length: no two triples make the same bytes."""
    digest = blake2b(digest_size=NAME_BYTES)
    for part in (model_digest, adapter, salt):
        encoded = part.encode()
        digest.update(len(encoded).to_bytes(8, "little"))
        digest.update(encoded)
    return digest.digest()


def extend_chain(parent: bytes, token_ids: Sequence[int], block_size: int) -> list[bytes]:
    """Names of the full blocks of `token_ids`, the first of which follows `parent`; a partial block has no name."""
    num_blocks = len(token_ids) // block_size
    packed = array("I", token_ids[: num_blocks * block_size])
    if sys.byteorder == "big":
        packed.byteswap()
    data = memoryview(packed).cast("B")
    stride = block_size * _TOKEN_BYTES
    names: list[bytes] = []
    for start in range(0, num_blocks * stride, stride):
        digest = blake2b(parent, digest_size=NAME_BYTES)
        digest.update(data[start : start + stride])
        parent = digest.digest()
        names.append(parent)
    return names


def name_prompt(root: bytes, chain: Sequence[bytes], token_ids: Sequence[int], block_size: int) -> bytes:
    """Name of all of `token_ids`, whose full blocks have the names in `chain`: the rest counts too."""
    num_blocks = len(token_ids) // block_size
    packed = array("I", token_ids[num_blocks * block_size :])
    if sys.byteorder == "big":
        packed.byteswap()
    parent = chain[num_blocks - 1] if num_blocks else root
    return blake2b(parent + packed.tobytes(), digest_size=NAME_BYTES, person=b"whole prompt").digest()


_STRIDE = 4
_NEWER, _OLDER, _LAST_USE, _NAMED = range(_STRIDE)
_MICROSECONDS = 1e6


class PrefixCache:
    """Named blocks and the least-recently-used list of the idle ones.

    Invariants: a name belongs to at most one block and a block has at most one name; only named blocks are idle.
    The list is circular through block 0, which is never given to a request. What is known of a block stands together
    (neighbours in the list, last use, whether it has a name): in a large cache every place that is looked at is a miss
    of the processor's caches.
    """

    def __init__(self, num_blocks: int) -> None:
        self._block_of: dict[bytes, int] = {}
        self._names = bytearray(NAME_BYTES * num_blocks)
        self._records = array("q", bytes(8 * _STRIDE * num_blocks))
        self._horizon = 0
        self.num_idle = 0
        self.on_evict: Callable[[int, bytes, float], None] | None = None
        """Told of each block that loses its name, with the name and its last use, before anybody gets the block."""

    def __len__(self) -> int:
        return len(self._block_of)

    @property
    def horizon(self) -> float:
        """Last-use time of the newest block that was evicted; 0 when none was."""
        return self._horizon / _MICROSECONDS

    def find(self, name: bytes) -> int:
        """The block of this name, or 0."""
        return self._block_of.get(name, 0)

    def is_named(self, block: int) -> bool:
        """Whether `block` can be found by its name, idle or held."""
        return self._records[_STRIDE * block + _NAMED] != 0

    def register(self, name: bytes, block: int) -> int:
        """Name a block that a request holds. The block of that name afterwards: an older one keeps its name."""
        owner = self._block_of.setdefault(name, block)
        if owner == block and not self._records[_STRIDE * block + _NAMED]:
            self._records[_STRIDE * block + _NAMED] = 1
            self._names[NAME_BYTES * block : NAME_BYTES * (block + 1)] = name
        return owner

    def add_idle(self, block: int, now: float) -> None:
        """The last holder of a named block let go of it: it is the most recently used one now."""
        records, at = self._records, _STRIDE * block
        newest = records[_OLDER]
        records[_STRIDE * newest + _NEWER] = block
        records[at] = 0
        records[at + _OLDER] = newest
        records[at + _LAST_USE] = int(now * _MICROSECONDS)
        records[_OLDER] = block
        self.num_idle += 1

    def remove_idle(self, block: int) -> None:
        """An idle block is held again; it keeps its name."""
        records, at = self._records, _STRIDE * block
        newer, older = records[at], records[at + _OLDER]
        records[_STRIDE * older + _NEWER] = newer
        records[_STRIDE * newer + _OLDER] = older
        self.num_idle -= 1

    def touch(self, block: int, now: float) -> None:
        """Make an idle block the most recently used one."""
        self.remove_idle(block)
        self.add_idle(block, now)

    def next_idle(self, block: int) -> int:
        """The idle block that was used next after this one, or, of 0, the least recently used; 0: there is none."""
        return self._records[_STRIDE * block + _NEWER]

    def newest_idle(self) -> int:
        """The idle block that was used last; 0: there is none."""
        return self._records[_OLDER]

    def name_of(self, block: int) -> bytes:
        """The name of a named block."""
        return bytes(self._names[NAME_BYTES * block : NAME_BYTES * (block + 1)])

    def evict(self) -> int:
        """Take the name from the least recently used idle block and hand the block out."""
        return self.give_up(self._records[_NEWER])

    def give_up(self, block: int) -> int:
        """Take the name from an idle block and hand it out."""
        records = self._records
        assert block != 0, "evict() without an idle block"
        self.remove_idle(block)
        at = _STRIDE * block
        self._horizon = max(self._horizon, records[at + _LAST_USE])
        records[at + _NAMED] = 0
        name = self.name_of(block)
        del self._block_of[name]
        if self.on_evict is not None:
            self.on_evict(block, name, records[at + _LAST_USE] / _MICROSECONDS)
        return block

    def idle_blocks(self) -> list[int]:
        """Least recently used first. Walks the whole list: for tests and debugging."""
        blocks: list[int] = []
        block = self._records[_NEWER]
        while block:
            blocks.append(block)
            block = self._records[_STRIDE * block + _NEWER]
        return blocks
