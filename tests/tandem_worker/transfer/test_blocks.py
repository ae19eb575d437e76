from __future__ import annotations

from types import SimpleNamespace

import torch
from tandem_worker.transfer.blocks import BlockSpace, contiguous_runs


def test_runs_of_neighbours() -> None:
    assert contiguous_runs([4, 5, 9, 1, 2, 3]) == [(4, 6), (9, 10), (1, 4)]
    assert contiguous_runs([]) == []


def test_views_are_the_block_space(kit: SimpleNamespace) -> None:
    cache = kit.build_cache(dtype=torch.bfloat16)
    space = BlockSpace(cache)
    views = space.writer(space.locate(dict.fromkeys(range(3)))).views(1, (3, 4, 9))
    ((first,), (second,), _) = views.blocks
    assert [len(span) for span in views.spans] == [2 * len(first), len(first)]
    second[:] = b"\x3f" * len(second)
    assert cache.layers[1][4].view(torch.uint8).eq(0x3F).all()
    assert not cache.layers[1][3].any()


def test_fingerprint_is_readable_and_tells_layouts_apart(kit: SimpleNamespace) -> None:
    layout = BlockSpace(kit.build_cache()).layout
    assert layout.fingerprint == "v1/float32/4/3x(2,2,4,8)"
    assert layout.block_bytes == (512, 512, 512)
    assert BlockSpace(kit.build_cache(heads=1)).layout.fingerprint != layout.fingerprint
    assert BlockSpace(kit.build_cache(num_blocks=3)).layout.fingerprint == layout.fingerprint
