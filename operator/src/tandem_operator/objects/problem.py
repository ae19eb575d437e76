"""What keeps a model from being ready: a reason and a sentence, wherever it was found."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """Something that keeps the model from being ready."""

    reason: str
    message: str
    stalled: bool = False
    """It needs a person; waiting alone will not do."""
    from_worker: bool = False
    """The worker itself said so, or the hub: it is about the model rather than about Kubernetes."""
