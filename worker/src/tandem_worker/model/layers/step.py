"""What the layers of one step share."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

import torch

from tandem_worker.model.attention import StepAttention
from tandem_worker.model.contract import ForwardBatch
from tandem_worker.model.layers.rotary import Rotation


class LiveRows(Protocol):
    """What the half of a layer that attends to nothing asks of a step."""

    @property
    def live(self) -> torch.Tensor | None:
        """`[T]` bool, which tokens belong to a sequence; None: all do."""
        ...


class AllLive:
    """Rows that all belong to somebody; satisfies `LiveRows`."""

    live = None


@dataclass(slots=True, kw_only=True)
class Step:
    """One step: its inputs, its attention and the rotations by name (most families have one)."""

    batch: ForwardBatch
    attention: StepAttention
    rotation: Rotation
    block_size: int
    extras: dict[str, torch.Tensor] = field(default_factory=dict)
    """Per-token tensors that only one family needs, computed once per step."""

    _live: torch.Tensor | None = None

    @property
    def live(self) -> torch.Tensor | None:
        """As `LiveRows.live`. Computed once, on the device."""
        if self.batch.has_padding and self._live is None:
            self._live = self.batch.slot_mapping >= self.block_size
        return self._live

    def entering(self, layer: int) -> None:
        """Tell the engine that this layer's KV is read and written next."""
        if self.batch.before_layer is not None:
            self.batch.before_layer(layer)

    def written(self, layer: int) -> None:
        """Tell the engine that this layer's KV is in place."""
        if self.batch.on_layer is not None:
            self.batch.on_layer(layer)
