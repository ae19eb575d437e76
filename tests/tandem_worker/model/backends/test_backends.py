"""Every family gives on the other backends the logits it gives on the torch backend.

Of Triton's kernels the twins run here, which tests the wiring; `test_backends_interpreted.py` runs the same file in
Triton's interpreter, and on a machine with a GPU `-m gpu` runs the compiled kernels.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tandem_worker.engine.execute.cuda_graphs import build_static_batch
from tandem_worker.model.backends import native
from tandem_worker.model.backends.contract import BackendName
from tandem_worker.model.backends.native.packing import NativePacker
from tandem_worker.model.backends.select import find_backend, select_backend
from tandem_worker.model.contract import allocate_kv_cache
from tandem_worker.model.load import load_model
from torch.nn import functional
from transformers import DeepseekV3Config, GptOssConfig, Llama4TextConfig, LlamaConfig, Qwen3Config, Qwen3MoeConfig

from tests.tandem_worker.kernels.quantizing import quantize_fp8, quantize_int4, quantize_mxfp4
from tests.tandem_worker.model.backends.onednn import needs_onednn

COMMON = {
    "vocab_size": 41,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 128,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
LATENT = {
    "moe_intermediate_size": 16,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 1,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "q_lora_rank": 20,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 12,
    "v_head_dim": 10,
    "num_nextn_predict_layers": 0,
    "num_key_value_heads": 4,
}
SINKS = {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 5}
CHUNKED = {
    "intermediate_size_mlp": 40,
    "num_local_experts": 4,
    "num_experts_per_tok": 1,
    "attention_chunk_size": 8,
    "floor_scale": 6,
    "no_rope_layers": [1, 0],
    "interleave_moe_layer_step": 1,
}
CONFIGS: dict[str, Callable[[], Any]] = {
    "llama": lambda: LlamaConfig(**COMMON, attention_bias=True, mlp_bias=True, tie_word_embeddings=True),
    "qwen3": lambda: Qwen3Config(**COMMON, use_sliding_window=True, sliding_window=5, max_window_layers=1),
    "qwen3_moe": lambda: Qwen3MoeConfig(**COMMON, **EXPERTS, norm_topk_prob=True, mlp_only_layers=[1]),
    "deepseek": lambda: DeepseekV3Config(**{**COMMON, "head_dim": None, **LATENT}),
    "gpt_oss": lambda: GptOssConfig(**COMMON, **SINKS, rope_parameters={"rope_type": "default", "rope_theta": 1e4}),
    "llama4": lambda: Llama4TextConfig(
        **COMMON, **CHUNKED, rope_parameters={"rope_type": "default", "rope_theta": 1e4}
    ),
    "llama4_top2": lambda: Llama4TextConfig(
        **{**COMMON, **CHUNKED, "num_experts_per_tok": 2, "use_qk_norm": False},
        layer_types=["full_attention", "chunked_attention"],
        rope_parameters={"rope_type": "default", "rope_theta": 1e4},
    ),
}


SCHEMES: dict[str, dict[str, Any]] = {
    "fp8": {"weight_block_size": [16, 16]},
    "compressed-tensors": {"config_groups": {"group_0": {"weights": {"num_bits": 4, "type": "int"}}}},
    "mxfp4": {},
}


def quantize(folder: Path, method: str) -> None:
    """Rounds a saved checkpoint's matrices and saves them in a published layout."""
    tensors, quantized = load_file(folder / "model.safetensors"), {}
    for name, weight in tensors.items():
        if method == "mxfp4" and name.endswith("_proj") and "experts" in name:
            packed = quantize_mxfp4(weight.transpose(1, 2))
            quantized[f"{name}_blocks"] = packed.packed.unflatten(-1, (-1, 16))
            quantized[f"{name}_scales"] = packed.scale
        elif method == "fp8" and "_proj" in name and "kv_b" not in name and name.endswith(".weight"):
            rows, columns = (-(-extent // 16) * 16 for extent in weight.shape)
            padded = functional.pad(weight, (0, columns - weight.shape[1], 0, rows - weight.shape[0]))
            packed = quantize_fp8(padded, 16)
            quantized[name] = packed.data[: weight.shape[0], : weight.shape[1]].contiguous()
            quantized[f"{name}_scale_inv"] = packed.scale
        elif method == "compressed-tensors" and "_proj" in name:
            packed = quantize_int4(weight, 16)
            quantized[f"{name}_packed"], quantized[f"{name}_scale"] = packed.packed, packed.scale
            quantized[f"{name}_shape"] = torch.tensor(weight.shape)
        else:
            quantized[name] = weight
    save_file(quantized, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": method, **SCHEMES[method]}
    (folder / "config.json").write_text(json.dumps(config))


QUANTIZED: dict[str, tuple[Callable[[], Any], str]] = {
    "qwen3_moe_int4": (CONFIGS["qwen3_moe"], "compressed-tensors"),
    "deepseek_fp8": (CONFIGS["deepseek"], "fp8"),
    "gpt_oss_mxfp4": (
        lambda: GptOssConfig(
            **{**COMMON, **SINKS, "intermediate_size": 64}, rope_parameters={"rope_type": "default", "rope_theta": 1e4}
        ),
        "mxfp4",
    ),
}
CASES = (*CONFIGS, *QUANTIZED)
DEVICES = [
    "cpu",
    pytest.param(
        "cuda",
        marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")],
    ),
]
LIMIT = 1e-4


def steps() -> list[dict[int, Sequence[int]]]:
    """Whole prompts and chunks, a chunk end inside a block beside a decode, then decodes alone.

    No choice of an expert hangs on a rounding with these tokens: another expert is an error of a tenth and more.
    """
    tokens = torch.randint(3, 41, (3, 24), generator=torch.Generator().manual_seed(4)).tolist()
    return [
        {0: tokens[0][:1], 1: tokens[1][:9]},
        {0: tokens[0][1:2], 1: tokens[1][9:14], 2: tokens[2][:6]},
        {1: tokens[1][14:15], 0: tokens[0][2:3], 2: tokens[2][6:7]},
        {2: tokens[2][7:8], 1: tokens[1][15:16]},
    ]


def save_family(family: str, save_random_model: Any, folder: Path) -> None:
    config, method = QUANTIZED.get(family) or (CONFIGS[family], None)
    save_random_model(config())
    if method is not None:
        quantize(folder, method)


def three_sequences(model: Any, paged_sequences: Any) -> Any:
    run = paged_sequences(model)
    for _ in range(3):
        run.add()
    return run


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("family", CASES)
def test_backends_agree(
    family: str, device: str, save_random_model: Any, paged_sequences: Any, logits_error: Any, tmp_path: Path
) -> None:
    save_family(family, save_random_model, tmp_path)
    runs = []
    for name, place in ((BackendName.TORCH, "cpu"), (BackendName.TRITON, device)):
        model = load_model(tmp_path, device=torch.device(place), dtype=torch.float32, backend=name)
        runs.append(three_sequences(model, paged_sequences))
    for number, new in enumerate(steps()):
        expected, actual = (run.step(new).cpu() for run in runs)
        assert logits_error(actual, expected) < LIMIT, f"step {number}"


@pytest.mark.skipif(native.find_obstacle() is not None, reason=str(native.find_obstacle()))
@pytest.mark.parametrize("family", CASES)
def test_cpu_kernels_are_as_exact_as_torch(
    family: str, save_random_model: Any, paged_sequences: Any, logits_error: Any, tmp_path: Path
) -> None:
    """Both compute in bfloat16; what they lack to float32 is compared."""
    save_family(family, save_random_model, tmp_path)
    runs = []
    for name, dtype in (
        (BackendName.TORCH, torch.float32),
        (BackendName.TORCH, torch.bfloat16),
        (BackendName.NATIVE, torch.bfloat16),
    ):
        model = load_model(tmp_path, device=torch.device("cpu"), dtype=dtype, backend=name)
        runs.append(three_sequences(model, paged_sequences))
    errors = torch.zeros(2)
    for new in steps():
        expected, *actual = (run.step(new) for run in runs)
        errors += torch.tensor([logits_error(one, expected) for one in actual])
    plain, kernels = errors.tolist()
    assert kernels < 1.3 * plain


def test_many_rows_take_the_other_products(
    save_random_model: Any, paged_sequences: Any, logits_error: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beyond the few rows of decode, weights go to the ordinary matrix product."""
    from tandem_worker.model.backends.triton import layers as triton

    save_random_model(CONFIGS["llama"]())
    logits = []
    for name, few in ((BackendName.TORCH, 64), (BackendName.TRITON, 0)):
        monkeypatch.setattr(triton, "MAX_FEW_ROWS", few)
        run = paged_sequences(load_model(tmp_path, device=torch.device("cpu"), dtype=torch.float32, backend=name))
        run.add()
        logits.append(run.step({0: [3, 4, 5]}))
    assert logits_error(logits[1], logits[0]) < LIMIT


@needs_onednn
def test_packed_by_onednn_the_kernels_compute_the_same(
    save_random_model: Any, paged_sequences: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on CPUs with AMX, whose weights oneDNN packs."""
    from tandem_worker.model.backends.native import backend, layers

    save_random_model(CONFIGS["llama"]())
    runs = []
    for packs in (True, False):
        monkeypatch.setattr(layers, "PACKS", packs)
        monkeypatch.setattr(backend, "NATIVE", replace(backend.NATIVE, packer=NativePacker if packs else None))
        model = load_model(tmp_path, device=torch.device("cpu"), dtype=torch.bfloat16, backend=BackendName.NATIVE)
        runs.append(three_sequences(model, paged_sequences))
    assert all(torch.equal(*(run.step(new) for run in runs)) for new in steps())


def test_many_rows_are_left_to_amx_where_there_is_one() -> None:
    from tandem_worker.model.backends.native.layers import most_rows

    assert most_rows({"avx512_bf16": True, "amx_bf16": True}) == 32
    assert most_rows({"avx512_bf16": True}) > 1 << 30


def test_a_backend_refuses_an_element_type_it_does_not_compute_in(save_random_model: Any, tmp_path: Path) -> None:
    save_random_model(CONFIGS["llama"]())
    with pytest.raises(ValueError, match=r"native .*bfloat16"):
        load_model(tmp_path, device=torch.device("cpu"), dtype=torch.float32, backend=BackendName.NATIVE)


def test_device_and_type_choose_and_a_name_overrides(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu, half = torch.device("cpu"), torch.bfloat16
    assert select_backend(cpu, torch.float32) is BackendName.TORCH
    assert select_backend(torch.device("cuda"), half) is BackendName.TRITON
    for obstacle, expected in ((None, BackendName.NATIVE), ("not here", BackendName.TORCH)):
        monkeypatch.setattr(native, "find_obstacle", lambda found=obstacle: found)
        assert select_backend(cpu, half) is expected
    assert all(find_backend(name).name is name for name in BackendName)


@pytest.mark.parametrize("rows", [1, 3, 70])
@pytest.mark.parametrize("name", [BackendName.TORCH, BackendName.TRITON, BackendName.NATIVE])
def test_logits_are_not_rounded_to_the_models_type(name: BackendName, rows: int) -> None:
    """Of two logits that bfloat16 would make equal the greater one wins."""
    if name is BackendName.NATIVE and (obstacle := native.find_obstacle()) is not None:
        pytest.skip(obstacle)
    generator = torch.Generator().manual_seed(3)
    weight = torch.randn(300, 64, generator=generator).bfloat16()
    x = torch.randn(rows, 64, generator=generator).bfloat16()
    logits = find_backend(name).head(weight)(x)
    exact = x.double() @ weight.double().t()
    assert logits.dtype == torch.float32
    assert ((logits - exact).abs().max() / exact.abs().max()) < 1e-6
    assert (logits != logits.bfloat16()).float().mean() > 0.9


@pytest.mark.parametrize("name", [BackendName.TORCH, BackendName.TRITON])
@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek", "gpt_oss", "llama4", "llama4_top2"])
def test_padding_meets_no_expert_and_changes_no_other_row(
    family: str, name: BackendName, save_random_model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Decodes of which the last three are padding, as a recording has them."""
    save_random_model(CONFIGS[family]())
    model: Any = load_model(tmp_path, device=torch.device("cpu"), dtype=torch.float32, backend=name)
    seen: list[torch.Tensor] = []
    experts = find_backend(name).experts
    add_to = experts.add_to

    def note(self: Any, x: Any, routing: Any, residual: Any, **options: Any) -> Any:
        seen.append(routing.experts)
        return add_to(self, x, routing, residual, **options)

    monkeypatch.setattr(experts, "add_to", note)
    batch = build_static_batch(5, 8, 4, torch.device("cpu"))
    batch.token_ids[:2] = torch.tensor([7, 9])
    batch.slot_mapping[:2] = torch.tensor([4, 8])
    batch.block_tables[:2, 0] = torch.tensor([1, 2])
    logits = []
    for has_padding in (True, False):
        cache = allocate_kv_cache(model.kv_cache_spec(4), 9, torch.device("cpu"))
        with torch.inference_mode():
            logits.append(model.forward(replace(batch, has_padding=has_padding, context_lens_host=(1,) * 5), cache))
    assert torch.allclose(logits[0][:2], logits[1][:2], atol=1e-5)
    assert logits[0].isfinite().all()
    with_padding, without = seen[: len(seen) // 2], seen[len(seen) // 2 :]
    assert with_padding
    for masked, plain in zip(with_padding, without, strict=True):
        assert (masked[2:] == -1).all()
        assert torch.equal(masked[:2], plain[:2])
