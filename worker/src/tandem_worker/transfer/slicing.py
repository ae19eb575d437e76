"""What moves from which rank of one group to which rank of another: KV re-sliced between different TP and PP. Pure.

Both ends of a connection compute the same plan from the shards that they told each other, so no plan is sent.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from tandem_worker.transfer.errors import TransferError
from tandem_worker.transfer.layout import KVLayout, KVShard

Slices = dict[int, range | None]
"""Layers of the whole model, ascending, each with its KV heads (of the whole model); None for all that a block has."""


def plan_slices(layout: KVLayout, sources: Sequence[KVShard], target: KVShard) -> list[Slices]:
    """What `target` takes from each of `sources`: together every element that it holds, each exactly once.

    Where several sources hold the same (MLA, copied heads), targets and layers take turns among them, so that all of
    them send about as much. Raises TransferError when a part is held by no source.
    """
    plan: list[Slices] = [{} for _ in sources]
    for layer in target.layers:
        holders = [index for index, source in enumerate(sources) if layer in source.layers]
        num_heads = layout.num_heads(layer)
        if num_heads is None:
            plan[_choose(holders, target, layer, "it")][layer] = None
            continue
        for head in target.heads(num_heads):
            able = [index for index in holders if head in sources[index].heads(num_heads)]
            source = _choose(able, target, layer, f"its KV head {head}")
            taken = plan[source].get(layer) or range(head, head)
            assert taken.stop == head, "a rank's heads are neighbours, and of copies one is chosen per layer"
            plan[source][layer] = range(taken.start, head + 1)
    return plan


def _choose(holders: Sequence[int], target: KVShard, layer: int, what: str) -> int:
    if not holders:
        raise TransferError(f"no rank of the prefill worker holds layer {layer}, or {what} in that layer")
    return holders[(target.tp_rank + layer) % len(holders)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """The place of a slice of a layer in the blocks of one rank. Its bytes travel run by run."""

    layer: int
    """Among the rank's own layers."""
    block_bytes: int
    """Bytes of the rank's whole block."""
    runs: tuple[tuple[int, int], ...]
    """`[start, end)` of each contiguous run of bytes inside a block; one run is a whole block."""
    shape: tuple[int, ...]
    """Shape of the slice of one block."""
    narrow: tuple[int, int, int] | None
    """Axis of the block's shape, first head (of this rank), number of heads; None for the whole block."""
    num_bytes: int = field(init=False)
    """Bytes of all runs: asked for with every frame."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "num_bytes", sum(end - start for start, end in self.runs))


def locate(layout: KVLayout, shard: KVShard, slices: Slices) -> dict[int, Piece]:
    """Find where `slices` of blocks of `layout` lie in the blocks of the rank that holds `shard`, by layer of the
    model."""
    share = layout.share(shard)
    return {layer: _locate(layout, shard, share, layer, heads) for layer, heads in slices.items()}


def _locate(layout: KVLayout, shard: KVShard, share: KVLayout, layer: int, heads: range | None) -> Piece:
    local = layer - shard.first_layer
    shape, axis = share.block_shapes[local], share.head_axes[local]
    size = math.prod(shape) * share.element_bytes
    total = layout.num_heads(layer)
    if heads is None or axis is None or total is None or heads == shard.heads(total):
        return Piece(layer=local, block_bytes=size, runs=((0, size),), shape=shape, narrow=None)
    first, count = heads.start - shard.heads(total).start, len(heads)
    inner = math.prod(shape[axis + 1 :]) * share.element_bytes
    stride = shape[axis] * inner
    starts = [outer * stride + first * inner for outer in range(math.prod(shape[:axis]))]
    return Piece(
        layer=local,
        block_bytes=size,
        runs=tuple((start, start + count * inner) for start in starts),
        shape=(*shape[:axis], count, *shape[axis + 1 :]),
        narrow=(axis, first, count),
    )


def agree(layout: KVLayout, ranks: Sequence[KVShard], source: KVShard, target: KVShard) -> Slices:
    """What a connection between the ranks that hold `source` and `target` moves.

    `ranks` are all shards of the prefill group. Raises TransferError when they cannot serve the target.
    """
    try:
        for shard in (*ranks, target):
            layout.share(shard)
        return plan_slices(layout, ranks, target)[ranks.index(source)]
    except ValueError as error:
        raise TransferError(f"the ranks' shares of the KV cache cannot be combined: {error}") from error
