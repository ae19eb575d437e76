"""Blocks between memory and a tier's buffers are the bytes that they are, on a CPU and on a GPU."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tandem_worker.model.contract import KVCache, KVCacheSpec, KVLayerSpec
from tandem_worker.tiers.memory import allocate_rows, open_memory

SPEC = KVCacheSpec(
    layers=(KVLayerSpec(block_shape=(2, 3, 4, 8), head_dim_index=1), KVLayerSpec(block_shape=(4, 10))),
    dtype=torch.bfloat16,
    block_size=4,
)
DEVICES = [
    "cpu",
    pytest.param(
        "cuda",
        marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")],
    ),
]


def build_cache(device: str) -> KVCache:
    layers = tuple(
        torch.randint(0, 255, (9, *layer.block_shape, 2), dtype=torch.uint8).view(torch.bfloat16).squeeze(-1).to(device)
        for layer in SPEC.layers
    )
    return KVCache(spec=SPEC, num_blocks=9, layers=layers)


@pytest.mark.parametrize("device", DEVICES)
def test_out_and_in_again(device: str) -> None:
    cache = build_cache(device)
    memory = open_memory(cache)
    assert memory.layer_bytes == (2 * 3 * 4 * 8 * 2, 4 * 10 * 2)
    rows = allocate_rows(4, 4096)
    memory.copy_out((5, 2, 7), rows, 100, memory.fence())
    for row, block in enumerate((5, 2, 7)):
        expected = b"".join(layer[block].cpu().view(torch.uint8).numpy().tobytes() for layer in cache.layers)
        assert rows[row, 100 : 100 + len(expected)].tobytes() == expected
    before = [layer.cpu().view(torch.uint8).clone() for layer in cache.layers]
    memory.copy_in(rows, 100, (1, 8))
    for layer, old in zip(cache.layers, before, strict=True):
        now = layer.cpu().view(torch.uint8)
        assert torch.equal(now[1], old[5])
        assert torch.equal(now[8], old[2])
        kept = [block for block in range(9) if block not in (1, 8)]
        assert torch.equal(now[kept], old[kept])


def test_rows_begin_at_a_page() -> None:
    rows = allocate_rows(3, 8192)
    assert rows.ctypes.data % 4096 == 0
    assert rows.shape == (3, 8192)
    assert not np.any(rows)
