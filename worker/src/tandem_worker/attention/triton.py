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
        self._token_tables: torch.Tensor | None = None

    def write(self, kv: torch.Tensor, kv_layer: torch.Tensor) -> None:
        if kv.shape[1] == 1:
            kernels.latent_write(kv[:, 0, 0], kv_layer, self._batch.slot_mapping)
            return
        kernels.kv_write(kv[:, 0], kv[:, 1], kv_layer, self._batch.slot_mapping)

    def attend(self, q: torch.Tensor, kv: torch.Tensor, kv_layer: torch.Tensor, spec: AttentionSpec) -> torch.Tensor:
        batch = self._batch
        if spec.value_dim is not None:
            return self._attend_latents(q, kv_layer, spec, spec.value_dim)
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

    def _attend_latents(self, q: torch.Tensor, latents: torch.Tensor, spec: AttentionSpec, rank: int) -> torch.Tensor:
        """MLA in absorbed form. Several new tokens of a sequence are attended as if each were a sequence."""
        batch = self._batch
        tables, contexts = batch.block_tables, batch.context_lens
        if not batch.is_decode:
            if self._token_tables is None:
                lengths = batch.query_start.diff().long()
                self._token_tables = tables.repeat_interleave(lengths, dim=0, output_size=q.shape[0])
            tables, contexts = self._token_tables, (batch.positions + 1).int()
        return kernels.mla_decode_attention(q, latents, tables, contexts, latent_dim=rank, scale=spec.scale).flatten(1)
