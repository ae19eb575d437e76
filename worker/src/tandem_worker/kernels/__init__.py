"""Triton kernels, each with a plain-torch twin in `reference`.

An operation called with CUDA tensors launches its kernel; called with CPU tensors it runs its twin (`dispatch` is the
one place that decides). T tokens of a step, B sequences, H hidden size, Hq query heads, Hk KV heads, D head dimension,
R rotated dimensions, I intermediate size, N blocks, S tokens per block, M blocks per sequence, P positions.

```
operation                                                  shapes                                        result
rms_norm(x, weight, eps)                                   x [..., H], weight [H] or None                [..., H]
residual_rms_norm(x, residual, weight, eps)                x, residual [T, H]; residual += x             [T, H]
rope(q, k, cos, sin, positions)                            q [T, Hq, D], k [T, Hk, D] or None,           in place
                                                           tables [P, R/2], positions [T]
silu_mul(gate_up), swiglu_clamped(gate_up)                 [T, 2I], gate first                           [T, I]
kv_write(k, v, kv_cache, slot_mapping)                     k, v [T, Hk, D], cache [N, 2, Hk, S, D]       in place
latent_write(latent, latent_cache, slot_mapping)           latent [T, L], cache [N, S, L] (MLA)          in place
copy_rows(pairs, source, source_column, target,            pairs [K, 2], source [N, P], target [M, Q]    in place
          target_column, width)
fused_qkv_norm_rope_kv_write(qkv, cos, sin, positions,     qkv [T, (Hq + 2 Hk) D], q_norm=, k_norm= [D]  q [T, Hq, D]
                             kv_cache, slot_mapping)
paged_decode_attention(q, kv_cache, block_tables,          q [T, Hq, D], tables [B, M],                  [T, Hq, D]
                       context_lens, query_start,          query_start [B + 1], sequence_ids [T]
                       sequence_ids, scale=)
paged_prefill_attention(q, kv_cache, block_tables,         q [T, Hq, D], query_start [B + 1]             [T, Hq, D]
                        query_start, context_lens, scale=)
mla_decode_attention(q, latent_cache, block_tables,        q [B, H, L + R], cache [N, S, L + R]          [B, H, L]
                     context_lens, latent_dim=, scale=)
latent_gather(latent_cache, block_tables, kv_start, C)     kv_start [B + 1], C = kv_start[B]             [C, L + R]
mla_prefill_attention(q, kv, k_rope, query_start,          q [T, H, Dn + R], kv [C, H, Dn + Dv],         [T, H, Dv]
                      kv_start, scale=)                    k_rope [C, R]
small_batch_linear(x, weight, bias, residual=)             x [M, K], weight [N, K] in any form           [M, N]
widen(like, weight)                                        weight [N, K] in any form                     [N, K]
look_up(ids, weight, dtype)                                ids [T], weight [N, K] in 12 bits             [T, K]
gate_up_silu(x, weight, bias)                              x [M, K], weight [2I, K] in any form          [M, I]
apply_penalties(logits, prompt_seen, output_counts,        [B, V], penalties [B]                         in place
                presence, frequency, repetition)
apply_logit_bias(logits, ids, values)                      [B, V], [B, N]                                in place
apply_bitmask(logits, bitmask)                             [B, V], [B, ceil(V / 32)]                     in place
sample_tokens(logits, seeds, choices, positions,           [B, V], [B]                                   tokens [B]
              temperature, top_k, top_p, min_p)
token_logprobs(logits, tokens, num_top)                    [B, V], [B]                                   [B], 2 x [B, n]
moe_route(logits, top_k)                                   [T, E]                                        2 x [T, top_k]
fused_moe(x, gate_up, down, topk_weights, topk_ids)        x [T, H], [E, 2I, H], [E, H, I], [T, top_k]   [T, H]
```

Both attentions take `window=` (keys a query sees, its own included), `chunk=` (Llama 4) and `sinks=` `[Hq]` (gpt-oss).
Operations that return a tensor take `out=`.
"""

from __future__ import annotations

from .activation import silu_mul, swiglu_clamped
from .decode_attention import paged_decode_attention
from .fused_qkv import fused_qkv_norm_rope_kv_write
from .kv import kv_write, latent_write
from .linear import gate_up_silu, small_batch_linear
from .logit_edits import apply_bitmask, apply_logit_bias, apply_penalties
from .mla_decode import mla_decode_attention
from .mla_prefill import latent_gather, mla_prefill_attention
from .moe import fused_moe
from .norm import residual_rms_norm, rms_norm
from .prefill_attention import paged_prefill_attention
from .rotary import rope
from .routing import moe_route
from .rows import copy_rows
from .sampling import sample_tokens, token_logprobs
from .widen import look_up, widen

__all__ = [
    "apply_bitmask",
    "apply_logit_bias",
    "apply_penalties",
    "copy_rows",
    "fused_moe",
    "fused_qkv_norm_rope_kv_write",
    "gate_up_silu",
    "kv_write",
    "latent_gather",
    "latent_write",
    "look_up",
    "mla_decode_attention",
    "mla_prefill_attention",
    "moe_route",
    "paged_decode_attention",
    "paged_prefill_attention",
    "residual_rms_norm",
    "rms_norm",
    "rope",
    "sample_tokens",
    "silu_mul",
    "small_batch_linear",
    "swiglu_clamped",
    "token_logprobs",
    "widen",
]
