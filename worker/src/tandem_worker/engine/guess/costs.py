"""What a step costs by the rows that it computes, learned from every step.

A product's kernels read each weight once and multiply it with a few rows in registers (`ROWS_PER_PASS`); further rows
are passes over weights that the cache holds. So a step costs a base, a little for each row, and more for each pass. The
base follows the contexts and whatever else runs on the machine, the two slopes stay.
"""

from __future__ import annotations

import math

ROWS_PER_PASS = 6
"""Rows that the native kernels compute in one pass (`kMaxRows`)."""
_PER_ROW, _PER_PASS = 0.02, 0.20
"""Costs of one more row and of one more pass, as shares of a step of one row, before anything was measured: SmolLM2,
one thread."""
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
    __slots__ = ("_base", "_num_learned", "_pass_factor", "_row_factor")

    def __init__(self) -> None:
        self._base: float | None = None
        self._num_learned = 0
        self._row_factor = self._pass_factor = 1.0

    def relative(self, rows: int) -> float:
        """Duration of a step of `rows` rows, over one of a single row."""
        more, passes = _count(rows)
        return 1.0 + self._row_factor * _PER_ROW * more + self._pass_factor * _PER_PASS * passes

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
        more, passes = _count(rows)
        by_row, by_pass = _PER_ROW * more, _PER_PASS * passes
        scale = _SLOPE_WEIGHT * error / (_LEAST_SQUARE + by_row * by_row + by_pass * by_pass)
        self._row_factor = min(_MOST, max(_LEAST, self._row_factor + scale * by_row))
        self._pass_factor = min(_MOST, max(_LEAST, self._pass_factor + scale * by_pass))
        self._base *= 1 + _BASE_WEIGHT * error / shape


def _count(rows: int) -> tuple[int, int]:
    """Rows and passes beyond the first."""
    return rows - 1, -(-rows // ROWS_PER_PASS) - 1
