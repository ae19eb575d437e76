"""Block spaces of whole models and of the ranks that share them."""

from __future__ import annotations

import torch
from tandem_worker.model.contract import KVCache, KVCacheSpec, KVLayerSpec
from tandem_worker.transfer.layout import KVLayout, KVShard

BLOCK_SIZE = 4


def spread(num_layers: int, *, tp: int = 1, pp: int = 1) -> list[KVShard]:
    """The shards of `pp x tp` ranks, tensor ranks innermost; the first stages are one layer longer."""
    share, longer = divmod(num_layers, pp)
    counts = [share + (stage < longer) for stage in range(pp)]
    return [
        KVShard(first_layer=sum(counts[:stage]), num_layers=counts[stage], tp_rank=rank, tp_size=tp)
        for stage in range(pp)
        for rank in range(tp)
    ]


def build_layout(num_layers: int, num_heads: int | None) -> KVLayout:
    """Of float32 blocks; `num_heads` None stands for MLA."""
    shape, axis = ((BLOCK_SIZE, 6), None) if num_heads is None else ((2, num_heads, BLOCK_SIZE, 3), 1)
    return KVLayout(
        dtype="float32",
        element_bytes=4,
        block_size=BLOCK_SIZE,
        block_shapes=(shape,) * num_layers,
        head_axes=(axis,) * num_layers,
    )


def build_whole(layout: KVLayout, num_blocks: int) -> list[torch.Tensor]:
    """Blocks of the whole model, layer by layer; no element is like another, and none is 0."""
    tensors, start = [], 1
    for shape in layout.block_shapes:
        tensor = torch.arange(start, start + num_blocks * torch.Size(shape).numel(), dtype=torch.float32)
        tensors.append(tensor.reshape(num_blocks, *shape))
        start += tensor.numel()
    return tensors


def take_share(whole: list[torch.Tensor], layout: KVLayout, shard: KVShard) -> list[torch.Tensor]:
    """What the rank with this shard holds of `whole`."""
    pieces = []
    for layer in shard.layers:
        axis, heads = layout.head_axes[layer], layout.num_heads(layer)
        piece = whole[layer]
        if axis is not None and heads is not None:
            piece = piece.index_select(axis + 1, torch.tensor(list(shard.heads(heads))))
        pieces.append(piece.contiguous())
    return pieces


def build_cache(layers: list[torch.Tensor], layout: KVLayout, shard: KVShard) -> KVCache:
    share = layout.share(shard)
    specs = tuple(
        KVLayerSpec(block_shape=shape, head_dim_index=axis)
        for shape, axis in zip(share.block_shapes, share.head_axes, strict=True)
    )
    spec = KVCacheSpec(layers=specs, dtype=torch.float32, block_size=BLOCK_SIZE)
    return KVCache(spec=spec, num_blocks=layers[0].shape[0], layers=tuple(layers))
