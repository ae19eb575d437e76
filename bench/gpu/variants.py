"""Other splits, warps and stages of the kernels that matter most, largest expected gain first.

A variant changes what a launch is told, not the kernel: options in `JITFunction.run`, or an operation's own argument.
Each is checked as its case is before it is timed, beside the launch as it is today in the same process.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from triton.runtime.jit import JITFunction

from bench.gpu.item import Figures, Item, Setting, WrongError
from bench.gpu.shapes import Ceiling, build_place, read_finding
from bench.kernels.case import Case
from bench.kernels.cases import THEMES
from bench.kernels.check import check
from bench.kernels.measure import measure

SPLITS = {"small_batch_linear bf16 M=1": (1, 2, 3, 4), "mla_decode_attention H=16": (2, 4, 8, 16, 32),
          "paged_decode_attention Qwen3-8B B=32": (1, 2, 4, 8)}  # fmt: skip
"""Splits tried, by the beginning of a case's name."""
LAUNCHES: tuple[tuple[str, str, str], ...] = (
    ("products", "small_batch_linear bf16 M=1", "_small_batch_linear_kernel"),
    ("products", "gate_up_silu bf16 M=1", "_gate_up_silu_kernel"),
    ("products", "small_batch_linear lossless M=1", "_small_batch_linear_kernel"),
    ("decode", "paged_decode_attention Qwen3-8B B=32", "_paged_decode_attention_kernel"),
    ("products", "small_batch_linear int4 M=1", "_small_batch_linear_kernel"),
    ("experts", "fused_moe bf16 T=32", "_expert_kernel"),
    ("prefill", "paged_prefill_attention 32/8", "_paged_prefill_attention_kernel"),
    ("decode", "mla_decode_attention H=128 B=32", "_mla_decode_attention_kernel"),
)
"""Theme, beginning of the case's name, and the kernel whose launch is varied."""
OPTIONS: tuple[dict[str, int], ...] = (
    {"num_stages": 2}, {"num_stages": 3}, {"num_stages": 4}, {"num_stages": 5}, {"num_stages": 6},
    {"num_warps": 2}, {"num_warps": 4}, {"num_warps": 8},
)  # fmt: skip


def variant_items(setting: Setting) -> Iterator[Item]:
    place, ceiling = build_place(setting), Ceiling(setting)
    yield Item(name="ceilings", run=ceiling.figures)
    cases = {case.name: case for theme in ("products", "decode", "experts", "prefill") for case in THEMES[theme](place)}
    for beginning, splits in SPLITS.items():
        for case in find(cases, beginning, tiny=setting.tiny):
            for count in splits[: 1 if setting.tiny else None]:
                varied = replace(case, run=partial(case.run, num_splits=count))
                yield _item(f"{case.name}: {count} split{'s' * (count > 1)}", case, varied, ceiling, place.device)
    for _, beginning, kernel in LAUNCHES:
        for case in find(cases, beginning, tiny=setting.tiny):
            for options in OPTIONS[: 1 if setting.tiny else None]:
                told = ", ".join(f"{name} {value}" for name, value in options.items())
                varied = replace(case, run=overridden(case.run, kernel, options))
                yield _item(f"{case.name}: {told}", case, varied, ceiling, place.device)


def find(cases: dict[str, Case], beginning: str, *, tiny: bool) -> list[Case]:
    """The first case of that name. Tiny ones have other sizes in their names: there operation and form decide."""
    operation, form, *_ = beginning.split()
    wanted = [f"{operation} {form}", operation] if tiny else [beginning]
    found = [case for start in wanted for name, case in cases.items() if name.startswith(start)]
    return found[:1]


def _item(name: str, case: Case, varied: Case, ceiling: Ceiling, device: torch.device) -> Item:
    return Item(name=name, run=lambda: compare(case, varied, ceiling, device), seconds=60)


def compare(case: Case, varied: Case, ceiling: Ceiling, device: torch.device) -> Figures:
    """Both in turns: figures of the variant, and how much faster it is."""
    torch.manual_seed(20)
    found = check(varied)
    if not found.passed:
        raise WrongError("the variant's results are wrong", read_finding(found))
    plain, other = (measure(each, ceiling.found, device) for each in (case, varied))
    return {
        "us": other.microseconds,
        "us today": plain.microseconds,
        "gain": plain.microseconds / other.microseconds,
        "ratio": other.achieved,
        "of": "copy" if other.bound_by == "memory" else "matmul",
    }


def overridden(run: Callable[..., object], kernel: str, options: dict[str, int]) -> Callable[..., object]:
    """`run` with other launch options of that kernel."""

    def varied(*values: Any) -> object:
        with launch_options(kernel, options):
            return run(*values)

    return varied


@contextmanager
def launch_options(kernel: str, options: dict[str, int]) -> Iterator[None]:
    plain = JITFunction.run

    def run(self: JITFunction, *args: Any, **told: Any) -> Any:
        return plain(self, *args, **(told | options if self.__name__ == kernel else told))

    JITFunction.run = run
    try:
        yield
    finally:
        JITFunction.run = plain
