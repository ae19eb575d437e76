"""What is asked of routing, out of all figures of a run. Pure."""

from __future__ import annotations

from collections.abc import Mapping

HITS_LOST = 2.0
"""Points of the hit ratio that four gateways may lose against one."""
SLOWER = 1.15
"""Their time to first token at the 90th percentile, against that of one."""
COMPUTED = 1.2
"""Tokens that one gateway has computed, against perfect greedy."""
PREDICTED = 90.0
"""Percent of the first tokens that come within a fifth of what was predicted, of one gateway."""

ONE, FOUR, GREEDY = "tandem", "tandem, 4 gateways", "perfect greedy"

Rows = Mapping[str, Mapping[str, float]]
"""Figures by policy."""


def judge(cells: Mapping[str, Rows]) -> dict[str, dict[str, object]]:
    """For each thing asked: the worst cell's figure, the goal, whether it is met, and the figure of each cell."""
    return {
        "hits that four gateways lose, points": _find_worst(
            {name: rows[ONE]["hits"] - rows[FOUR]["hits"] for name, rows in cells.items()}, HITS_LOST
        ),
        "TTFT p90, four gateways / one": _find_worst(
            {name: rows[FOUR]["ttft_p90"] / rows[ONE]["ttft_p90"] for name, rows in cells.items()}, SLOWER
        ),
        "computed tokens, one gateway / perfect greedy": _find_worst(
            {name: (100 - rows[ONE]["hits"]) / (100 - rows[GREEDY]["hits"]) for name, rows in cells.items()}, COMPUTED
        ),
        "percent within a fifth of the prediction, one gateway": _find_worst(
            {name: rows[ONE]["predicted"] for name, rows in cells.items()}, PREDICTED, least=True
        ),
    }


def _find_worst(figures: Mapping[str, float], goal: float, *, least: bool = False) -> dict[str, object]:
    value = min(figures.values()) if least else max(figures.values())
    return {
        "value": round(value, 3),
        "goal": goal,
        "met": value >= goal if least else value <= goal,
        "cells": {name: round(figure, 3) for name, figure in figures.items()},
    }
