"""How a CPU's block space gets its memory, by what the kernel says is resident."""

from __future__ import annotations

import ctypes
import errno
import itertools
import resource
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tandem_worker.engine.execute.pages import BlockPages, find_pages
from tandem_worker.host.memory import LARGE_PAGE, reserve_zeroed
from tandem_worker.host.vitals import Vitals
from tandem_worker.model.contract import KVCache, KVCacheSpec, KVLayerSpec, allocate_kv_cache

PAGE = resource.getpagesize()
NUM_LAYERS = 3
BLOCK_BYTES = 96 * 1024


def build_cache(num_blocks: int = 640) -> KVCache:
    """60 MiB in each layer."""
    layers = (KVLayerSpec(block_shape=(2, 3, 16, 512)),) * NUM_LAYERS
    spec = KVCacheSpec(layers=layers, dtype=torch.bfloat16, block_size=16)
    assert spec.bytes_per_block == NUM_LAYERS * BLOCK_BYTES
    return allocate_kv_cache(spec, num_blocks, torch.device("cpu"))


def resident_bytes(tensor: torch.Tensor) -> int:
    """By mincore."""
    start = tensor.data_ptr() // PAGE * PAGE
    count = -(-(tensor.data_ptr() + tensor.nbytes - start) // PAGE)
    found = (ctypes.c_ubyte * count)()
    assert ctypes.CDLL(None).mincore(ctypes.c_void_p(start), ctypes.c_size_t(count * PAGE), found) == 0
    return sum(byte & 1 for byte in found) * PAGE


def test_a_block_space_takes_no_memory_before_it_is_written() -> None:
    cache = build_cache()
    assert all(resident_bytes(layer) == 0 for layer in cache.layers)
    assert int(torch.count_nonzero(cache.layers[0][7])) == 0
    cache.layers[0][7] = 1.0
    assert BLOCK_BYTES <= resident_bytes(cache.layers[0]) <= BLOCK_BYTES + 2 * LARGE_PAGE
    assert resident_bytes(cache.layers[1]) == 0
    assert cache.layers[0].sum() == BLOCK_BYTES // 2
    assert int(torch.count_nonzero(cache.layers[0][8])) == 0


def test_a_small_block_space_is_an_ordinary_tensor_of_zeros() -> None:
    cache = build_cache(4)
    assert all(int(torch.count_nonzero(layer)) == 0 for layer in cache.layers)


def test_reserved_memory_is_private_and_goes_with_whoever_uses_it() -> None:
    def mapped() -> int:
        return int(Path("/proc/self/statm").read_text().split()[0]) * PAGE

    before = mapped()
    tensor = torch.frombuffer(reserve_zeroed(1 << 30), dtype=torch.uint8)
    assert mapped() - before >= 1 << 30
    del tensor
    assert mapped() - before < 1 << 29


def test_blocks_have_their_memory_before_they_are_given_out() -> None:
    cache, touched = build_cache(), [1]
    ahead = 64
    pages = BlockPages(cache, lambda: touched[0], ahead_bytes=ahead * NUM_LAYERS * BLOCK_BYTES)
    assert pages.resident_bytes == NUM_LAYERS * BLOCK_BYTES
    cache.layers[0][3] = 5.0  # what is there already stays
    for touched[0] in (1, 100, 101, 640):
        assert pages.advance()
        there = min(640, touched[0] + ahead)
        for layer in cache.layers:
            assert resident_bytes(layer[:there]) >= there * BLOCK_BYTES
            assert resident_bytes(layer) <= there * BLOCK_BYTES + 2 * LARGE_PAGE
        assert pages.resident_bytes == there * NUM_LAYERS * BLOCK_BYTES
    assert float(cache.layers[0][3].min()) == 5.0
    assert int(torch.count_nonzero(cache.layers[1])) == 0


def test_a_system_that_cannot_do_it_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    def refuse(*_: int) -> int:
        ctypes.set_errno(errno.EINVAL)
        return -1

    caplog.set_level("INFO")
    pages = BlockPages(build_cache(), lambda: 1)
    pages._madvise = refuse  # type: ignore[assignment]
    vitals = Vitals()
    thread = vitals.start_thread("pages", pages._run)
    thread.join(60)
    assert not thread.is_alive()
    assert caplog.messages == ["memory of KV blocks is taken when they are first used: Invalid argument"]
    assert vitals.problems() == []


@given(
    address=st.integers(0, 1 << 40).map(lambda number: number * 16),
    block_bytes=st.integers(1, 1 << 22),
    cuts=st.lists(st.integers(0, 1000), min_size=2, max_size=5, unique=True).map(sorted),
)
def test_stretches_meet_and_leave_nothing_out(address: int, block_bytes: int, cuts: list[int]) -> None:
    found = [find_pages(address, block_bytes, *pair, page=4096) for pair in itertools.pairwise(cuts)]
    assert all(start % 4096 == 0 == stop % 4096 for start, stop in found)
    assert all(one[1] == other[0] for one, other in itertools.pairwise(found))
    assert found[0][0] - (address + cuts[0] * block_bytes) < 4096
    assert found[-1][1] >= address + cuts[-1] * block_bytes
