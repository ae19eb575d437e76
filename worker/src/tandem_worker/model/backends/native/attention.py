"""Attention by the CPU kernels: prefills and decodes of a step in one call, read from the blocks where they lie."""

from __future__ import annotations

import torch

from tandem_worker.model.attention import AttentionSpec
from tandem_worker.model.backends import native
from tandem_worker.model.backends.torch.attention import TorchAttention, TorchStepAttention
from tandem_worker.model.contract import ForwardBatch


class NativeAttention(TorchAttention):
    def begin(self, batch: ForwardBatch, block_size: int) -> TorchStepAttention:
        return NativeStepAttention(self, batch, block_size)


class NativeStepAttention(TorchStepAttention):
    """Latents, whose keys are their values, and heads of odd widths are left to torch."""

    def __init__(self, backend: TorchAttention, batch: ForwardBatch, block_size: int) -> None:
        super().__init__(backend, batch, block_size)
        self._steps: dict[tuple[int | None, int | None], native.AttentionStep] = {}

    def attend(self, q: torch.Tensor, kv: torch.Tensor, kv_layer: torch.Tensor, spec: AttentionSpec) -> torch.Tensor:
        if spec.value_dim is not None or spec.head_dim % native.LANES:
            return super().attend(q, kv, kv_layer, spec)
        step = self._steps.get((spec.window, spec.chunk))
        if step is None:
            batch = self._batch
            step = self._steps[spec.window, spec.chunk] = native.AttentionStep(
                batch.block_tables,
                batch.query_start,
                batch.context_lens,
                num_heads=spec.num_heads,
                num_kv_heads=spec.num_kv_heads,
                head_dim=spec.head_dim,
                block_size=self._block_size,
                scale=spec.scale,
                window=spec.window,
                chunk=spec.chunk,
            )
        return step.attend(q, kv_layer, spec.sinks)
