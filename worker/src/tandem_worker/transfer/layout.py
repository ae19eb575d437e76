"""Shape of the block space: of the whole model, and of the shard that one rank holds. Pure.

A block belongs to the whole model: `block_size` tokens in every layer. Pipeline stages hold runs of its layers, tensor
parallel ranks runs of its KV heads. All ranks of a group give a block the same number.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tandem_worker.model.contract import KVCacheSpec


FORMAT_VERSION = 1
"""What the numbers inside a block mean where shapes do not say it: the order of keys and values, keys with their
positions rotated in. Raise it with every change of that, so that builds before and after it refuse each other."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KVShard:
    """Which part of every block a rank holds: the layers of its pipeline stage, the KV heads of its tensor rank."""

    first_layer: int
    num_layers: int
    tp_rank: int = 0
    tp_size: int = 1

    @property
    def layers(self) -> range:
        """Layers of the whole model, counted from 0."""
        return range(self.first_layer, self.first_layer + self.num_layers)

    def heads(self, num_heads: int) -> range:
        """KV heads of the whole model that this rank holds. With more ranks than heads several hold the same one."""
        if num_heads % self.tp_size and self.tp_size % num_heads:
            raise ValueError(f"{num_heads} KV heads cannot be split over {self.tp_size} tensor-parallel ranks")
        first = self.tp_rank * num_heads // self.tp_size
        return range(first, first + max(1, num_heads // self.tp_size))


@dataclass(frozen=True, slots=True, kw_only=True)
class RankAddress:
    """A rank of a prefill group: where it takes connections, and what it holds."""

    endpoint: str
    shard: KVShard


@dataclass(frozen=True, slots=True, kw_only=True)
class KVLayout:
    """Shape of a block as far as a peer must share it. The number of blocks may differ between workers."""

    dtype: str
    element_bytes: int
    block_size: int
    """Tokens per block."""
    block_shapes: tuple[tuple[int, ...], ...]
    """One shape per layer."""
    head_axes: tuple[int | None, ...]
    """Axis of the KV heads in each layer's shape; None where every tensor-parallel rank holds all of it (MLA)."""

    @property
    def num_layers(self) -> int:
        """Layers that have KV."""
        return len(self.block_shapes)

    @property
    def block_bytes(self) -> tuple[int, ...]:
        """Bytes of one block, per layer."""
        return tuple(math.prod(shape) * self.element_bytes for shape in self.block_shapes)

    @property
    def fingerprint(self) -> str:
        """Equal for equal layouts and readable in an error message: `v1/bfloat16/16/30x(2,h3,16,64)`.

        The format's version, the element type, tokens per block, and runs of layers; `h` stands before the KV heads.
        """
        layers = zip(self.block_shapes, self.head_axes, strict=True)
        runs = "+".join(f"{len(list(run))}x{_describe(*layer)}" for layer, run in groupby(layers))
        return f"v{FORMAT_VERSION}/{self.dtype}/{self.block_size}/{runs}"

    @property
    def whole_shard(self) -> KVShard:
        """What a worker of one rank holds."""
        return KVShard(first_layer=0, num_layers=self.num_layers)

    def num_heads(self, layer: int) -> int | None:
        """KV heads of a layer; None where its blocks have no axis of heads (MLA)."""
        axis = self.head_axes[layer]
        return None if axis is None else self.block_shapes[layer][axis]

    def share(self, shard: KVShard) -> KVLayout:
        """What `shard` holds of blocks of this layout. Raises ValueError when there is no such part."""
        if shard.first_layer < 0 or shard.layers.stop > self.num_layers:
            raise ValueError(f"layers {shard.first_layer} to {shard.layers.stop - 1} are not in {self.fingerprint}")
        shapes: list[tuple[int, ...]] = []
        for layer in shard.layers:
            heads = self.num_heads(layer)
            count = None if heads is None else len(shard.heads(heads))
            shapes.append(_with_heads(self.block_shapes[layer], self.head_axes[layer], count))
        axes = tuple(self.head_axes[layer] for layer in shard.layers)
        return replace(self, block_shapes=tuple(shapes), head_axes=axes)

    @classmethod
    def of(cls, spec: KVCacheSpec) -> KVLayout:
        """The layout of what one rank allocates."""
        return cls(
            dtype=str(spec.dtype).removeprefix("torch."),
            element_bytes=spec.dtype.itemsize,
            block_size=spec.block_size,
            block_shapes=tuple(layer.block_shape for layer in spec.layers),
            head_axes=tuple(layer.head_dim_index for layer in spec.layers),
        )

    @classmethod
    def join(
        cls, shares: Sequence[tuple[KVShard, KVLayout]], num_kv_heads: int, *, head_kv_heads: int | None = None
    ) -> KVLayout:
        """The layout of the whole model from what all ranks of a group allocate.

        `num_kv_heads` is the model's: where ranks hold copies of a head it does not follow from their shapes. Nor does
        `head_kv_heads`, those of a draft head, whose layer is the last but one; None: there is no draft head.
        Raises ValueError when the shares do not make one model.
        """
        shapes: list[tuple[int, ...]] = []
        axes: list[int | None] = []
        counts = [num_kv_heads] * max(shard.layers.stop for shard, _ in shares)
        if head_kv_heads is not None:
            counts[-2] = head_kv_heads
        for shard, share in sorted(shares, key=lambda entry: (entry[0].first_layer, entry[0].tp_rank)):
            if shard.tp_rank == 0 and shard.first_layer == len(shapes):
                axes += share.head_axes
                rows = zip(share.block_shapes, share.head_axes, counts[shard.first_layer :], strict=False)
                shapes += [_with_heads(shape, axis, count) for shape, axis, count in rows]
        whole = replace(shares[0][1], block_shapes=tuple(shapes), head_axes=tuple(axes))
        for shard, share in shares:
            if whole.share(shard) != share:
                raise ValueError(
                    f"tensor rank {shard.tp_rank} of the stage of layer {shard.first_layer} allocates "
                    f"{share.fingerprint}, but its part of {whole.fingerprint} is {whole.share(shard).fingerprint}"
                )
        return whole


def _describe(shape: tuple[int, ...], head_axis: int | None) -> str:
    return "(" + ",".join(f"h{extent}" if axis == head_axis else str(extent) for axis, extent in enumerate(shape)) + ")"


def _with_heads(shape: tuple[int, ...], axis: int | None, count: int | None) -> tuple[int, ...]:
    if axis is None or count is None:
        return shape
    return (*shape[:axis], count, *shape[axis + 1 :])
