"""The host beside the device: small arrays on their way there, and waiting for what was launched."""

from __future__ import annotations

import numpy as np
import torch


def upload(values: np.ndarray | torch.Tensor, device: torch.device) -> torch.Tensor:
    """`values`, which are on the host, on `device`. On a CPU the result shares their memory.

    The host does not wait: a copy from pageable memory would end only when the device has computed all that was
    launched before. What is launched afterwards finds them.
    """
    host = torch.from_numpy(values) if isinstance(values, np.ndarray) else values
    return host if device.type == "cpu" else host.pin_memory().to(device, non_blocking=True)


def wait_for_launched(device: torch.device) -> None:
    """Return when the device has done what the current stream was given so far. Blocks the thread; it does not spin."""
    if device.type == "cpu":
        return
    done = torch.cuda.Event(blocking=True)
    done.record(torch.cuda.current_stream(device))
    done.synchronize()
