"""Hash chains and the index over them."""

import sys
import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tandem_gateway.scheduling import Endpoint
from tandem_gateway.scheduling.prefix import (
    BRANCHES,
    CHUNK_BYTES,
    MAX_ENTRIES,
    MAX_SESSIONS,
    MIN_ENTRIES,
    PrefixIndex,
    build_chain,
    build_parent,
)

from tests.tandem_gateway.scheduling.fleet import count_shared, make_chain, make_endpoint


@pytest.fixture
def workers() -> list[Endpoint]:
    return [make_endpoint(f"w{index}") for index in range(64)]


@given(st.binary(max_size=6 * CHUNK_BYTES), st.binary(max_size=3 * CHUNK_BYTES))
def test_a_chain_grows_at_its_end_only(prompt: bytes, more: bytes) -> None:
    chain = build_chain(prompt)
    assert len(chain) == len(prompt) // CHUNK_BYTES
    assert build_chain(prompt + more)[: len(chain)] == chain


def test_a_chain_depends_on_everything_before() -> None:
    same = b"s" * CHUNK_BYTES
    assert build_chain(b"a" * CHUNK_BYTES + same)[1] != build_chain(b"b" * CHUNK_BYTES + same)[1]


@pytest.mark.parametrize("fleet", [4, 8, 32, 64])
def test_every_session_is_found_under_a_common_system_prompt(workers: list[Endpoint], fleet: int) -> None:
    """An entry names four holders only: those of the deepest entry are looked at, not those of the root."""
    index = PrefixIndex()
    for session in range(200):
        index.record(make_chain(session, 6, shared=2), (workers[session % fleet],), 0.0)
    for session in range(200):
        assert index.match(make_chain(session, 9, shared=2))[workers[session % fleet]] == 6


def test_a_deep_holder_is_found_beside_newer_shallow_ones(workers: list[Endpoint]) -> None:
    index = PrefixIndex()
    index.record([1, 2, 3, 4], (workers[0],), 0.0)
    for worker in workers[1:6]:
        index.record([1, 2], (worker,), 0.0)
    match = index.match([1, 2, 3, 4, 5])
    assert match[workers[0]] == 4
    assert match[workers[5]] in (1, 2)  # steps double towards the root


def test_both_workers_of_a_pair_are_recorded(workers: list[Endpoint]) -> None:
    index = PrefixIndex()
    index.record([1, 2], (workers[0], workers[1]), 0.0)
    assert index.match([1, 2]) == {workers[0]: 2, workers[1]: 2}
    assert index.match([1, 2], above=2) == {}
    assert index.match([7]) == {}


CHAINS = st.lists(st.tuples(st.integers(0, 8), st.integers(1, 12), st.integers(0, 3)), max_size=60)


@given(CHAINS)
def test_what_was_recorded_last_is_always_found_and_nothing_is_made_up(records: list[tuple[int, int, int]]) -> None:
    index = PrefixIndex()
    index.generation = 24
    fleet = [make_endpoint(f"w{number}") for number in range(4)]
    sent: dict[Endpoint, list[list[int]]] = {endpoint: [] for endpoint in fleet}
    for session, length, number in records:
        chain = make_chain(session, length, shared=2)
        index.record(chain, (fleet[number],), 0.0)
        sent[fleet[number]].append(chain)
        assert index.match(chain)[fleet[number]] == len(chain)
        for endpoint, depth in index.match(make_chain(session, 12, shared=2)).items():
            assert any(known[:depth] == make_chain(session, 12, shared=2)[:depth] for known in sent[endpoint])
        assert len(index) <= 2 * 24


@given(CHAINS)
def test_below_an_unknown_entry_nothing_is_known(records: list[tuple[int, int, int]]) -> None:
    """What the binary search for the deepest entry relies on."""
    index = PrefixIndex()
    index.generation = 16
    worker = make_endpoint()
    for session, length, shared in records:
        index.record(make_chain(session, length, shared=shared), (worker,), 0.0)
    for session, _, shared in records:
        chain = make_chain(session, 14, shared=shared)
        known = [entry in index._young or entry in index._old for entry in chain]
        assert known == sorted(known, reverse=True)


def test_a_holding_ends_when_its_cache_has_taken_in_as_much_again(workers: list[Endpoint]) -> None:
    index, worker = PrefixIndex(), workers[0]
    worker.kv_tokens = 1000
    index.record([1, 2], (worker,), 0.0)
    worker.kv_written = 999
    assert index.match([1, 2]) == {worker: 2}
    worker.kv_written = 1000
    assert index.match([1, 2]) == {}


def test_a_holding_ends_with_its_worker_and_when_the_worker_says_so(workers: list[Endpoint]) -> None:
    index = PrefixIndex()
    index.record([1], (workers[0], workers[1], workers[2]), 10.0)
    workers[0].gone = True
    workers[1].evicted_until = 10.5
    assert index.match([1]) == {workers[2]: 1}


def test_what_many_prompts_share_is_known_as_shared(workers: list[Endpoint]) -> None:
    index = PrefixIndex()
    for session in range(BRANCHES + 1):
        assert count_shared(index, make_chain(session, 6, shared=3)) == 0
        index.record(make_chain(session, 6, shared=3), (workers[0],), 0.0)
    assert count_shared(index, make_chain(99, 6, shared=3)) == 3
    assert count_shared(index, make_chain(99, 2, shared=0)) == 0


def test_the_index_has_room_for_what_the_caches_hold() -> None:
    index = PrefixIndex()
    index.resize(64 * (1 << 20) * 4.0)  # 64 workers of 1M tokens of four bytes
    assert index.generation >= 64 * (1 << 20) * 4 // CHUNK_BYTES
    index.resize(1e15)
    assert index.generation == MAX_ENTRIES
    index.resize(0)
    assert index.generation == MIN_ENTRIES


def test_an_entry_costs_at_most_a_hundred_bytes(workers: list[Endpoint]) -> None:
    index = PrefixIndex()
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    for session in range(4 * MIN_ENTRIES // 32):
        index.record(
            [hash((session, part)) & sys.maxsize | 1 << 62 for part in range(32)], (workers[session % 64],), 0.0
        )
        if len(index) >= 2 * MIN_ENTRIES - 64:
            break
    used = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    assert len(index) >= 2 * MIN_ENTRIES - 64
    assert used / len(index) <= 100


def test_short_sessions_are_remembered_within_a_bound(workers: list[Endpoint]) -> None:
    index = PrefixIndex()
    for session in range(MAX_SESSIONS + 10):
        index.record_session(session, (workers[session % 4],), 50, 0.0, b"hi")
    assert index.match_session(0, b"hi") == []
    assert index.match_session(MAX_SESSIONS, b"hi") == [(workers[MAX_SESSIONS % 4], 50)]
    assert len(index._young_sessions) + len(index._old_sessions) <= MAX_SESSIONS


def test_a_session_is_credited_with_what_its_prompt_begins_with_and_with_nothing_under_its_name_alone() -> None:
    index, worker = PrefixIndex(), make_endpoint("w")
    index.record_session(7, (worker,), 50, 0.0, b"what is a fox?")
    assert index.match_session(7, b"what is a fox? And a hen?") == [(worker, 50)]
    for other in (b"", b"what is a", b"what is a fix?", b"who are you, and what is a fox?"):
        assert index.match_session(7, other) == []


def test_chains_of_other_salts_and_tenants_have_nothing_in_common() -> None:
    prompt = b"x" * 3 * CHUNK_BYTES
    asks = [(b"a", b""), (b"", b"a"), (b"a", b"b"), (b"ab", b""), (b"b", b"a")]
    chains = [build_chain(prompt, build_parent(*ask)) for ask in asks]
    assert len({entry for chain in chains for entry in chain}) == 3 * len(asks)
    assert not {entry for chain in chains for entry in chain} & set(build_chain(prompt))
