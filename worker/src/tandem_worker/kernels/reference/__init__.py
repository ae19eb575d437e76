"""Plain-torch twins of the kernels: the oracle of their tests and the backend where no kernel can run."""

from __future__ import annotations

from .attention import paged_decode_attention_reference, paged_prefill_attention_reference
from .elementwise import (
    copy_rows_reference,
    fused_qkv_norm_rope_kv_write_reference,
    kv_write_reference,
    latent_write_reference,
    residual_rms_norm_reference,
    rms_norm_reference,
    rope_reference,
    silu_mul_reference,
    swiglu_clamped_reference,
)
from .linear import gate_up_silu_reference, look_up_reference, small_batch_linear_reference, widen_reference
from .mla import latent_gather_reference, mla_decode_attention_reference, mla_prefill_attention_reference
from .moe import fused_moe_reference, moe_route_reference
from .sampling import (
    apply_bitmask_reference,
    apply_logit_bias_reference,
    apply_penalties_reference,
    sample_tokens_reference,
    token_logprobs_reference,
)

__all__ = [
    "apply_bitmask_reference",
    "apply_logit_bias_reference",
    "apply_penalties_reference",
    "copy_rows_reference",
    "fused_moe_reference",
    "fused_qkv_norm_rope_kv_write_reference",
    "gate_up_silu_reference",
    "kv_write_reference",
    "latent_gather_reference",
    "latent_write_reference",
    "look_up_reference",
    "mla_decode_attention_reference",
    "mla_prefill_attention_reference",
    "moe_route_reference",
    "paged_decode_attention_reference",
    "paged_prefill_attention_reference",
    "residual_rms_norm_reference",
    "rms_norm_reference",
    "rope_reference",
    "sample_tokens_reference",
    "silu_mul_reference",
    "small_batch_linear_reference",
    "swiglu_clamped_reference",
    "token_logprobs_reference",
    "widen_reference",
]
