"""Checkpoints of a bare transformer: their tensors lack the `model.` with which those of causal models begin."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from tandem_worker.model.checkpoint.contract import WeightSource
from tandem_worker.model.checkpoint.stored import Slice, Stored

_ROOT = "model."


class BareSource:
    """Shows `layers.0...` as `model.layers.0...`; satisfies `WeightSource`."""

    def __init__(self, source: WeightSource) -> None:
        self._source = source

    def names(self) -> Iterable[str]:
        return (_ROOT + name for name in self._source.names())

    def __contains__(self, name: str) -> bool:
        return name.startswith(_ROOT) and name.removeprefix(_ROOT) in self._source

    def shape(self, name: str) -> tuple[int, ...]:
        return self._source.shape(name.removeprefix(_ROOT))

    def dtype(self, name: str) -> torch.dtype:
        return self._source.dtype(name.removeprefix(_ROOT))

    def stored(self, name: str) -> Stored | None:
        return self._source.stored(name.removeprefix(_ROOT))

    def read(self, name: str, part: Slice | None = None) -> torch.Tensor:
        return self._source.read(name.removeprefix(_ROOT), part)
