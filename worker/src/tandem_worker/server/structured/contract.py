"""What a grammar may be asked for, how it is refused, and what its compiler counts.

Loads nothing heavy: processes that prepare requests import it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tandem_worker.host.errors import WorkerError


class GrammarError(WorkerError):
    """A schema or grammar cannot be compiled, or its resource limits were reached; the message says why."""


class GrammarUnavailableError(WorkerError):
    """Nothing can be said about a grammar now, whatever it is; the message says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StructuralTag:
    """A part of an answer that is not free."""

    trigger: str
    """No other tag's trigger contains it, so free text ends at one of them at most."""
    begin: str
    """Begins with the trigger."""
    schema: dict[str, Any]
    end: str
    """May be empty: then the value alone ends it."""


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
