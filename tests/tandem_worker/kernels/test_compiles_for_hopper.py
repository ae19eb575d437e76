"""Every kernel compiles for Hopper in bfloat16, fits its resources and uses the instructions it is written for.

No GPU takes part: Triton brings its own assembler. One call per operation, at the shapes of a served model.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pkgutil import iter_modules

import pytest
import torch
from tandem_worker import kernels
from tandem_worker.kernels.quantized import Fp8Weight, Int4Weight, Mxfp4Weight, SplitByteWeight
from triton import knobs
from triton.runtime.jit import JITFunction

pytestmark = [
    pytest.mark.timeout(300),
    pytest.mark.skipif(knobs.runtime.interpret, reason="the interpreter does not compile"),
]
MAX_SHARED = 227 * 1024
"""Shared memory that a block of compute capability 9.0 may have."""
MAX_STACK = 64
"""Bytes of spills per thread that are tolerated: MLA's accumulator leaves no register free."""
HALF = torch.bfloat16
TABLE = torch.zeros(4, 64, dtype=torch.int32)
LENGTHS = torch.zeros(4, dtype=torch.int32)
STARTS = torch.zeros(5, dtype=torch.int32)
POSITIONS = torch.zeros(4, dtype=torch.int64)


def zeros(*shape: int, dtype: torch.dtype = HALF) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype)


def cache(heads: int = 8, head_dim: int = 128) -> torch.Tensor:
    """Block space as the engine lays it out: a head's keys of a block lie together."""
    return zeros(4, 2, heads, 16, head_dim)


def tables(half: int = 64) -> tuple[torch.Tensor, torch.Tensor]:
    return zeros(32, half, dtype=torch.float32), zeros(32, half, dtype=torch.float32)


FORMS: dict[str, Callable[[], object]] = {
    "bf16": lambda: zeros(4096, 4096),
    "fp8": lambda: Fp8Weight(
        data=zeros(4096, 4096, dtype=torch.float8_e4m3fn), scale=zeros(32, 32, dtype=torch.float32)
    ),
    "int4": lambda: Int4Weight(packed=zeros(4096, 512, dtype=torch.int32), scale=zeros(4096, 128)),
    "int4 of wide groups": lambda: Int4Weight(
        packed=zeros(4096, 512, dtype=torch.int32), scale=zeros(4096, 32), zero=zeros(4096, 32, dtype=torch.uint8)
    ),
    "mxfp4": lambda: Mxfp4Weight(
        packed=zeros(4096, 2048, dtype=torch.uint8), scale=zeros(4096, 128, dtype=torch.uint8)
    ),
    "12 bits": lambda: split_byte(4096, 4096),
}


def split_byte(*shape: int) -> SplitByteWeight:
    half = (*shape[:-1], shape[-1] // 2)
    beside = zeros(shape[0] * shape[-2], dtype=torch.int32)
    return SplitByteWeight(low=zeros(*half, dtype=torch.int16), codes=zeros(*half, dtype=torch.uint8), beside=beside)


SLOW = ("fused_moe", "gate_up_silu", "small_batch_linear fp8", "small_batch_linear mxfp4", "small_batch_linear 12")
"""Compilations of several seconds each, and one that the count of instructions repeats."""
ROWS = torch.zeros(4)
COUNTS = torch.zeros(4, 151936, dtype=torch.int32)
LOGITS = torch.zeros(4, 151936)
SAMPLING: dict[str, Callable[[], object]] = {
    "apply_penalties": lambda: kernels.apply_penalties(LOGITS, COUNTS.bool(), COUNTS, ROWS, ROWS, ROWS),
    "apply_logit_bias": lambda: kernels.apply_logit_bias(LOGITS, TABLE, ROWS[:, None].repeat(1, 64)),
    "apply_bitmask": lambda: kernels.apply_bitmask(LOGITS, COUNTS[:, :4748].contiguous()),
    "sample_tokens": lambda: kernels.sample_tokens(LOGITS, POSITIONS, POSITIONS, POSITIONS, ROWS, LENGTHS, ROWS, ROWS),
    "token_logprobs": lambda: kernels.token_logprobs(LOGITS, POSITIONS, 20),
}
SIMPLE: dict[str, Callable[[], object]] = {
    **{
        f"widen {form}": (lambda make=make: kernels.widen(zeros(1), make()))
        for form, make in FORMS.items()
        if form != "bf16"
    },
    "look_up": lambda: kernels.look_up(POSITIONS, split_byte(4096, 4096), HALF),
    "rms_norm": lambda: kernels.rms_norm(zeros(4, 4096), zeros(4096), 1e-5),
    "rms_norm per head": lambda: kernels.rms_norm(zeros(4, 32, 128), zeros(128), 1e-5),
    "residual_rms_norm": lambda: kernels.residual_rms_norm(zeros(4, 4096), zeros(4, 4096), zeros(4096), 1e-5),
    "rope": lambda: kernels.rope(zeros(4, 32, 128), zeros(4, 8, 128), *tables(), POSITIONS),
    "silu_mul": lambda: kernels.silu_mul(zeros(4, 28672)),
    "swiglu_clamped": lambda: kernels.swiglu_clamped(zeros(4, 5760)),
    "kv_write": lambda: kernels.kv_write(zeros(4, 8, 128), zeros(4, 8, 128), cache(), POSITIONS),
    "fused_qkv_norm_rope_kv_write": lambda: kernels.fused_qkv_norm_rope_kv_write(
        zeros(4, 48 * 128), *tables(), POSITIONS, cache(), POSITIONS, q_norm=zeros(128), k_norm=zeros(128)
    ),
    "latent_gather": lambda: kernels.latent_gather(zeros(4, 64, 576), TABLE, STARTS, 512),
    "moe_route": lambda: kernels.moe_route(zeros(4, 256), 8, scoring="sigmoid", num_groups=8, top_groups=4),
    "moe_route with padding": lambda: kernels.moe_route(zeros(4, 256), 8, live=torch.zeros(4, dtype=torch.bool)),
    "copy_rows": lambda: kernels.copy_rows(
        zeros(4, 2, dtype=torch.int64),
        zeros(4, 8192, dtype=torch.int64),
        0,
        zeros(4, 1 << 18, dtype=torch.int64),
        8192,
        8192,
    ),
    "latent_write": lambda: kernels.latent_write(zeros(4, 576), zeros(4, 64, 576), POSITIONS),
}
MATRIX: dict[str, tuple[Callable[[], object], str]] = {
    "paged_decode_attention": (
        lambda: kernels.paged_decode_attention(zeros(4, 32, 128), cache(), TABLE, LENGTHS, scale=0.1),
        "mma.sync",
    ),
    "paged_decode_attention with window and sinks": (
        lambda: kernels.paged_decode_attention(
            zeros(4, 64, 64), cache(8, 64), TABLE, LENGTHS, scale=0.1, window=128, sinks=zeros(64)
        ),
        "mma.sync",
    ),
    "paged_prefill_attention": (
        lambda: kernels.paged_prefill_attention(zeros(4096, 32, 128), cache(), TABLE, STARTS, LENGTHS, scale=0.1),
        "wgmma",
    ),
    "mla_decode_attention": (
        lambda: kernels.mla_decode_attention(
            zeros(4, 128, 576), zeros(4, 64, 576), TABLE, LENGTHS, latent_dim=512, scale=0.1
        ),
        "wgmma",
    ),
    **{
        f"mla_decode_attention of one rank's {heads} heads": (
            lambda heads=heads: kernels.mla_decode_attention(
                zeros(4, heads, 576), zeros(4, 64, 576), TABLE, LENGTHS, latent_dim=512, scale=0.1
            ),
            "mma.sync",
        )
        for heads in (16, 32)
    },
    "mla_prefill_attention": (
        lambda: kernels.mla_prefill_attention(
            zeros(4096, 16, 192), zeros(4096, 16, 256), zeros(4096, 64), STARTS, STARTS, scale=0.1
        ),
        "wgmma",
    ),
    **{
        f"small_batch_linear {form}": (lambda make=make: kernels.small_batch_linear(zeros(8, 4096), make()), "mma.sync")
        for form, make in FORMS.items()
    },
    "small_batch_linear of logits": (
        lambda: kernels.small_batch_linear(zeros(8, 4096), zeros(151936, 4096), out=torch.zeros(8, 151936)),
        "mma.sync",
    ),
    **{f"fused_moe {form}": (lambda form=form: fused_moe(form, 8), "mma.sync") for form in FORMS},
    **{f"fused_moe of a long step {form}": (lambda form=form: fused_moe(form, 4096), "wgmma") for form in FORMS},
    **{
        f"gate_up_silu {form}": (lambda make=make: kernels.gate_up_silu(zeros(64, 4096), make()), "mma")
        for form, make in FORMS.items()
    },
}


def fused_moe(form: str, num_tokens: int) -> None:
    """Eight of a Kimi K2 layer's experts."""

    def experts(rows: int, columns: int):
        match form:
            case "bf16":
                return zeros(8, rows, columns)
            case "fp8":
                data = zeros(8, rows, columns, dtype=torch.float8_e4m3fn)
                return Fp8Weight(data=data, scale=zeros(8, rows // 128, columns // 128, dtype=torch.float32))
            case "int4":
                packed = zeros(8, rows, columns // 8, dtype=torch.int32)
                return Int4Weight(packed=packed, scale=zeros(8, rows, columns // 32))
            case "int4 of wide groups":
                packed = zeros(8, rows, columns // 8, dtype=torch.int32)
                zero = zeros(8, rows, columns // 128, dtype=torch.uint8)
                return Int4Weight(packed=packed, scale=zeros(8, rows, columns // 128), zero=zero)
            case "12 bits":
                return split_byte(8, rows, columns)
        packed = zeros(8, rows, columns // 2, dtype=torch.uint8)
        return Mxfp4Weight(packed=packed, scale=zeros(8, rows, columns // 32, dtype=torch.uint8))

    ids, weights = zeros(num_tokens, 8, dtype=torch.int32), zeros(num_tokens, 8, dtype=torch.float32)
    kernels.fused_moe(zeros(num_tokens, 1024), experts(512, 1024), experts(1024, 256), weights, ids)


def check_resources(compiled) -> None:
    assert compiled
    for kernel in compiled:
        print(f"{kernel.name}: {kernel.registers} registers, {kernel.stack} B stack, {kernel.shared} B shared")
        assert kernel.shared <= MAX_SHARED, f"{kernel.name} needs {kernel.shared} bytes of shared memory"
        assert kernel.stack <= MAX_STACK, f"{kernel.name} spills {kernel.stack} bytes per thread"


@pytest.mark.parametrize("name", SIMPLE)
def test_memory_bound_kernels(compiled_launches, name):
    compiled = compiled_launches(SIMPLE[name])
    check_resources(compiled)
    assert any(wide in compiled[0].ptx for wide in (".v4.b32", ".v2.b64")), "loads are not 16 bytes wide"


@pytest.mark.parametrize("name", SAMPLING)
def test_sampling_kernels(compiled_launches, name):
    check_resources(compiled_launches(SAMPLING[name]))


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.full] if name.startswith(SLOW) else []) for name in MATRIX]
)
def test_matrix_kernels(compiled_launches, name):
    call, instruction = MATRIX[name]
    compiled = compiled_launches(call)
    check_resources(compiled)
    assert any(instruction in kernel.ptx for kernel in compiled)


MAX_PER_WEIGHT = 4.2
"""Instructions of a thread for each weight: a warp's issue slots then allow 2.4 times what an H200 copies."""


@pytest.mark.parametrize(
    ("num_rows", "most"), [(8, MAX_PER_WEIGHT), *(pytest.param(rows, 5.2, marks=pytest.mark.full) for rows in (32, 64))]
)
def test_12_bits_are_decoded_in_few_instructions(compiled_launches, num_rows, most):
    """Of more rows the matrix instructions and their operands take more, as they do of plain weights."""
    (kernel, *_) = compiled_launches(lambda: kernels.small_batch_linear(zeros(num_rows, 4096), split_byte(6144, 4096)))
    assert kernel.stack == 0, f"{kernel.stack} bytes of registers are spilled"
    loop = max(kernel.loops(), key=lambda found: found["PRMT"])
    weights = kernel.options["BLOCK_N"] * kernel.options["BLOCK_K"] / (32 * kernel.options["num_warps"])
    print(f"{loop.total() / weights:.2f} instructions per weight: {loop}")
    # Three for the codes, two tables, three for the signs, four to join: of eight weights.
    assert loop["PRMT"] == 6 * weights / 8
    assert weights < loop.total() <= most * weights


def test_scales_of_wide_groups_are_loaded_once(compiled_launches):
    """And not once for each weight: 64 loads per thread and tile."""
    (kernel, *_) = compiled_launches(MATRIX["small_batch_linear int4 of wide groups"][0])
    assert kernel.ptx.count("ld.global") <= 16


VARYING = {
    "num_rows",
    "num_pairs",
    "num_sequences",
    "num_splits",
    "fewest_tiles",
    "max_splits",
    "num_entries",
    "max_blocks",
    "stride_table",
}
"""Integers that change from step to step."""


def launched_kernels() -> list[JITFunction]:
    modules = [importlib.import_module(f"{kernels.__name__}.{found.name}") for found in iter_modules(kernels.__path__)]
    members = [member for module in modules for name, member in vars(module).items() if name.endswith("_kernel")]
    return [member for member in members if isinstance(member, JITFunction)]


def test_the_size_of_a_batch_does_not_ask_for_another_kernel() -> None:
    """Triton would compile one for 1, one for multiples of 16 and one for others, each while a stream waits."""
    found = launched_kernels()
    assert len(found) > 25
    static = (
        "_widen_kernel",
        "_look_up_kernel",
        "_rope_kernel",
        "_fused_qkv_kernel",
    )  # of a weight; of the table of angles
    specialized = [
        f"{kernel.__name__}({parameter.name})"
        for kernel in found
        for parameter in kernel.params
        if parameter.name in VARYING and not parameter.do_not_specialize and kernel.__name__ not in static
    ]
    assert specialized == []
