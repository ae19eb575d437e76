from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from tandem_worker.host.nvml import NO_GPU, GpuReader


class FakeNvml:
    NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_TX = 138
    NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_RX = 139
    NVML_SUCCESS = 0

    def __init__(self) -> None:
        self.kib = (0, 0)
        self.link_result = 0
        self.broken: Exception | None = None

    def nvmlInit(self) -> None:
        if self.broken:
            raise self.broken

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:
        return uuid

    def nvmlDeviceGetMemoryInfo(self, handle: str) -> Any:
        if self.broken:
            raise self.broken
        return SimpleNamespace(used=3 << 30, total=80 << 30)

    def nvmlDeviceGetFieldValues(self, handle: str, fields: list[tuple[int, int]]) -> Any:
        assert [field for field, _ in fields] == [138, 139]
        return [SimpleNamespace(nvmlReturn=self.link_result, value=SimpleNamespace(ullVal=value)) for value in self.kib]


def test_without_a_gpu_everything_is_absent() -> None:
    assert GpuReader(None).sample() == NO_GPU


def test_figures() -> None:
    nvml, now = FakeNvml(), [100.0]
    reader = GpuReader("GPU-1", nvml, clock=lambda: now[0])
    first = reader.sample()
    assert (first.vram_used_bytes, first.vram_total_bytes) == (3 << 30, 80 << 30)
    assert first.nvlink_tx_bytes_per_second is None
    nvml.kib, now[0] = (2000, 500), 102.0
    second = reader.sample()
    assert (second.nvlink_tx_bytes_total, second.nvlink_rx_bytes_total) == (2000 * 1024, 500 * 1024)
    assert (second.nvlink_tx_bytes_per_second, second.nvlink_rx_bytes_per_second) == (1_024_000, 256_000)
    nvml.kib, now[0] = (9000, 9000), 102.1
    assert reader.sample().nvlink_tx_bytes_per_second == 1_024_000, "a rate over 0.1 s is noise"


def test_a_gpu_without_nvlink_has_no_nvlink_figures() -> None:
    nvml = FakeNvml()
    nvml.link_result = 3
    sample = GpuReader("GPU-1", nvml).sample()
    assert sample.nvlink_tx_bytes_total is None
    assert sample.vram_total_bytes == 80 << 30


@pytest.mark.parametrize("error", [RuntimeError("Driver Not Loaded"), OSError("libnvidia-ml.so.1")])
def test_errors_are_logged_once(caplog: pytest.LogCaptureFixture, error: Exception) -> None:
    nvml = FakeNvml()
    reader = GpuReader("GPU-1", nvml)
    nvml.broken = error
    for _ in range(3):
        assert reader.sample().vram_used_bytes is None
    messages = [record.getMessage() for record in caplog.records]
    assert len(messages) == len(set(messages))
    assert sum("memory" in message for message in messages) == 1


def test_nvml_that_cannot_be_opened() -> None:
    nvml = FakeNvml()
    nvml.broken = RuntimeError("Driver Not Loaded")
    assert GpuReader("GPU-1", nvml).sample() == NO_GPU
