"""The achieved share of the limit of every case as bars, in one SVG written by hand: no plotting library is needed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

_ROW, _LEFT, _BARS, _TOP = 18, 420, 420, 64
_COLORS = {"memory": "#2f6f9f", "arithmetic": "#b5651d"}


def draw_achieved(report: Mapping[str, Any]) -> str:
    """SVG of a report of `bench.kernels`: one bar per case up to 100% of its limit, colored by what bounds it."""
    kernels: Sequence[Mapping[str, Any]] = report["kernels"]
    ceilings = report["ceilings"]
    height = _TOP + _ROW * len(kernels) + 24
    title = (
        f"{report['device']}, {report['date']}: share of the limit "
        f"(copy {ceilings['copy_bytes_per_s'] / 1e12:.2f} TB/s, "
        f"bf16 matmul {ceilings['matmul_flops_per_s'] / 1e12:.0f} TFLOP/s)"
    )
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_LEFT + _BARS + 80}" height="{height}" '
        'font-family="sans-serif" font-size="12">',
        f'<rect width="100%" height="100%" fill="white"/><text x="12" y="22" font-size="14">{escape(title)}</text>',
    ]
    parts += [_legend(index, name, color) for index, (name, color) in enumerate(_COLORS.items())]
    for share in (0.25, 0.5, 0.75, 1.0):
        x = _LEFT + share * _BARS
        parts.append(f'<line x1="{x:g}" y1="{_TOP}" x2="{x:g}" y2="{height - 20}" stroke="#ccc"/>')
        parts.append(f'<text x="{x:g}" y="{height - 6}" text-anchor="middle" fill="#555">{share:.0%}</text>')
    parts += [_bar(index, case) for index, case in enumerate(kernels)]
    return "\n".join([*parts, "</svg>", ""])


def _legend(index: int, name: str, color: str) -> str:
    x = _LEFT + 110 * index
    return (
        f'<rect x="{x}" y="38" width="12" height="12" fill="{color}"/>'
        f'<text x="{x + 18}" y="48">bound by {name}</text>'
    )  # fmt: skip


def _bar(index: int, case: Mapping[str, Any]) -> str:
    y, achieved = _TOP + _ROW * index, float(case["achieved"])
    width = min(achieved, 1.1) * _BARS
    return (
        f'<text x="{_LEFT - 8}" y="{y + 13}" text-anchor="end">{escape(case["name"])}</text>'
        f'<rect x="{_LEFT}" y="{y + 3}" width="{width:.1f}" height="{_ROW - 5}" fill="{_COLORS[case["bound_by"]]}"/>'
        f'<text x="{_LEFT + width + 4:.1f}" y="{y + 13}" fill="#333">{achieved:.0%}</text>'
    )
