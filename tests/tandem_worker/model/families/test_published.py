"""Published configurations, made small, as their publishers wrote them: equal to transformers, or refused by name.

The figures that set a model's size are replaced; every other key is as in the model's repository.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tandem_worker.host.errors import StartupError
from tandem_worker.model.checkpoint.schemes import check_scheme
from tandem_worker.model.config import parse_config
from tandem_worker.model.families.registry import find_family

from tests.tandem_worker.model.specimens import ask_reference, ask_worker, build_reference

LIMIT = 1e-4
SMALL: dict[str, Any] = {
    "vocab_size": 97, "hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4,
    "initializer_range": 0.02, "use_cache": True, "attention_dropout": 0.0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
LLAMA: dict[str, Any] = SMALL | {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "num_key_value_heads": 2, "hidden_act": "silu",
    "rms_norm_eps": 1e-05, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
}  # fmt: skip
LLAMA_31 = LLAMA | {
    "attention_bias": False, "max_position_embeddings": 131072, "mlp_bias": False, "pretraining_tp": 1,
    "rope_scaling": {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                     "original_max_position_embeddings": 8192, "rope_type": "llama3"},
    "rope_theta": 500000.0, "transformers_version": "4.42.3", "eos_token_id": [128001, 128008, 128009],
}  # fmt: skip
QWEN3: dict[str, Any] = SMALL | {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "attention_bias": False, "head_dim": 12,
    "num_key_value_heads": 2, "hidden_act": "silu", "max_position_embeddings": 40960, "max_window_layers": 28,
    "rms_norm_eps": 1e-06, "rope_scaling": None, "rope_theta": 1000000, "sliding_window": None,
    "tie_word_embeddings": True, "torch_dtype": "bfloat16", "transformers_version": "4.51.0",
    "use_sliding_window": False,
}  # fmt: skip
QWEN3_MOE = QWEN3 | {
    "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "decoder_sparse_step": 1,
    "max_window_layers": 48, "mlp_only_layers": [], "moe_intermediate_size": 24, "norm_topk_prob": True,
    "num_experts": 8, "num_experts_per_tok": 2, "output_router_logits": False, "router_aux_loss_coef": 0.001,
    "tie_word_embeddings": False,
}  # fmt: skip
DEEPSEEK_V3: dict[str, Any] = SMALL | {
    "architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", "attention_bias": False,
    "auto_map": {"AutoConfig": "configuration_deepseek.DeepseekV3Config"}, "aux_loss_alpha": 0.001, "ep_size": 1,
    "first_k_dense_replace": 3, "hidden_act": "silu", "kv_lora_rank": 16, "max_position_embeddings": 163840,
    "moe_intermediate_size": 24, "moe_layer_freq": 1, "n_group": 4, "n_routed_experts": 8, "n_shared_experts": 1,
    "norm_topk_prob": True, "num_experts_per_tok": 3, "num_key_value_heads": 4, "num_nextn_predict_layers": 1,
    "pretraining_tp": 1, "q_lora_rank": 20, "qk_nope_head_dim": 12, "qk_rope_head_dim": 8, "rms_norm_eps": 1e-06,
    "rope_scaling": {"beta_fast": 32, "beta_slow": 1, "factor": 40, "mscale": 1.0, "mscale_all_dim": 1.0,
                     "original_max_position_embeddings": 4096, "type": "yarn"},
    "rope_theta": 10000, "routed_scaling_factor": 2.5, "scoring_func": "sigmoid", "seq_aux": True,
    "tie_word_embeddings": False, "topk_group": 2, "topk_method": "noaux_tc", "torch_dtype": "bfloat16",
    "transformers_version": "4.33.1", "v_head_dim": 10, "bos_token_id": 0, "eos_token_id": 1,
}  # fmt: skip
LLAMA4: dict[str, Any] = SMALL | {
    "architectures": ["Llama4ForCausalLM"], "model_type": "llama4_text", "_attn_implementation_autoset": True,
    "attention_bias": False, "attention_chunk_size": 8, "attn_scale": 0.1, "attn_temperature_tuning": True,
    "cache_implementation": "hybrid", "floor_scale": 8192, "for_llm_compressor": False, "head_dim": 12,
    "hidden_act": "silu", "interleave_moe_layer_step": 1, "intermediate_size_mlp": 64,
    "max_position_embeddings": 10485760, "moe_layers": [0, 1, 2, 3], "no_rope_layers": [1, 1, 1, 0],
    "num_experts_per_tok": 1, "num_key_value_heads": 2, "num_local_experts": 4, "output_router_logits": False,
    "pad_token_id": 3, "rms_norm_eps": 1e-05,
    "rope_scaling": {"factor": 16.0, "high_freq_factor": 1.0, "low_freq_factor": 1.0,
                     "original_max_position_embeddings": 8192, "rope_type": "llama3"},
    "rope_theta": 500000.0, "router_aux_loss_coef": 0.001, "router_jitter_noise": 0.0, "torch_dtype": "bfloat16",
    "use_qk_norm": True,
}  # fmt: skip
GPT_OSS: dict[str, Any] = SMALL | {
    "architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss", "attention_bias": True, "experts_per_token": 2,
    "head_dim": 12, "hidden_act": "silu", "initial_context_length": 4096,
    "layer_types": ["sliding_attention", "full_attention"] * 2, "max_position_embeddings": 131072,
    "num_experts_per_tok": 2, "num_key_value_heads": 2, "num_local_experts": 6, "output_router_logits": False,
    "pad_token_id": 96, "rms_norm_eps": 1e-05, "rope_theta": 150000, "router_aux_loss_coef": 0.9,
    "rope_scaling": {"beta_fast": 32.0, "beta_slow": 1.0, "factor": 32.0, "original_max_position_embeddings": 4096,
                     "rope_type": "yarn", "truncate": False},
    "sliding_window": 128, "swiglu_limit": 7.0, "tie_word_embeddings": False, "transformers_version": "4.55.0.dev0",
}  # fmt: skip

SERVED: dict[str, dict[str, Any]] = {
    "llama-2": LLAMA | {"max_position_embeddings": 4096, "pretraining_tp": 1, "rope_scaling": None, "pad_token_id": 0,
                        "_name_or_path": "meta-llama/Llama-2-7b-hf", "transformers_version": "4.31.0.dev0"},
    "llama-1": {key: value for key, value in LLAMA.items() if key != "num_key_value_heads"}
               | {"max_sequence_length": 2048, "max_position_embeddings": 2048, "pad_token_id": 0},
    "llama-3.1": LLAMA_31,
    "llama-3.2": LLAMA_31 | {"head_dim": 12, "tie_word_embeddings": True,
                             "rope_scaling": {**LLAMA_31["rope_scaling"], "factor": 32.0}},
    "vicuna-16k": LLAMA | {"max_position_embeddings": 4096, "rope_scaling": {"factor": 4.0, "type": "linear"}},
    "code-llama": LLAMA | {"max_position_embeddings": 16384, "rope_theta": 1000000, "rope_scaling": None},
    "granite-code": LLAMA | {"attention_bias": True, "mlp_bias": True, "attention_dropout": 0.1, "pad_token_id": 0,
                             "rope_theta": 10000000, "tie_word_embeddings": True, "max_position_embeddings": 128000,
                             "rope_scaling": None, "pretraining_tp": 1},
    "bielik-v3": LLAMA | {"attention_bias": True, "mlp_bias": True, "head_dim": 12, "max_position_embeddings": 8192,
                          "rope_theta": 1000000.0, "rope_scaling": None, "pretraining_tp": 1},
    "yi": LLAMA | {"max_position_embeddings": 4096, "rope_theta": 5000000.0, "pretraining_tp": 1, "pad_token_id": 0},
    "tiny-llama": LLAMA | {"max_position_embeddings": 2048, "rope_theta": 10000.0, "rope_scaling": None},
    "smollm2": LLAMA | {"is_llama_config": True, "rope_interleaved": False, "max_position_embeddings": 8192,
                        "rope_theta": 100000, "tie_word_embeddings": True, "pretraining_tp": 1,
                        "transformers.js_config": {"kv_cache_dtype": {"q4f16": "float16"}}},
    "falcon3": LLAMA | {"activation": "swiglu", "attention_bias": False, "head_dim": 12, "mlp_bias": False,
                        "max_position_embeddings": 32768, "rope_theta": 1000042, "rope_scaling": None},
    "deepseek-r1-distill": LLAMA_31 | {"unsloth_fixed": True},
    "qwen3-0.6b": QWEN3,
    "qwen3-32b": QWEN3 | {"tie_word_embeddings": False, "max_window_layers": 64},
    "qwen3-yarn": QWEN3 | {"rope_scaling": {"rope_type": "yarn", "factor": 4.0,
                                            "original_max_position_embeddings": 32768}},
    "qwen3-embedding-as-causal": QWEN3 | {"max_position_embeddings": 32768},
    "qwen3-30b-a3b": QWEN3_MOE,
    "qwen3-coder": QWEN3_MOE | {"qkv_bias": False, "shared_expert_intermediate_size": 0, "use_qk_norm": True,
                                "max_position_embeddings": 262144, "rope_theta": 10000000},
    "deepseek-v3": DEEPSEEK_V3,
    "moonlight": DEEPSEEK_V3 | {"q_lora_rank": None, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1,
                                "num_nextn_predict_layers": 0, "rope_scaling": None, "routed_scaling_factor": 2.446},
    "kimi-k2": DEEPSEEK_V3 | {"model_type": "deepseek_v3", "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1,
                              "num_nextn_predict_layers": 0, "rope_theta": 50000.0, "routed_scaling_factor": 2.827,
                              "rope_scaling": {**DEEPSEEK_V3["rope_scaling"], "beta_fast": 1.0, "factor": 32.0}},
    "llama-4-scout": LLAMA4,
    "llama-4-maverick": LLAMA4 | {"interleave_moe_layer_step": 2, "moe_layers": [1, 3], "rope_scaling": None,
                                  "no_rope_layers": [], "use_qk_norm": False, "max_position_embeddings": 1048576},
    "gpt-oss": GPT_OSS,
}  # fmt: skip

REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "deepseek-v2-lite": (DEEPSEEK_V3 | {"architectures": ["DeepseekV2ForCausalLM"]}, "DeepseekV2ForCausalLM"),
    "smollm3": (LLAMA | {"architectures": ["SmolLM3ForCausalLM"]}, "SmolLM3ForCausalLM"),
    "mistral": (LLAMA | {"architectures": ["MistralForCausalLM"]}, "MistralForCausalLM"),
    "mistral-under-another-name": (LLAMA_31 | {"model_type": "mistral"}, "model_type is 'mistral'"),
    "relu-llama": (LLAMA_31 | {"hidden_act": "relu"}, "hidden_act is 'relu'"),
    "mlx": (LLAMA_31 | {"quantization": {"group_size": 64, "bits": 4}}, "quantization is"),
    "dynamic-ntk": (LLAMA_31 | {"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope_type is 'dynamic'"),
    "longrope": (LLAMA_31 | {"rope_scaling": {"type": "longrope", "factor": 2.0}}, "rope_type is 'longrope'"),
    "a-window-in-llama": (LLAMA_31 | {"sliding_window": 4096}, "sliding_window is 4096"),
    "bidirectional": (LLAMA_31 | {"is_causal": False}, "is_causal is False"),
    "per-layer": (LLAMA_31 | {"per_layer_config": {"0": {"rms_norm_eps": 0.1}}}, "per_layer_config is"),
    "softmax-routing": (DEEPSEEK_V3 | {"scoring_func": "softmax"}, "scoring_func is 'softmax'"),
    "greedy-groups": (DEEPSEEK_V3 | {"topk_method": "group_limited_greedy"}, "topk_method is"),
    "dense-between": (DEEPSEEK_V3 | {"moe_layer_freq": 2}, "moe_layer_freq is 2"),
    "shared-expert": (QWEN3_MOE | {"shared_expert_intermediate_size": 64}, "shared_expert_intermediate_size is 64"),
}


@pytest.mark.parametrize("name", SERVED)
def test_equals_transformers(name: str, paged_sequences: Any, logits_error: Any, tmp_path: Path) -> None:
    expected = ask_reference(build_reference(tmp_path, SERVED[name]))
    assert logits_error(ask_worker(tmp_path, paged_sequences), expected) < LIMIT


@pytest.mark.parametrize("name", REFUSED)
def test_refused_by_name(name: str) -> None:
    raw, says = REFUSED[name]
    architecture = raw["architectures"][0]
    with pytest.raises(StartupError, match=says) as refusal:
        parse_config(raw, find_family(architecture).keys, architecture=architecture)
    assert refusal.value.reason in ("UnsupportedConfig", "UnsupportedArchitecture")


V4_DUMP: dict[str, Any] = {
    "_name_or_path": "", "add_cross_attention": False, "bad_words_ids": None, "begin_suppress_tokens": None,
    "chunk_size_feed_forward": 0, "cross_attention_hidden_size": None, "decoder_start_token_id": None,
    "diversity_penalty": 0.0, "do_sample": False, "early_stopping": False, "encoder_no_repeat_ngram_size": 0,
    "exponential_decay_length_penalty": None, "finetuning_task": None, "forced_bos_token_id": None,
    "forced_eos_token_id": None, "id2label": {"0": "LABEL_0", "1": "LABEL_1"}, "is_decoder": False,
    "is_encoder_decoder": False, "label2id": {"LABEL_0": 0, "LABEL_1": 1}, "length_penalty": 1.0, "max_length": 20,
    "min_length": 0, "no_repeat_ngram_size": 0, "num_beam_groups": 1, "num_beams": 1, "num_return_sequences": 1,
    "output_attentions": False, "output_hidden_states": False, "output_scores": False, "prefix": None,
    "problem_type": None, "pruned_heads": {}, "remove_invalid_values": False, "repetition_penalty": 1.0,
    "return_dict": True, "return_dict_in_generate": False, "sep_token_id": None, "suppress_tokens": None,
    "task_specific_params": None, "temperature": 1.0, "tf_legacy_loss": False, "tie_encoder_decoder": False,
    "tokenizer_class": None, "top_k": 50, "top_p": 1.0, "torchscript": False, "typical_p": 1.0, "use_bfloat16": False,
}  # fmt: skip
"""What transformers 4 wrote of a configuration inside another one."""
KIMI_INT4: dict[str, Any] = {
    "quant_method": "compressed-tensors", "format": "pack-quantized", "ignore": ["lm_head", "re:.*self_attn.*"],
    "kv_cache_scheme": None, "quantization_status": "compressed",
    "config_groups": {"group_0": {
        "input_activations": None, "output_activations": None, "targets": ["Linear"],
        "weights": {"actorder": None, "block_structure": None, "dynamic": False, "group_size": 32, "num_bits": 4,
                    "observer": "minmax", "observer_kwargs": {}, "strategy": "group", "symmetric": True, "type": "int"},
    }},
}  # fmt: skip
WRAPPED: dict[str, dict[str, Any]] = {
    "kimi-k2.5": {
        "architectures": ["KimiK25ForConditionalGeneration"], "auto_map": {}, "bos_token_id": 1, "dtype": "bfloat16",
        "ignore_index": -100, "media_placeholder_token_id": 5, "model_type": "kimi_k25", "pad_token_id": 6,
        "text_config": {**DEEPSEEK_V3, **V4_DUMP, "model_type": "kimi_k2", "quantization_config": KIMI_INT4},
        "tie_word_embeddings": False, "use_unified_vision_chunk": True, "video_placeholder": "<v>", "vision_config": {},
    },
    "llama-4": {
        "architectures": ["Llama4ForConditionalGeneration"], "boi_token_index": 1, "eoi_token_index": 2,
        "image_token_index": 3, "model_type": "llama4", "text_config": LLAMA4, "tie_word_embeddings": False,
        "torch_dtype": "bfloat16", "transformers_version": "4.51.0.dev0", "vision_config": {"hidden_act": "gelu"},
    },
    "gpt-oss": GPT_OSS | {"quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}},
    "qwen3-fp8": QWEN3 | {"quantization_config": {
        "activation_scheme": "dynamic", "fmt": "e4m3", "modules_to_not_convert": ["lm_head"], "quant_method": "fp8",
        "weight_block_size": [128, 128]}},
    "deepseek-v3.1": DEEPSEEK_V3 | {"quantization_config": {
        "activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8", "scale_fmt": "ue8m0",
        "weight_block_size": [128, 128]}},
}  # fmt: skip


@pytest.mark.parametrize("name", WRAPPED)
def test_keys_of_large_checkpoints_are_known(name: str) -> None:
    raw = WRAPPED[name]
    architecture = raw["architectures"][0]
    config = parse_config(raw, find_family(architecture).keys, architecture=architecture)
    assert config.num_layers == 4
    if config.quantization:
        check_scheme(config.quantization)
