"""The models that examples name: what their repositories' `config.json` says, as far as it decides who serves them.

Read from https://huggingface.co/ORGANIZATION/NAME/resolve/main/config.json. Tests reach no network, so a model that an
example begins to name is entered here first.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_SMOLLM2 = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 49152, "rms_norm_eps": 1e-5,
    "max_position_embeddings": 8192, "tie_word_embeddings": True, "hidden_act": "silu", "torch_dtype": "bfloat16",
}  # fmt: skip
_QWEN3 = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "vocab_size": 151936, "rms_norm_eps": 1e-6,
    "max_position_embeddings": 40960, "rope_theta": 1000000, "rope_scaling": None, "attention_bias": False,
    "head_dim": 128, "num_key_value_heads": 8, "hidden_act": "silu", "use_sliding_window": False,
    "sliding_window": None, "torch_dtype": "bfloat16",
}  # fmt: skip
_LLAMA31 = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 128256, "rms_norm_eps": 1e-5,
    "max_position_embeddings": 131072, "rope_theta": 500000.0, "attention_bias": False, "mlp_bias": False,
    "rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                     "original_max_position_embeddings": 8192},
    "num_key_value_heads": 8, "hidden_act": "silu", "tie_word_embeddings": False, "torch_dtype": "bfloat16",
}  # fmt: skip


def _sizes(hidden: int, intermediate: int, layers: int, heads: int) -> dict[str, int]:
    return {
        "hidden_size": hidden, "intermediate_size": intermediate,
        "num_hidden_layers": layers, "num_attention_heads": heads,
    }  # fmt: skip


PUBLISHED: Mapping[str, Mapping[str, Any]] = {
    "HuggingFaceTB/SmolLM2-135M-Instruct": _SMOLLM2
    | _sizes(576, 1536, 30, 9)
    | {"num_key_value_heads": 3, "rope_theta": 100000},
    "HuggingFaceTB/SmolLM2-1.7B-Instruct": _SMOLLM2
    | _sizes(2048, 8192, 24, 32)
    | {"num_key_value_heads": 32, "rope_theta": 130000},
    "Qwen/Qwen3-0.6B": _QWEN3 | _sizes(1024, 3072, 28, 16) | {"tie_word_embeddings": True},
    "Qwen/Qwen3-8B": _QWEN3 | _sizes(4096, 12288, 36, 32) | {"tie_word_embeddings": False},
    "NousResearch/Hermes-3-Llama-3.1-70B": _LLAMA31 | _sizes(8192, 28672, 80, 64),
    "NousResearch/Hermes-3-Llama-3.1-405B": _LLAMA31 | _sizes(16384, 53248, 126, 128),
    "Qwen/Qwen2.5-7B-Instruct": _sizes(3584, 18944, 28, 28)
    | {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "num_key_value_heads": 4, "vocab_size": 152064},
}
"""The last one is here because nobody serves it."""

PLACEHOLDERS = {"my-organization/my-private-model": "stands for a repository of the reader's own"}
