"""The GPU's driver without torch: memory and copies into it, for what a start has it do while torch is imported.

The context is the primary one, which torch finds open later. Every call lets other threads of the interpreter run.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tandem_api.launch import Device

_LIBRARY = "libcuda.so.1"
_NON_BLOCKING = 1
_CONTROL = Path("/dev/nvidiactl")


class CudaError(RuntimeError):
    """A call that failed, and what the driver calls that."""


def expects_gpu(device: Device, control: Path = _CONTROL) -> bool:
    """Whether a start is planned for a GPU: one is configured, or under Auto the system shows one. Torch, which knows,
    is not there yet; where it finds none all the same, the start is right and takes longer."""
    return device == "CUDA" or (device == "Auto" and control.exists())


class Driver:
    """One device. Safe to use from any thread."""

    def __init__(self, number: int = 0, library: Any = None) -> None:
        """Raises CudaError where there is no driver, no such device, or one that cannot be used."""
        try:
            self._library: Any = library or ctypes.CDLL(_LIBRARY)
        except OSError as error:
            raise CudaError(f"{_LIBRARY} cannot be loaded: {error}") from error
        self._context = ctypes.c_void_p()
        device, self._local = ctypes.c_int(), threading.local()
        self._call("cuInit", 0)
        self._call("cuDeviceGet", ctypes.byref(device), number)
        self._call("cuDevicePrimaryCtxRetain", ctypes.byref(self._context), device)

    def allocate(self, size: int) -> int:
        """The address of `size` bytes on the device. Raises CudaError where there are not so many."""
        address = ctypes.c_uint64()
        self._call_here("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(size))
        return address.value

    def free(self, address: int) -> None:
        """Give memory back that `allocate` gave, once the device has done what was launched."""
        self._call_here("cuCtxSynchronize")
        self._call_here("cuMemFree_v2", ctypes.c_uint64(address))

    def free_bytes(self) -> int:
        """Bytes of the device's memory that nobody has."""
        free, total = ctypes.c_size_t(), ctypes.c_size_t()
        self._call_here("cuMemGetInfo_v2", ctypes.byref(free), ctypes.byref(total))
        return free.value

    @contextmanager
    def open_lane(self, size: int) -> Iterator[Lane]:
        """A way to the device for pieces of at most `size` bytes."""
        address, stream = ctypes.c_void_p(), ctypes.c_void_p()
        self._call_here("cuStreamCreate", ctypes.byref(stream), _NON_BLOCKING)
        try:
            self._call_here("cuMemHostAlloc", ctypes.byref(address), ctypes.c_size_t(size), 0)
            try:
                yield Lane(self, address, stream, size)
            finally:
                self._call_here("cuMemFreeHost", address)
        finally:
            self._call_here("cuStreamDestroy_v2", stream)

    def _call_here(self, name: str, *arguments: Any) -> None:
        if not getattr(self._local, "entered", False):
            self._call("cuCtxSetCurrent", self._context)
            self._local.entered = True
        self._call(name, *arguments)

    def _call(self, name: str, *arguments: Any) -> None:
        code = getattr(self._library, name)(*arguments)
        if code:
            text = ctypes.c_char_p()
            self._library.cuGetErrorName(code, ctypes.byref(text))
            raise CudaError(f"CUDA error {code} in {name}: {(text.value or b'unknown').decode()}")


class Lane:
    """A buffer in pinned memory, and copies out of it, beside everything that others have the device do."""

    def __init__(self, driver: Driver, address: ctypes.c_void_p, stream: ctypes.c_void_p, size: int) -> None:
        self._driver, self._address, self._stream = driver, address, stream
        self.buffer = memoryview((ctypes.c_ubyte * size).from_address(address.value or 0)).cast("B")

    def carry(self, address: int, size: int) -> None:
        """Copy the buffer's first bytes to the device; they are there when this returns. Raises CudaError."""
        call = self._driver._call_here
        call("cuMemcpyHtoDAsync_v2", ctypes.c_uint64(address), self._address, ctypes.c_size_t(size), self._stream)
        call("cuStreamSynchronize", self._stream)
