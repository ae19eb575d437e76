"""What the compiler of grammars counts, for metrics."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class CompileCounts:
    """Since the start."""

    compiled: int = 0
    refused: int = 0
    unavailable: int = 0
    cached: int = 0
    """Requests for a grammar that was compiled or refused before."""
    seconds: float = 0.0
    """Spent on compiling, waiting included."""
