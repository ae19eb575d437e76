"""Routed experts from a checkpoint, published one by one or stacked; each rank reads its share."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch

from tandem_worker.model.assembly.build import Build
from tandem_worker.model.checkpoint.loader import Part, WeightLoader, shard
from tandem_worker.model.checkpoint.stored import Slice
from tandem_worker.model.layers.moe import Experts, ExpertWeights
from tandem_worker.parallel.context import ParallelContext

if TYPE_CHECKING:
    from tandem_worker.kernels.quantized import Weight
    from tandem_worker.model.checkpoint.stored import PackedWeight


def expert_share(num_experts: int, context: ParallelContext) -> range:
    """Experts that this rank holds."""
    piece = shard(0, num_experts, context.ep_rank, context.ep_size, what="number of experts")
    return range(num_experts) if piece is None else range(piece.start, piece.stop)


def load_experts(
    build: Build,
    prefix: str,
    *,
    num_experts: int,
    hidden_size: int,
    intermediate_size: int,
) -> Experts:
    """Experts that are published one by one, as `{prefix}{expert}.gate_proj` and so on."""
    loader, context = build.loader, build.context
    rank, size, what = context.tp_rank, context.tp_size, "moe_intermediate_size"
    rows = shard(0, intermediate_size, rank, size, what=what)
    columns = shard(1, intermediate_size, rank, size, what=what)
    shape = (intermediate_size, hidden_size)
    share = expert_share(num_experts, context)

    def read() -> Iterator[ExpertWeights]:
        for expert in share:
            one = f"{prefix}{expert}."
            gate_up = [Part(name=f"{one}{name}_proj.weight", shape=shape, piece=rows) for name in ("gate", "up")]
            down = Part(name=f"{one}down_proj.weight", shape=shape[::-1], piece=columns)
            yield ExpertWeights(gate_up=loader.matrix(gate_up, stacked=True), down=loader.matrix([down], stacked=True))

    return build.backend.experts(read(), num_local=len(share), ep=context.ep, shrink=loader.shrink)


def load_stacked_experts(
    build: Build,
    prefix: str,
    *,
    num_experts: int,
    hidden_size: int,
    intermediate_size: int,
    interleaved: bool,
    swiglu_limit: float | None = None,
) -> Experts:
    """Experts that are published as one tensor, `[expert, in, out]`, with biases where there are any.

    `interleaved` says that columns of gate and up alternate; otherwise gate is the first half.
    """
    loader, context = build.loader, build.context
    rank, size = context.tp_rank, context.tp_size
    piece = shard(0, intermediate_size, rank, size, what="intermediate_size") or Slice(0, 0, intermediate_size)
    wide = torch.arange(2 * intermediate_size)
    order = torch.stack((wide[0::2], wide[1::2])) if interleaved else wide.view(2, -1)
    columns = order[:, piece.start : piece.stop].flatten()
    share = expert_share(num_experts, context)

    def read() -> Iterator[ExpertWeights]:
        for expert in share:
            one = _StackedReader(loader, prefix, num_experts, expert)
            gate_up_bias = one.read_bias("gate_up_proj_bias", 2 * intermediate_size)
            down_bias = one.read_bias("down_proj_bias", hidden_size) if rank == 0 else None
            yield ExpertWeights(
                gate_up=one.matrix("gate_up_proj", hidden_size, 2 * intermediate_size, outputs=columns),
                down=one.matrix("down_proj", intermediate_size, hidden_size, inputs=piece),
                gate_up_bias=None if gate_up_bias is None else loader.place(gate_up_bias[columns]),
                down_bias=None if down_bias is None else loader.place(down_bias),
            )

    return build.backend.experts(
        read(), num_local=len(share), ep=context.ep, swiglu_limit=swiglu_limit, shrink=loader.shrink
    )


class _StackedReader:
    """Reads one expert out of tensors that hold all of them."""

    def __init__(self, loader: WeightLoader, prefix: str, num_experts: int, expert: int) -> None:
        self._loader = loader
        self._prefix = prefix
        self._num_experts = num_experts
        self._piece = Slice(0, expert, expert + 1)

    def read_bias(self, name: str, width: int) -> torch.Tensor | None:
        """As `read`; None where the checkpoint has no such bias."""
        return self.read(name, width) if self._loader.has(f"{self._prefix}{name}") else None

    def read(self, name: str, *shape: int) -> torch.Tensor:
        """The expert's `shape`, as stored."""
        return self._loader.read(self._part(name, *shape))[0]

    def matrix(
        self,
        name: str,
        num_inputs: int,
        num_outputs: int,
        *,
        inputs: Slice | None = None,
        outputs: torch.Tensor | None = None,
    ) -> Weight | PackedWeight:
        """The expert's `[outputs, inputs]` from what is stored the other way round; None takes all."""
        packed = self._loader.packed(self._part(name, num_inputs, num_outputs))
        if packed is not None:
            from tandem_worker.model.checkpoint.packing import narrow, select_rows

            part = None if inputs is None else Slice(1, inputs.start, inputs.stop)
            cut = narrow(packed if outputs is None else select_rows(packed, outputs), part)
            if cut is not None:
                return self._loader.move(cut)

        def read() -> torch.Tensor:
            weight = self.read(name, num_inputs, num_outputs)
            if inputs is not None:
                weight = weight[inputs.start : inputs.stop]
            return self._loader.place((weight if outputs is None else weight[:, outputs]).t())

        taken = slice(0, num_inputs) if inputs is None else slice(inputs.start, inputs.stop)
        num_taken = num_outputs if outputs is None else len(outputs)
        first = 0 if outputs is None else int(outputs[0])
        key = f"expert {self._prefix}{name}[{self._piece.start}][{taken.start}:{taken.stop}][{first}+{num_taken}]"
        made = self._loader.pack_plain(key, (num_taken, taken.stop - taken.start), read)
        return read() if made is None else made

    def _part(self, name: str, *shape: int) -> Part:
        return Part(name=f"{self._prefix}{name}", shape=(self._num_experts, *shape), piece=self._piece)
