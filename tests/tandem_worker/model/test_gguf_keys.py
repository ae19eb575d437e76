"""GGUF metadata: what is read of it, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from tandem_worker.host.errors import StartupError
from tandem_worker.model.gguf_keys import DERIVED, FIXED, IGNORES, READS, ROPE_READS
from tandem_worker.model.load import open_checkpoint

from tests.tandem_worker.model.checkpoint.test_checkpoints import write_gguf

Describe = Callable[[gguf.GGUFWriter], None]
F32 = gguf.GGMLQuantizationType.F32


def read(folder: Path, describe: Describe, architecture: str = "llama", **options: Any) -> Any:
    write_gguf(folder / "model.gguf", F32, architecture, describe=describe, **options)
    return open_checkpoint(folder)[0]


def refusal(folder: Path, describe: Describe, architecture: str = "llama") -> str:
    with pytest.raises(StartupError) as caught:
        read(folder, describe, architecture)
    assert caught.value.reason == "UnsupportedConfig"
    return str(caught.value)


@pytest.mark.parametrize(
    ("describe", "says"),
    [
        (lambda writer: writer.add_expert_count(8), "llama.expert_count is 8 (known: 0)"),
        (lambda writer: writer.add_rope_dimension_count(32), "llama.rope.dimension_count is 32 (known: 64)"),
        (lambda writer: writer.add_value_length(32), "llama.attention.value_length is 32 (known: 64)"),
        (lambda writer: writer.add_logit_scale(0.5), "llama.logit_scale is 0.5"),
        (lambda writer: writer.add_sliding_window(512), "llama.attention.sliding_window is 512"),
        (lambda writer: writer.add_causal_attention(False), "llama.attention.causal is False"),
        (lambda writer: writer.add_float32("llama.attention.scale", 0.5), "attention.scale is 0.5 (known: 0.125)"),
        (lambda writer: writer.add_uint32("llama.key_of_tomorrow", 3), "llama.key_of_tomorrow is 3 (not a key"),
        (lambda writer: writer.add_array("llama.key_of_tomorrow", [3, 4]), "llama.key_of_tomorrow is [3, 4]"),
        (lambda writer: writer.add_rope_scaling_type(gguf.RopeScalingType.LONGROPE), "rope_type is 'longrope'"),
    ],
)  # fmt: skip
def test_keys_that_change_the_computation(describe: Describe, says: str, tmp_path: Path) -> None:
    assert says in refusal(tmp_path, describe)


def test_keys_that_say_nothing(tmp_path: Path) -> None:
    def describe(writer: gguf.GGUFWriter) -> None:
        writer.add_rope_dimension_count(64)
        writer.add_key_length(64)
        writer.add_value_length(64)
        writer.add_expert_count(0)
        writer.add_rope_scaling_type(gguf.RopeScalingType.NONE)
        writer.add_rope_scaling_finetuned(True)
        writer.add_float32("llama.attention.scale", 0.125)
        writer.add_name("a name")

    assert read(tmp_path, describe).head_dim == 64


@pytest.mark.parametrize(
    ("describe", "kind", "scaling"),
    [
        (lambda writer: writer.add_rope_scaling_factor(2.0), "linear", {"factor": 2.0}),
        (lambda writer: None, "default", {}),
    ],
)
def test_rotary_scaling(describe: Describe, kind: str, scaling: dict[str, float], tmp_path: Path) -> None:
    """A factor without a type is linear."""
    rope = read(tmp_path, describe).rope
    assert (rope.kind, rope.scaling) == (kind, scaling)


def test_yarn(tmp_path: Path) -> None:
    def describe(writer: gguf.GGUFWriter) -> None:
        writer.add_rope_freq_base(5e5)
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(4.0)
        writer.add_rope_scaling_orig_ctx_len(32)

    rope = read(tmp_path, describe, "qwen3").rope
    assert (rope.theta, rope.kind) == (5e5, "yarn")
    assert rope.scaling == {"factor": 4.0, "original_max_position_embeddings": 32}


@pytest.mark.parametrize("counts", [[2, 2], [2, 4]])
def test_a_list_that_says_the_same_of_every_layer(counts: list[int], tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    writer = gguf.GGUFWriter(str(path), "llama")
    for key, value in {"block_count": 2, "context_length": 8, "embedding_length": 8, "feed_forward_length": 8,
                       "vocab_size": 4, "attention.head_count": 4}.items():  # fmt: skip
        writer.add_uint32(f"llama.{key}", value)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_head_count_kv(counts)
    writer.add_tensor("token_embd.weight", np.ones((4, 8), dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    if counts[0] == counts[1]:
        assert open_checkpoint(path)[0].num_kv_heads == 2
        return
    with pytest.raises(StartupError, match=r"head_count_kv is \[2, 4\] \(known: one number for all layers\)"):
        open_checkpoint(path)


@pytest.mark.parametrize("name", ["attn_q", "ffn_gate"])
def test_biases_are_known_by_their_tensors(name: str, tmp_path: Path) -> None:
    extra = {f"blk.0.{name}.bias": np.ones(256, dtype=np.float32)}
    config = read(tmp_path, lambda writer: None, extra=extra)
    assert (config.flag("attention_bias"), config.flag("mlp_bias")) == (name == "attn_q", name == "ffn_gate")


def test_a_key_is_declared_once() -> None:
    tables = [READS, ROPE_READS, IGNORES, FIXED, DERIVED]
    assert len({key for table in tables for key in table}) == sum(map(len, tables))
