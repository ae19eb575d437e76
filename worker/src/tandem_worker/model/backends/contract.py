"""What a model is built from: the classes that families take their layers from, without asking where a tensor lives."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

import torch

from tandem_worker.model.attention import AttentionBackend
from tandem_worker.model.checkpoint.stored import PackedWeight, Packer
from tandem_worker.model.contract import KVLayerSpec
from tandem_worker.model.layers.attention import SelfAttention
from tandem_worker.model.layers.draft import HeadCalls, HeadParts
from tandem_worker.model.layers.embedding import Embedding
from tandem_worker.model.layers.linear import HeadLinear, Linear
from tandem_worker.model.layers.mlp import GatedMLP
from tandem_worker.model.layers.moe import Experts
from tandem_worker.model.layers.norm import HeadNorm, RMSNorm
from tandem_worker.model.layers.pre_norm import DecoderLayer, LayerStack, PreNormLayer
from tandem_worker.model.layers.rotary import Rotation
from tandem_worker.model.layers.routers import Route, Router
from tandem_worker.parallel.collectives import Collective

if TYPE_CHECKING:
    from tandem_worker.kernels.quantized import Weight


class BackendName(StrEnum):
    TORCH = "torch"
    NATIVE = "native"
    TRITON = "triton"


@dataclass(frozen=True, slots=True, kw_only=True)
class Lossless:
    """How a backend keeps bfloat16 weights in 12 bits, bit for bit."""

    embedding: Callable[[Weight | PackedWeight, int, Collective | None, torch.dtype], Embedding]
    """Makes the embedding from a rank's rows of the table, the number of the first of them, what adds up the ranks'
    results, and the model's element type."""
    find_obstacle: Callable[[torch.dtype], str | None]
    """Why it cannot be done here with that element type, as a sentence; None when it can."""
    ratios: Mapping[int, float]
    """How many times as fast as plain weights it was measured, by rows of a product; `Auto` chooses by it."""
    count_cache_bytes: Callable[[], int] = lambda: 0
    """How much of a model stays in caches from one step to the next: where all of it does, `Auto` is `Plain`."""
    packer: Callable[[], Packer] | None = None
    """Makes matrices from what the checkpoint stores, in host memory."""
    shrink: Callable[[torch.Tensor], Weight | None] | None = None
    """Makes one of a plain matrix `[N, K]`, or of experts `[E, N, K]`, where that is; None for one that stays plain."""
    connect: Callable[[object], None] | None = None
    """Shows a whole model's matrices to each other."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Backend:
    """The classes that layers are made of.

    *Exact rows.* A row's logits have the same bits whether it is decoded, part of a chunk of any size, or computed
    again after a preemption or a move, alone or beside others, on one thread or several: a row is computed from itself
    and the keys that it sees, in an order that follows from its position alone. So a stream that moves goes on with
    the tokens that it would have had. NATIVE keeps this, but for latents (MLA) and, where oneDNN has AMX, beyond
    `most_rows`. TRITON keeps it for decoded rows and guesses, up to 32 in a step (`count_exact_rows`). TORCH does not:
    its products take other paths for other numbers of rows. docs/kernels.md has the table.
    """

    name: BackendName
    keeps_packed: bool
    """Quantized weights stay as they are; otherwise they are dequantized at load."""
    attention: Callable[[], AttentionBackend]
    linear: type[Linear]
    head: type[HeadLinear]
    norm: type[RMSNorm]
    head_norm: type[HeadNorm]
    rotation: type[Rotation]
    self_attention: type[SelfAttention]
    mlp: type[GatedMLP]
    experts: type[Experts]
    route: Callable[[Router], Route]
    """The function that chooses experts by a router's rule."""
    find_inexact: Callable[[Sequence[KVLayerSpec]], str | None]
    """Why rows of a model with these layers are not exact, as a part of a sentence; None when they are."""
    count_exact_rows: Callable[[Sequence[DecoderLayer]], int] = lambda layers: 1
    """Asked only where rows are not exact: `CausalLM.exact_rows` of a model with these layers."""
    dtype: torch.dtype | None = None
    """The one element type it computes in; None: any."""
    layer: type[PreNormLayer] = PreNormLayer
    stack: type[LayerStack] = LayerStack
    head_calls: Callable[[HeadParts, int], HeadCalls | None] = lambda parts, block_size: None
    """Computes a draft head whole, over blocks of so many tokens; None: it is computed kernel by kernel."""
    packer: Callable[[], Packer] | None = None
    """Makes matrices as they are multiplied from what the checkpoint stores; None: layers pack them."""
    lossless: Lossless | None = None
    """None: it multiplies no such form."""
