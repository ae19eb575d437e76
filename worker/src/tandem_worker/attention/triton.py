"""Attention on a GPU: the paged Triton kernels read blocks where they lie."""

from __future__ import annotations

import torch

from tandem_worker import kernels
from tandem_worker.attention.base import AttentionSpec
from tandem_worker.models.base import ForwardBatch


class TritonAttention:
    """Backend for CUDA devices."""

    def begin(self, batch: ForwardBatch, block_size: int) -> TritonStepAttention:
        return TritonStepAttention(batch)


class TritonStepAttention:
    """One step. Batches of one token per sequence use the split-KV kernel, others the one for several queries."""

    def __init__(self, batch: ForwardBatch) -> None:
        self._batch = batch

    def write(self, kv: torch.Tensor, kv_layer: torch.Tensor) -> None:
        kernels.kv_write(kv[:, 0], kv[:, 1], kv_layer, self._batch.slot_mapping)

    def attend(self, q: torch.Tensor, kv: torch.Tensor, kv_layer: torch.Tensor, spec: AttentionSpec) -> torch.Tensor:
        batch = self._batch
        if batch.is_decode:
            out = kernels.paged_decode_attention(
                q,
                kv_layer,
                batch.block_tables,
                batch.context_lens,
                scale=spec.scale,
                window=spec.window,
                chunk=spec.chunk,
                sinks=spec.sinks,
            )
        else:
            out = kernels.paged_prefill_attention(
                q,
                kv_layer,
                batch.block_tables,
                batch.query_start,
                batch.context_lens,
                scale=spec.scale,
                window=spec.window,
                chunk=spec.chunk,
                sinks=spec.sinks,
            )
        return out.flatten(1)
