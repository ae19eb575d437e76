"""Re-slicing: every element of a target rank comes from the same element of the whole model, once."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tandem_worker.transfer.errors import TransferError
from tandem_worker.transfer.layout import KVLayout, KVShard
from tandem_worker.transfer.slicing import agree, locate, plan_slices

from tests.tandem_worker.transfer.shards import build_cache, build_layout, build_whole, spread, take_share

NUM_BLOCKS = 2


def move(layout: KVLayout, sources: list[KVShard], target: KVShard) -> list[int]:
    """Carry out the plan byte by byte and check it; how many bytes each source sent."""
    whole = build_whole(layout, NUM_BLOCKS)
    held = [[t.reshape(-1).view(torch.uint8) for t in take_share(whole, layout, source)] for source in sources]
    expected = take_share(whole, layout, target)
    arrived = [torch.zeros_like(tensor).reshape(-1).view(torch.uint8) for tensor in expected]
    writes = [torch.zeros_like(tensor, dtype=torch.int32) for tensor in arrived]
    sent = [0] * len(sources)
    for index, slices in enumerate(plan_slices(layout, sources, target)):
        there, here = locate(layout, sources[index], slices), locate(layout, target, slices)
        for layer in slices:
            out, into = there[layer], here[layer]
            for block in range(NUM_BLOCKS):
                base = block * out.block_bytes
                data = torch.cat([held[index][out.layer][base + start : base + end] for start, end in out.runs])
                sent[index] += data.numel()
                base = block * into.block_bytes
                for start, end in into.runs:
                    arrived[into.layer][base + start : base + end] = data[: end - start]
                    writes[into.layer][base + start : base + end] += 1
                    data = data[end - start :]
                assert not data.numel()
    assert all(bool((count == 1).all()) for count in writes)
    for tensor, wanted in zip(arrived, expected, strict=True):
        assert torch.equal(tensor.view(torch.float32).reshape(wanted.shape), wanted)
    return sent


@pytest.mark.parametrize("num_heads", [4, None], ids=["heads", "latents"])
@pytest.mark.parametrize(
    ("source", "target"),
    [
        pytest.param({}, {}, id="TP1-TP1"),
        pytest.param({}, {"tp": 2}, id="TP1-TP2"),
        pytest.param({"tp": 2}, {}, id="TP2-TP1"),
        pytest.param({"tp": 2}, {"tp": 4}, id="TP2-TP4"),
        pytest.param({"tp": 8}, {"tp": 2}, id="TP8-TP2-copied-heads"),
        pytest.param({"tp": 2}, {"tp": 8}, id="TP2-TP8-copied-heads"),
        pytest.param({"pp": 2}, {}, id="PP2-PP1"),
        pytest.param({}, {"pp": 2}, id="PP1-PP2"),
        pytest.param({"pp": 3}, {"pp": 2}, id="PP3-PP2"),
        pytest.param({"tp": 2}, {"pp": 2}, id="TP2-PP2"),
        pytest.param({"tp": 2, "pp": 2}, {"tp": 4}, id="TP2xPP2-TP4"),
    ],
)
def test_grids(source: dict[str, int], target: dict[str, int], num_heads: int | None) -> None:
    layout = build_layout(5, num_heads)
    for shard in spread(5, **target):
        move(layout, spread(5, **source), shard)


GRID = st.tuples(st.sampled_from([1, 2, 3, 4, 6, 8, 16]), st.integers(1, 4))


@settings(deadline=None)
@given(heads=st.sampled_from([None, 1, 2, 4, 8, 12]), layers=st.integers(4, 7), source=GRID, target=GRID)
def test_every_element_is_written_once_with_its_own_value(
    heads: int | None, layers: int, source: tuple[int, int], target: tuple[int, int]
) -> None:
    layout = build_layout(layers, heads)
    for tp, _ in (source, target):
        if heads is not None and heads % tp and tp % heads:
            with pytest.raises(ValueError, match="cannot be split"):
                layout.share(spread(layers, tp=tp)[0])
            return
    sources, targets = (spread(layers, tp=tp, pp=pp) for tp, pp in (source, target))
    for shard in targets[:: max(1, len(targets) // 4)]:
        move(layout, sources, shard)


@pytest.mark.parametrize("num_heads", [2, None], ids=["copied heads", "latents"])
@pytest.mark.parametrize("target_tp", [1, 2, 4])
def test_ranks_that_hold_the_same_share_the_work(num_heads: int | None, target_tp: int) -> None:
    layout, sources = build_layout(8, num_heads), spread(8, tp=4)
    sent = [move(layout, sources, target) for target in spread(8, tp=target_tp)]
    totals = [sum(amounts) for amounts in zip(*sent, strict=True)]
    assert len(set(totals)) == 1


def test_a_whole_block_is_one_run_and_a_slice_is_two() -> None:
    """Keys and values of a head lie apart."""
    layout = build_layout(1, 4)
    (half, _), (whole,) = spread(1, tp=2), spread(1)
    assert locate(layout, half, {0: range(2)})[0].runs == ((0, 2 * 2 * 4 * 3 * 4),)
    assert len(locate(layout, whole, {0: range(2)})[0].runs) == 2
    assert locate(layout, whole, {0: range(4)})[0].narrow is None


def test_a_layer_that_no_rank_holds_is_an_error() -> None:
    layout = build_layout(4, 2)
    first, second = spread(4, pp=2)
    with pytest.raises(TransferError, match="holds layer 2"):
        agree(layout, [first], first, second)
    with pytest.raises(TransferError, match="combined"):
        agree(layout, [first], second, first)
    with pytest.raises(TransferError, match="cannot be split over 3"):
        agree(layout, [first], first, KVShard(first_layer=0, num_layers=4, tp_size=3))
    with pytest.raises(TransferError, match="layers 3 to 5 are not in"):
        agree(layout, [first], first, KVShard(first_layer=3, num_layers=3))
    with pytest.raises(TransferError, match="KV head 1"):
        agree(layout, spread(4, tp=2)[:1], spread(4, tp=2)[0], spread(4)[0])


@pytest.mark.parametrize("num_heads", [2, None])
@pytest.mark.parametrize("grid", [{}, {"tp": 2}, {"tp": 4}, {"pp": 3}, {"tp": 2, "pp": 2}])
def test_the_layout_of_the_model_follows_from_those_of_its_ranks(num_heads: int | None, grid: dict[str, int]) -> None:
    layout = build_layout(5, num_heads)
    whole = build_whole(layout, NUM_BLOCKS)
    shards = spread(5, **grid)
    caches = [build_cache(take_share(whole, layout, shard), layout, shard) for shard in shards]
    shares = [(shard, KVLayout.of(cache.spec)) for shard, cache in zip(shards, caches, strict=True)]
    assert KVLayout.join(shares, num_kv_heads=2) == layout
    if num_heads is not None:
        with pytest.raises(ValueError, match=r"allocates|cannot be split"):
            KVLayout.join(shares, num_kv_heads=3)


@pytest.mark.parametrize("heads", [range(1), range(1, 3), range(3, 4), range(4)])
def test_runs_of_bytes_and_a_view_of_the_tensor_are_the_same_slice(heads: range) -> None:
    """The CPU moves the former, a GPU the latter."""
    layout = build_layout(1, 4)
    (layer,) = build_whole(layout, NUM_BLOCKS)
    piece = locate(layout, layout.whole_shard, {0: heads})[0]
    data = layer.reshape(NUM_BLOCKS, -1).view(torch.uint8)
    by_runs = torch.cat([data[1, start:end] for start, end in piece.runs])
    view = layer
    if piece.narrow is not None:
        axis, first, count = piece.narrow
        view = layer.narrow(axis + 1, first, count)
    assert view.shape[1:] == piece.shape
    assert torch.equal(view[1].reshape(-1).view(torch.uint8), by_runs)
    assert torch.equal(view[1], layer[1, :, heads.start : heads.stop])
