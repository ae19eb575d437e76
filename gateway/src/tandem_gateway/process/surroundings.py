"""What a gateway asks of the process that it runs in, and tells it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from tandem_api.fleet import StartingReport, WorkerReport
from tandem_api.telemetry import WorkerTelemetry

from tandem_gateway.scheduling import Worker


class Surroundings(Protocol):
    """The process around a gateway. Asked from when the event loop runs, never while a gateway is made."""

    @property
    def telemetry_reads(self) -> Mapping[str, int]:
        """Samples that came and reads that failed, by how they ended."""
        ...

    def find_sample(self, worker: Worker) -> tuple[WorkerTelemetry, float] | None:
        """A worker's last sample and its age in seconds."""
        ...

    def report_held(self) -> list[WorkerReport]:
        """Workers that discovery knows and that get no requests yet."""
        ...

    def report_starting(self) -> list[StartingReport]:
        """Workers that are not ready, and what they wait for."""
        ...

    def describe_model(self) -> Mapping[str, object]:
        """What a worker has told about the model."""
        ...

    def on_waiting(self) -> None:
        """A request has come to wait for a worker."""
        ...
