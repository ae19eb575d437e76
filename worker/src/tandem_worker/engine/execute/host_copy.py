"""Bringing small results to the host while the device goes on computing.

On a GPU the copy runs on a stream of its own, behind the work that makes the result but not behind what is launched
later, and ends in pinned memory. Waiting blocks the thread on an event; it does not spin.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch


class HostCopy(Protocol):
    def wait(self) -> torch.Tensor:
        """The content, on the host. Raises what the device raised."""
        ...


class HostCopier(Protocol):
    def start(self, tensor: torch.Tensor) -> HostCopy:
        """Copy `tensor` as it is when the work launched so far is done. Returns at once."""
        ...


class HostMemoryCopier:
    """For tensors that are on the host already."""

    def start(self, tensor: torch.Tensor) -> HostCopy:
        return _Present(tensor)


class _Present:
    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor

    def wait(self) -> torch.Tensor:
        return self._tensor


class CudaCopier:
    """`cuda` is `torch.cuda`, or what stands in for it where there is no device."""

    def __init__(self, device: torch.device, cuda: Any = torch.cuda) -> None:
        self._cuda = cuda
        self._device = device
        self._stream = cuda.Stream(device)

    def start(self, tensor: torch.Tensor) -> HostCopy:
        self._stream.wait_stream(self._cuda.current_stream(self._device))
        host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=self._cuda.is_available())
        with self._cuda.stream(self._stream):
            host.copy_(tensor, non_blocking=True)
        tensor.record_stream(self._stream)  # its memory is not given out again before the copy has read it
        done = self._cuda.Event(blocking=True)
        done.record(self._stream)
        return _UnderWay(host, done)


class _UnderWay:
    def __init__(self, host: torch.Tensor, done: Any) -> None:
        self._host = host
        self._done = done

    def wait(self) -> torch.Tensor:
        self._done.synchronize()
        return self._host


def build_copier(device: torch.device) -> HostCopier:
    """A copier for this device: on a GPU it copies beside the steps, on the CPU there is nothing to copy."""
    return CudaCopier(device) if device.type == "cuda" else HostMemoryCopier()
