"""What a step costs by the rows that it computes, learned from every step.

A product's kernels read each weight once and multiply it with a few rows; further rows are passes over it. So a step
costs a base, a little for each row, and more for each pass. The base follows the contexts and whatever else runs on the
machine, the two slopes stay.
"""

from __future__ import annotations

import math
from typing import NamedTuple


class RowCosts(NamedTuple):
    """What rows cost before anything was measured, as shares of a step of one row."""

    rows_per_pass: int
    per_row: float
    per_pass: float


ON_CPU = RowCosts(rows_per_pass=6, per_row=0.02, per_pass=0.20)
"""The native kernels keep the sums of six rows in registers (`kMaxRows`); further passes read the cache. Measured for
SmolLM2 on one thread."""
ON_GPU = RowCosts(rows_per_pass=64, per_row=0.0045, per_pass=0.0)
"""Qwen3-8B's shapes on an H200 in bfloat16: 4.93 ms for a row, 5.1 for 8, 6.5 for 64 and 10.7 for 256, in a line."""
_BASE_WEIGHT, _SLOPE_WEIGHT = 0.1, 0.02
_LEAST, _MOST = 0.4, 4.0
"""Bounds of what is learned, as factors of what is assumed: what a busy machine does to single steps must not make rows
look free."""
_OUTLIER = 0.1
"""A step says no more than that it was so much longer or shorter than predicted: more is what disturbed it."""
_FIRST_STEPS = 8
"""The fastest of these says what the base is: memory is touched for the first time in them."""
_LEAST_SQUARE = 0.01
"""Steps of few more rows say little about what a row costs."""


class StepCosts:
    __slots__ = ("_base", "_costs", "_num_learned", "_pass_factor", "_row_factor")

    def __init__(self, costs: RowCosts = ON_CPU) -> None:
        self._costs = costs
        self._base: float | None = None
        self._num_learned = 0
        self._row_factor = self._pass_factor = 1.0

    def relative(self, rows: int) -> float:
        """Duration of a step of `rows` rows, over one of a single row."""
        by_row, by_pass = self._count(rows)
        return 1.0 + self._row_factor * by_row + self._pass_factor * by_pass

    def predict(self, rows: int) -> float | None:
        """Seconds; None before the first step."""
        return None if self._base is None else self._base * self.relative(rows)

    def learn(self, rows: int, seconds: float) -> None:
        """A step of decodes alone took so long."""
        shape = self.relative(rows)
        if self._base is None or self._num_learned < _FIRST_STEPS:
            self._base = min(seconds / shape, self._base or math.inf)
            self._num_learned += 1
            return
        limit = _OUTLIER * shape
        error = min(limit, max(-limit, seconds / self._base - shape))
        by_row, by_pass = self._count(rows)
        scale = _SLOPE_WEIGHT * error / (_LEAST_SQUARE + by_row * by_row + by_pass * by_pass)
        self._row_factor = min(_MOST, max(_LEAST, self._row_factor + scale * by_row))
        self._pass_factor = min(_MOST, max(_LEAST, self._pass_factor + scale * by_pass))
        self._base *= 1 + _BASE_WEIGHT * error / shape

    def _count(self, rows: int) -> tuple[float, float]:
        """Costs of the rows and of the passes beyond the first, as they were assumed."""
        costs = self._costs
        return costs.per_row * (rows - 1), costs.per_pass * (-(-rows // costs.rows_per_pass) - 1)
