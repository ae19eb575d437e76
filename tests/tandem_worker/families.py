"""Every model family as a small random checkpoint, and transformers as its oracle."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

VOCAB_SIZE = 97
_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
_YARN = {
    "rope_type": "yarn",
    "rope_theta": 1000.0,
    "factor": 8.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "original_max_position_embeddings": 32,
}
COMMON: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 12,
    "max_position_embeddings": 256,
}
_EXPERTS: dict[str, Any] = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
_LOCAL_EXPERTS: dict[str, Any] = {"num_local_experts": 6, "num_experts_per_tok": 2, "num_hidden_layers": 4}
_LATENT: dict[str, Any] = {
    "head_dim": None,
    "num_key_value_heads": 4,
    "q_lora_rank": 20,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 12,
    "v_head_dim": 10,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 24,
    "first_k_dense_replace": 1,
    "num_nextn_predict_layers": 0,
}

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama3": ("llama", {"rope_parameters": _LLAMA3_ROPE}),
    "smollm2": ("llama", {"tie_word_embeddings": True, "num_attention_heads": 6, "head_dim": 8}),
    "qwen3": ("qwen3", {}),
    "qwen3-moe": ("qwen3_moe", {**_EXPERTS, "norm_topk_prob": True}),
    "deepseek-v3": ("deepseek_v3", {**_LATENT, "n_group": 4, "topk_group": 2, "rope_parameters": _YARN}),
    "kimi-k2": ("deepseek_v3", {**_LATENT, "n_group": 1, "topk_group": 1, "n_shared_experts": 1}),
    "llama4": (
        "llama4_text",
        {
            **_LOCAL_EXPERTS,
            "num_experts_per_tok": 1,
            "intermediate_size_mlp": 64,
            "attention_chunk_size": 8,
            "floor_scale": 6,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
        },
    ),
    "gpt-oss": (
        "gpt_oss",
        {**_LOCAL_EXPERTS, "sliding_window": 11, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
    ),
}
"""By the names that people use: the architecture, and how its configuration differs from the common one."""


def save_family(family: str, folder: Path, **changes: Any) -> Any:
    """Save a random checkpoint of `family` in float32 and return transformers' model of it."""
    from transformers import AutoConfig, AutoModelForCausalLM

    architecture, own = FAMILIES[family]
    options = {name: value for name, value in {**COMMON, **own, **changes}.items() if value is not None}
    torch.manual_seed(11)
    config = AutoConfig.for_model(architecture, **options)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.uniform_(0.5, 1.5)
            else:
                parameter.normal_(0.0, 0.2)
    model.eval().save_pretrained(folder)
    return model


def assert_greedy(reference: Any, prompt: Sequence[int], answer: Sequence[int]) -> None:
    """`answer` is what `reference` continues `prompt` with: each token is its first choice after those before it."""
    with torch.inference_mode():
        logits = reference(torch.tensor([[*prompt, *answer]])).logits[0, len(prompt) - 1 : -1]
    assert list(answer) == logits.argmax(-1).tolist()
