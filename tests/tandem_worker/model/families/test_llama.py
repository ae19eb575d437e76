"""Llama against transformers: small random models, and SmolLM2 itself."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tandem_worker.model.load import load_model
from transformers import LlamaConfig

CPU = torch.device("cpu")


def small_config(**changes: object) -> LlamaConfig:
    options: dict[str, object] = {
        "vocab_size": 97,
        "hidden_size": 48,
        "intermediate_size": 80,
        "num_hidden_layers": 3,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 256,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    }
    return LlamaConfig(**{**options, **changes})


LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({}, id="plain"),
        pytest.param({"tie_word_embeddings": True, "num_key_value_heads": 6}, id="tied-mha"),
        pytest.param({"rope_parameters": LLAMA3_ROPE, "attention_bias": True}, id="llama3-rope-bias"),
        pytest.param({"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}}, id="linear-rope"),
        pytest.param({"num_key_value_heads": 1, "mlp_bias": False}, id="mqa"),
    ],
)
def test_equals_transformers(changes, save_random_model, against_reference, tmp_path: Path) -> None:
    reference = save_random_model(small_config(**changes))
    model = load_model(tmp_path, device=CPU, dtype=torch.float32)
    against_reference(model, reference, vocab_size=97)


def test_sharded_checkpoint(save_random_model, against_reference, tmp_path: Path) -> None:
    reference = save_random_model(small_config(), max_shard_size="40KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    against_reference(load_model(tmp_path, device=CPU, dtype=torch.float32), reference, vocab_size=97)


def test_prefix_blocks_can_be_shared(save_random_model, paged_sequences, logits_error, tmp_path: Path) -> None:
    reference = save_random_model(small_config())
    run = paged_sequences(load_model(tmp_path, device=CPU, dtype=torch.float32))
    prefix, first, second = list(range(3, 15)), [20, 21, 22], [30, 31, 32, 33, 34]
    one = run.add()
    run.step({one: prefix + first})
    two = run.add(prefix, run.blocks[one][: len(prefix) // run.block_size])
    logits = run.step({two: second})
    expected = reference(torch.tensor([prefix + second])).logits[0, -1]
    assert logits_error(logits[0], expected) < 1e-5


def test_layers_are_announced_in_order_once_written(save_random_model, paged_sequences, tmp_path: Path) -> None:
    save_random_model(small_config())
    run = paged_sequences(load_model(tmp_path, device=CPU, dtype=torch.float32))
    run.add()
    seen: list[tuple[int, bool]] = []

    def note(layer: int) -> None:
        block = run.cache.layers[layer][run.blocks[0][0]]
        seen.append((layer, bool((block != 1e3).all())))

    run.step({0: [5, 6, 7, 8]}, note)
    assert seen == [(0, True), (1, True), (2, True)]


def test_bfloat16_stays_close(save_random_model, paged_sequences, logits_error, tmp_path: Path) -> None:
    reference = save_random_model(small_config(), spread=0.1)
    run = paged_sequences(load_model(tmp_path, device=CPU, dtype=torch.bfloat16))
    run.add()
    tokens = list(range(3, 40))
    run.step({0: tokens[:20]})
    logits = run.step({0: tokens[20:]})
    assert logits.dtype == torch.float32
    assert logits_error(logits[0], reference(torch.tensor([tokens])).logits[0, -1]) < 0.05
