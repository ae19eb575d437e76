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
    index.record([1, 2, 3, 4], 10)
    index.record([1, 2, 8], 20)
    assert index.match([1, 2, 3, 9]) == {10: 3, 20: 2}
    assert index.match([2, 3]) == {10: 2, 20: 1}
    assert index.match([7]) == {}


def test_a_gap_ends_the_match() -> None:
    index = PrefixIndex()
    index.record([1], 10)
    index.record([3], 10)
    assert index.match([1, 2, 3]) == {10: 1}


def test_the_least_recently_used_leaves_go_first() -> None:
    index = PrefixIndex(capacity=4)
    index.record([1, 2, 3], 10)
    index.record([7, 8], 20)
    assert len(index) == 4
    assert index.match([1, 2, 3]) == {10: 2}
    index.match([1, 2])
    index.record([1, 2], 10)
    index.record([9], 30)
    assert index.match([1, 2]) == {10: 2}
    assert index.match([7, 8]) == {20: 1}


@given(st.lists(st.tuples(st.lists(st.integers(0, 30), max_size=12, unique=True), st.integers(1, 9)), max_size=40))
def test_the_index_stays_within_its_capacity(records: list[tuple[list[int], int]]) -> None:
    index = PrefixIndex(capacity=16)
    for chain, serial in records:
        index.record(chain, serial)
        assert len(index) <= 16
        if chain:
            assert index.match(chain).get(serial) == len(chain)
