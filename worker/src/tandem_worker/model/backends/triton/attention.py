"""Attention on a GPU: the paged Triton kernels read blocks where they lie."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.nn import functional

from tandem_worker import kernels
from tandem_worker.host.uploads import upload
from tandem_worker.model.attention import AttentionSpec, LatentSpec
from tandem_worker.model.backends.latent import plan_expanded
from tandem_worker.model.contract import ForwardBatch

_MAX_EXPANDED_BYTES = 1 << 30
"""Most that MLA's expanded keys and values take in one layer's prefill; sequences beyond attend in absorbed form."""


class TritonAttention:
    """Backend for CUDA devices."""

    def begin(self, batch: ForwardBatch, block_size: int) -> TritonStepAttention:
        return TritonStepAttention(batch)


class TritonStepAttention:
    """One step. Sequences with one token, or with guesses behind their newest one, come first and use the split-KV
    kernel, others the one for many queries.

    In one kernel a tile is either too wide for decodes, of which it has few rows each, or too narrow for a prompt.
    """

    def __init__(self, batch: ForwardBatch) -> None:
        self._batch = batch
        lengths, known = batch.query_lens_host, batch.num_decodes
        self._num_decodes = next((index for index in range(known, len(lengths)) if lengths[index] != 1), len(lengths))
        self._num_rows = sum(lengths[: self._num_decodes])
        self._prompt_query_start = batch.query_start if self._num_decodes == 0 else None
        self._sequence_ids: torch.Tensor | None = None
        self._work: dict[Any, torch.Tensor] = {}
        self._token_tables: torch.Tensor | None = None
        self._latent_plan: _LatentPlan | None = None

    def write(self, kv: torch.Tensor, kv_layer: torch.Tensor) -> None:
        if kv.shape[1] == 1:
            kernels.latent_write(kv[:, 0, 0], kv_layer, self._batch.slot_mapping)
            return
        kernels.kv_write(kv[:, 0], kv[:, 1], kv_layer, self._batch.slot_mapping)

    def attend(self, q: torch.Tensor, kv: torch.Tensor, kv_layer: torch.Tensor, spec: AttentionSpec) -> torch.Tensor:
        return self.attend_cached(q, kv_layer, spec)

    def attend_cached(self, q: torch.Tensor, kv_layer: torch.Tensor, spec: AttentionSpec) -> torch.Tensor:
        """As `attend`: the new keys and values are read from their blocks like the others."""
        batch, count, rows = self._batch, self._num_decodes, self._num_rows
        options: dict[str, Any] = {
            "scale": spec.scale, "window": spec.window, "chunk": spec.chunk, "sinks": spec.sinks
        }  # fmt: skip
        tables, contexts = batch.block_tables, batch.context_lens
        out = q.new_empty(q.shape)
        if count:
            kernels.paged_decode_attention(
                q[:rows],
                kv_layer,
                tables[:count],
                contexts[:count],
                batch.query_start[: count + 1],
                self._find_sequence_ids()[:rows],
                work=self._work,
                out=out[:rows],
                **options,
            )
        if count < contexts.shape[0]:
            kernels.paged_prefill_attention(
                q[rows:],
                kv_layer,
                tables[count:],
                self._query_start_of_prompts(),
                contexts[count:],
                out=out[rows:],
                **options,
            )
        return out.flatten(1)

    def _find_sequence_ids(self) -> torch.Tensor:
        if self._sequence_ids is None:
            self._sequence_ids = self._batch.find_sequence_ids()
        return self._sequence_ids

    def _query_start_of_prompts(self) -> torch.Tensor:
        """Beginnings of the sequences behind the decodes among their own tokens."""
        if self._prompt_query_start is None:
            self._prompt_query_start = self._batch.query_start[self._num_decodes :] - self._num_rows
        return self._prompt_query_start

    def attend_latents(
        self, queries: torch.Tensor, kv: torch.Tensor, kv_layer: torch.Tensor, spec: LatentSpec
    ) -> torch.Tensor:
        batch = self._batch
        tables, contexts = self._per_token()
        if batch.is_decode_with_guesses:  # the form that a recording can hold: it depends on tensors alone
            return self._attend_absorbed(queries, kv_layer, tables, contexts, spec)
        plan = self._latent_plan
        if plan is None:
            plan = self._latent_plan = _plan_latents(batch, spec)
        if plan.rows is None:
            return self._attend_absorbed(queries, kv_layer, tables, contexts, spec)
        expanded = _attend_expanded(queries.index_select(0, plan.rows), kv_layer, plan, spec)
        out = expanded.new_empty(queries.shape[0], expanded.shape[1]).index_copy_(0, plan.rows, expanded)
        if plan.others is not None:
            rows = plan.others
            absorbed = self._attend_absorbed(
                queries.index_select(0, rows), kv_layer, tables.index_select(0, rows), contexts[rows], spec
            )
            out.index_copy_(0, rows, absorbed)
        return out

    def _per_token(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Block tables and context lengths as if each new token were a sequence."""
        batch = self._batch
        if batch.is_decode and batch.sequence_ids is None:
            return batch.block_tables, batch.context_lens
        if self._token_tables is None:
            self._token_tables = batch.block_tables.index_select(0, self._find_sequence_ids())
        return self._token_tables, (batch.positions + 1).int()

    @staticmethod
    def _attend_absorbed(
        queries: torch.Tensor, latents: torch.Tensor, tables: torch.Tensor, contexts: torch.Tensor, spec: LatentSpec
    ) -> torch.Tensor:
        """One query per row of `tables`."""
        q, rank = spec.absorb(queries), spec.rank
        scale = spec.attention.scale
        return spec.bring_out(kernels.mla_decode_attention(q, latents, tables, contexts, latent_dim=rank, scale=scale))


@dataclass(frozen=True, slots=True, kw_only=True)
class _LatentPlan:
    """Which of a step's tokens attend to expanded latents, and what of."""

    rows: torch.Tensor | None
    """Their rows of T; None: no token does."""
    others: torch.Tensor | None
    """The rest; None: there is none."""
    tables: torch.Tensor
    query_start: torch.Tensor
    kv_start: torch.Tensor
    num_keys: int


def _plan_latents(batch: ForwardBatch, spec: LatentSpec) -> _LatentPlan:
    device, heads = batch.positions.device, spec.attention.num_heads
    room = _MAX_EXPANDED_BYTES // (heads * spec.expand.shape[1] * spec.expand.element_size())
    chosen = plan_expanded(batch.query_lens_host, batch.context_lens_host, spec, max_tokens=room)
    expanded, rows, others, first = set(chosen), [], [], 0
    for index, length in enumerate(batch.query_lens_host):
        (rows if index in expanded else others).extend(range(first, first + length))
        first += length
    return _LatentPlan(
        rows=upload(np.array(rows), device) if rows else None,
        others=upload(np.array(others), device) if others else None,
        tables=batch.block_tables.index_select(0, upload(np.array(chosen, dtype=np.int64), device)),
        query_start=_starts([batch.query_lens_host[index] for index in chosen], device),
        kv_start=_starts([batch.context_lens_host[index] for index in chosen], device),
        num_keys=sum(batch.context_lens_host[index] for index in chosen),
    )


def _starts(lengths: Sequence[int], device: torch.device) -> torch.Tensor:
    """Beginnings of the runs, and the end of the last, `[len(lengths) + 1]` int32."""
    return upload(np.cumsum([0, *lengths], dtype=np.int32), device)


def _attend_expanded(queries: torch.Tensor, latents: torch.Tensor, plan: _LatentPlan, spec: LatentSpec) -> torch.Tensor:
    gathered = kernels.latent_gather(latents, plan.tables, plan.kv_start, plan.num_keys)
    kv = functional.linear(gathered[:, : spec.rank], spec.expand.flatten(0, 1))
    return kernels.mla_prefill_attention(
        queries,
        kv.view(plan.num_keys, spec.attention.num_heads, -1),
        gathered[:, spec.rank :],
        plan.query_start,
        plan.kv_start,
        scale=spec.attention.scale,
    ).flatten(1)
