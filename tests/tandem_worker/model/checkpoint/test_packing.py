"""Published layouts kept packed have the values they have dequantized, whole and in parts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from tandem_worker.kernels.quantized import Fp8Weight, Int4Weight, Mxfp4Weight
from tandem_worker.model.checkpoint import packing
from tandem_worker.model.checkpoint.loader import Part, WeightLoader
from tandem_worker.model.checkpoint.stored import Slice
from tandem_worker.model.load import open_checkpoint

from tests.tandem_worker.model.checkpoint.test_quantized import CONFIG

COMPRESSED = {"quant_method": "compressed-tensors", "config_groups": {"g": {"weights": {"num_bits": 4}}}}


def words(*shape: int) -> torch.Tensor:
    return torch.randint(-(1 << 31), (1 << 31) - 1, shape).to(torch.int32)


def compressed(name: str, rows: int, columns: int, group: int, *, zeros: bool = False) -> dict[str, torch.Tensor]:
    tensors = {
        f"{name}.weight_packed": words(rows, columns // 8),
        f"{name}.weight_scale": torch.rand(rows, columns // group).bfloat16(),
        f"{name}.weight_shape": torch.tensor([rows, columns]),
    }
    return tensors | ({f"{name}.weight_zero_point": words(rows // 8, columns // group)} if zeros else {})


def gptq(name: str, rows: int, columns: int, group: int, order: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
    return {
        f"{name}.qweight": words(columns // 8, rows),
        f"{name}.qzeros": words(columns // group, rows // 8),
        f"{name}.scales": torch.rand(columns // group, rows).half(),
        f"{name}.g_idx": torch.arange(columns) // group if order is None else order,
    }


def awq(name: str, rows: int, columns: int, group: int) -> dict[str, torch.Tensor]:
    return {
        f"{name}.qweight": words(columns, rows // 8),
        f"{name}.qzeros": words(columns // group, rows // 8),
        f"{name}.scales": torch.rand(columns // group, rows).half(),
    }


def load(folder: Path, quantization: dict[str, Any], tensors: dict[str, torch.Tensor], **options: Any) -> WeightLoader:
    (folder / "config.json").write_text(json.dumps({**CONFIG, "quantization_config": quantization}))
    save_file(tensors, folder / "model.safetensors")
    options = {
        "dtype": torch.float32,
        "device": torch.device("cpu"),
        "keeps_packed": True,
    } | options
    return WeightLoader(open_checkpoint(folder)[1], **options)


INT4 = {
    "compressed-tensors": (COMPRESSED, lambda name: compressed(name, 24, 64, 32)),
    "compressed-tensors with zeros": (COMPRESSED, lambda name: compressed(name, 24, 64, 32, zeros=True)),
    "gptq": ({"quant_method": "gptq", "bits": 4}, lambda name: gptq(name, 24, 64, 16)),
    "gptq v2": (
        {"quant_method": "gptq", "bits": 4, "checkpoint_format": "gptq_v2"},
        lambda name: gptq(name, 24, 64, 32),
    ),
    "gptq, one group of 96": ({"quant_method": "gptq", "bits": 4}, lambda name: gptq(name, 24, 96, 96)),
    "awq": ({"quant_method": "awq", "bits": 4}, lambda name: awq(name, 24, 64, 32)),
}


@pytest.mark.parametrize("layout", INT4)
def test_int4_keeps_every_value(layout: str, tmp_path: Path) -> None:
    quantization, make = INT4[layout]
    loader = load(tmp_path, quantization, make("a") | make("b"))
    columns = 96 if "96" in layout else 64
    for piece in (None, Slice(0, 8, 16), Slice(1, 32, columns)):
        parts = [Part(name=f"{name}.weight", shape=(24, columns), piece=piece) for name in ("a", "b")]
        weight = loader.matrix(parts)
        assert isinstance(weight, Int4Weight)
        assert torch.equal(weight.dequantize(), loader.stack(parts))
    assert loader.forms == {"Int4Weight": 3}


@pytest.mark.parametrize(
    ("quantization", "tensors", "piece"),
    [
        ({"quant_method": "gptq", "bits": 8}, {}, None),
        ({"quant_method": "gptq", "bits": 4}, gptq("a", 24, 64, 16, torch.randperm(64) // 16), None),
        (COMPRESSED, compressed("a", 24, 64, 8), None),
        (COMPRESSED, compressed("a", 24, 64, 32), Slice(1, 0, 16)),
    ],
    ids=["8 bits", "act order", "groups of 8", "a group cut in two"],
)
def test_what_has_no_packed_form_is_dequantized(
    quantization: dict[str, Any], tensors: dict[str, torch.Tensor], piece: Slice | None, tmp_path: Path
) -> None:
    if not tensors:
        tensors = {"a.qweight": words(16, 24), "a.qzeros": words(4, 6), "a.scales": torch.rand(4, 24).half()}
    loader = load(tmp_path, quantization, tensors)
    part = Part(name="a.weight", shape=(24, 64), piece=piece)
    weight = loader.matrix([part])
    assert isinstance(weight, torch.Tensor)
    assert torch.equal(weight, loader.stack([part]))
    assert loader.forms == {"plain": 1}


def test_fp8_tiles_line_up_or_are_dequantized(tmp_path: Path) -> None:
    tensors = {}
    for name, rows in (("a", 32), ("b", 24)):
        tensors[f"{name}.weight"] = torch.randn(rows, 48).to(torch.float8_e4m3fn)
        tensors[f"{name}.weight_scale_inv"] = torch.rand(-(-rows // 16), 3)
    loader = load(tmp_path, {"quant_method": "fp8", "weight_block_size": [16, 16]}, tensors)
    a, b = Part(name="a.weight", shape=(32, 48)), Part(name="b.weight", shape=(24, 48))
    assert isinstance(loader.matrix([a, b]), Fp8Weight)
    for parts in ([a, b], [b], [Part(name="a.weight", shape=(32, 48), piece=Slice(1, 16, 48))]):
        weight = loader.matrix(parts)
        assert isinstance(weight, Fp8Weight)
        assert torch.equal(weight.dequantize(), loader.stack(parts))
    assert isinstance(loader.matrix([b, a]), torch.Tensor)
    assert isinstance(loader.matrix([Part(name="a.weight", shape=(32, 48), piece=Slice(0, 8, 24))]), torch.Tensor)


def test_mxfp4_is_taken_as_it_is(tmp_path: Path) -> None:
    tensors = {
        "e_blocks": torch.randint(0, 256, (3, 6, 2, 16)).to(torch.uint8),
        "e_scales": torch.randint(120, 130, (3, 6, 2)).to(torch.uint8),
    }
    loader = load(tmp_path, {"quant_method": "mxfp4"}, tensors)
    part = Part(name="e", shape=(3, 64, 6), piece=Slice(0, 1, 2))
    weight = loader.packed(part)
    assert isinstance(weight, Mxfp4Weight)
    assert torch.equal(weight.dequantize(), loader.read(part)[0].t())
    order = torch.tensor([4, 0, 2])
    assert torch.equal(packing.select_rows(weight, order).dequantize(), weight.dequantize()[order])


def test_the_torch_backend_dequantizes(tmp_path: Path) -> None:
    loader = load(tmp_path, COMPRESSED, compressed("a", 24, 64, 32), keeps_packed=False)
    assert isinstance(loader.matrix([Part(name="a.weight", shape=(24, 64))]), torch.Tensor)
