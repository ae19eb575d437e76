"""What a GPU tells through NVML: memory, links, activity, health. Without NVML figures are absent, never zero."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)

_ALL_LINKS = 0xFFFFFFFF
"""As scope of an NVLink field: the sum over the links of the GPU."""
_SLOWED = 8 | 32 | 64 | 128
"""Reasons for which clocks are lowered against the GPU's wish: hardware slowdown, thermal slowdown by software and by
hardware, power brake. Neither idleness nor the power cap, at which a busy GPU always is."""
_MOST_EVENTS = 16
"""Events of one reading."""
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
    nvlink_bytes_per_second_limit: int | None = None
    """What all links of the GPU carry one way."""
    active: float | None = None
    """Share of the time in which a kernel ran on it."""
    slowed: bool | None = None
    """Heat or power lowers its clocks."""
    ecc_uncorrected: int | None = None
    """Memory errors that were not corrected, since the driver started."""
    xid: int | None = None
    """The last critical error since this process started, by NVIDIA's number; None: none, or not told."""


NO_GPU = GpuSample()
_TYPES = {field.name: bool if field.name == "slowed" else (int, float) for field in fields(GpuSample)}


def pack(sample: GpuSample) -> dict[str, Any]:
    """What it tells, for another process."""
    return {name: value for name, value in asdict(sample).items() if value is not None}


def unpack(content: Mapping[str, Any]) -> GpuSample:
    """What another process told; names that are not known here, and values that are no such figure, are left out."""
    known: dict[str, Any] = {
        name: value
        for name, value in content.items()
        if name in _TYPES and isinstance(value, _TYPES[name]) and 0 <= value < 2**63
    }
    return GpuSample(**known)


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
        self._events: Any = None
        self._xid: int | None = None
        self._limit: int | None = None
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
            if links is not None and self._limit is None:
                self._limit = self._try("NVLink speed", self._read_limit)
            activity = self._try("activity", lambda: self._nvml.nvmlDeviceGetUtilizationRates(self._handle))
            reasons = self._try("clocks", lambda: self._nvml.nvmlDeviceGetCurrentClocksEventReasons(self._handle))
            ecc = self._try("ECC counters", self._read_ecc)
            self._try("events", self._read_events)
        return GpuSample(
            vram_used_bytes=None if memory is None else int(memory.used),
            vram_total_bytes=None if memory is None else int(memory.total),
            nvlink_tx_bytes_total=None if links is None else links[0],
            nvlink_rx_bytes_total=None if links is None else links[1],
            nvlink_tx_bytes_per_second=None if rates is None else rates[0],
            nvlink_rx_bytes_per_second=None if rates is None else rates[1],
            nvlink_bytes_per_second_limit=None if links is None else self._limit,
            active=None if activity is None else activity.gpu / 100,
            slowed=None if reasons is None else bool(reasons & _SLOWED),
            ecc_uncorrected=ecc,
            xid=self._xid,
        )

    def _open(self, uuid: str) -> None:
        def find() -> Any:
            if self._nvml is None:
                import pynvml

                self._nvml = pynvml
            self._nvml.nvmlInit()
            return self._nvml.nvmlDeviceGetHandleByUUID(uuid)

        self._handle = self._try("device", find)
        if self._handle is not None:
            self._events = self._try("events", self._listen)

    def _listen(self) -> Any:
        events = self._nvml.nvmlEventSetCreate()
        self._nvml.nvmlDeviceRegisterEvents(self._handle, self._nvml.nvmlEventTypeXidCriticalError, events)
        return events

    def _read_events(self) -> None:
        """Errors that were reported since the last reading."""
        for _ in range(_MOST_EVENTS if self._events is not None else 0):
            try:
                self._xid = int(self._nvml.nvmlEventSetWait_v2(self._events, 0).eventData)
            except self._nvml.NVMLError_Timeout:  # there is none
                return

    def _read_ecc(self) -> int:
        nvml = self._nvml
        return int(
            nvml.nvmlDeviceGetTotalEccErrors(
                self._handle, nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC
            )
        )

    def _read_limit(self) -> int | None:
        """Bytes per second of all links together, one way; None where that is not told."""
        nvml = self._nvml
        wanted = [nvml.NVML_FI_DEV_NVLINK_SPEED_MBPS_COMMON, nvml.NVML_FI_DEV_NVLINK_LINK_COUNT]
        speed, count = nvml.nvmlDeviceGetFieldValues(self._handle, wanted)
        if speed.nvmlReturn != nvml.NVML_SUCCESS or count.nvmlReturn != nvml.NVML_SUCCESS:
            return None
        return int(speed.value.uiVal) * int(count.value.uiVal) * 1_000_000 or None

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


def open_gpu_reader(device: torch.device) -> GpuReader:
    """Reads the figures of the GPU that `device` is, whatever its number is to NVML; of none on a CPU."""
    if device.type != "cuda":
        return GpuReader(None)
    import torch

    return GpuReader(f"GPU-{torch.cuda.get_device_properties(device).uuid}")
