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
paged_decode_attention(q, kv_cache, block_tables,          q [B, Hq, D], tables [B, M]                   [B, Hq, D]
                       context_lens, scale=)
paged_prefill_attention(q, kv_cache, block_tables,         q [T, Hq, D], query_start [B + 1]             [T, Hq, D]
                        query_start, context_lens, scale=)
```

Both attentions take `window=` (keys a query sees, its own included), `chunk=` (Llama 4) and `sinks=` `[Hq]` (gpt-oss).
Operations that return a tensor take `out=`.
"""

from __future__ import annotations

from .activation import silu_mul, swiglu_clamped
from .decode_attention import paged_decode_attention
from .kv import kv_write, latent_write
from .norm import residual_rms_norm, rms_norm
from .prefill_attention import paged_prefill_attention
from .rotary import rope

__all__ = [
    "kv_write",
    "latent_write",
    "paged_decode_attention",
    "paged_prefill_attention",
    "residual_rms_norm",
    "rms_norm",
    "rope",
    "silu_mul",
    "swiglu_clamped",
]
