"""Llama 4's language model against transformers on small random models."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tandem_worker.model.load import load_model
from transformers import Llama4TextConfig


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({}, id="scout"),
        pytest.param({"interleave_moe_layer_step": 2, "use_qk_norm": False}, id="maverick"),
        pytest.param({"attn_temperature_tuning": False, "num_experts_per_tok": 2}, id="no-tuning-top-2"),
    ],
)
def test_equals_transformers(changes, save_random_model, against_reference, tmp_path: Path) -> None:
    options = {
        "vocab_size": 97,
        "hidden_size": 48,
        "intermediate_size": 32,
        "intermediate_size_mlp": 64,
        "num_hidden_layers": 4,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "num_local_experts": 4,
        "num_experts_per_tok": 1,
        "attention_chunk_size": 8,
        "floor_scale": 6,
        "max_position_embeddings": 256,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
    }
    reference = save_random_model(Llama4TextConfig(**{**options, **changes}))
    model = load_model(tmp_path, device=torch.device("cpu"), dtype=torch.float32)
    against_reference(model, reference, vocab_size=97)
