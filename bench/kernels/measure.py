"""Timing on the device, and the ceilings every result is compared with.

A case says how many bytes it must move and how many operations it must do, each input read once and each output
written once. Its limit is the larger of bytes over the copy bandwidth and operations over the matmul rate, both
measured in the same run; achieved is limit over time. On a CPU, where only dry runs happen, times are wall time.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import triton

from bench.kernels.case import Case


@dataclass(frozen=True, slots=True, kw_only=True)
class Ceilings:
    """What the device does at best, measured."""

    copy_bytes_per_s: float
    matmul_flops_per_s: float

    def limit_seconds(self, num_bytes: float, flops: float = 0.0) -> float:
        """The least time for moving and computing this much, whichever takes longer."""
        return max(num_bytes / self.copy_bytes_per_s, flops / self.matmul_flops_per_s)


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


def median_seconds(run: Callable[[], object], device: torch.device, milliseconds: int = 100) -> float:
    """Median of many timed runs, after a warm-up that also compiles."""
    run()
    if device.type == "cuda":
        found = triton.testing.do_bench(run, warmup=25, rep=milliseconds, return_mode="median")
        assert isinstance(found, float)
        return found * 1e-3
    times: list[float] = []
    while len(times) < 3 or (sum(times) < milliseconds * 1e-4 and len(times) < 100):
        began = time.perf_counter()
        run()
        times.append(time.perf_counter() - began)
    return statistics.median(times)


def graphed(run: Callable[..., object], inputs: list[tuple]) -> Callable[[], object]:
    """One replay of a CUDA graph that runs once on each of the inputs: launch gaps drop out. On a CPU plain calls."""

    def calls() -> None:
        for values in inputs:
            run(*values)

    if not any(isinstance(value, torch.Tensor) and value.is_cuda for value in inputs[0]):
        return calls
    calls()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        calls()
    return graph.replay


def measure_ceilings(device: torch.device, *, megabytes: int = 1024, side: int = 8192) -> Ceilings:
    """Device-to-device copy (read plus write), and a cubed bf16 product, on random data."""
    source = torch.randn(megabytes << 18, device=device)
    target = torch.empty_like(source)
    copy = median_seconds(lambda: target.copy_(source), device)
    a, b = (torch.randn(side, side, device=device, dtype=torch.bfloat16) for _ in range(2))
    product = median_seconds(lambda: a @ b, device)
    return Ceilings(copy_bytes_per_s=2 * source.nbytes / copy, matmul_flops_per_s=2 * side**3 / product)


def measure_read(device: torch.device, *, megabytes: int = 1024) -> float:
    """Bytes per second of a stream that is only read: a sum, whose result is one number."""
    source = torch.randn(megabytes << 18, device=device)
    return source.nbytes / median_seconds(source.sum, device)


def measure(case: Case, ceilings: Ceilings, device: torch.device) -> Result:
    inputs = case.rotated() if device.type == "cuda" else [case.make()]
    seconds = median_seconds(graphed(case.run, inputs), device) / len(inputs)
    memory, arithmetic = case.bytes / ceilings.copy_bytes_per_s, case.flops / ceilings.matmul_flops_per_s
    return Result(
        name=case.name,
        microseconds=seconds * 1e6,
        gigabytes_per_s=case.bytes / seconds / 1e9,
        teraflops_per_s=case.flops / seconds / 1e12,
        limit_microseconds=max(memory, arithmetic) * 1e6,
        bound_by="memory" if memory >= arithmetic else "arithmetic",
    )
