"""Hash chains and the index over them."""

from hypothesis import given
from hypothesis import strategies as st
from tandem_gateway.scheduling.prefix import CHUNK_BYTES, PrefixIndex, build_chain


@given(st.binary(max_size=6 * CHUNK_BYTES), st.binary(max_size=3 * CHUNK_BYTES))
def test_a_chain_grows_at_its_end_only(prompt: bytes, more: bytes) -> None:
    chain = build_chain(prompt)
    assert len(chain) == len(prompt) // CHUNK_BYTES
    assert build_chain(prompt + more)[: len(chain)] == chain


def test_a_chain_depends_on_everything_before() -> None:
    same = b"s" * CHUNK_BYTES
    assert build_chain(b"a" * CHUNK_BYTES + same)[1] != build_chain(b"b" * CHUNK_BYTES + same)[1]


def test_match_counts_leading_chunks_per_endpoint() -> None:
    index = PrefixIndex()
    index.record([1, 2, 3, 4], (10,))
    index.record([1, 2, 8], (20,))
    assert index.match([1, 2, 3, 9]) == {10: 3, 20: 2}
    assert index.match([2, 3]) == {10: 2, 20: 1}
    assert index.match([7]) == {}


def test_two_workers_of_one_request_are_recorded_together_and_the_newest_four_stay() -> None:
    index = PrefixIndex()
    index.record([1, 2], (10, 20))
    index.record([1], (10, 30))
    assert index.match([1, 2]) == {10: 2, 20: 2, 30: 1}
    for serial in (40, 50):
        index.record([1], (serial,))
    assert index.match([1]) == {10: 1, 30: 1, 40: 1, 50: 1}


@given(st.lists(st.tuples(st.lists(st.integers(0, 6), max_size=6, unique=True), st.integers(1, 4)), max_size=10))
def test_match_agrees_with_a_naive_walk(records: list[tuple[list[int], int]]) -> None:
    index = PrefixIndex()
    held: dict[int, set[int]] = {}
    for chain, serial in records:
        index.record(chain, (serial,))
        for entry in chain:
            held.setdefault(entry, set()).add(serial)
    probe = [0, 1, 2, 3, 4]
    expected = {}
    for serial in range(1, 5):
        depth = 0
        while depth < len(probe) and serial in held.get(probe[depth], ()):
            depth += 1
        if depth:
            expected[serial] = depth
    assert index.match(probe) == expected


def test_a_gap_ends_the_match() -> None:
    index = PrefixIndex()
    index.record([1], (10,))
    index.record([3], (10,))
    assert index.match([1, 2, 3]) == {10: 1}


def test_the_least_recently_used_leaves_go_first() -> None:
    index = PrefixIndex(capacity=4)
    index.record([1, 2, 3], (10,))
    index.record([7, 8], (20,))
    assert len(index) == 4
    assert index.match([1, 2, 3]) == {10: 2}
    index.match([1, 2])
    index.record([1, 2], (10,))
    index.record([9], (30,))
    assert index.match([1, 2]) == {10: 2}
    assert index.match([7, 8]) == {20: 1}


@given(st.lists(st.tuples(st.lists(st.integers(0, 30), max_size=12, unique=True), st.integers(1, 9)), max_size=40))
def test_the_index_stays_within_its_capacity(records: list[tuple[list[int], int]]) -> None:
    index = PrefixIndex(capacity=16)
    for chain, serial in records:
        index.record(chain, (serial,))
        assert len(index) <= 16
        if chain:
            assert index.match(chain).get(serial) == len(chain)
