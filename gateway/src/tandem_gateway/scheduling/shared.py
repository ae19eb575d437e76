"""Which endpoints have a prompt's beginning in their cache, and until when; and what many prompts begin with, such as a
system prompt.

An entry of the index names the newest four holders, which are enough to find a conversation again. Of a system prompt
every worker that has it is a good place for the next conversation, and one that has not would compute it once more: in
a large fleet most have not.
"""

from __future__ import annotations

from tandem_gateway.scheduling.endpoint import Candidates, Endpoint

MAX_SHARERS = 256
"""Workers that are known to have one shared prefix."""
SPREAD = 4.0
"""A prefix is brought to this many times the share of the workers that it has of the requests: few enough that most of
its prompts find it, and enough that none of its workers has too much to do."""
HALF_LIFE = 2048
"""Requests, after which one counts half for that share."""
DECAY = 0.5 ** (1 / HALF_LIFE)
_LOOKS = 2
"""Holders looked at for each that is wanted: some belong to another pool, or have forgotten."""
_ALL = 1 << 30
"""Chunks: no prompt has more."""
MAX_HOLDERS = 4
"""Named by one entry, the newest."""


class Holding:
    """One endpoint's copy of a prompt: when it was last used, and how much its cache had taken in by then."""

    __slots__ = ("endpoint", "shared", "store", "stored_at", "stored_chunks", "used_at", "written")

    def __init__(
        self,
        endpoint: Endpoint,
        now: float,
        shared: SharedPrefix | None = None,
        stored_at: int | None = None,
        stored_chunks: int = 0,
    ) -> None:
        self.endpoint = endpoint
        self.used_at = now
        self.written = endpoint.kv_written
        self.shared = shared
        """The longest part of it that many prompts begin with, as far as was known then."""
        self.store = endpoint.store
        """The store that the worker puts it into besides, once no request has it in use."""
        self.stored_at = stored_at
        """How much the store had taken in when that was; None: it is yet to be."""
        self.stored_chunks = stored_chunks
        """So many chunks of it: while a request has it in use, those that were there before."""

    def end_use(self, since: float, heard_at: float) -> None:
        """The request that had it in use has ended, which was sent at `since`, and whose worker showed a sign of life
        last at `heard_at`. Where its answer comes in one piece, this is new when it ends."""
        self.used_at = max(self.used_at, heard_at)
        self.note_stored()
        if self.store is not None:
            self.store.learn_length(max(0.0, self.used_at - since))

    def note_stored(self) -> None:
        """No request has it in use, or none that this gateway knows the end of."""
        if self.store is not None:
            self.stored_at, self.stored_chunks = self.store.written, _ALL

    def is_stored(self) -> bool:
        """Whether it is in the store, whatever has become of the worker."""
        return self.store is not None and self.stored_at is not None and self.store.has(self.stored_at)

    def is_settled(self, now: float) -> bool:
        """Whether one that another gateway has sent is in the store: its request has ended if it took no longer than
        others do, which nobody tells."""
        return self.store is not None and now - self.used_at >= self.store.answer_seconds and self.is_stored()

    def alive(self) -> bool:
        """The worker still exists, has not said that it forgot, nor taken in a whole cache of other tokens since."""
        endpoint = self.endpoint
        return (
            endpoint.kv_written - self.written < endpoint.kv_tokens
            and self.used_at >= endpoint.evicted_until
            and not endpoint.gone
        )


Holders = tuple[Holding, ...]


def merge(holders: Holders, news: Holders, endpoints: tuple[Endpoint, ...]) -> Holders:
    """The newest of both; `endpoints` are those of `news`."""
    kept = [holding for holding in holders if holding.endpoint not in endpoints]
    return (*kept, *news)[-MAX_HOLDERS:]


class SharedPrefix:
    """An entry after which many prompts part."""

    __slots__ = ("_count", "_counted_at", "_order", "_turn", "depth", "entry", "holders", "live", "parent", "wanted")

    def __init__(self, entry: int, depth: int, parent: SharedPrefix | None) -> None:
        self.entry = entry
        self.depth = depth
        """Chunks."""
        self.parent = parent
        """The next shorter one that this one begins with."""
        self.live = True
        """It is still counted as one that many share."""
        self.holders: dict[Endpoint, Holding] = {}
        self._order: list[Endpoint] = []
        self._turn = 0
        self._count = 0.0
        """Prompts that begin with it, older ones for less, when there were `_counted_at` of all."""
        self._counted_at = 0
        self.wanted = 0.0
        """The share of the workers that are to have it."""

    def count(self, number: int, all_prompts: float) -> None:
        """The prompt of this number begins with it; `all_prompts` are those that there were, older ones for less."""
        self._count = self._count * 0.5 ** ((number - self._counted_at) / HALF_LIFE) + 1
        self._counted_at = number
        self.wanted = SPREAD * self._count / all_prompts

    def wants_more(self, workers: int) -> bool:
        """Whether too few of so many workers have it."""
        return len(self.holders) < self.wanted * workers

    def hold(self, holding: Holding) -> None:
        """Somebody has it, as have the holders of every longer one."""
        endpoint = holding.endpoint
        if endpoint not in self.holders:
            if len(self._order) < MAX_SHARERS:
                self._order.append(endpoint)
            else:
                place = self._turn % MAX_SHARERS
                del self.holders[self._order[place]]
                self._order[place] = endpoint
        self.holders[endpoint] = holding

    def retire(self) -> None:
        """It is counted no longer. Entries of the index name it still, so it keeps nobody."""
        self.live = False
        self.holders.clear()
        self._order.clear()

    def has(self, endpoint: Endpoint) -> bool:
        """Whether this worker probably has it."""
        holding = self.holders.get(endpoint)
        return holding is not None and holding.alive()

    def sample(self, count: int, pool: Candidates) -> list[Endpoint]:
        """Up to so many workers of the pool that have it and may be chosen, others each time. O(count)."""
        order = self._order
        found: list[Endpoint] = []
        for _ in range(min(_LOOKS * count, len(order))):
            self._turn = turn = (self._turn + 1) % len(order)
            endpoint = order[turn]
            if endpoint.pool is not pool or endpoint.level < 0 or endpoint in found:
                if endpoint.gone:
                    self._drop(turn)
            elif self.holders[endpoint].alive():
                found.append(endpoint)
                if len(found) == count:
                    break
            else:
                self._drop(turn)
            if not order:
                break
        return found

    def _drop(self, place: int) -> None:
        """Whoever is there has it no more."""
        order = self._order
        del self.holders[order[place]]
        last = order.pop()
        if place < len(order):
            order[place] = last
