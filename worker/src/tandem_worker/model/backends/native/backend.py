"""The CPU kernels as a backend."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from tandem_worker.host.caches import observe_cache_bytes
from tandem_worker.model.backends import native
from tandem_worker.model.backends.contract import BackendName, Lossless
from tandem_worker.model.backends.form import CPU_RATIOS
from tandem_worker.model.backends.native import library
from tandem_worker.model.backends.native.attention import NativeAttention
from tandem_worker.model.backends.native.head import build_head_calls
from tandem_worker.model.backends.native.layers import (
    PACKS,
    NativeEmbedding,
    NativeExperts,
    NativeHead,
    NativeLinear,
    NativeMLP,
    NativeRMSNorm,
    NativeSelfAttention,
    build_route,
)
from tandem_worker.model.backends.native.packing import LosslessPacker, NativePacker
from tandem_worker.model.backends.native.stack import NativeStack
from tandem_worker.model.backends.torch.layers import TORCH
from tandem_worker.model.contract import KVLayerSpec


def find_inexact(layers: Sequence[KVLayerSpec]) -> str | None:
    """As `Backend.find_inexact`."""
    if not PACKS:
        return "oneDNN multiplies many rows with AMX, and the kernels few"
    if any(layer.head_dim_index is None for layer in layers):
        return "torch attends to latents (MLA)"
    if any(layer.block_shape[-1] % library.LANES for layer in layers):
        return f"torch attends with heads whose width is no multiple of {library.LANES}"
    return None


NATIVE = replace(
    TORCH,
    name=BackendName.NATIVE,
    dtype=torch.bfloat16,
    attention=NativeAttention,
    linear=NativeLinear,
    head=NativeHead,
    norm=NativeRMSNorm,
    self_attention=NativeSelfAttention,
    mlp=NativeMLP,
    experts=NativeExperts,
    route=build_route,
    find_inexact=find_inexact,
    stack=NativeStack,
    head_calls=build_head_calls,
    packer=NativePacker if PACKS else None,
    lossless=Lossless(
        packer=LosslessPacker,
        embedding=NativeEmbedding,
        find_obstacle=lambda dtype: native.find_lossless_obstacle(),
        ratios=CPU_RATIOS,
        count_cache_bytes=observe_cache_bytes,
    ),
)
