"""The contract between attention layers and a backend's way of attending over paged blocks.

A block of a layer is `[2, num_kv_heads, block_size, head_dim]`: a head's keys of a block are one contiguous run.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

import torch

from tandem_worker.model.contract import ForwardBatch, KVLayerSpec

KV_HEAD_AXIS = 1


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class AttentionSpec:
    """What one layer's attention looks like on this rank."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    """Width of queries and keys."""
    scale: float
    window: int | None = None
    """Keys that a query sees, its own included."""
    chunk: int | None = None
    """A query sees only keys of its own chunk of this many positions (Llama 4)."""
    value_dim: int | None = None
    """For MLA: keys are the cached latents themselves, and values their first `value_dim` elements."""
    sinks: torch.Tensor | None = None
    """`[num_heads]` logits that take part in the softmax without a value (gpt-oss)."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LatentSpec:
    """MLA of one layer on this rank."""

    attention: AttentionSpec
    """The absorbed form: `head_dim` is the latent's width, `value_dim` its part without positions (the rank)."""
    expand: torch.Tensor
    """`[num_heads, nope_dim + value width, rank]`: a latent's key part, then its value, for every head."""
    nope_dim: int
    _key_in: torch.Tensor = field(init=False)
    _value_out: torch.Tensor = field(init=False)

    def __post_init__(self) -> None:
        key_in, value_out = self.expand[:, : self.nope_dim], self.expand[:, self.nope_dim :].transpose(1, 2)
        if self.expand.device.type == "cpu":  # its batched products prefer dense operands; a GPU takes views
            key_in, value_out = key_in.contiguous(), value_out.contiguous()
        object.__setattr__(self, "_key_in", key_in)
        object.__setattr__(self, "_value_out", value_out)

    @property
    def rank(self) -> int:
        """Width of a latent without its positions; DeepSeek's `kv_lora_rank`."""
        return self.expand.shape[2]

    @property
    def rope_dim(self) -> int:
        """Width of the part of a cached key that carries positions; DeepSeek's `qk_rope_head_dim`."""
        return self.attention.head_dim - self.rank

    @property
    def value_width(self) -> int:
        """Width of one head's values."""
        return self.expand.shape[1] - self.nope_dim

    def absorb(self, queries: torch.Tensor) -> torch.Tensor:
        """`[T, H, nope + rope]` to queries of latents, `[T, H, rank + rope]`."""
        inside = torch.bmm(queries[..., : self.nope_dim].transpose(0, 1), self._key_in).transpose(0, 1)
        return torch.cat((inside, queries[..., self.nope_dim :]), dim=-1)

    def bring_out(self, attended: torch.Tensor) -> torch.Tensor:
        """What absorbed queries gathered, `[T, H, rank]`, to the heads' values side by side, `[T, H * value]`."""
        return torch.bmm(attended.transpose(0, 1), self._value_out).transpose(0, 1).flatten(1)


class StepAttention(Protocol):
    """Attention of one step. Made once per step, used by every layer."""

    def write(self, kv: torch.Tensor, kv_layer: torch.Tensor) -> None:
        """Store the new tokens' keys and values, `[T, 2, num_kv_heads, head_dim]`, in their slots.

        MLA's latents are `[T, 1, 1, head_dim]`.
        """
        ...

    def attend(self, q: torch.Tensor, kv: torch.Tensor, kv_layer: torch.Tensor, spec: AttentionSpec) -> torch.Tensor:
        """Causal attention of `q` `[T, num_heads, head_dim]` over each sequence's context, written keys included.

        `kv` is what `write` was given. Returns `[T, num_heads * head_dim]` (MLA: `value_dim`).
        """
        ...

    def attend_latents(
        self, queries: torch.Tensor, kv: torch.Tensor, kv_layer: torch.Tensor, spec: LatentSpec
    ) -> torch.Tensor:
        """MLA of `queries` `[T, num_heads, nope_dim + rope_dim]` over latents; `[T, num_heads * value_width]`."""
        ...


class AttentionBackend(Protocol):
    """A way of attending that suits a device."""

    def begin(self, batch: ForwardBatch, block_size: int) -> StepAttention:
        """Prepare what all layers of a step share."""
        ...


def kv_layer_spec(block_size: int, num_kv_heads: int, head_dim: int) -> KVLayerSpec:
    """Block shape of a layer with keys and values of equal width."""
    return KVLayerSpec(block_shape=(2, num_kv_heads, block_size, head_dim), head_dim_index=KV_HEAD_AXIS)


def latent_layer_spec(block_size: int, width: int) -> KVLayerSpec:
    """Block shape of an MLA layer: latents, which every tensor-parallel rank holds whole."""
    return KVLayerSpec(block_shape=(block_size, width), head_dim_index=None)
