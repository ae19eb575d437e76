"""VRAM and NVLink figures through NVML. Without NVML they are absent, never zero."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

logger = logging.getLogger(__name__)

_ALL_LINKS = 0xFFFFFFFF
"""As scope of an NVLink field: the sum over the links of the GPU."""
_MIN_RATE_SECONDS = 0.5
"""Rates over less than this are noise; the one before is reported again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuSample:
    """One reading; what the driver does not tell is None."""

    vram_used_bytes: int | None = None
    vram_total_bytes: int | None = None
    nvlink_tx_bytes_total: int | None = None
    nvlink_rx_bytes_total: int | None = None
    nvlink_tx_bytes_per_second: float | None = None
    nvlink_rx_bytes_per_second: float | None = None


NO_GPU = GpuSample()


class GpuReader:
    """Reads one GPU. `uuid` is how CUDA names it: NVML numbers devices differently. Any thread."""

    def __init__(self, uuid: str | None, nvml: Any = None, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._reported: set[str] = set()
        self._last: tuple[float, int, int] | None = None
        self._rates: tuple[float, float] | None = None
        self._nvml = nvml
        self._handle: Any = None
        if uuid is not None:
            self._open(uuid)

    def sample(self) -> GpuSample:
        """The figures now. What cannot be read is None, and rates are None at the first reading. Any thread."""
        if self._handle is None:
            return NO_GPU
        with self._lock:
            memory = self._try("memory", lambda: self._nvml.nvmlDeviceGetMemoryInfo(self._handle))
            links = self._try("NVLink counters", self._read_links)
            rates = self._rate(links) if links is not None else None
        return GpuSample(
            vram_used_bytes=None if memory is None else int(memory.used),
            vram_total_bytes=None if memory is None else int(memory.total),
            nvlink_tx_bytes_total=None if links is None else links[0],
            nvlink_rx_bytes_total=None if links is None else links[1],
            nvlink_tx_bytes_per_second=None if rates is None else rates[0],
            nvlink_rx_bytes_per_second=None if rates is None else rates[1],
        )

    def _open(self, uuid: str) -> None:
        def find() -> Any:
            if self._nvml is None:
                import pynvml

                self._nvml = pynvml
            self._nvml.nvmlInit()
            return self._nvml.nvmlDeviceGetHandleByUUID(uuid)

        self._handle = self._try("device", find)

    def _read_links(self) -> tuple[int, int] | None:
        """Bytes sent and received over all links since the driver started; None where there are none."""
        nvml = self._nvml
        wanted = [
            (nvml.NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_TX, _ALL_LINKS),
            (nvml.NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_RX, _ALL_LINKS),
        ]
        sent, received = nvml.nvmlDeviceGetFieldValues(self._handle, wanted)
        if sent.nvmlReturn != nvml.NVML_SUCCESS or received.nvmlReturn != nvml.NVML_SUCCESS:
            return None
        return int(sent.value.ullVal) * 1024, int(received.value.ullVal) * 1024

    def _rate(self, links: tuple[int, int]) -> tuple[float, float] | None:
        now = self._clock()
        if self._last is None:
            self._last = (now, *links)
            return None
        then, sent, received = self._last
        if now - then >= _MIN_RATE_SECONDS:
            self._last = (now, *links)
            # Counters restart with the driver.
            self._rates = (max(0, links[0] - sent) / (now - then), max(0, links[1] - received) / (now - then))
        return self._rates

    def _try(self, what: str, read: Callable[[], Any]) -> Any:
        """The result, or None. The same failure is logged once: it comes back with every scrape."""
        try:
            return read()
        except Exception as error:  # the library raises its own errors, and OSError or AttributeError by driver version
            if what not in self._reported:
                self._reported.add(what)
                logger.warning("NVML does not tell the GPU's %s: %r", what, error)
            return None
