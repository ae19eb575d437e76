"""Qwen3, dense and mixture of experts, against transformers on small random models."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tandem_worker.model.load import load_model
from transformers import Qwen3Config, Qwen3MoeConfig

SMALL = {
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
}
EXPERTS = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24}


@pytest.mark.parametrize(
    "config",
    [
        pytest.param(Qwen3Config(**SMALL), id="dense"),
        pytest.param(Qwen3Config(**SMALL, tie_word_embeddings=True), id="dense-tied"),
        pytest.param(Qwen3MoeConfig(**SMALL, **EXPERTS, norm_topk_prob=True), id="experts"),
        pytest.param(Qwen3MoeConfig(**SMALL, **EXPERTS, norm_topk_prob=False, mlp_only_layers=[1]), id="mixed"),
    ],
)
def test_equals_transformers(config, save_random_model, against_reference, tmp_path: Path) -> None:
    reference = save_random_model(config)
    model = load_model(tmp_path, device=torch.device("cpu"), dtype=torch.float32)
    against_reference(model, reference, vocab_size=97)
