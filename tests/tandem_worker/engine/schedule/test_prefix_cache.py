from __future__ import annotations

import subprocess
import sys

from hypothesis import given
from hypothesis import strategies as st
from tandem_worker.engine.schedule.prefix_cache import PrefixCache, build_chain_root, extend_chain

TOKENS = st.lists(st.integers(0, 300_000), max_size=40)


def name_prompt(token_ids: list[int], block_size: int = 4) -> list[bytes]:
    return extend_chain(build_chain_root("digest"), token_ids, block_size)


@given(TOKENS, TOKENS)
def test_names_agree_exactly_as_far_as_the_blocks_do(left: list[int], right: list[int]) -> None:
    for index, (one, other) in enumerate(zip(name_prompt(left), name_prompt(right), strict=False)):
        assert (one == other) == (left[: 4 * index + 4] == right[: 4 * index + 4])


@given(TOKENS, st.integers(0, 10))
def test_a_chain_can_be_extended_from_any_block(token_ids: list[int], split: int) -> None:
    whole = name_prompt(token_ids)
    head = whole[:split]
    parent = head[-1] if head else build_chain_root("digest")
    assert head + extend_chain(parent, token_ids[4 * len(head) :], 4) == whole


def test_model_adapter_and_salt_separate_names() -> None:
    roots = [
        build_chain_root("a"),
        build_chain_root("b"),
        build_chain_root("a", adapter="x"),
        build_chain_root("a", salt="x"),
        build_chain_root("ax"),
        build_chain_root("", adapter="a"),
    ]
    assert len(set(roots)) == len(roots)


def test_names_are_the_same_in_another_process_and_release() -> None:
    program = (
        "from tandem_worker.engine.schedule.prefix_cache import *\n"
        "print(extend_chain(build_chain_root('digest', 'adapter', 'salt'), [1, 2, 300000, 4], 2)[-1].hex())"
    )
    printed = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout.strip()
    assert printed == "54035de112d54fe7af91ea1cb675ce41"


def fill(cache: PrefixCache, names: list[bytes], now: float) -> None:
    for block, name in enumerate(names, start=1):
        cache.register(name, block)
    for block in range(len(names), 0, -1):
        cache.add_idle(block, now)


def test_eviction_takes_the_deepest_block_of_the_least_recent_chain() -> None:
    cache = PrefixCache(10)
    names = name_prompt(list(range(16)))
    fill(cache, names, now=5.0)
    assert [cache.evict() for _ in range(3)] == [4, 3, 2]
    assert [cache.find(name) for name in names] == [1, 0, 0, 0]


def test_the_horizon_is_the_last_use_of_the_newest_evicted_block() -> None:
    cache = PrefixCache(10)
    first, second = name_prompt(list(range(8)))
    cache.register(first, 1)
    cache.register(second, 2)
    cache.add_idle(2, 10.0)
    cache.add_idle(1, 11.0)
    assert cache.horizon == 0.0
    cache.touch(2, 12.0)
    assert cache.evict() == 1
    assert cache.horizon == 11.0
    assert cache.evict() == 2
    assert cache.horizon == 12.0
    assert len(cache) == cache.num_idle == 0


def test_the_first_block_of_a_name_keeps_it() -> None:
    cache = PrefixCache(10)
    (name,) = name_prompt(list(range(4)))
    assert cache.register(name, 3) == 3
    assert cache.register(name, 5) == 3
    assert not cache.is_named(5)
