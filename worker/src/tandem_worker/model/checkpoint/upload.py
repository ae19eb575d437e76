"""Large tensors on their way from their files to a GPU while others are laid out.

A tensor is handed out before it is filled, so that files are read at a stretch, in the order in which tensors are asked
for. Whoever computes with one waits for all of them: while they are under way, every operation is looked at on its way
to torch. Kernels that are launched past torch are not seen: `settle` comes before those.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Self

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tandem_worker.host.cuda import Driver
from tandem_worker.model.checkpoint.carrying import MOST_READERS, Carriers, Span, WeightFile
from tandem_worker.model.checkpoint.stored import BF16, F16, F32, Slice, Stored

logger = logging.getLogger(__name__)

LEAST = 1 << 20
"""Bytes of a tensor below which copying it at once takes less than telling others to."""
KINDS = {F32: torch.float32, F16: torch.float16, BF16: torch.bfloat16}


def open_uploads(device: torch.device) -> Uploads:
    """The way onto a GPU, with as many readers as torch has threads, within reason. Raises CudaError."""
    driver, readers = Driver(device.index or 0), max(2, min(MOST_READERS, torch.get_num_threads()))
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


class Uploads(TorchDispatchMode):
    """Entered while a model is loaded, on the loading thread; it is left when all that was begun is there."""

    def __init__(self, carriers: Carriers, *, settle_device: Callable[[], None], least: int = LEAST) -> None:
        """`settle_device`: return when the device is done with what memory was used for before."""
        super().__init__()
        self._carriers, self._settle_device, self._least = carriers, settle_device, least
        self._files: dict[Path, WeightFile] = {}
        self._filling: dict[int, torch.Tensor] = {}
        """Tensors that are not filled yet, by the address of their storage: none is given back until then."""
        self._began = 0.0

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Nothing is compiled here; the default, True, imports all of torch's compiler."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self._filling and not func.is_view and any(map(self._is_filling, tree_leaves((args, kwargs)))):
            self.settle()
        return func(*args, **(kwargs or {}))

    def _is_filling(self, leaf: Any) -> bool:
        return isinstance(leaf, torch.Tensor) and leaf.untyped_storage().data_ptr() in self._filling

    def fill(self, target: torch.Tensor, stored: Stored, piece: Slice | None) -> bool:
        """Begin to fill `target`, which is contiguous, with a matrix or a piece of it. False: it must be copied, for it
        is small, has gaps, is of another type, or lies in no file as it is.

        Raises StartupError where a file cannot be read, this one or an earlier one, and CudaError.
        """
        self._carriers.check()
        if stored.place is None or KINDS.get(stored.kind) is not target.dtype or target.nbytes < self._least:
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
        self._filling[target.untyped_storage().data_ptr()] = target
        self._settle_device()
        self._carriers.carry(self._files[path], span, target.data_ptr())
        return True

    def settle(self) -> None:
        """Wait until everything is there that was begun. Raises StartupError where a file cannot be read, and
        CudaError."""
        self._carriers.settle()
        self._filling.clear()

    def __enter__(self) -> Self:
        super().__enter__()
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        super().__exit__(kind, error, trace)
        try:
            if error is None:
                self.settle()
        finally:
            self._carriers.close()
            for file in self._files.values():
                file.close()
            self._filling.clear()
        if self._began:
            seconds = time.perf_counter() - self._began
            logger.info("weights are on the device", extra=self._carriers.describe(seconds))
