"""DeepSeek-V3 and Kimi K2 against transformers on small random models."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tandem_worker.model.load import load_model
from transformers import DeepseekV3Config

CPU = torch.device("cpu")
YARN = {
    "rope_type": "yarn",
    "rope_theta": 1000.0,
    "factor": 8.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "original_max_position_embeddings": 32,
}


def small_config(**changes: object) -> DeepseekV3Config:
    options: dict[str, object] = {
        "vocab_size": 97,
        "hidden_size": 48,
        "intermediate_size": 80,
        "moe_intermediate_size": 24,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "n_routed_experts": 8,
        "num_experts_per_tok": 3,
        "n_group": 4,
        "topk_group": 2,
        "n_shared_experts": 2,
        "first_k_dense_replace": 1,
        "q_lora_rank": 20,
        "kv_lora_rank": 16,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 12,
        "v_head_dim": 10,
        "max_position_embeddings": 256,
        "num_nextn_predict_layers": 0,
    }
    return DeepseekV3Config(**{**options, **changes})


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({}, id="plain"),
        pytest.param({"rope_parameters": YARN}, id="yarn"),
        pytest.param({"q_lora_rank": None, "n_group": 1, "topk_group": 1}, id="no-query-rank-one-group"),
        pytest.param({"rope_interleave": False, "attention_bias": True}, id="half-rotation-bias"),
    ],
)
def test_equals_transformers(changes, save_random_model, against_reference, tmp_path: Path) -> None:
    reference = save_random_model(small_config(**changes))
    model = load_model(tmp_path, device=CPU, dtype=torch.float32)
    against_reference(model, reference, vocab_size=97)


def test_language_model_of_a_multimodal_checkpoint(save_random_model, against_reference, tmp_path: Path) -> None:
    reference = save_random_model(small_config())
    weights = tmp_path / "model.safetensors"
    save_file({f"language_model.{name}": tensor for name, tensor in load_file(weights).items()}, weights)
    config = tmp_path / "config.json"
    text = json.loads(config.read_text())
    config.write_text(json.dumps({"architectures": ["KimiK25ForConditionalGeneration"], "text_config": text}))
    against_reference(load_model(tmp_path, device=CPU, dtype=torch.float32), reference, vocab_size=97)


def test_a_block_holds_latents_only(save_random_model, tmp_path: Path) -> None:
    save_random_model(small_config())
    spec = load_model(tmp_path, device=CPU, dtype=torch.float32).kv_cache_spec(4)
    assert [layer.block_shape for layer in spec.layers] == [(4, 24)] * 3
    assert all(layer.head_dim_index is None for layer in spec.layers)
