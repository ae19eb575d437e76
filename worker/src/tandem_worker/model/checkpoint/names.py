"""Which tensors a model consists of, found without reading one."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from tandem_worker.model.checkpoint.contract import WeightSource
from tandem_worker.model.checkpoint.stored import Slice, Stored


class NameRecorder:
    """A checkpoint whose tensors have shapes and no content, and that notes which are asked for.

    Satisfies `WeightSource`. A model loaded from it on the `meta` device costs no memory.
    """

    def __init__(self, source: WeightSource) -> None:
        self._source = source
        self.taken: set[str] = set()

    def names(self) -> Iterable[str]:
        return self._source.names()

    def __contains__(self, name: str) -> bool:
        return name in self._source

    def shape(self, name: str) -> tuple[int, ...]:
        return self._source.shape(name)

    def dtype(self, name: str) -> torch.dtype:
        return self._source.dtype(name)

    def stored(self, name: str) -> Stored | None:
        del name  # there is no content
        return None

    def read(self, name: str, part: Slice | None = None) -> torch.Tensor:
        self.taken.add(name)
        shape = list(self._source.shape(name))
        if part is not None:
            shape[part.dim] = part.stop - part.start
        return torch.empty(shape, device="meta")
