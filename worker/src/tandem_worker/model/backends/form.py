"""In which form a worker keeps its matrices: plain, or 12 bits a weight, and why. Pure; needs no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from tandem_api.launch import WeightsForm, WorkerConfig
from tandem_api.names import Role

from tandem_worker.host.errors import StartupError

CPU_RATIOS: Mapping[int, float] = {1: 1.44, 4: 1.36, 6: 1.34, 8: 1.14, 32: 1.39, 128: 1.24, 512: 1.03, 2048: 1.0}
"""How many times as fast 12 bits are as plain weights on a CPU, by rows of a product: the least over SmolLM2's matrices
and an 8B layer's that `make bench-lossless` prints on idle cores. `docs/kernels.md` has the figures."""
GPU_RATIOS: Mapping[int, float] = {}
"""The same on a GPU, by `python -m bench.gpu lossless`. Empty: that has not been run. Single products of up to 64 rows
were 0.47 to 0.95 times as fast on an H200 (`shapes`)."""
_NOT_SLOWER = 1.0
_PROMPT = 32
"""Tokens of a prompt from which on a worker that only prefills is to be fast."""


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows that a worker's products have, the fewest and the most."""

    fewest: int = 1
    most: int = 1


def rows_of(config: WorkerConfig) -> Rows:
    """Those of a worker's role: its running requests where it decodes, a step's tokens where it prefills."""
    limits = config.scheduler
    match config.role:
        case Role.PREFILL:
            return Rows(_PROMPT, max(_PROMPT, limits.max_batch_tokens))
        case Role.DECODE:
            return Rows(1, max(limits.max_running_requests, limits.local_prefill_max_tokens))
        case _:
            return Rows(1, max(limits.max_running_requests, limits.max_batch_tokens))


Form = Literal["plain", "lossless"]


@dataclass(frozen=True, slots=True)
class FormChoice:
    form: Form
    why: str
    """As a part of a sentence."""


@dataclass(frozen=True, slots=True)
class Footprint:
    """What a step reads, and what stays in the processor's caches from one step to the next, in bytes."""

    weights: int
    """The whole model's matrices in 16 bits: ranks of one model choose alike."""
    caches: int

    @property
    def is_cached(self) -> bool:
        """Whether all matrices stay in the caches, so that a step reads none of them from memory."""
        return self.weights <= self.caches


def choose_form(
    asked: WeightsForm,
    rows: Rows,
    obstacle: str | None,
    ratios: Mapping[int, float],
    footprint: Footprint | None = None,
) -> FormChoice:
    """The form that `asked` means for products of so many `rows`, where `obstacle` says why 12 bits cannot be had.

    `ratios` are those of the backend. `footprint` None: the model is in no cache. Raises StartupError
    WeightsFormUnsupported where `Lossless` cannot be had.
    """
    if asked == "Lossless":
        if obstacle is not None:
            raise StartupError(
                "WeightsFormUnsupported",
                f"Weights cannot be kept in 12 bits here, as engine.weights: Lossless asks: {obstacle} "
                "Choose engine.weights: Auto or Plain.",
            )
        return FormChoice("lossless", "as engine.weights says")
    if asked == "Plain":
        return FormChoice("plain", "as engine.weights says")
    if obstacle is not None:
        return FormChoice("plain", obstacle.removesuffix("."))
    if footprint is not None and footprint.is_cached:
        return FormChoice("plain", "the model stays in the processor's caches, where 12 bits gain nothing")
    return choose_measured(rows, ratios)


def list_forms(asked: WeightsForm, rows: Rows, ratios: Mapping[int, float]) -> tuple[Form, ...]:
    """What `asked` may come to, the likeliest first, before anything is known of the model and of the processor."""
    if asked == "Auto" and choose_measured(rows, ratios).form == "lossless":
        return "lossless", "plain"
    return ("lossless",) if asked == "Lossless" else ("plain",)


def choose_measured(rows: Rows, ratios: Mapping[int, float]) -> FormChoice:
    """The form that is not slower at so many `rows`, of a model that is in no cache."""
    measured = _around(rows, ratios)
    if not measured:
        return FormChoice("plain", "12 bits have not been measured at its batch sizes")
    slowest = min(measured, key=lambda size: measured[size])
    told = f"at {rows.fewest} to {rows.most} rows 12 bits were measured at least {measured[slowest]:.2f} times as fast"
    if measured[slowest] < _NOT_SLOWER:
        return FormChoice("plain", f"{told}, at {slowest} rows")
    return FormChoice("lossless", told)


def _around(rows: Rows, ratios: Mapping[int, float]) -> dict[int, float]:
    """Measured sizes within `rows`, and the next around those; none where some are beyond all that was measured."""
    sizes = sorted(ratios)
    if not sizes or rows.fewest < sizes[0] or rows.most > sizes[-1]:
        return {}
    low = max(size for size in sizes if size <= rows.fewest)
    high = min(size for size in sizes if size >= rows.most)
    return {size: ratios[size] for size in sizes if low <= size <= high}
