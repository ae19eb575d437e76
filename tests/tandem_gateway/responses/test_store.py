"""The store of responses: what it holds, whose room is whose, and that what it says it holds is what it holds."""

from __future__ import annotations

import gc
import tracemalloc
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from tandem_api.launch import StoreLimits
from tandem_gateway.http.budget import Budget
from tandem_gateway.requests.prompt import Said
from tandem_gateway.responses import store as store_module
from tandem_gateway.responses.store import ENTRY_BYTES, ENTRY_SHARE, ResponseStore, Turn, join_turns

MIB = 1 << 20
A, B = b"a" * 16, b"b" * 16


def build(max_bytes: int = MIB, ttl: float = 100.0, budget: Budget | None = None) -> ResponseStore:
    return ResponseStore(StoreLimits(max_bytes=max_bytes, ttl_seconds=ttl), budget or Budget(512 * MIB))


def put(
    store: ResponseStore, name: str, *, tenant: bytes = A, parent: str | None = None, size: int = 10, now: float = 0.0
) -> bool:
    before = None if parent is None else store.find(tenant, parent, now)
    assert parent is None or before is not None
    text = b'"%b"' % name.encode()
    return store.keep(
        tenant, name, head=b'{"id":%b}' % text, given=Said(text + b"," + b"1" * size), output=text,
        parent=None if before is None else before.turn, now=now,
    )  # fmt: skip


def conversation(store: ResponseStore, name: str, *, tenant: bytes = A) -> bytes | None:
    found = store.find(tenant, name, 0.0)
    return None if found is None else join_turns(found.turn).items


def test_a_chain_holds_each_item_once_and_outlives_what_is_deleted_in_it() -> None:
    store = build()
    for number in range(50):
        assert put(store, f"r{number}", parent=f"r{number - 1}" if number else None, size=100)
    alone = build()
    for number in range(50):
        put(alone, f"r{number}", size=100)
    assert store.used_bytes == alone.used_bytes, "as much as responses that continue nothing"
    whole = conversation(store, "r49")
    assert whole is not None
    assert whole.count(b'"r') == 100
    for number in range(49):
        assert store.delete(A, f"r{number}", 0.0)
    assert conversation(store, "r49") == whole
    assert conversation(store, "r48") is None
    assert not store.delete(A, "r48", 0.0)
    assert store.delete(A, "r49", 0.0)
    assert (store.used_bytes, len(store.tenants), len(store)) == (0, 0, 0)


def test_a_request_under_way_keeps_what_it_continues() -> None:
    store = build()
    put(store, "first")
    found = store.find(A, "first", 0.0)
    assert found is not None
    found.turn.hold()
    assert store.delete(A, "first", 0.0)
    assert store.used_bytes > 0, "it is still held, and counted"
    assert store.keep(A, "second", head=b"{}", given=Said(b"2"), output=b"2", parent=found.turn, now=0.0)
    store.release(found.turn)
    assert conversation(store, "second") == b'"first",1111111111,"first",2,2'
    store.delete(A, "second", 0.0)
    assert store.used_bytes == 0


def test_whose_it_is_not_gets_what_nobody_would() -> None:
    store = build()
    put(store, "mine")
    assert store.find(B, "mine", 0.0) is None
    assert not store.delete(B, "mine", 0.0)
    assert store.find(A, "mine", 0.0) is not None
    assert (store.events["missed"], len(store.tenants)) == (2, 1), "who only asks takes no room"


def test_time_ends_it() -> None:
    store = build(ttl=10)
    put(store, "old", now=0)
    put(store, "new", parent="old", now=9)
    assert store.find(A, "old", 9.9) is not None, "asking for it does not make it younger"
    assert store.find(A, "old", 10) is None
    assert conversation(store, "new") is not None
    store.expire(19)
    assert (len(store), store.used_bytes, store.events["expired"]) == (0, 0, 2)


def test_who_asks_for_much_pushes_out_its_own() -> None:
    store = build()
    for number in range(5):
        put(store, f"b{number}", tenant=B, size=1000)
    for number in range(5000):
        assert put(store, f"a{number}", size=1000)
    assert all(store.find(B, f"b{number}", 0.0) for number in range(5))
    assert store.find(A, "a0", 0.0) is None
    assert store.find(A, "a4999", 0.0) is not None


def test_a_newcomer_gets_its_share_of_a_full_store() -> None:
    store = build()
    for number in range(1000):
        put(store, f"a{number}", size=1000)
    for number in range(1000):
        assert put(store, f"b{number}", tenant=B, size=1000)
    kept = sum(store.find(B, f"b{number}", 0.0) is not None for number in range(1000))
    left = sum(store.find(A, f"a{number}", 0.0) is not None for number in range(1000))
    assert abs(kept - left) <= 2
    assert kept > 100


def test_many_tenants_cannot_push_out_one_that_holds_little() -> None:
    store = build(4 * MIB)
    put(store, "mine", size=500)
    for number in range(4000):
        put(store, f"r{number}", tenant=number.to_bytes(16), size=1000)
    assert store.find(A, "mine", 0.0) is not None
    assert store.events["evicted"] > 1000


def test_what_is_used_stays_longest() -> None:
    store = build()
    count = 0
    while not store.events["evicted"]:
        put(store, f"r{count}", size=1000)
        count += 1
        store.find(A, "r0", 0.0)
    assert store.find(A, "r0", 0.0) is not None
    assert store.find(A, "r1", 0.0) is None


def test_one_response_cannot_take_all_there_is() -> None:
    store = build()
    assert put(store, "small")
    assert not put(store, "large", size=MIB // ENTRY_SHARE)
    assert not store.may_keep(MIB // ENTRY_SHARE)
    assert store.may_keep(MIB // ENTRY_SHARE - 2 * ENTRY_BYTES)
    assert store.find(A, "small", 0.0) is not None, "and pushes nobody out by trying"
    assert store.events["too_large"] == 1


def test_how_many_there_are_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_module, "MAX_RESPONSES", 10)
    store = build()
    for number in range(100):
        assert put(store, f"r{number}")
    assert len(store) == 10


def test_it_is_a_part_of_the_budget_and_at_most_half_of_it() -> None:
    budget = Budget(4 * MIB)
    store = build(16 * MIB, budget=budget)
    assert store.max_bytes == 2 * MIB
    for number in range(3000):
        put(store, f"r{number}", size=1000)
    assert budget.used == store.used_bytes <= 2 * MIB
    store.resize(StoreLimits(max_bytes=MIB), 0.0)
    assert budget.used == store.used_bytes <= MIB
    store.resize(StoreLimits(max_bytes=0, ttl_seconds=0), 0.0)
    assert (budget.used, len(store), len(store.tenants)) == (0, 0, 0)
    assert not put(store, "late"), "a request that was under way when it was turned off"


@pytest.mark.parametrize("tenants", [1, 800])
@pytest.mark.parametrize("size", [1, 2000])
def test_it_holds_no_more_than_it_says(tenants: int, size: int) -> None:
    """Real memory, of chains and of single responses, by one and by as many tenants as there are responses."""
    store = build(64 * MIB)
    gc.collect()
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    for number in range(800):
        # Nothing in it is shared with what is outside, as it would not be in a gateway.
        owner = (number % tenants).to_bytes(16)
        parent = f"resp_{number - 1:048x}" if tenants == 1 and number % 20 else None
        assert put(store, f"resp_{number:048x}", tenant=owner, parent=parent, size=size)
    gc.collect()
    used = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    assert used <= store.used_bytes
    assert store.used_bytes < 4 * used, "nor does it say much more than it holds"


@dataclass
class Known:
    """What a response must read like, however much of its chain is gone."""

    tenant: bytes
    text: bytes


@dataclass
class Flight:
    tenant: bytes
    turn: Turn
    text: bytes


@dataclass
class Model:
    known: dict[str, Known] = field(default_factory=dict)
    flights: list[Flight] = field(default_factory=list)


class Histories(RuleBasedStateMachine):
    """Any order of what clients do: bounds hold, nobody reads another's, whoever is there reads whole."""

    def __init__(self) -> None:
        super().__init__()
        self.budget = Budget(64 * MIB)
        self.store = build(24 * 1024, ttl=50, budget=self.budget)
        self.model = Model()
        self.now = 0.0
        self.count = 0

    @rule(tenant=st.sampled_from([A, B, b"c" * 16]), size=st.integers(0, 1500), place=st.integers(0, 30))
    def keep(self, tenant: bytes, size: int, place: int) -> None:
        names = [name for name, known in self.model.known.items() if known.tenant == tenant]
        before = self.store.find(tenant, names[-1 - place], self.now) if place < len(names) else None
        parent = None if before is None else before.turn
        text = b"" if before is None else self.model.known[before.id].text + b","
        if parent is not None:
            parent.hold()
        self.add(tenant, size, parent, text)
        if parent is not None:
            self.store.release(parent)

    def add(self, tenant: bytes, size: int, parent: Turn | None, text: bytes) -> None:
        self.count += 1
        name, given = f"r{self.count}", b"%d" % self.count + b"0" * size
        others = {key: each.bytes for key, each in self.store.tenants.known.items() if key != tenant}
        mine = self.store.tenants.known[tenant].bytes if tenant in self.store.tenants.known else 0
        if self.store.keep(tenant, name, head=b"{}", given=Said(given), output=b"7", parent=parent, now=self.now):
            self.model.known[name] = Known(tenant, text + given + b",7")
        wanted = mine + len(given) + 3 + ENTRY_BYTES
        for key, held in others.items():
            left = self.store.tenants.known[key].bytes if key in self.store.tenants.known else 0
            assert left == held or held >= min(wanted, max(others.values())), "only who holds most gives way"

    @rule(place=st.integers(0, 30))
    def begin(self, place: int) -> None:
        names = list(self.model.known)
        if place < len(names):
            known = self.model.known[names[-1 - place]]
            found = self.store.find(known.tenant, names[-1 - place], self.now)
            if found is not None:
                found.turn.hold()
                self.model.flights.append(Flight(known.tenant, found.turn, known.text))

    @rule(size=st.integers(0, 1500), answered=st.booleans())
    def end(self, size: int, answered: bool) -> None:
        if self.model.flights:
            flight = self.model.flights.pop(0)
            assert join_turns(flight.turn).items == flight.text
            if answered:
                self.add(flight.tenant, size, flight.turn, flight.text + b",")
            self.store.release(flight.turn)

    @rule(place=st.integers(0, 30), tenant=st.sampled_from([A, B, b"c" * 16]))
    def delete(self, place: int, tenant: bytes) -> None:
        names = list(self.model.known)
        if place < len(names):
            name = names[-1 - place]
            there = self.store.find(self.model.known[name].tenant, name, self.now) is not None
            assert self.store.delete(tenant, name, self.now) == (there and tenant == self.model.known[name].tenant)

    @rule(seconds=st.integers(1, 30))
    def wait(self, seconds: int) -> None:
        self.now += seconds
        self.store.expire(self.now)

    @invariant()
    def is_within_its_bounds(self) -> None:
        assert 0 <= self.store.used_bytes <= self.store.max_bytes
        assert self.budget.used == self.store.used_bytes == sum(t.bytes for t in self.store.tenants.known.values())
        assert len(self.store.tenants.ranked) <= 2 * len(self.store.tenants.known) + 64 + 1

    @invariant()
    def is_read_whole_by_its_owner_alone(self) -> None:
        for name, known in list(self.model.known.items())[-40:]:
            found = self.store.find(known.tenant, name, self.now)
            assert found is None or join_turns(found.turn).items == known.text
            for other in (A, B, b"c" * 16):
                assert other == known.tenant or self.store.find(other, name, self.now) is None

    def teardown(self) -> None:
        for flight in self.model.flights:
            self.store.release(flight.turn)
        self.store.expire(self.now + 1000)
        assert (self.store.used_bytes, self.budget.used, len(self.store.tenants), len(self.store)) == (0, 0, 0, 0)


TestHistories: Any = Histories.TestCase
TestHistories.settings = settings(max_examples=30, stateful_step_count=40, deadline=None)


@settings(max_examples=30)
@given(depth=st.integers(1, 400))
def test_a_conversation_counts_the_bytes_that_it_has(depth: int) -> None:
    store = build(8 * MIB)
    for number in range(depth):
        put(store, f"r{number}", parent=f"r{number - 1}" if number else None, size=number % 7)
    found = store.find(A, f"r{depth - 1}", 0.0)
    assert found is not None
    assert len(join_turns(found.turn).items) == found.turn.total
    assert found.turn.depth == depth
