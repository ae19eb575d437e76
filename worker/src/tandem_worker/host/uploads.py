"""The host beside the device: small arrays on their way there, and waiting for what was launched."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch

if TYPE_CHECKING:
    from numpy.typing import ArrayLike, DTypeLike

_ALIGNMENT = 16
"""Bytes."""


def upload(values: np.ndarray | torch.Tensor, device: torch.device) -> torch.Tensor:
    """`values`, which are on the host, on `device`. On a CPU the result shares their memory.

    The host does not wait: a copy from pageable memory would end only when the device has computed all that was
    launched before. What is launched afterwards finds them.
    """
    host = torch.from_numpy(values) if isinstance(values, np.ndarray) else values
    return host if device.type == "cpu" else host.pin_memory().to(device, non_blocking=True)


def upload_rows(rows: Sequence[ArrayLike], dtype: DTypeLike, device: torch.device) -> list[torch.Tensor]:
    """Rows of any lengths as tensors of `dtype` on `device`, brought there together.

    Each begins at a multiple of 16 bytes, whatever the lengths: Triton compiles a kernel for how pointers are aligned.
    """
    arrays = [np.asarray(row, dtype=dtype) for row in rows]
    step = _ALIGNMENT // arrays[0].itemsize
    whole = np.zeros((len(arrays), -(-max(map(len, arrays)) // step) * step), dtype=dtype)
    for place, array in zip(whole, arrays, strict=True):
        place[: len(array)] = array
    there = upload(whole, device)
    return [row[: len(array)] for row, array in zip(there, arrays, strict=True)]


def wait_for_launched(device: torch.device) -> None:
    """Return when the device has done what the current stream was given so far. Blocks the thread; it does not spin."""
    if device.type == "cpu":
        return
    done = torch.cuda.Event(blocking=True)
    done.record(torch.cuda.current_stream(device))
    done.synchronize()
