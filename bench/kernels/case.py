"""What a case is: one kernel at one size, what it must move and compute, and the exact answer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVarTuple, cast

import torch

HALF = torch.bfloat16
COLD_BYTES = 256 << 20
"""Inputs rotate until they exceed the L2 cache several times."""

Tensors = tuple[torch.Tensor, ...]
Values = TypeVarTuple("Values")


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One kernel at one size. Nothing is allocated before `make` is called."""

    name: str
    make: Callable[[], tuple]
    """Fresh inputs of one call, random ones."""
    run: Callable[..., object]
    """The operation on such inputs."""
    expect: Callable[..., Tensors]
    """What `outputs` must hold for these inputs, computed in float64 or by the twin. It may write to its arguments."""
    outputs: Callable[..., Tensors] = field(
        default=lambda result, *inputs: result if isinstance(result, tuple) else (result,)
    )
    """Of `run`'s result and its inputs: what is compared. An operation in place leaves it in its inputs."""
    writes: tuple[int, ...] = ()
    """Inputs that `run` writes to."""
    error: Callable[[Tensors, tuple], float] | None = None
    """Of the outputs and their inputs, in place of a comparison with `expect`."""
    limit: float | None = None
    """Largest error; None: by the outputs' element type (`check.LIMITS`)."""
    bytes: float
    flops: float = 0.0

    def rotated(self) -> list[tuple]:
        """Inputs for timing, so many that caches stay cold."""
        return [self.make() for _ in range(max(1, min(16, int(COLD_BYTES // max(1.0, self.bytes)) + 1)))]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """How large the cases are."""

    tokens: tuple[int, ...]
    """Of elementwise operations."""
    hidden: int
    intermediate: int
    positions: int
    block_size: int
    latent_block_size: int
    models: tuple[tuple[str, int, int, int], ...]
    """Name, query heads, KV heads and head size of models with grouped queries."""
    decodes: tuple[tuple[int, int], ...]
    """Sequences and their context."""
    ragged: tuple[int, int, int]
    """Sequences, the shortest and the longest context."""
    guessed: tuple[tuple[int, int, int], ...]
    """Sequences, their context, and how many of its last tokens are computed: the newest one and guesses behind it."""
    recorded: tuple[tuple[int, int, int], ...]
    """Sequences, their context, and the longest that their block table has room for."""
    prefills: tuple[tuple[int, int], ...]
    """New tokens and context of a prompt."""
    latent: tuple[int, int]
    """MLA's latent and rotated dimensions."""
    latent_heads: tuple[int, ...]
    latent_decodes: tuple[tuple[int, int], ...]
    latent_head_dims: tuple[int, int]
    """Of expanded keys (without rotation) and of values."""
    latent_prefill: int
    latent_gather: int
    products: tuple[int, int]
    """Outputs and inputs of a projection, which are also the inputs and outputs of gate and up."""
    rows: tuple[int, ...]
    experts: tuple[int, int, int, int]
    """Hidden size, width, experts and choices."""
    expert_tokens: tuple[int, ...]
    routed: tuple[int, int]
    """Tokens and experts."""
    vocabulary: int
    sampled: tuple[int, ...]
    """Rows."""


SERVED = Sizes(
    tokens=(64, 8192), hidden=4096, intermediate=12288, positions=40960, block_size=16, latent_block_size=64,
    models=(("Qwen3-8B", 32, 8, 128), ("Llama-3 70B", 64, 8, 128), ("gpt-oss", 64, 8, 64)),
    decodes=((1, 32768), (32, 8192), (256, 1024)), ragged=(33, 1000, 32768),
    guessed=((1, 2000, 8), (1, 32768, 8), (64, 1024, 2)),
    recorded=((1, 500, 40960), (64, 200, 40960), (256, 200, 40960)), prefills=((8192, 8192), (2048, 32768)),
    latent=(512, 64), latent_heads=(128, 16), latent_decodes=((1, 32768), (32, 8192), (128, 4096)),
    latent_head_dims=(128, 128), latent_prefill=4096, latent_gather=32768,
    products=(4096, 12288), rows=(1, 8, 64),
    experts=(7168, 2048, 48, 8), expert_tokens=(1, 4, 32, 64, 256, 2048), routed=(8192, 256),
    vocabulary=151936, sampled=(1, 256),
)  # fmt: skip
"""Of served models: Qwen3-8B, Llama-3 70B, gpt-oss, DeepSeek-V3, and Kimi K2's experts on one of eight ranks."""

TINY = Sizes(
    tokens=(5,), hidden=64, intermediate=96, positions=64, block_size=16, latent_block_size=16,
    models=(("tiny", 4, 2, 32),),
    decodes=((3, 40),), ragged=(3, 7, 60), guessed=((2, 40, 9),), recorded=((3, 20, 64),), prefills=((20, 20), (5, 40)),
    latent=(32, 16), latent_heads=(4,), latent_decodes=((2, 40),), latent_head_dims=(32, 16),
    latent_prefill=24, latent_gather=40,
    products=(128, 256), rows=(1, 8),
    experts=(128, 64, 4, 2), expert_tokens=(1, 200), routed=(9, 32),
    vocabulary=300, sampled=(3,),
)  # fmt: skip
"""Of dry runs and of tools that slow a kernel down by orders of magnitude."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where cases lie, and how large they are."""

    device: torch.device
    sizes: Sizes = SERVED

    def randn(self, *shape: int, dtype: torch.dtype = HALF) -> torch.Tensor:
        return torch.randn(shape, device=self.device, dtype=dtype)

    def integers(self, low: int, high: int, shape: tuple[int, ...], dtype: torch.dtype = torch.int64) -> torch.Tensor:
        return torch.randint(low, high, shape, device=self.device, dtype=dtype)

    def ints(self, *values: int) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=self.device)

    def tables(self, contexts: list[int], block_size: int) -> tuple[torch.Tensor, int]:
        """Block tables of sequences over a scattered block space, padded with 0, and the number of its blocks."""
        counts = [-(-context // block_size) for context in contexts]
        num_blocks = sum(counts)
        order = torch.randperm(num_blocks, device=self.device).int()
        tables = torch.zeros((len(contexts), max(counts)), dtype=torch.int32, device=self.device)
        start = 0
        for row, count in enumerate(counts):
            tables[row, :count] = order[start : start + count]
            start += count
        return tables, num_blocks


def wide(*values: *Values) -> tuple[*Values]:
    """Float64 copies; what is no floating tensor passes through."""
    copies = (
        value.double() if isinstance(value, torch.Tensor) and value.is_floating_point() else value for value in values
    )
    return cast(tuple[*Values], tuple(copies))
