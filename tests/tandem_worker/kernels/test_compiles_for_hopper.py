"""Every kernel compiles for Hopper in bfloat16, fits its resources and uses the instructions it is written for.

No GPU takes part: Triton brings its own assembler. One call per operation, at the shapes of a served model.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from tandem_worker import kernels
from triton import knobs

pytestmark = [
    pytest.mark.timeout(300),
    pytest.mark.skipif(knobs.runtime.interpret, reason="the interpreter does not compile"),
]
MAX_SHARED = 227 * 1024
"""Shared memory that a block of compute capability 9.0 may have."""
HALF = torch.bfloat16
TABLE = torch.zeros(4, 64, dtype=torch.int32)
LENGTHS = torch.zeros(4, dtype=torch.int32)
POSITIONS = torch.zeros(4, dtype=torch.int64)


def zeros(*shape: int, dtype: torch.dtype = HALF) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype)


def cache(heads: int = 8, head_dim: int = 128) -> torch.Tensor:
    """Block space as the attention layers hand it over: offset before keys and values in memory."""
    return zeros(4, 16, 2, heads, head_dim).permute(0, 2, 3, 1, 4)


def tables(half: int = 64) -> tuple[torch.Tensor, torch.Tensor]:
    return zeros(32, half, dtype=torch.float32), zeros(32, half, dtype=torch.float32)


SIMPLE: dict[str, Callable[[], object]] = {
    "rms_norm": lambda: kernels.rms_norm(zeros(4, 4096), zeros(4096), 1e-5),
    "rms_norm per head": lambda: kernels.rms_norm(zeros(4, 32, 128), zeros(128), 1e-5),
    "residual_rms_norm": lambda: kernels.residual_rms_norm(zeros(4, 4096), zeros(4, 4096), zeros(4096), 1e-5),
    "rope": lambda: kernels.rope(zeros(4, 32, 128), zeros(4, 8, 128), *tables(), POSITIONS),
    "silu_mul": lambda: kernels.silu_mul(zeros(4, 28672)),
    "swiglu_clamped": lambda: kernels.swiglu_clamped(zeros(4, 5760)),
    "kv_write": lambda: kernels.kv_write(zeros(4, 8, 128), zeros(4, 8, 128), cache(), POSITIONS),
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
        lambda: kernels.paged_prefill_attention(
            zeros(4096, 32, 128), cache(), TABLE, torch.zeros(5, dtype=torch.int32), LENGTHS, scale=0.1
        ),
        "wgmma",
    ),
}


def check_resources(compiled) -> None:
    assert compiled
    for kernel in compiled:
        print(f"{kernel.name}: {kernel.registers} registers, {kernel.stack} B stack, {kernel.shared} B shared")
        assert kernel.shared <= MAX_SHARED, f"{kernel.name} needs {kernel.shared} bytes of shared memory"
        assert kernel.stack == 0, f"{kernel.name} spills {kernel.stack} bytes per thread"


@pytest.mark.parametrize("name", SIMPLE)
def test_memory_bound_kernels(compiled_launches, name):
    compiled = compiled_launches(SIMPLE[name])
    check_resources(compiled)
    assert ".v4.b32" in compiled[0].ptx, "loads are not 16 bytes wide"


@pytest.mark.parametrize("name", MATRIX)
def test_matrix_kernels(compiled_launches, name):
    call, instruction = MATRIX[name]
    compiled = compiled_launches(call)
    check_resources(compiled)
    assert instruction in compiled[0].ptx
