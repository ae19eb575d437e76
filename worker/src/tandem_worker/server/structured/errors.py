"""What the compiler of grammars refuses. Loads nothing heavy: processes that prepare requests import it."""

from __future__ import annotations

from tandem_worker.host.errors import WorkerError


class GrammarError(WorkerError):
    """A schema or grammar cannot be compiled, or its resource limits were reached; the message says why."""


class GrammarUnavailableError(WorkerError):
    """Nothing can be said about a grammar now, whatever it is; the message says why."""
