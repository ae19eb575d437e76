"""gpt-oss against transformers on small random models."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tandem_worker.model.load import load_model
from transformers import GptOssConfig

YARN = {
    "rope_type": "yarn",
    "rope_theta": 1000.0,
    "factor": 8.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 32,
}


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}, id="plain"),
        pytest.param({"rope_parameters": YARN, "sliding_window": 5}, id="yarn-short-window"),
    ],
)
def test_equals_transformers(changes, save_random_model, against_reference, tmp_path: Path) -> None:
    options = {
        "vocab_size": 97,
        "hidden_size": 48,
        "intermediate_size": 32,
        "num_hidden_layers": 4,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "num_local_experts": 6,
        "num_experts_per_tok": 2,
        "sliding_window": 11,
        "max_position_embeddings": 256,
    }
    reference = save_random_model(GptOssConfig(**{**options, **changes}))
    model = load_model(tmp_path, device=torch.device("cpu"), dtype=torch.float32)
    against_reference(model, reference, vocab_size=97)
