"""Readers of safetensors and GGUF, and what they say about files that a person must replace."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from tandem_worker.host.errors import StartupError
from tandem_worker.model.checkpoint.gguf import gguf_metadata, open_gguf
from tandem_worker.model.checkpoint.loader import Part, WeightLoader, shard
from tandem_worker.model.checkpoint.safetensors import SafetensorsSource
from tandem_worker.model.checkpoint.stored import Slice
from tandem_worker.model.load import load_model, open_checkpoint

CPU = torch.device("cpu")
CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 16,
    "hidden_size": 8,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 64,
    "tie_word_embeddings": True,
}
LAYER = "model.layers.0."
SHAPES = {
    "model.embed_tokens.weight": (16, 8),
    "model.norm.weight": (8,),
    f"{LAYER}input_layernorm.weight": (8,),
    f"{LAYER}post_attention_layernorm.weight": (8,),
    **{f"{LAYER}self_attn.{name}_proj.weight": (8, 8) for name in "qkvo"},
    f"{LAYER}mlp.gate_proj.weight": (16, 8),
    f"{LAYER}mlp.up_proj.weight": (16, 8),
    f"{LAYER}mlp.down_proj.weight": (8, 16),
}


def write_model(folder: Path, config: dict[str, Any] | None = None, **changes: torch.Tensor | None) -> Path:
    (folder / "config.json").write_text(json.dumps(config or CONFIG))
    tensors = {name: torch.randn(shape) for name, shape in SHAPES.items()}
    for name, tensor in changes.items():
        tensors.pop(name)
        if tensor is not None:
            tensors[name] = tensor
    save_file(tensors, folder / "model.safetensors")
    return folder


def reason(path: Path) -> tuple[str, str]:
    with pytest.raises(StartupError) as caught:
        load_model(path, device=CPU, dtype=torch.float32)
    return caught.value.reason, str(caught.value)


def test_no_such_path(tmp_path: Path) -> None:
    assert reason(tmp_path / "nothing")[0] == "WeightsNotFound"


def test_folder_without_weights(tmp_path: Path) -> None:
    assert reason(tmp_path)[0] == "WeightsNotFound"


def test_no_config(tmp_path: Path) -> None:
    write_model(tmp_path)
    (tmp_path / "config.json").unlink()
    assert reason(tmp_path)[0] == "ConfigMissing"


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"architectures": ["LlamaForCausalLM"]}'])
def test_bad_config(text: str, tmp_path: Path) -> None:
    write_model(tmp_path)
    (tmp_path / "config.json").write_text(text)
    assert reason(tmp_path)[0] == "ConfigInvalid"


def test_unknown_architecture_lists_the_known(tmp_path: Path) -> None:
    write_model(tmp_path, {**CONFIG, "architectures": ["MambaForCausalLM"]})
    found, message = reason(tmp_path)
    assert found == "UnsupportedArchitecture"
    assert "MambaForCausalLM" in message
    assert "LlamaForCausalLM" in message


def test_missing_tensor_is_named(tmp_path: Path) -> None:
    name = f"{LAYER}mlp.up_proj.weight"
    write_model(tmp_path, **{name: None})
    found, message = reason(tmp_path)
    assert found == "WeightsIncomplete"
    assert name in message


def test_wrong_shape_is_named(tmp_path: Path) -> None:
    name = f"{LAYER}mlp.up_proj.weight"
    write_model(tmp_path, **{name: torch.ones(12, 8)})
    found, message = reason(tmp_path)
    assert found == "WeightsShapeMismatch"
    assert "[12, 8]" in message
    assert "[16, 8]" in message


@pytest.mark.parametrize("keep", [0, 5, 200, -3])
def test_truncated_safetensors(keep: int, tmp_path: Path) -> None:
    path = write_model(tmp_path) / "model.safetensors"
    path.write_bytes(path.read_bytes()[:keep])
    assert reason(tmp_path)[0] == "WeightsCorrupt"


def test_shard_of_the_index_is_missing(tmp_path: Path) -> None:
    write_model(tmp_path)
    index = {"weight_map": {"a": "model.safetensors", "b": "model-00002.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    found, message = reason(tmp_path)
    assert found == "WeightsIncomplete"
    assert "model-00002.safetensors" in message


@pytest.mark.parametrize("name", ["../other/model.safetensors", "/etc/passwd", "a\0b", "..\\x", "", ".", "a//b"])
def test_an_index_that_leads_out_of_the_folder_is_refused(tmp_path: Path, name: str) -> None:
    for folder in (tmp_path / "model", tmp_path / "other"):
        folder.mkdir()
        write_model(folder)
    index = {"weight_map": {"a": "model.safetensors", "b": name}}
    (tmp_path / "model" / "model.safetensors.index.json").write_text(json.dumps(index))
    found, message = reason(tmp_path / "model")
    assert found == "WeightsCorrupt"
    assert repr(name) in message


def test_parts_are_stacked_and_converted(tmp_path: Path) -> None:
    save_file({"a": torch.arange(12.0).view(4, 3), "b": torch.ones(2, 3)}, tmp_path / "x.safetensors")
    source = SafetensorsSource([tmp_path / "x.safetensors"])
    loader = WeightLoader(source, dtype=torch.bfloat16, device=CPU, keeps_packed=False)
    parts = [Part(name="a", shape=(4, 3), piece=Slice(0, 1, 3)), Part(name="b", shape=(2, 3))]
    stacked = loader.stack(parts)
    assert stacked.dtype == torch.bfloat16
    assert stacked.tolist() == [[3, 4, 5], [6, 7, 8], [1, 1, 1], [1, 1, 1]]


def test_shard_must_divide() -> None:
    assert shard(1, 12, 2, 3, what="width") == Slice(1, 8, 12)
    with pytest.raises(StartupError, match=r"width \(10\) cannot be split over 3"):
        shard(0, 10, 0, 3, what="width")


def write_gguf(
    path: Path,
    kind: gguf.GGMLQuantizationType,
    architecture: str = "llama",
    *,
    extra: Mapping[str, np.ndarray] | None = None,
    describe: Callable[[gguf.GGUFWriter], None] = lambda _: None,
) -> dict[str, np.ndarray]:
    """A one-layer model whose matrices are 256 wide, so that every quantized type has whole blocks.

    `extra` tensors are added as they are, `describe` adds metadata.
    """
    writer = gguf.GGUFWriter(str(path), architecture)
    writer.add_block_count(1)
    writer.add_context_length(64)
    writer.add_embedding_length(256)
    writer.add_feed_forward_length(256)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(32)
    describe(writer)
    random = np.random.default_rng(1)
    shapes = {
        "token_embd.weight": (32, 256),
        "blk.0.attn_q.weight": (256, 256),
        "blk.0.attn_k.weight": (128, 256),
        "blk.0.attn_v.weight": (128, 256),
        "blk.0.attn_output.weight": (256, 256),
        "blk.0.ffn_gate.weight": (256, 256),
        "blk.0.ffn_up.weight": (256, 256),
        "blk.0.ffn_down.weight": (256, 256),
    }
    written = {}
    for name, shape in shapes.items():
        value = random.standard_normal(shape).astype(np.float32)
        packed = gguf.quants.quantize(value, kind)
        writer.add_tensor(name, packed, raw_dtype=kind)
        written[name] = gguf.quants.dequantize(packed, kind)
    for name in ("output_norm", "blk.0.attn_norm", "blk.0.ffn_norm"):
        writer.add_tensor(f"{name}.weight", np.ones(256, dtype=np.float32))
    if architecture == "qwen3":
        for name in ("q", "k"):
            writer.add_tensor(f"blk.0.attn_{name}_norm.weight", np.ones(64, dtype=np.float32))
    for name, value in (extra or {}).items():
        writer.add_tensor(name, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return written


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q8_0"])
def test_gguf_types(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    written = write_gguf(path, gguf.GGMLQuantizationType[kind])
    _, source = open_checkpoint(path)
    down = source.read(f"{LAYER}mlp.down_proj.weight").float()
    assert torch.equal(down, torch.from_numpy(np.array(written["blk.0.ffn_down.weight"])))
    assert torch.equal(source.read(f"{LAYER}mlp.down_proj.weight", Slice(0, 3, 9)).float(), down[3:9])
    assert torch.equal(source.read(f"{LAYER}mlp.down_proj.weight", Slice(1, 32, 64)).float(), down[:, 32:64])


def test_gguf_llama_rows_return_to_half_split_order(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    written = write_gguf(path, gguf.GGMLQuantizationType.F32)
    _, source = open_checkpoint(path)
    stored = torch.from_numpy(np.array(written["blk.0.attn_k.weight"]))
    restored = source.read(f"{LAYER}self_attn.k_proj.weight")
    for head in range(2):
        for pair in range(32):
            assert torch.equal(restored[head * 64 + pair], stored[head * 64 + 2 * pair])
            assert torch.equal(restored[head * 64 + 32 + pair], stored[head * 64 + 2 * pair + 1])


@pytest.mark.parametrize("architecture", ["llama", "qwen3"])
def test_gguf_folder_loads(architecture: str, tmp_path: Path) -> None:
    write_gguf(tmp_path / "model.gguf", gguf.GGMLQuantizationType.Q8_0, architecture)
    model = load_model(tmp_path, device=CPU, dtype=torch.float32)
    assert model.vocab_size == 32
    assert model.kv_cache_spec(16).layers[0].block_shape == (2, 2, 16, 64)


def test_gguf_of_another_architecture(tmp_path: Path) -> None:
    write_gguf(tmp_path / "model.gguf", gguf.GGMLQuantizationType.F32, "bert")
    assert reason(tmp_path)[0] == "UnsupportedArchitecture"


@pytest.mark.parametrize("share", [0.0, 0.001, 0.5, 0.99])
def test_truncated_gguf(share: float, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    write_gguf(path, gguf.GGMLQuantizationType.F16)
    path.write_bytes(path.read_bytes()[: int(path.stat().st_size * share)])
    assert reason(path)[0] == "WeightsCorrupt"


def test_several_gguf_files_are_ambiguous(tmp_path: Path) -> None:
    for name in ("a.gguf", "b.gguf"):
        (tmp_path / name).write_bytes(b"")
    assert reason(tmp_path)[0] == "WeightsAmbiguous"


def test_gguf_vocabulary_is_counted_not_read(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_token_list([f"token{index}" for index in range(3000)])
    writer.add_token_scores([0.0] * 3000)
    writer.add_context_length(77)
    writer.add_tensor("output_norm.weight", np.arange(4, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    reader = open_gguf(path)
    metadata = gguf_metadata(reader)
    assert metadata["tokenizer.num_tokens"] == 3000
    assert metadata["llama.context_length"] == 77
    assert reader.tensors[0].data.tolist() == [0, 1, 2, 3]
