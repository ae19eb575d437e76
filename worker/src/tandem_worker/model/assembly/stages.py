"""Which layers a pipeline stage holds."""

from __future__ import annotations

from tandem_worker.parallel.context import ParallelContext


def stage_layers(num_layers: int, context: ParallelContext) -> range:
    """Layers of this pipeline stage. Unless the context says which: equal shares, the first ones longer if need be."""
    if context.layers is not None:
        return context.layers
    share, longer = divmod(num_layers, context.pp_size)
    start = context.pp_rank * share + min(context.pp_rank, longer)
    return range(start, start + share + (context.pp_rank < longer))
