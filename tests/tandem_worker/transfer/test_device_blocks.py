"""Blocks and slices of them on a GPU are the bytes that they are on the CPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tandem_worker.model.contract import KVCache
from tandem_worker.transfer.blocks import BlockSpace
from tandem_worker.transfer.slicing import Slices

from tests.tandem_worker.transfer.shards import build_cache, build_layout, build_whole

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
LAYOUT = build_layout(2, 4)
BLOCKS = (5, 2, 3)


def spaces() -> tuple[BlockSpace, BlockSpace, KVCache]:
    """The same blocks on the CPU and on the device."""
    whole = build_whole(LAYOUT, 8)
    host = build_cache(whole, LAYOUT, LAYOUT.whole_shard)
    device = build_cache([layer.cuda() for layer in whole], LAYOUT, LAYOUT.whole_shard)
    return BlockSpace(host), BlockSpace(device), device


def payload(views: Any) -> bytes:
    return b"".join(bytes(span) for span in views.spans)


@pytest.mark.parametrize("slices", [{0: None, 1: None}, {0: range(1, 3), 1: range(3, 4)}], ids=["whole", "heads"])
def test_read_and_written_as_on_the_host(slices: Slices) -> None:
    host, device, cache = spaces()
    sent = {layer: payload(host.reader(host.locate(slices)).views(layer, BLOCKS, None)) for layer in slices}
    reader, writer = device.reader(device.locate(slices)), device.writer(device.locate(slices))
    before = [layer.clone() for layer in cache.layers]
    for layer, data in sent.items():
        views = reader.views(layer, BLOCKS, device.fence())
        assert payload(views) == data
        assert [b"".join(map(bytes, runs)) for runs in views.blocks] == [
            data[i : i + len(data) // 3] for i in range(0, len(data), len(data) // 3)
        ]
    for layer in cache.layers:
        layer.zero_()
    torch.cuda.synchronize()
    for layer, data in sent.items():
        (span,) = writer.views(layer, BLOCKS).spans
        span[:] = data
        writer.commit(layer, BLOCKS, [True, False, True])
        heads = slices[layer] or range(4)
        expected = torch.zeros_like(before[layer])
        for block in (5, 3):
            expected[block, :, heads.start : heads.stop] = before[layer][block, :, heads.start : heads.stop]
        assert torch.equal(cache.layers[layer], expected)
