"""Every bench case: its check, themes side by side, then its time, alone on the device."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from bench.gpu.item import Figures, Item, Setting, WrongError
from bench.kernels.case import SERVED, TINY, Case, Place
from bench.kernels.cases import THEMES
from bench.kernels.check import Finding, check
from bench.kernels.measure import Ceilings, measure, measure_ceilings
from bench.kernels.weight_cases import BYTES_PER_WEIGHT

_SEED = 20
_ORDER = ("decode", "products", "experts", "prefill", "sampling", "elementwise")
"""Of timing: what the engine's speed hangs on first."""


def build_place(setting: Setting) -> Place:
    return Place(device=torch.device(setting.place), sizes=TINY if setting.tiny else SERVED)


def cases_of(theme: str, place: Place) -> Iterator[Case]:
    """Of a theme, or those of it whose weights have one form; the last form brings what has none."""
    name, _, form = theme.partition(" ")
    forms = list(BYTES_PER_WEIGHT)
    for case in THEMES[name](place):
        words = case.name.split()
        if not form or form in words or (form == forms[-1] and not set(forms) & set(words)):
            yield case


def check_items(setting: Setting, theme: str) -> Iterator[Item]:
    for case in cases_of(theme, build_place(setting)):
        yield Item(name=f"check {case.name}", run=lambda case=case: run_check(case), seconds=90)


def run_check(case: Case) -> Figures:
    torch.manual_seed(_SEED)
    found = check(case)
    figures = read_finding(found)
    if not found.passed:
        raise WrongError("the results are wrong" if found.repeats else "the bits change from run to run", figures)
    return figures


def read_finding(found: Finding) -> dict[str, Any]:
    figures: dict[str, Any] = {
        "error": found.error, "worst_row": found.worst_row, "limit": found.limit, "repeats": found.repeats,
    }  # fmt: skip
    return figures | ({"evidence": found.evidence} if found.evidence else {})


class Ceiling:
    """The device's ceilings, measured in this process when they are first needed."""

    def __init__(self, setting: Setting) -> None:
        self._setting = setting
        self._found: Ceilings | None = None

    @property
    def found(self) -> Ceilings:
        if self._found is None:
            size = {"megabytes": 4, "side": 128} if self._setting.tiny else {}
            self._found = measure_ceilings(torch.device(self._setting.place), **size)
        return self._found

    def figures(self) -> Figures:
        return {
            "copy_tb_per_s": self.found.copy_bytes_per_s / 1e12,
            "matmul_tflop_per_s": self.found.matmul_flops_per_s / 1e12,
        }


def time_items(setting: Setting) -> Iterator[Item]:
    """Of the cases that are right."""
    place, ceiling = build_place(setting), Ceiling(setting)
    yield Item(name="ceilings", run=ceiling.figures)
    for theme in _ORDER:
        for case in THEMES[theme](place):
            yield Item(
                name=f"time {case.name}", run=lambda case=case: run_time(case, ceiling, place.device), seconds=60,
                needs=(f"check {case.name}",),
            )  # fmt: skip


def run_time(case: Case, ceiling: Ceiling, device: torch.device) -> Figures:
    torch.manual_seed(_SEED)
    result = measure(case, ceiling.found, device)
    return {
        "us": result.microseconds,
        "GB/s": result.gigabytes_per_s,
        "TFLOP/s": result.teraflops_per_s,
        "ratio": result.achieved,
        "of": "copy" if result.bound_by == "memory" else "matmul",
    }
