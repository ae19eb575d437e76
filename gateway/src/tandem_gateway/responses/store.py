"""The bounded memory of responses. No socket and no clock: `now` is handed in.

A response is what it says of itself, and a turn: the items that it added to its conversation. Turns point to the turn
before, so a chain holds every item once however long it gets, and what is deleted or evicted in its middle stays for
those that follow it, out of sight, until the last of them goes.

Invariants: `used_bytes` counts everything that is held, overheads of Python included, and keeping a response never
takes it beyond the limit; it is a part of the gateway's budget. Room is made by the tenant that holds most, the
newcomer counted with what it wants to add, and there by what was used least recently: whoever holds less than an equal
share loses nothing to others.
"""

from __future__ import annotations

import heapq
from collections import Counter, OrderedDict
from collections.abc import Iterator

from tandem_api.launch import StoreLimits

from tandem_gateway.http.budget import Budget
from tandem_gateway.requests.json_body import bound_nodes
from tandem_gateway.requests.prompt import Said

ENTRY_BYTES = 1400
"""Bytes of Python's objects for one response with a turn and perhaps a tenant of its own, besides the bytes of their
JSON."""
MAX_RESPONSES = 100_000
ENTRY_SHARE = 8
"""One response may take the n-th part of the room that there is for all."""


class Turn:
    """What one response adds to its conversation: items in JSON, joined by commas."""

    __slots__ = ("depth", "input", "key", "nodes", "opening", "output", "parent", "tenant", "total", "uses")

    def __init__(self, key: str, tenant: Tenant, given: Said, output: bytes, parent: Turn | None) -> None:
        self.key = key
        """Names it for good, so that its items can have names."""
        self.tenant = tenant
        self.input = given.items
        self.output = output
        self.parent = parent
        self.uses = 0
        """References to it: by its response, by turns that follow, and by requests under way."""
        self.depth = 1 if parent is None else parent.depth + 1
        before = 0 if parent is None or not parent.total else parent.total + 1
        own = len(given.items) + len(output) + (1 if given.items and output else 0)
        self.total = before + own if own else max(0, before - 1)
        """Bytes of the conversation up to here, in JSON."""
        known = 0 if parent is None else parent.opening
        self.opening = known or (before + given.opening if given.opening else 0)
        """As that of `Said`, of the conversation up to here."""
        self.nodes = bound_nodes(given.items) + bound_nodes(output) + (0 if parent is None else parent.nodes)
        """Objects, lists and strings of the conversation up to here, at most."""

    @property
    def size(self) -> int:
        return len(self.input) + len(self.output)

    def hold(self) -> None:
        """It is in use, and stays until `ResponseStore.release`."""
        self.uses += 1


class StoredResponse:
    __slots__ = ("head", "id", "made_at", "turn")

    def __init__(self, name: str, head: bytes, turn: Turn, made_at: float) -> None:
        self.id = name
        self.head = head
        """The response as a JSON object, without its `output`."""
        self.turn = turn
        self.made_at = made_at

    @property
    def size(self) -> int:
        return len(self.head) + len(self.turn.output)

    def render(self) -> bytes:
        return b'%b,"output":[%b]}' % (self.head[:-1], self.turn.output)


class Tenant:
    __slots__ = ("bytes", "key", "responses")

    def __init__(self, key: bytes) -> None:
        self.key = key
        self.bytes = 0
        self.responses: OrderedDict[str, StoredResponse] = OrderedDict()
        """Least recently used first."""

    def __lt__(self, other: Tenant) -> bool:  # the heap compares those of equal size
        return self.key < other.key


class Tenants:
    """Whoever has something in the store, by key, and the one that has most."""

    def __init__(self, budget: Budget) -> None:
        self._budget = budget
        self.known: dict[bytes, Tenant] = {}
        self.ranked: list[tuple[int, Tenant]] = []
        """A heap of tenants by bytes, negative. A tenant that grows is pushed again; what is out of date is corrected
        when it comes up."""
        self.used_bytes = 0

    def __len__(self) -> int:
        return len(self.known)

    def get(self, key: bytes) -> Tenant | None:
        return self.known.get(key)

    def open(self, key: bytes) -> Tenant:
        """The tenant of this key, which may be a new one."""
        found = self.known.get(key)
        if found is None:
            found = self.known[key] = Tenant(key)
        return found

    def count(self, tenant: Tenant, size: int) -> None:
        """It holds so many bytes more, or less. Who holds none any more is forgotten."""
        tenant.bytes += size
        self.used_bytes += size
        self._budget.used += size
        if not tenant.bytes:
            self.known.pop(tenant.key, None)

    def note_growth(self, tenant: Tenant) -> None:
        """It has got another response."""
        heapq.heappush(self.ranked, (-tenant.bytes, tenant))
        if len(self.ranked) > 2 * len(self.known) + 64:
            self.ranked = [(-each.bytes, each) for each in self.known.values()]
            heapq.heapify(self.ranked)

    def find_largest(self) -> Tenant:
        """The largest of those that have a response, of which there is one."""
        while True:
            size, tenant = self.ranked[0]
            if tenant.responses and -size == tenant.bytes:
                return tenant
            heapq.heappop(self.ranked)
            if tenant.responses and -size > tenant.bytes:  # one that has grown was pushed again
                heapq.heappush(self.ranked, (-tenant.bytes, tenant))


class ResponseStore:
    def __init__(self, limits: StoreLimits, budget: Budget) -> None:
        self._budget = budget
        self.tenants = Tenants(budget)
        self._responses: OrderedDict[str, tuple[Tenant, StoredResponse]] = OrderedDict()
        """Oldest first."""
        self.events: Counter[str] = Counter()
        self._set(limits)

    def __len__(self) -> int:
        return len(self._responses)

    @property
    def used_bytes(self) -> int:
        return self.tenants.used_bytes

    def _set(self, limits: StoreLimits) -> None:
        self.max_bytes = min(limits.max_bytes, self._budget.limit // 2)
        """Others hold bytes, too: the store takes no more than half of what there is for all."""
        self.max_entry_bytes = self.max_bytes // ENTRY_SHARE
        self.ttl_seconds = limits.ttl_seconds

    def resize(self, limits: StoreLimits, now: float) -> None:
        """From now on these limits hold. Turns of requests under way may hold more for a moment."""
        self._set(limits)
        self.expire(now)
        while self.used_bytes > self.max_bytes and self._responses:
            largest = self.tenants.find_largest()
            self._remove(largest, next(iter(largest.responses)), "evicted")

    def peek(self, tenant: bytes, name: str) -> StoredResponse | None:
        """As `find`, and nothing is changed by it."""
        owner = self.tenants.get(tenant)
        return None if owner is None else owner.responses.get(name)

    def find(self, tenant: bytes, name: str, now: float) -> StoredResponse | None:
        """The tenant's own response of this name, which counts as used by that. None: there is none, or it is somebody
        else's."""
        self.expire(now)
        owner = self.tenants.get(tenant)
        found = None if owner is None else owner.responses.get(name)
        if owner is None or found is None:
            self.events["missed"] += 1
            return None
        owner.responses.move_to_end(name)
        self.events["found"] += 1
        return found

    def delete(self, tenant: bytes, name: str, now: float) -> bool:
        """Whether there was one."""
        if self.find(tenant, name, now) is None:
            return False
        self._remove(self.tenants.open(tenant), name, "deleted")
        return True

    def may_keep(self, size: int) -> bool:
        """Whether a response with this many bytes of JSON can be kept at all."""
        return size + ENTRY_BYTES <= self.max_entry_bytes

    def keep(
        self, tenant: bytes, name: str, *, head: bytes, given: Said, output: bytes, parent: Turn | None, now: float
    ) -> bool:
        """Keep a response with the items that it was given and that it made; they follow `parent`, which is in use.
        False: there is no room for one so large."""
        self.expire(now)
        size = len(head) + len(given.items) + len(output) + ENTRY_BYTES
        if size > self.max_entry_bytes or not self._make_room(self.tenants.get(tenant), size):
            self.events["too_large"] += 1
            return False
        owner = self.tenants.open(tenant)
        turn = Turn(name, owner, given, output, parent)
        if parent is not None:
            parent.hold()
        turn.hold()
        response = StoredResponse(name, head, turn, now)
        owner.responses[name] = response
        self._responses[name] = owner, response
        self.tenants.count(owner, size)
        self.tenants.note_growth(owner)
        self.events["kept"] += 1
        return True

    def release(self, turn: Turn) -> None:
        """One use less. What nobody uses goes, and with it the turns before that nobody else uses."""
        while True:
            turn.uses -= 1
            if turn.uses:
                return
            self.tenants.count(turn.tenant, -turn.size - ENTRY_BYTES)
            if turn.parent is None:
                return
            turn = turn.parent

    def expire(self, now: float) -> None:
        """Forget what is too old."""
        while self._responses:
            owner, oldest = next(iter(self._responses.values()))
            if now - oldest.made_at < self.ttl_seconds:
                return
            self._remove(owner, oldest.id, "expired")

    def describe(self, now: float) -> dict[str, object]:
        """For people: how full it is, and nothing of what was said."""
        oldest = next(iter(self._responses.values()), None)
        return {
            "responses": len(self._responses),
            "tenants": len(self.tenants),
            "bytes": self.used_bytes,
            "maxBytes": self.max_bytes,
            "maxResponseBytes": self.max_entry_bytes,
            "ttlSeconds": self.ttl_seconds,
            "oldestSeconds": None if oldest is None else round(now - oldest[1].made_at, 1),
            "events": dict(sorted(self.events.items())),
        }

    # room

    def _make_room(self, newcomer: Tenant | None, size: int) -> bool:
        while self.used_bytes + size > self.max_bytes or len(self._responses) >= MAX_RESPONSES:
            if not self._responses:
                return False  # requests under way use the rest
            victim = self.tenants.find_largest()
            if size + (0 if newcomer is None else newcomer.bytes) > victim.bytes:
                if newcomer is None or not newcomer.responses:
                    return False  # it would be the largest, and has nothing to give up
                victim = newcomer
            self._remove(victim, next(iter(victim.responses)), "evicted")
        return True

    def _remove(self, owner: Tenant, name: str, event: str) -> None:
        response = owner.responses.pop(name)
        del self._responses[name]
        self.events[event] += 1
        self.tenants.count(owner, -len(response.head))
        self.release(response.turn)


def list_turns(last: Turn | None) -> Iterator[Turn]:
    """Newest first."""
    while last is not None:
        yield last
        last = last.parent


def join_turns(last: Turn | None, more: Said | None = None) -> Said:
    """The conversation up to here, and `more` after it. One copy of its bytes."""
    more = more or Said()
    parts = [more.items] if more.items else []
    for turn in list_turns(last):
        parts += [part for part in (turn.output, turn.input) if part]
    before, known = (0, 0) if last is None else (last.total, last.opening)
    later = more.opening and more.opening + before + (1 if before else 0)
    return Said(b",".join(reversed(parts)), known or later)
