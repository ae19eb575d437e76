"""What a family builds a model from."""

from __future__ import annotations

from dataclasses import dataclass

from tandem_worker.model.backends.contract import Backend
from tandem_worker.model.checkpoint.loader import WeightLoader
from tandem_worker.parallel.context import ParallelContext


@dataclass(frozen=True, slots=True, kw_only=True)
class Build:
    """One model in the making on one rank."""

    loader: WeightLoader
    backend: Backend
    """The classes that layers are made of."""
    context: ParallelContext
    """Which share of the model this rank holds."""
