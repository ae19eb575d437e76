"""Timing on the device, and the two ceilings every result is compared with.

A case says how many bytes it must move and how many operations it must do, each input read once and each output
written once. Its limit is the larger of bytes over the copy bandwidth and operations over the matmul rate, both
measured in the same run; achieved is limit over time.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import triton


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One kernel at one size. `run` is called with every one of `inputs` in turn, so that caches stay cold."""

    name: str
    inputs: list[tuple]
    run: Callable[..., object]
    bytes: float
    flops: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Ceilings:
    """What the device does at best, measured."""

    copy_bytes_per_s: float
    matmul_flops_per_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    name: str
    microseconds: float
    gigabytes_per_s: float
    teraflops_per_s: float
    limit_microseconds: float
    bound_by: str

    @property
    def achieved(self) -> float:
        return self.limit_microseconds / self.microseconds


def median_seconds(run: Callable[[], object], milliseconds: int = 100) -> float:
    """Median of many timed runs, after a warm-up that also compiles."""
    run()
    return triton.testing.do_bench(run, warmup=25, rep=milliseconds, return_mode="median") * 1e-3


def graphed(case: Case) -> Callable[[], object]:
    """One replay of a CUDA graph that runs the case once on each of its inputs: launch gaps drop out."""
    for values in case.inputs:
        case.run(*values)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for values in case.inputs:
            case.run(*values)
    return graph.replay


def measure_ceilings() -> Ceilings:
    """Device-to-device copy of 1 GiB (read plus write), and an 8192-cubed bf16 product, on random data."""
    source = torch.randn(1 << 28, device="cuda")
    target = torch.empty_like(source)
    copy = median_seconds(lambda: target.copy_(source))
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    product = median_seconds(lambda: a @ b)
    return Ceilings(copy_bytes_per_s=2 * source.nbytes / copy, matmul_flops_per_s=2 * 8192**3 / product)


def measure(case: Case, ceilings: Ceilings) -> Result:
    seconds = median_seconds(graphed(case)) / len(case.inputs)
    memory, arithmetic = case.bytes / ceilings.copy_bytes_per_s, case.flops / ceilings.matmul_flops_per_s
    return Result(
        name=case.name,
        microseconds=seconds * 1e6,
        gigabytes_per_s=case.bytes / seconds / 1e9,
        teraflops_per_s=case.flops / seconds / 1e12,
        limit_microseconds=max(memory, arithmetic) * 1e6,
        bound_by="memory" if memory >= arithmetic else "arithmetic",
    )
