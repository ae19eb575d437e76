"""What a model family offers the engine, and what the engine hands to it.

A model is a function from one `ForwardBatch` and the `KVCache` to logits. It knows nothing of requests, scheduling or
sampling. Tokens of all sequences of a step stand one after another in one dimension T; nothing is padded.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from tandem_worker.host.memory import LARGE_PAGE, reserve_zeroed

if TYPE_CHECKING:
    import torch

    from tandem_worker.model.pooling import EmbeddingSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class KVLayerSpec:
    """Shape of one layer's share of a block.

    `block_shape` is what one block of this layer looks like, for example `(2, num_kv_heads, block_size, head_dim)`
    (keys, values), or `(block_size, kv_lora_rank + rope_dim)` for MLA. Blocks of a layer are one contiguous tensor
    `[num_blocks, *block_shape]`, so a block is one contiguous run of bytes, whatever the family.
    """

    block_shape: tuple[int, ...]
    head_dim_index: int | None = None
    """Axis of `block_shape` that is split under tensor parallelism; None when every rank holds all of it (MLA)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KVCacheSpec:
    """What the model needs stored per block. `bytes_per_block` is over all layers."""

    layers: tuple[KVLayerSpec, ...]
    dtype: torch.dtype
    block_size: int

    @property
    def bytes_per_block(self) -> int:
        """Bytes of one block over all layers of this rank."""
        return sum(math.prod(layer.block_shape) for layer in self.layers) * self.dtype.itemsize


@dataclass(frozen=True, slots=True, kw_only=True)
class KVCache:
    """The block space. `layers[i]` is `[num_blocks, *spec.layers[i].block_shape]`, contiguous.

    Block 0 is never given to a request: padding and dropped tokens write there.
    """

    spec: KVCacheSpec
    num_blocks: int
    layers: tuple[torch.Tensor, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardBatch:
    """Inputs of one step over B sequences with T new tokens in all. Host-side tuples spare the CPU path a sync."""

    token_ids: torch.Tensor  # [T] int64
    positions: torch.Tensor  # [T] int64, absolute position of each token in its sequence
    slot_mapping: torch.Tensor  # [T] int64, block_id * block_size + offset: where this token's KV is written
    block_tables: torch.Tensor  # [B, max_blocks] int32, blocks of each sequence in order, padded with 0
    query_start: torch.Tensor  # [B + 1] int32, first token of each sequence in T
    context_lens: torch.Tensor  # [B] int32, tokens of each sequence including the new ones
    logits_rows: torch.Tensor  # [N] int64, rows of T whose logits are wanted, ascending
    query_lens_host: tuple[int, ...]  # B new tokens per sequence
    context_lens_host: tuple[int, ...]  # B
    has_padding: bool = False
    """There may be rows of no sequence: tokens whose slot is in block 0. Their results are not used."""
    num_decodes: int = 0
    """Leading sequences whose tokens are their newest ones and guesses behind it; the tokens of others are known."""
    sequence_ids: torch.Tensor | None = None
    """`[T]` int32, the sequence of each token; None: whoever needs them makes them of `query_start`."""
    before_layer: Callable[[int], None] | None = field(default=None)
    """Called with the layer's index before that layer's KV is read or written, in the order of the layers: blocks of it
    may still be on their way."""
    on_layer: Callable[[int], None] | None = field(default=None)
    """Called with the layer's index when that layer's KV of this batch is written (on a GPU: enqueued)."""
    on_compute: Callable[[], None] | None = field(default=None)
    """Called before the layers of a model that `is_one_call`."""

    @property
    def is_decode(self) -> bool:
        """Exactly one new token in every sequence."""
        return len(self.query_lens_host) == self.token_ids.shape[0]

    @property
    def is_decode_with_guesses(self) -> bool:
        """Nothing but newest tokens of sequences and guesses behind them."""
        return self.is_decode or len(self.query_lens_host) == self.num_decodes

    def find_sequence_ids(self) -> torch.Tensor:
        """`sequence_ids`, made where nobody has."""
        if self.sequence_ids is not None:
            return self.sequence_ids
        import torch

        lengths, count = self.query_start.diff(), len(self.query_lens_host)
        ids = torch.arange(count, dtype=torch.int32, device=lengths.device)
        return ids.repeat_interleave(lengths.long(), output_size=self.token_ids.shape[0])


class CausalLM(Protocol):
    """A model family. Instances hold weights on one device; `forward` is called under `torch.inference_mode()`."""

    vocab_size: int
    max_position_embeddings: int
    device: torch.device
    dtype: torch.dtype
    embedding: EmbeddingSpec | None
    """None: the model generates."""
    inexact: str | None
    """Why a row's logits may have other bits in other company, as a part of a sentence; None: they never have."""
    exact_rows: int
    """Rows of a step up to which they have none all the same, where it has newest tokens and guesses alone: 1 where
    there are no such steps, `sys.maxsize` where `inexact` is None."""
    is_one_call: bool
    """Its layers are one call, in which other threads have the interpreter's lock; `on_compute` is called before it."""

    def kv_cache_spec(self, block_size: int) -> KVCacheSpec:
        """What this rank stores per block of `block_size` tokens, layer by layer."""
        ...

    def forward(self, batch: ForwardBatch, kv_cache: KVCache) -> torch.Tensor:
        """Logits `[N, vocab_size]` of `batch.logits_rows`, float32. Writes this batch's KV into `kv_cache`.

        Of an embedding model, in place of logits, the final hidden states `[N, embedding.size]`.
        """
        ...


def has_head(model: CausalLM) -> bool:
    """Whether it was loaded with a draft head, for which its blocks have more layers."""
    return getattr(model, "has_head", False)


def allocate_kv_cache(spec: KVCacheSpec, num_blocks: int, device: torch.device) -> KVCache:
    """Block space of `num_blocks` blocks, zero so that padding reads are finite. On a CPU blocks take memory when they
    are first written; on a GPU all have it from here on."""
    import torch

    shapes = [(num_blocks, *layer.block_shape) for layer in spec.layers]
    if device.type == "cpu":
        layers = tuple(_reserve(shape, spec.dtype) for shape in shapes)
    else:
        layers = tuple(torch.zeros(shape, dtype=spec.dtype, device=device) for shape in shapes)
    return KVCache(spec=spec, num_blocks=num_blocks, layers=layers)


def _reserve(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Zeros that take their memory as they are written. Small ones share pages with others, and have theirs."""
    import torch

    count = math.prod(shape)
    if count * dtype.itemsize < LARGE_PAGE:
        return torch.zeros(shape, dtype=dtype)
    return torch.frombuffer(reserve_zeroed(count * dtype.itemsize), dtype=dtype, count=count).view(shape)
