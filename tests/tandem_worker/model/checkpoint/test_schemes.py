"""Which quantized checkpoints are taken by what they say of themselves, and which are refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tandem_worker.host.errors import StartupError
from tandem_worker.model.checkpoint.schemes import SCHEMES, check_scheme

from tests.tandem_worker.model.checkpoint.test_quantized import save

INT4 = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32, "dynamic": False}
FP8 = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "channel", "dynamic": False}


def groups(*weights: dict[str, Any] | None, **others: Any) -> dict[str, Any]:
    named = {f"group_{index}": {"weights": weight, "targets": ["Linear"]} for index, weight in enumerate(weights)}
    return {"quant_method": "compressed-tensors", "config_groups": named, **others}


TAKEN = [
    {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3", "weight_block_size": [128, 128]},
    {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": True, "sym": True, "damp_percent": 0.01,
     "checkpoint_format": "gptq", "static_groups": False, "true_sequential": True, "model_file_base_name": "model"},
    {"quant_method": "gptq", "bits": 8, "meta": {"quantizer": ["gptqmodel:1.4.0"]}, "pack_dtype": "int32",
     "dynamic": None},
    {"quant_method": "awq", "bits": 4, "group_size": 128, "version": "gemm", "zero_point": True,
     "modules_to_not_convert": None},
    {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]},
    groups(INT4, format="pack-quantized", quantization_status="compressed", kv_cache_scheme=None, ignore=["lm_head"]),
    groups(FP8, format="float-quantized", sparsity_config={}, transform_config={}, version="0.12"),
]  # fmt: skip
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"quant_method": "gptq", "bits": 3}, "bits is 3"),
    ({"quant_method": "gptq"}, "bits is missing"),
    ({"quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin"}, "checkpoint_format is 'marlin'"),
    ({"quant_method": "gptq", "bits": 4, "dynamic": {r"+:.*\.18\.": {"bits": 8}}}, "dynamic is"),
    ({"quant_method": "awq", "bits": 4, "version": "gemv"}, "version is 'gemv'"),
    ({"quant_method": "awq", "bits": 8}, "bits is 8"),
    ({"quant_method": "fp8", "key_of_tomorrow": 1}, "key_of_tomorrow is 1"),
    (groups(INT4, {**INT4, "num_bits": 8}), "config_groups differ"),
    (groups(FP8, {**INT4, "num_bits": 8}), "config_groups differ"),
    (groups({**FP8, "num_bits": 4}), "num_bits is 4"),
    (groups({**FP8, "strategy": "block", "block_structure": [128, 128]}), "strategy is 'block'"),
    (groups(INT4, format="nvfp4-pack-quantized"), "format is 'nvfp4-pack-quantized'"),
    (groups({**INT4, "num_bits": 8}, format="int-quantized"), "format is 'int-quantized'"),
    (groups(INT4, sparsity_config={"format": "sparse-24-bitmask"}), "sparsity_config is"),
    (groups(INT4, transform_config={"config_groups": {"u": {}}}), "transform_config is"),
    (groups(None), "config_groups.group_0.weights is None"),
    ({"quant_method": "compressed-tensors"}, "config_groups is None"),
    ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "Weights quantized by 'bitsandbytes' cannot be loaded"),
]


@pytest.mark.parametrize("quantization", TAKEN, ids=lambda one: one["quant_method"])
def test_published_settings_are_taken(quantization: dict[str, Any]) -> None:
    check_scheme(quantization)


@pytest.mark.parametrize(("quantization", "says"), REFUSED, ids=[says for _, says in REFUSED])
def test_other_settings_are_refused_by_name(quantization: dict[str, Any], says: str) -> None:
    with pytest.raises(StartupError) as refusal:
        check_scheme(quantization)
    assert refusal.value.reason == "WeightsUnsupported"
    assert says in str(refusal.value)


@pytest.mark.parametrize("quantization", ["int4", [1], 4])
def test_what_is_no_object_is_refused(quantization: Any) -> None:
    with pytest.raises(StartupError, match="must be an object"):
        check_scheme(quantization)


def test_a_key_is_declared_once() -> None:
    for scheme in SCHEMES.values():
        assert not scheme.ignores & (scheme.reads | set(scheme.fixed))


@pytest.mark.parametrize("side", ["weight_g_idx", "weight_global_scale", "qzeros"])
def test_a_companion_that_is_not_read_keeps_its_name(side: str, tmp_path: Path) -> None:
    tensors = {
        "a.weight_packed": torch.zeros(4, 2, dtype=torch.int32),
        "a.weight_scale": torch.ones(4, 2),
        "a.weight_shape": torch.tensor([4, 16]),
        f"a.{side}": torch.ones(4),
    }
    assert set(save(tmp_path, groups(INT4), tensors).names()) == {"a.weight", f"a.{side}"}


def test_a_scale_beside_a_plain_matrix_keeps_its_name(tmp_path: Path) -> None:
    """The matrix is then read without it: integers, say, that no scheme names."""
    tensors = {"a.weight": torch.ones(4, 4, dtype=torch.int8), "a.weight_scale": torch.ones(4, 1)}
    assert set(save(tmp_path, groups(FP8), tensors).names()) == {"a.weight", "a.weight_scale"}
