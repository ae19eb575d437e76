"""Which endpoint has probably cached which prompt prefix, without tokenizing.

A prompt's bytes are cut into chunks of fixed size and hashed as a chain (xxh3, each chunk seeded with its parent's
hash, the first with that of tenant and salt), so that equal entries mean equal prefixes. Equal bytes tokenize equally
except around a chunk's border, which is why this is an estimate that decides *where* a request goes and never *what* is
computed.

Invariants: who holds an entry holds all entries above it, because workers evict leaves first; so only the deepest ones
are looked at, and a shallow entry need not name everybody. Where an entry is known, so are all above it: recording
renews a whole chain, and eviction forgets whole generations.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise

from xxhash import xxh3_64_intdigest

from tandem_gateway.scheduling.endpoint import Endpoint
from tandem_gateway.scheduling.shared import DECAY, Holders, Holding, SharedPrefix, merge
from tandem_gateway.scheduling.storing import Store

CHUNK_BYTES = 1024
"""About 256 tokens of English. Smaller chunks see shorter shared prefixes at a higher price per prompt."""
MAX_MATCHES = 4
"""Endpoints that `match` finds: more would only cost time."""
MIN_ENTRIES = 10_922
MAX_ENTRIES = 699_050
"""Entries of one generation; both are about 110 MB then."""
BRANCHES = 8
"""Prompts that part after an entry make it a shared one: the end of a system prompt, say."""
MAX_SHARED_CHUNKS = 256
"""Longer beginnings are conversations that many go on with, not system prompts."""
MAX_SHARED = 512
"""Shared entries, the last used. With all their holders about 25 MB."""
_MAX_BRANCHES = 4096
MAX_SESSIONS = 8192
"""Sessions of short prompts, about 4 MB."""


_NO_SESSION: list[tuple[Endpoint, int]] = []
_NOT_STORED: tuple[int | None, int] = None, 0


def build_parent(salt: bytes, tenant: bytes) -> int:
    """What a chain begins with: nobody is told of, or routed by, what others with another salt or tenant have asked."""
    return xxh3_64_intdigest(b"%d %b%b" % (len(salt), salt, tenant))


def build_chain(prompt: bytes, parent: int = 0) -> list[int]:
    """Hashes of the prompt's full chunks, first chunk first. O(len(prompt))."""
    chain: list[int] = []
    if len(prompt) < CHUNK_BYTES:
        return chain
    for start, end in pairwise(range(0, len(prompt) + 1, CHUNK_BYTES)):
        parent = xxh3_64_intdigest(prompt[start:end], parent)
        chain.append(parent)
    return chain


class PrefixIndex:
    """From chain entry to the endpoints that served it, newest last, in two generations: when the young one is full it
    becomes the old one, and what was in the old one and not used since is forgotten. Half of an exact LRU's memory, and
    recording is one assignment per entry.
    """

    __slots__ = (
        "_branches", "_old", "_old_sessions", "_shared", "_weight", "_young", "_young_sessions", "generation",
        "prompts",
    )  # fmt: skip

    def __init__(self) -> None:
        self.generation = MIN_ENTRIES
        """Entries of one generation; only a single prompt that is longer can exceed it."""
        self.prompts = 0
        """Recorded so far."""
        self._weight = 0.0
        """The same, older ones for less."""
        self._young: dict[int, Holders] = {}
        self._old: dict[int, Holders] = {}
        self._branches: dict[int, int] = {}
        """How many prompts parted after an entry. Oldest first."""
        self._shared: dict[int, SharedPrefix] = {}
        """Entries after which many prompts parted, the last used at the end."""
        self._young_sessions: dict[int, tuple[Holders, int, int, int]] = {}
        self._old_sessions: dict[int, tuple[Holders, int, int, int]] = {}
        """Who holds a short session, how many tokens it has, and length and hash of its last prompt; two generations,
        as above."""

    def __len__(self) -> int:
        return len(self._young) + len(self._old)

    def resize(self, kv_bytes: float) -> None:
        """Make room for `kv_bytes` of distinct prompts, within bounds.

        A generation is as large as a full dict, two thirds of a power of two: there an entry costs the least.
        """
        wanted = kv_bytes / CHUNK_BYTES
        generation = MIN_ENTRIES
        while generation < wanted and generation < MAX_ENTRIES:
            generation = (generation * 3 // 2 + 1) * 2 * 2 // 3
        self.generation = generation

    def match(
        self, chain: list[int], above: int = 0, chunk_tokens: float = 1.0, depth: int | None = None
    ) -> dict[Endpoint, int]:
        """For each endpoint that holds more than `above` leading chunks their number times `chunk_tokens`, deepest
        first; O(log n). `depth` is what `locate` found, where it was asked.
        """
        found: dict[Endpoint, int] = {}
        young, old = self._young, self._old
        depth = self.find_depth(chain) if depth is None else depth
        step = 0
        last: Holders | None = None
        while depth > above:
            entry = chain[depth - 1]
            holders = young.get(entry) or old.get(entry) or ()
            if holders is not last:
                last = holders
                tokens = int(depth * chunk_tokens)
                for holding in holders:
                    endpoint = holding.endpoint
                    if endpoint not in found and holding.alive():
                        found[endpoint] = tokens
                if len(found) >= MAX_MATCHES:
                    break
            # Runs of one prompt have the same holders: steps double, so that a long prompt is no long walk.
            step += step or 1
            depth -= step
        return found

    def match_stored(self, chain: list[int], depth: int, chunk_tokens: float, most: int) -> dict[Store, int]:
        """For each of `most` stores the tokens of this prompt that are in it. `depth`: what `locate` found. O(log n).

        Who holds an entry in memory need not be there any more: whoever put it into the store.
        """
        found: dict[Store, int] = {}
        young, old = self._young, self._old
        step = 0
        last: Holders | None = None
        while depth > 0 and len(found) < most:
            entry = chain[depth - 1]
            holders = young.get(entry) or old.get(entry) or ()
            if holders is not last:
                last = holders
                for holding in holders:
                    store = holding.store
                    if store is not None and holding.is_stored():
                        tokens = int(min(depth, holding.stored_chunks) * chunk_tokens)
                        found[store] = max(tokens, found.get(store, 0))
            step += step or 1
            depth -= step
        return found

    def find_depth(self, chain: list[int]) -> int:
        """How many leading entries are known: a binary search, since none is known below an unknown one."""
        young, old = self._young, self._old
        low, high = 0, len(chain)
        while low < high:
            middle = (low + high + 1) >> 1
            entry = chain[middle - 1]
            if entry in young or entry in old:
                low = middle
            else:
                high = middle - 1
        return low

    def locate(self, chain: list[int]) -> tuple[int, SharedPrefix | None]:
        """How many leading entries are known, and the longest of them that many prompts begin with; O(log n).

        Who was recorded last with an entry knew what is shared of it. What has come to be shared since shows once a
        prompt that goes beyond it is recorded again.
        """
        depth = self.find_depth(chain)
        if not depth:
            return 0, None
        entry = chain[depth - 1]
        shared = (self._young.get(entry) or self._old[entry])[-1].shared
        while shared is not None and (shared.depth > depth or not shared.live):
            shared = shared.parent
        return depth, shared

    def record(self, chain: list[int], endpoints: tuple[Endpoint, ...], now: float) -> Holding:
        """`endpoints` now hold this prompt, of one chunk at least. Returns the last one's copy."""
        if len(self._young) + len(chain) > self.generation:
            self._old, self._young = self._young, {}
        known, shared = self.locate(chain)
        if 0 < known < len(chain):
            shared = self._count_branch(chain[known - 1], known, shared)
        young, old = self._young, self._old
        at, chunks = self._find_stored(chain[known - 1], known, endpoints[-1].store) if known else _NOT_STORED
        news: Holders = tuple([Holding(endpoint, now, shared, at, chunks) for endpoint in endpoints])
        self.prompts += 1
        self._weight = self._weight * DECAY + 1
        self.share(shared, news)
        while shared is not None:
            shared.count(self.prompts, self._weight)
            shared = shared.parent
        before: Holders | None = None
        after = news
        for entry in chain:
            holders = young.get(entry) or old.get(entry)
            if holders is None:
                young[entry] = news
                continue
            if holders is not before:
                before, after = holders, merge(holders, news, endpoints)
            young[entry] = after
        return news[-1]

    def _find_stored(self, entry: int, depth: int, store: Store | None) -> tuple[int | None, int]:
        """How many chunks of what ends with this entry, at this depth, have been put into the store, and how much that
        had taken in when they were; None: it was not."""
        if store is None:
            return _NOT_STORED
        holders = self._young.get(entry) or self._old.get(entry) or ()
        there = [(min(depth, each.stored_chunks), each.stored_at) for each in holders if each.store is store]
        chunks, at = max(((some, at) for some, at in there if at is not None), default=(0, None))
        return at, chunks

    def match_session(self, seed: int, prompt: bytes) -> list[tuple[Endpoint, int]]:
        """Who holds how many tokens of a prompt that is too short for chunks: those of its session's last one, where it
        begins with that. A name alone says nothing: many clients may have the same."""
        session = self._young_sessions.get(seed) or self._old_sessions.get(seed)
        if session is None:
            return _NO_SESSION
        holders, tokens, length, digest = session
        if len(prompt) < length or xxh3_64_intdigest(prompt[:length]) != digest:
            return _NO_SESSION
        found: list[tuple[Endpoint, int]] = []
        for holding in holders:
            if holding.alive():
                found.append((holding.endpoint, tokens))  # noqa: PERF401
        return found

    def record_session(
        self, seed: int, endpoints: tuple[Endpoint, ...], tokens: int, now: float, prompt: bytes
    ) -> Holding:
        """The same for a session whose prompts are too short for chunks."""
        if len(self._young_sessions) >= MAX_SESSIONS // 2:
            self._old_sessions, self._young_sessions = self._young_sessions, {}
        holders = (Holding(endpoints[0], now),)
        if len(endpoints) > 1:
            holders += (Holding(endpoints[1], now),)
        self._young_sessions[seed] = holders, tokens, len(prompt), xxh3_64_intdigest(prompt)
        return holders[-1]

    def share(self, shared: SharedPrefix | None, holdings: Iterable[Holding]) -> None:
        """These have what many prompts begin with, and so what that begins with, which is used as lately."""
        while shared is not None:
            if shared.live:
                self._shared[shared.entry] = self._shared.pop(shared.entry)
                for holding in holdings:
                    shared.hold(holding)
            shared = shared.parent

    def find_shared(self, entry: int) -> SharedPrefix | None:
        """What ends with this entry, where many prompts begin with it."""
        return self._shared.get(entry)

    def holds(self, entry: int, endpoint: Endpoint) -> bool:
        """Whether this gateway has lately sent there what ends with this entry."""
        holders = self._young.get(entry)
        return holders is not None and any(holding.endpoint is endpoint for holding in holders)

    def _count_branch(self, entry: int, depth: int, shared: SharedPrefix | None) -> SharedPrefix | None:
        """A prompt parts after this entry. Returns the longest beginning of it that many share now."""
        branches = self._branches
        count = branches[entry] = branches.pop(entry, 0) + 1
        if count >= BRANCHES and depth <= MAX_SHARED_CHUNKS and entry not in self._shared:
            shared = self._shared[entry] = SharedPrefix(entry, depth, shared)
            for holding in self._young.get(entry) or self._old.get(entry) or ():
                shared.hold(holding)
            if len(self._shared) > MAX_SHARED:
                self._shared.pop(next(iter(self._shared))).retire()
        if len(branches) > _MAX_BRANCHES:
            self._branches = dict(list(branches.items())[_MAX_BRANCHES // 2 :])
        return shared
