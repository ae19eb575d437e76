"""Which chunk comes from where: the decisions of one starter. Pure; callers lock.

*From peers* whatever one has, the rarest of a sample first, so that starters hold different chunks and have something
to give. *From the hub* groups of chunks that nobody has and nobody is getting. Whose they are needs no server: every
starter ranks all starters for a group by a hash, and the first of them fetches it. Where starters know each other, each
group is therefore asked of the hub once. Who has nothing left takes over, one at a time, the last groups of those who
have; who makes no progress for long counts as nobody.

*Who is right* is the hub alone. A chunk about which two peers say different things, or of a file whose digest is wrong,
is disputed: it comes from the hub, and whoever said otherwise has been wrong and is not asked again.
"""

from __future__ import annotations

import hashlib
import random
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from tandem_worker.host.files.layout import Layout
from tandem_worker.host.files.wire import GONE, UNKNOWN

HUB, DISK = "hub", "disk"
STALL_SECONDS = 5.0
"""A starter without a new chunk for so long, and for three times what one takes from the hub here, counts as nobody."""
_TURN_SECONDS = 0.5
"""Who has nothing left waits this long, or what a chunk takes from the hub, before it takes over a group of others."""
_SAMPLE = 8
_TRIES = 64


@dataclass(slots=True)
class PeerView:
    """What is known of a peer."""

    id: str
    claims: dict[int, bytes] = field(default_factory=dict)
    """Chunks that it has, and their sums."""
    wanted: list[int] = field(default_factory=list)
    """Those of them that were missing here when it told of them."""
    in_flight: frozenset[int] = frozenset()
    starting: bool = False
    idle: bool = False
    progressed: float = 0.0


class Plan:
    def __init__(self, layout: Layout, own_id: str, seed: int | None = None) -> None:
        """`own_id` is this process's among the starters. Times are seconds of one clock."""
        self._layout, self._id = layout, own_id
        self._random = random.Random(seed)
        self.missing = set(range(layout.num_chunks))
        self.sums: dict[int, bytes] = {}
        self._sources: dict[int, str] = {}
        """Sources of the chunks that are here: `HUB`, `DISK`, or the name of the peer that it came from."""
        self._fetching: dict[int, str] = {}
        self._hub_since: dict[int, float] = {}
        self.hub_seconds: float | None = None
        """What a chunk takes from the hub here, smoothed."""
        self._peers: dict[str, PeerView] = {}
        self._num_holders: Counter[int] = Counter()
        self._disputed: dict[int, None] = {}
        self._suspects: dict[int, tuple[str, bytes]] = {}
        """Chunks of a wrong file: who gave them, and their sums."""
        self.retracted: list[int] = []
        """Chunks that are here no longer, for the caller to tell and to clear."""
        self.restored: list[int] = []
        """Chunks of those that are here after all."""
        self._idle_since: float | None = None
        self._ranked_for: frozenset[str] = frozenset()
        self._owners: list[list[str]] = []
        """The starters of each group, first whose it is."""
        self._orders: dict[str, list[int]] = {}

    # Peers.

    def observe(
        self,
        name: str,
        view_id: str,
        changes: Iterable[tuple[int, bytes]],
        now: float,
        *,
        in_flight: Iterable[int] = (),
        starting: bool = False,
        idle: bool = False,
    ) -> bool:
        """Take in a peer's news. False when it contradicts what is known to be right."""
        view = self._peers.get(name)
        if view is None:
            view = self._peers[name] = PeerView(view_id, progressed=now)
        view.in_flight, view.starting, view.idle = frozenset(in_flight), starting, idle
        honest = True
        for index, digest in changes:
            if digest == GONE:
                if view.claims.pop(index, None) is not None:
                    self._num_holders[index] -= 1
                continue
            view.progressed = now
            if index not in view.claims:
                self._num_holders[index] += 1
            view.claims[index] = digest
            if index in self.missing:
                view.wanted.append(index)
            honest = self._compare(view, index, digest) and honest
        return honest

    def _compare(self, view: PeerView, index: int, digest: bytes) -> bool:
        """False when the sum is known to be wrong; a dispute where it only differs from another's."""
        if digest == UNKNOWN:
            return True
        if (ours := self.sums.get(index)) is not None:
            if ours == digest:
                return True
            if self._sources[index] == HUB:
                return False
            self._dispute(index)
            return True
        others = (peer.claims.get(index, UNKNOWN) for peer in self._peers.values() if peer is not view)
        if any(other not in (UNKNOWN, digest) for other in others):
            self._dispute(index)
        return True

    def forget(self, name: str) -> None:
        """A peer is not connected any more."""
        view = self._peers.pop(name, None)
        if view is not None:
            self._num_holders.subtract(view.claims.keys())
        for index in [i for i, source in self._fetching.items() if source == name]:
            del self._fetching[index]

    def disclaim(self, name: str, index: int) -> None:
        """A peer has a chunk no longer."""
        view = self._peers.get(name)
        if view is not None and view.claims.pop(index, None) is not None:
            self._num_holders[index] -= 1

    def next_from_peer(self, name: str) -> int | None:
        """A chunk to get from this peer now; it counts as being fetched until `done` or `release`."""
        view = self._peers[name]
        candidates: list[int] = []
        tries = len(view.wanted) if len(view.wanted) <= 4 * _TRIES else _TRIES
        order = self._random.sample(range(len(view.wanted)), tries)
        stale: list[int] = []
        for place in order:
            index = view.wanted[place]
            if index not in self.missing or index not in view.claims:
                stale.append(place)
            elif index not in self._fetching and index not in self._disputed:
                candidates.append(index)
                if len(candidates) == _SAMPLE:
                    break
        for place in sorted(stale, reverse=True):
            view.wanted[place] = view.wanted[-1]
            view.wanted.pop()
        if not candidates:
            return None
        chosen = min(candidates, key=lambda index: self._num_holders[index])
        self._fetching[chosen] = name
        return chosen

    # The hub.

    def next_from_hub(self, now: float, *, help_peers: bool = False) -> list[int]:
        """Neighbouring chunks to get from the hub now, or none. They count as being fetched until `done` or `release`.

        `help_peers`: peers are so slow that what they have is taken from the hub too.
        """
        run = self._next_disputed() or self._next_own(now, help_peers=help_peers)
        if run:
            self._idle_since = None
        elif HUB not in self._fetching.values():
            run = self._next_of_others(now)
        for index in run:
            self._fetching[index] = HUB
        if run:
            self._hub_since[run[0]] = now
        return run

    def _next_disputed(self) -> list[int]:
        return next(([i] for i in self._disputed if i in self.missing and i not in self._fetching), [])

    def _next_own(self, now: float, *, help_peers: bool) -> list[int]:
        self._rank(now)
        taken = self._in_flight_elsewhere(now)
        for group in self._orders[self._id]:
            if run := self._run_of(group, taken, claimed=help_peers):
                return run
        return []

    def _next_of_others(self, now: float) -> list[int]:
        """After a while, a group of others: the last in their order, so that they hardly meet."""
        if self._idle_since is None:
            self._idle_since = now
        if now - self._idle_since < max(_TURN_SECONDS, self.hub_seconds or 0.0):
            return []
        taken = self._in_flight_elsewhere(now)
        idle = {view.id for view in self._peers.values() if view.idle} | {self._id}
        for owner, order in self._orders.items():
            if owner in idle:
                continue
            for group in reversed(order):
                run = self._run_of(group, taken, claimed=False)
                if run and next(s for s in self._owners[group] if s in idle) == self._id:
                    self._idle_since = now
                    return run
        return []

    @property
    def idle(self) -> bool:
        """Nothing is left here to ask the hub for."""
        return self._idle_since is not None

    def _run_of(self, group: int, taken: set[int], *, claimed: bool) -> list[int]:
        """The first chunks of a group, one after another, that the hub may be asked for."""
        run: list[int] = []
        for index in self._layout.groups[group]:
            free = index in self.missing and index not in self._fetching and index not in taken
            if free and (claimed or self._num_holders[index] <= 0):
                run.append(index)
            elif run:
                break
        return run

    def _starters(self, now: float) -> frozenset[str]:
        return frozenset({self._id, *(view.id for view in self._peers.values() if self._is_active(view, now))})

    def _is_active(self, view: PeerView, now: float) -> bool:
        oldest = now - min(self._hub_since.values(), default=now)
        return view.starting and now - view.progressed < max(STALL_SECONDS, 3 * max(self.hub_seconds or 0.0, oldest))

    def _in_flight_elsewhere(self, now: float) -> set[int]:
        active = (view.in_flight for view in self._peers.values() if self._is_active(view, now))
        return set().union(*active)

    def _rank(self, now: float) -> None:
        """Settle whose each group is, as every starter that knows the same others finds it."""
        starters = self._starters(now)
        if starters == self._ranked_for:
            return
        self._ranked_for = starters
        self._owners, orders = [], {starter: [] for starter in sorted(starters)}
        for group in range(len(self._layout.groups)):
            weights = {s: hashlib.sha256(f"{group} {s}".encode()).digest() for s in starters}
            ranking = sorted(starters, key=lambda starter: weights[starter])
            self._owners.append(ranking)
            orders[ranking[0]].append((weights[ranking[0]], group))
        self._orders = {starter: [group for _, group in sorted(entries)] for starter, entries in orders.items()}

    # Chunks.

    def accepts(self, index: int, source: str) -> bool:
        """Whether a chunk that has come may be written down: it is missing, and was to come from there."""
        disputed = index in self._disputed and source != HUB
        return index in self.missing and self._fetching.get(index) == source and not disputed

    def done(self, index: int, digest: bytes, source: str, now: float) -> list[str]:
        """A chunk is written down. Names of peers that are now known to have been wrong."""
        self._fetching.pop(index, None)
        self.missing.discard(index)
        self.sums[index], self._sources[index] = digest, source
        if source != HUB:
            return []
        if (since := self._hub_since.pop(index, None)) is not None:
            took = now - since
            self.hub_seconds = took if self.hub_seconds is None else 0.7 * self.hub_seconds + 0.3 * took
        if self._fetching.get(index + 1) == HUB:
            self._hub_since.setdefault(index + 1, now)
        self._disputed.pop(index, None)
        wrong = [n for n, view in self._peers.items() if view.claims.get(index, UNKNOWN) not in (UNKNOWN, digest)]
        giver, given = self._suspects.pop(index, (HUB, digest))
        if given != digest:
            self._acquit(giver)
            wrong += [giver] if giver != DISK and giver not in wrong else []
        return wrong

    def _acquit(self, giver: str) -> None:
        """What others gave of the wrong file is believed again, and what this one gave comes from anybody else."""
        for index, (source, digest) in self._suspects.items():
            self._disputed.pop(index, None)
            if source != giver and index in self.missing and index not in self._fetching:
                self.missing.discard(index)
                self.sums[index], self._sources[index] = digest, source
                self.restored.append(index)
        self._suspects.clear()

    def release(self, indices: Iterable[int]) -> None:
        """Chunks that did not come."""
        for index in indices:
            self._fetching.pop(index, None)
            self._hub_since.pop(index, None)

    def seal(self, file: int) -> list[str]:
        """A file's digest is the hub's: its sums are right. Names of peers that said otherwise."""
        wrong: set[str] = set()
        for index in self._layout.chunks_of(file):
            self._sources[index] = HUB
            self._suspects.pop(index, None)
            for name, view in self._peers.items():
                if view.claims.get(index, UNKNOWN) not in (UNKNOWN, self.sums[index]):
                    wrong.add(name)
        return sorted(wrong)

    def reject(self, file: int) -> bool:
        """A file's digest is not the hub's: what others gave of it comes from the hub. False when all of it did."""
        chunks = self._layout.chunks_of(file)
        by_source: dict[str, list[int]] = {}
        for index in chunks:
            by_source.setdefault(self._sources[index], []).append(index)
        only_hub = set(by_source) <= {HUB}
        if not only_hub:
            by_source.pop(HUB, None)
        # One of each giver's first: who is wrong about everything is found out at once.
        turns = sorted((turn, index) for given in by_source.values() for turn, index in enumerate(given))
        for _, index in turns:
            self._suspects[index] = (self._sources[index], self.sums[index])
            self._dispute(index)
        if only_hub:
            self._suspects.clear()
        return not only_hub

    def _dispute(self, index: int) -> None:
        self._disputed[index] = None
        if index not in self.missing:
            self.missing.add(index)
            del self.sums[index], self._sources[index]
            self.retracted.append(index)
            for view in self._peers.values():
                if index in view.claims:
                    view.wanted.append(index)

    def is_complete(self, file: int) -> bool:
        """Whether every chunk of the file is here."""
        return not any(index in self.missing for index in self._layout.chunks_of(file))

    @property
    def in_flight(self) -> frozenset[int]:
        """What is being got from the hub."""
        return frozenset(index for index, source in self._fetching.items() if source == HUB)

    def bytes_at_peers(self) -> int:
        """What somebody has of what is missing here."""
        return sum(self._layout.chunk(i).size for i in self.missing if self._num_holders[i] > 0)
