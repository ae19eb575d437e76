"""Calls of the driver, in front of one that keeps device memory in the host's."""

from __future__ import annotations

import ctypes
import threading
from pathlib import Path
from typing import Any

import pytest
from tandem_worker.host.cuda import CudaError, Driver, expects_gpu


class FakeCuda:
    """A device with so many bytes."""

    def __init__(self, room: int = 1000) -> None:
        self.calls: list[str] = []
        self.room = room
        self.blocks: dict[int, Any] = {}

    def __getattr__(self, name: str) -> Any:
        def call(*arguments: Any) -> int:
            self.calls.append(name)
            return 0

        return call

    def cuMemAlloc_v2(self, address: Any, size: ctypes.c_size_t) -> int:
        if size.value > self.room:
            return 2
        block = (ctypes.c_ubyte * size.value)()
        self.blocks[ctypes.addressof(block)] = block
        address._obj.value = ctypes.addressof(block)
        return 0

    def cuMemFree_v2(self, address: ctypes.c_uint64) -> int:
        self.calls.append("cuMemFree_v2")
        return 0 if self.blocks.pop(address.value, None) is not None else 1

    def cuMemHostAlloc(self, address: Any, size: ctypes.c_size_t, flags: int) -> int:
        self.pinned = (ctypes.c_ubyte * size.value)()
        address._obj.value = ctypes.addressof(self.pinned)
        return 0

    def cuMemcpyHtoDAsync_v2(self, target: Any, source: Any, size: Any, stream: Any) -> int:
        ctypes.memmove(target.value, source.value, size.value)
        return 0

    def cuMemGetInfo_v2(self, free: Any, total: Any) -> int:
        free._obj.value = self.room
        return 0

    def cuGetErrorName(self, code: int, text: Any) -> int:
        text._obj.value = {2: b"CUDA_ERROR_OUT_OF_MEMORY"}.get(code)
        return 0


def test_bytes_arrive_where_they_are_wanted() -> None:
    cuda = FakeCuda()
    driver = Driver(library=cuda)
    address = driver.allocate(10)
    with driver.open_lane(4) as lane:
        for start in (0, 4, 8):
            piece = bytes(range(start, min(start + 4, 10)))
            lane.buffer[: len(piece)] = piece
            lane.carry(address + start, len(piece))
    assert bytes(cuda.blocks[address]) == bytes(range(10))
    assert cuda.calls.count("cuMemFreeHost") == cuda.calls.count("cuStreamDestroy_v2") == 1
    driver.free(address)
    assert not cuda.blocks
    assert cuda.calls[-2:] == ["cuCtxSynchronize", "cuMemFree_v2"], "what was launched may still read it"
    assert driver.free_bytes() == 1000


def test_every_thread_enters_the_context_once() -> None:
    cuda = FakeCuda()
    driver = Driver(library=cuda)

    def work() -> None:
        for _ in range(3):
            driver.free(driver.allocate(8))

    work()
    assert cuda.calls.count("cuCtxSetCurrent") == 1
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert cuda.calls.count("cuCtxSetCurrent") == 2
    assert cuda.calls[:3] == ["cuInit", "cuDeviceGet", "cuDevicePrimaryCtxRetain"]


def test_errors_say_what_failed() -> None:
    driver = Driver(library=FakeCuda(room=5))
    with pytest.raises(CudaError, match=r"CUDA error 2 in cuMemAlloc_v2: CUDA_ERROR_OUT_OF_MEMORY"):
        driver.allocate(6)
    with pytest.raises(CudaError, match=r"CUDA error 1 in cuMemFree_v2: unknown"):
        driver.free(77)


def test_a_buffer_is_given_back_after_an_error() -> None:
    cuda = FakeCuda()
    with pytest.raises(ZeroDivisionError), Driver(library=cuda).open_lane(4):
        raise ZeroDivisionError
    assert cuda.calls[-2:] == ["cuMemFreeHost", "cuStreamDestroy_v2"]


def test_without_a_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tandem_worker.host.cuda._LIBRARY", "libnone.so.1")
    with pytest.raises(CudaError, match=r"libnone\.so\.1 cannot be loaded"):
        Driver()


def test_which_starts_are_planned_for_a_gpu(tmp_path: Path) -> None:
    there, absent = tmp_path / "nvidiactl", tmp_path / "none"
    there.touch()
    assert [expects_gpu(device, there) for device in ("CUDA", "Auto", "CPU")] == [True, True, False]
    assert [expects_gpu(device, absent) for device in ("CUDA", "Auto", "CPU")] == [True, False, False]
