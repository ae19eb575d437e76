"""Large tensors from their files to a GPU by several threads; each is there when it is handed out."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Self

import torch

from tandem_worker.host.cuda import Driver
from tandem_worker.model.checkpoint.carrying import MOST_READERS, PIECE, Carriers, Span, WeightFile
from tandem_worker.model.checkpoint.safetensors import KINDS
from tandem_worker.model.checkpoint.stored import Slice, Stored

logger = logging.getLogger(__name__)

LEAST = 1 << 20
"""Bytes of a tensor below which copying it at once takes less than telling others to."""


def open_uploads(device: torch.device) -> Uploads:
    """The way onto a GPU, with as many readers as torch has threads, within reason. Raises CudaError."""
    driver, readers = Driver(device.index or 0), max(2, min(MOST_READERS, torch.get_num_threads()))
    with driver.open_lane(PIECE):  # what fails on a reader's thread fails the load, which can do without
        pass
    return Uploads(
        Carriers(driver.open_lane, readers), settle_device=lambda: torch.cuda.current_stream(device).synchronize()
    )


def find_span(shape: Sequence[int], piece: Slice | None, whole: Span) -> Span | None:
    """What is taken of a tensor of that shape, which lies at `whole`; None where it has gaps."""
    if piece is None:
        return whole
    if piece.dim or not shape[0]:
        return None
    row = whole.size // shape[0]
    return Span(whole.start + piece.start * row, (piece.stop - piece.start) * row)


class Uploads:
    """Open while a model is loaded, by the loading thread."""

    def __init__(self, carriers: Carriers, *, settle_device: Callable[[], None], least: int = LEAST) -> None:
        """`settle_device`: return when the device is done with what memory was used for before."""
        self._carriers, self._settle_device, self._least = carriers, settle_device, least
        self._files: dict[Path, WeightFile] = {}
        self._targets: list[torch.Tensor] = []
        """None of them is given back while it is being filled, whatever else fails."""
        self._began = 0.0

    def fill(self, target: torch.Tensor, stored: Stored, piece: Slice | None) -> bool:
        """Begin to fill `target`, which is contiguous, with a matrix or a piece of it; it is filled when `settle`
        returns. False: it must be copied, for it is small, has gaps, is of another type, or lies in no file as it is.

        Raises StartupError where a file cannot be read, this one or an earlier one, and CudaError.
        """
        self._carriers.check()
        if stored.place is None or KINDS.get(target.dtype) != stored.kind or target.nbytes < self._least:
            return False
        path, name = stored.place
        if path not in self._files:
            self._files[path] = WeightFile(path)
        whole = self._files[path].spans.get(name)
        if whole is None or whole.size != stored.num_bytes:
            return False
        span = find_span((stored.rows, stored.columns), piece, whole)
        if span is None or span.size != target.nbytes:
            return False
        self._began = self._began or time.perf_counter()
        self._targets.append(target)
        self._settle_device()
        self._carriers.carry(self._files[path], span, target.data_ptr())
        return True

    def settle(self) -> None:
        """Wait until everything is there that was begun. Raises StartupError where a file cannot be read, and
        CudaError."""
        self._carriers.settle()
        self._targets.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._carriers.close()
        self._targets.clear()
        for file in self._files.values():
            file.close()
        if self._began:
            seconds = time.perf_counter() - self._began
            logger.info("weights are on the device", extra=self._carriers.describe(seconds))
