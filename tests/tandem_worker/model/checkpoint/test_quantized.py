"""Quantized checkpoints serve the same model as their dequantized weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from tandem_worker.host.errors import StartupError
from tandem_worker.model.checkpoint import unpacking
from tandem_worker.model.checkpoint.stored import Slice
from tandem_worker.model.load import open_checkpoint

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 16,
    "hidden_size": 8,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 64,
}


def save(folder: Path, quantization: dict[str, Any], tensors: dict[str, torch.Tensor]) -> Any:
    (folder / "config.json").write_text(json.dumps({**CONFIG, "quantization_config": quantization}))
    save_file(tensors, folder / "model.safetensors")
    return open_checkpoint(folder)[1]


def test_fp8_blocks(tmp_path: Path) -> None:
    weight, scale = torch.randn(6, 8).to(torch.float8_e4m3fn), torch.rand(2, 2)
    quantization = {"quant_method": "fp8", "weight_block_size": [4, 4]}
    source = save(tmp_path, quantization, {"a.weight": weight, "a.weight_scale_inv": scale, "n.weight": torch.ones(3)})
    assert set(source.names()) == {"a.weight", "n.weight"}
    assert torch.equal(source.read("a.weight"), unpacking.fp8_blocks(weight, scale, (4, 4)))
    assert torch.equal(source.read("a.weight", Slice(0, 2, 5)), source.read("a.weight")[2:5])
    assert torch.equal(source.read("n.weight"), torch.ones(3))


def test_packed_int4_groups(tmp_path: Path) -> None:
    quantization = {
        "quant_method": "compressed-tensors",
        "config_groups": {"group_0": {"weights": {"num_bits": 4, "group_size": 8}}},
    }
    tensors = {
        "a.weight_packed": torch.randint(-(1 << 31), 1 << 31, (4, 2)).to(torch.int32),
        "a.weight_scale": torch.rand(4, 2).bfloat16(),
        "a.weight_shape": torch.tensor([4, 16]),
    }
    source = save(tmp_path, quantization, tensors)
    assert "a.weight" in source
    assert source.shape("a.weight") == (4, 16)
    expected = unpacking.int_groups(tensors["a.weight_packed"], tensors["a.weight_scale"], None, (4, 16), 4)
    assert torch.equal(source.read("a.weight", Slice(1, 3, 9)), expected[:, 3:9])


@pytest.mark.parametrize(("method", "shape"), [("gptq", (16, 8)), ("awq", (64, 2))])
def test_words(method: str, shape: tuple[int, int], tmp_path: Path) -> None:
    outputs, inputs = (16, 64) if method == "awq" else (8, 128)
    tensors = {
        "a.qweight": torch.randint(-(1 << 31), 1 << 31, shape).to(torch.int32),
        "a.qzeros": torch.randint(-(1 << 31), 1 << 31, (2, outputs // 8)).to(torch.int32),
        "a.scales": torch.rand(2, outputs).half(),
    }
    source = save(tmp_path, {"quant_method": method, "bits": 4}, tensors)
    assert source.shape("a.weight") == (outputs, inputs)
    assert tuple(source.read("a.weight").shape) == (outputs, inputs)


def test_mxfp4_reads_one_expert(tmp_path: Path) -> None:
    tensors = {
        "e.gate_up_proj_blocks": torch.randint(0, 256, (3, 6, 2, 16)).to(torch.uint8),
        "e.gate_up_proj_scales": torch.randint(120, 130, (3, 6, 2)).to(torch.uint8),
    }
    source = save(tmp_path, {"quant_method": "mxfp4"}, tensors)
    assert source.shape("e.gate_up_proj") == (3, 64, 6)
    expected = unpacking.mxfp4(tensors["e.gate_up_proj_blocks"], tensors["e.gate_up_proj_scales"]).transpose(1, 2)
    assert torch.equal(source.read("e.gate_up_proj", Slice(0, 1, 2)), expected[1:2])


def test_unknown_method_is_named(tmp_path: Path) -> None:
    with pytest.raises(StartupError, match="'bitnet'"):
        save(tmp_path, {"quant_method": "bitnet"}, {"a.weight": torch.ones(1)})


def test_missing_scale_is_named(tmp_path: Path) -> None:
    source = save(tmp_path, {"quant_method": "fp8"}, {"a.weight": torch.ones(2, 2).to(torch.float8_e4m3fn)})
    with pytest.raises(StartupError, match=r"lacks tensor a\.weight_scale_inv"):
        source.read("a.weight")
