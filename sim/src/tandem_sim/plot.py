"""A chart of what was found, as PNG and SVG. Needs matplotlib: `tandem-sim[plot]`."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tandem_sim.comparison import KINDS, Rate
from tandem_sim.report import Answer

COLORS = {"disaggregated": "#2f6f9f", "convertible": "#6a9f58", "aggregated": "#b5651d"}
TARGET = "#555555"
NAMES = {
    "disaggregated": "disaggregated, best ratio",
    "convertible": "with convertible decode workers",
    "aggregated": "aggregated, best step",
}


class PlotError(Exception):
    """What is missing for a chart."""


def check() -> None:
    """Raises PlotError where matplotlib is missing."""
    try:
        importlib.import_module("matplotlib")
    except ImportError as error:
        raise PlotError("--plot needs matplotlib: pip install 'tandem-sim[plot]'") from error


def draw(answer: Answer, path: Path) -> list[Path]:
    """Write `path` as .png and .svg; returns both."""
    panels = ([answer] if answer.planner is not None else []) + ([answer] if answer.rates else []) * 3
    figure, axes = _build_figure(max(1, len(panels)), 1)
    row = list(axes[0])
    if answer.planner is not None:
        _draw_replicas(row.pop(0), answer)
    if answer.rates:
        draw_rates(row, answer.rates, _read_targets(answer))
    figure.suptitle(f"{answer.workload.name} on {answer.workload.profile.name}", fontsize=11)
    return _save(figure, path)


def draw_studies(studies: Sequence[tuple[str, Sequence[Rate], dict[str, float]]], path: Path) -> list[Path]:
    """One row of charts for each comparison: its title, its rates and its targets."""
    figure, axes = _build_figure(3, len(studies))
    for row, (title, rates, targets) in zip(axes, studies, strict=True):
        draw_rates(row, rates, targets)
        row[0].set_title(title, loc="left", fontsize=10)
    return _save(figure, path)


def draw_rates(axes: Sequence[Any], rates: Sequence[Rate], targets: dict[str, float]) -> None:
    """p90 of first token and token time and attainment over the rate, on three axes."""
    at = [rate.requests_per_second for rate in rates]
    for index, kind in enumerate(KINDS):
        seen = [rate.trials[index].seen for rate in rates]
        values = (
            [one.ttft_p90 for one in seen],
            [1000 * one.token_p90 for one in seen],
            [one.attainment for one in seen],
        )
        for axis, series in zip(axes, values, strict=True):
            axis.plot(at, series, marker="o", markersize=3, color=COLORS[kind], label=NAMES[kind])
    for axis, (label, target) in zip(axes, targets.items(), strict=True):
        axis.axhline(target, color=TARGET, linestyle=":", linewidth=1)
        axis.set_ylabel(label)
        axis.set_xlabel("requests per second")
    ticker = importlib.import_module("matplotlib.ticker")
    axes[0].set_yscale("log")
    axes[0].yaxis.set_major_locator(ticker.LogLocator(subs=(1, 2, 5)))
    axes[0].yaxis.set_major_formatter(ticker.StrMethodFormatter("{x:g}"))
    axes[0].yaxis.set_minor_formatter(ticker.NullFormatter())
    axes[1].set_ylim(bottom=0)
    axes[2].set_ylim(0, 1.02)
    axes[2].legend(fontsize=8, loc="lower left")


def name_targets(ttft: float, token: float, goal: float) -> dict[str, float]:
    """Labels of the three axes, with the line that each has. Seconds, seconds, share."""
    return {"TTFT p90, s": ttft, "token time p90, ms": 1000 * token, "share within both targets": goal}


def _read_targets(answer: Answer) -> dict[str, float]:
    workload = answer.workload
    return name_targets(workload.ttft.limit(workload.prompts.tokens), workload.tpot.seconds, answer.goal)


def _draw_replicas(axis: Any, answer: Answer) -> None:
    assert answer.planner is not None
    end = answer.seconds / 60
    fixed = {"prefill": answer.smallest.fleet.prefills, "decode": answer.smallest.fleet.decodes}
    for (role, orders), color in zip(answer.planner[1].orders.items(), COLORS.values(), strict=False):
        kept = [(at / 60, count) for at, count in orders if at / 60 <= end]
        times, counts = [at for at, _ in kept] + [end], [count for _, count in kept] + [kept[-1][1]]
        axis.step(times, counts, where="post", color=color, label=f"{role.value}, autoscaled")
        axis.axhline(fixed[role.value], color=color, linestyle=":", linewidth=1, label=f"{role.value}, fixed")
    axis.set_xlabel("minutes")
    axis.set_ylabel("replicas")
    axis.set_ylim(bottom=0)
    axis.legend(fontsize=8)


def _build_figure(columns: int, rows: int) -> tuple[Any, Any]:
    check()
    figures = importlib.import_module("matplotlib.figure")
    figure = figures.Figure(figsize=(4.2 * columns, 3.3 * rows), layout="constrained")
    return figure, figure.subplots(rows, columns, squeeze=False)


def _save(figure: Any, path: Path) -> list[Path]:
    """The same bytes for the same figures: without a date, with names of elements that do not change."""
    settings = importlib.import_module("matplotlib").rc_context({"svg.hashsalt": "tandem", "svg.fonttype": "none"})
    paths = [path.with_suffix(".png"), path.with_suffix(".svg")]
    with settings:
        figure.savefig(paths[0], dpi=120)
        figure.savefig(paths[1], metadata={"Date": None})
    return paths
