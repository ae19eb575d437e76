"""Whether an operation is right at a size: against float64 or its twin, row by row, and equal bits a second time.

`torch.empty` is filled with NaN meanwhile, so an element that nobody wrote does not pass.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from bench.kernels.case import Case, Tensors

LIMITS = {torch.bfloat16: 1.2e-2, torch.float16: 2e-3, torch.float32: 1e-5}
"""Of |actual - expected| / |expected| over a whole tensor. Integers must be equal."""
_ROW_FACTOR = 4.0
"""A row may err by this much more than the tensor: a defect of one row in a thousand does not show in the whole."""
_SHOWN = 5
"""Differing values that are reported."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """What a check found."""

    error: float
    worst_row: float
    limit: float
    repeats: bool
    """The second run left the same bits."""
    evidence: dict[str, Any]
    """The first differing values; empty if it passed."""

    @property
    def excess(self) -> float:
        """The error in parts of its limit; more than 1 does not pass."""
        error = max(self.error, self.worst_row / _ROW_FACTOR)
        return error / self.limit if self.limit else (0.0 if error == 0.0 else float("inf"))

    @property
    def passed(self) -> bool:
        return self.excess <= 1.0 and self.repeats


@contextmanager
def poisoned_empty() -> Iterator[None]:
    """`torch.empty` returns NaN (integers: 113)."""
    empty = torch.empty

    def poisoned(*args: Any, **options: Any) -> torch.Tensor:
        tensor = empty(*args, **options)
        return tensor.fill_(float("nan") if tensor.is_floating_point() else 113)

    torch.empty = poisoned
    try:
        yield
    finally:
        torch.empty = empty


def check(case: Case) -> Finding:
    """Run the case twice on the same random inputs and compare: with what it should be, and with itself."""
    inputs = case.make()
    first, second = (_run_once(case, inputs) for _ in range(2))
    changed = [index for index, (one, other) in enumerate(zip(first, second, strict=True)) if not same_bits(one, other)]
    evidence: dict[str, Any] = {}
    if changed:
        evidence["the second run differs"] = first_differences(second[changed[0]], first[changed[0]], 0.0)
    if case.error is not None:
        limit, error = _limit(case, first[0]), case.error(first, inputs)
        return Finding(error=error, worst_row=error, limit=limit, repeats=not changed, evidence=evidence)
    worst = Finding(error=0.0, worst_row=0.0, limit=0.0, repeats=not changed, evidence=evidence)
    for output, exact in zip(first, case.expect(*_fresh(case, inputs)), strict=True):
        whole, row = compare(output, exact)
        found = Finding(
            error=whole, worst_row=row, limit=_limit(case, output), repeats=not changed, evidence=worst.evidence
        )
        if found.excess > 1.0:
            evidence.setdefault("first differing values", first_differences(output, exact, found.limit))
        worst = max(worst, found, key=lambda finding: (finding.excess, finding.limit))
    return worst


def _limit(case: Case, output: torch.Tensor) -> float:
    return LIMITS.get(output.dtype, 0.0) if case.limit is None else case.limit


def _fresh(case: Case, inputs: tuple) -> tuple:
    """The inputs, with copies in place of those that the operation writes to."""
    return tuple(value.clone() if index in case.writes else value for index, value in enumerate(inputs))


def _run_once(case: Case, inputs: tuple) -> Tensors:
    inputs = _fresh(case, inputs)
    with poisoned_empty():
        result = case.run(*inputs)
    return case.outputs(result, *inputs)


def compare(actual: torch.Tensor, expected: torch.Tensor) -> tuple[float, float]:
    """Errors of the whole and of the worst row; infinite where shapes differ or a value is NaN or only one infinite.

    Of integers: the share of those that differ.
    """
    if actual.shape != expected.shape:
        return float("inf"), float("inf")
    if actual.numel() == 0:
        return 0.0, 0.0
    if not actual.is_floating_point():
        share = float((actual != expected).double().mean())
        return share, share
    actual, expected = actual.double(), expected.double()
    infinite = expected.isinf()
    if not bool(torch.where(infinite, actual == expected, actual.isfinite() & ~expected.isnan()).all()):
        return float("inf"), float("inf")
    difference = (actual - expected).masked_fill_(infinite, 0.0)
    expected = expected.masked_fill(infinite, 0.0)
    rows = expected.shape[-1] if expected.dim() > 1 else expected.numel()
    by_row, lengths = difference.reshape(-1, rows).norm(dim=1), expected.reshape(-1, rows).norm(dim=1)
    typical = lengths.square().mean().sqrt().clamp_min(1e-12)
    return float(difference.norm() / expected.norm().clamp_min(1e-12)), float(
        (by_row / lengths.maximum(0.1 * typical)).max()
    )


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether both hold the same bytes: NaN equals itself, 0 does not equal -0."""
    return one.shape == other.shape and torch.equal(
        one.contiguous().view(-1).view(torch.uint8), other.contiguous().view(-1).view(torch.uint8)
    )


def first_differences(actual: torch.Tensor, expected: torch.Tensor, tolerance: float) -> dict[str, Any]:
    """How many values differ by more than `tolerance` of their size, and the first of them with their places."""
    if actual.shape != expected.shape:
        return {"shape": list(actual.shape), "expected shape": list(expected.shape)}
    left, right = actual.double(), expected.double()
    scale = right.masked_fill(right.isinf(), 0.0).abs().mean().clamp_min(1e-12)
    differs = ~((left - right).abs() <= tolerance * (right.abs() + scale)) & ~(left == right)
    places = differs.nonzero()
    shown = [
        {"at": place, "value": float(left[tuple(place)]), "expected": float(right[tuple(place)])}
        for place in places[:_SHOWN].tolist()
    ]
    return {"count": int(places.shape[0]), "of": actual.numel(), "first": shown}
