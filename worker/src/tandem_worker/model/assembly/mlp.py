"""Gated MLPs from a checkpoint."""

from __future__ import annotations

from tandem_worker.model.assembly.build import Build
from tandem_worker.model.checkpoint.loader import Part, shard
from tandem_worker.model.layers.mlp import GatedMLP


def load_mlp(
    build: Build,
    prefix: str,
    hidden_size: int,
    intermediate_size: int,
    *,
    bias: bool = False,
) -> GatedMLP:
    """`bias` says that all three projections have one. Matrices are `[out, in]`; ranks split the intermediate width."""
    loader, context = build.loader, build.context
    rank, size = context.tp_rank, context.tp_size
    what = "intermediate_size"
    rows = shard(0, intermediate_size, rank, size, what=what)
    shape = (intermediate_size, hidden_size)
    names = [f"{prefix}{name}_proj" for name in ("gate", "up")]
    gate_up = loader.matrix([Part(name=f"{name}.weight", shape=shape, piece=rows) for name in names])
    columns = shard(1, intermediate_size, rank, size, what=what)
    down = loader.matrix(
        [Part(name=f"{prefix}down_proj.weight", shape=(hidden_size, intermediate_size), piece=columns)]
    )
    gate_up_bias = down_bias = None
    if bias:
        gate_up_bias = loader.stack([Part(name=f"{name}.bias", shape=shape[:1], piece=rows) for name in names])
        down_bias = loader.load(f"{prefix}down_proj.bias", (hidden_size,))
    backend = build.backend
    return backend.mlp(backend.linear(gate_up, gate_up_bias), backend.linear(down, down_bias, reduce=context.tp))
