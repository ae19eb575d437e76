"""The running process: listeners, discovery, the clock, and an orderly end."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import resource
import signal
from collections.abc import Coroutine, Mapping
from typing import Any

from tandem_api.fleet import StartingReport, WorkerReport
from tandem_api.telemetry import WorkerTelemetry

from tandem_gateway.http.connection import ClientConnection
from tandem_gateway.http.tls import Certificate, protocol_factory
from tandem_gateway.process.admin import Admin
from tandem_gateway.process.clock import TICK_SECONDS, Clock
from tandem_gateway.process.cluster import Cluster
from tandem_gateway.process.gateway import Gateway
from tandem_gateway.process.intake import Intake
from tandem_gateway.process.jobs import Jobs
from tandem_gateway.process.reception import Reception
from tandem_gateway.process.replies import Replies
from tandem_gateway.process.reports import Reports
from tandem_gateway.process.settings import Settings
from tandem_gateway.records.access_log import AccessLog
from tandem_gateway.records.line_writer import LineWriter
from tandem_gateway.scheduling import Worker
from tandem_gateway.workers.discovery.static import follow_file
from tandem_gateway.workers.model_card import ModelCard
from tandem_gateway.workers.probation import Probation
from tandem_gateway.workers.telemetry import AT_ONCE, MAX_KEPT, TelemetryPoller

log = logging.getLogger(__name__)
BACKLOG = 1024
LAST_WORDS_TICKS = 10
OTHER_DESCRIPTORS = 64 + MAX_KEPT + AT_ONCE
"""Descriptors of the process itself: listeners, discovery, logs, probes, and reads of workers' telemetry."""


class Server:
    """Everything with a beginning and an end. `start` and `stop` are for tests; a process calls `run`."""

    def __init__(self, settings: Settings) -> None:
        """Raises ConfigError where keys or certificate cannot be read, or there is nothing to discover workers with."""
        self._settings = settings
        self._lines = LineWriter(1, "access-log") if settings.access_log else None
        access_log = AccessLog(self._lines.write) if self._lines else None
        tls = settings.config.tls
        self.gateway = Gateway(
            settings.config,
            self,
            access_log=access_log,
            tracing=settings.tracing,
            certificate=tls and Certificate(tls.path, min_version=tls.min_version),
        )
        replies = Replies(self.gateway, self)
        self.intake = Intake(self.gateway, replies)
        self.reception = Reception(
            self.gateway,
            self.intake,
            replies,
            max_connections=_affordable_connections(settings.config.max_connections),
        )
        self.probation = Probation(
            self.apply_workers,
            served_name=settings.config.served_name,
            token_line=lambda: self.gateway.token_line,
            connect_seconds=settings.config.timeouts.connect_seconds,
            is_urgent=lambda: self.gateway.queue.line.size > 0,
        )
        told = settings.workers or settings.workers_file is not None
        cluster = self._cluster = None if told else Cluster(settings.config, self.gateway, self.probation)
        """None where workers are not discovered in Kubernetes."""
        self.reports = Reports(self.gateway, self)
        self.admin = Admin(self.gateway, self.reports, knows_routing=lambda: cluster is None or cluster.routing.asked)
        self.card = ModelCard(
            token_line=lambda: self.gateway.token_line, connect_seconds=settings.config.timeouts.connect_seconds
        )
        self.telemetry = TelemetryPoller(
            connect_seconds=settings.config.timeouts.connect_seconds,
            period=settings.telemetry_seconds,
            on_sample=self.gateway.take_sample,
        )
        self.http_port = self.https_port = 0
        """0 where clients are not served so."""
        self.metrics_port = 0
        self._admin_listener: asyncio.Server | None = None
        self._listeners: list[asyncio.Server] = []
        """For clients."""
        self._stopping = asyncio.Event()
        self._jobs = Jobs(self._stopping.set)

    async def run(self) -> bool:
        """Serve until SIGTERM or SIGINT, then end in an orderly way. False when a part failed.

        Raises:
            OSError: a port cannot be listened on.
        """
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._stopping.set)
        await self.start()
        await self._stopping.wait()
        await self.drain()
        await self.stop()
        return not self._jobs.failed

    async def start(self) -> None:
        loop = asyncio.get_running_loop()
        settings = self._settings
        config = settings.config
        for job in self._discovery():
            self._jobs.spawn(job)
        self._admin_listener = await loop.create_server(
            lambda: ClientConnection(self.admin), settings.host, config.metrics_port
        )
        self.metrics_port = _port(self._admin_listener)
        if config.tls is not None and self.gateway.certificate is not None:
            factory = protocol_factory(self.reception, self.gateway.certificate)
            self._listeners += [await loop.create_server(factory, settings.host, config.tls.port, backlog=BACKLOG)]
            self.https_port = _port(self._listeners[-1])
        if config.tls is None or config.tls.plain_http:
            self._listeners += [
                await loop.create_server(
                    lambda: ClientConnection(self.reception), settings.host, config.http_port, backlog=BACKLOG
                )
            ]
            self.http_port = _port(self._listeners[-1])
        self._jobs.spawn(Clock(self.gateway, self.reception, self.admin).run())
        self._jobs.spawn(self.card.run())
        if settings.telemetry_seconds:
            self._jobs.spawn(self.telemetry.run())
        ports = {"http_port": self.http_port, "https_port": self.https_port, "metrics_port": self.metrics_port}
        log.info(
            "listening", extra={"model": config.served_name} | {name: port for name, port in ports.items() if port}
        )

    async def drain(self) -> None:
        """Unready at once; still accepting while endpoints elsewhere are updated; then finish what runs."""
        gateway, reception = self.gateway, self.reception
        gateway.start_draining()
        log.info("draining", extra={"in_flight": len(gateway.exchanges)})
        await asyncio.sleep(self._settings.lame_duck_seconds)
        for listener in self._listeners:
            listener.close()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(gateway.drain_timeout_seconds):
                settled = reception.close_idle()
                while reception.busy or not settled:
                    await asyncio.sleep(TICK_SECONDS / 2)
                    settled = reception.close_idle()

    async def stop(self) -> None:
        left = len(self.gateway.exchanges)
        for listener in (self._admin_listener, *self._listeners):
            if listener is not None:
                listener.close()
        self.gateway.stop()
        self.reception.stop()
        self.gateway.close()
        self.admin.stop()
        # Last words reach the sockets of whoever takes them.
        for _ in range(LAST_WORDS_TICKS):
            await asyncio.sleep(TICK_SECONDS)
            if not self.reception.busy:
                break
        await self._jobs.cancel()
        await asyncio.to_thread(self.gateway.tracer.close)
        if self._lines is not None:
            self._lines.close()
        log.info("stopped", extra={"cut_off": left})

    # what the gateway asks of the process

    @property
    def telemetry_reads(self) -> Mapping[str, int]:
        return self.telemetry.reads

    def find_sample(self, worker: Worker) -> tuple[WorkerTelemetry, float] | None:
        return self.telemetry.sample(worker)

    def report_held(self) -> list[WorkerReport]:
        return self.probation.reports()

    def report_starting(self) -> list[StartingReport]:
        return [] if self._cluster is None else self._cluster.starts.reports()

    def describe_model(self) -> Mapping[str, object]:
        return self.card.facts

    def on_waiting(self) -> None:
        if self._cluster is not None:
            self._cluster.waker.poke()

    # discovery

    def apply_workers(self, workers: list[Worker]) -> None:
        self.admin.discovered = True
        self.gateway.apply_workers(workers)
        self.card.take(workers)
        self.telemetry.take(workers)

    def _discovery(self) -> list[Coroutine[Any, Any, None]]:
        """The jobs that tell about workers, and what the gateway follows while it runs."""
        settings = self._settings
        if self._cluster is not None:
            return self._cluster.jobs()
        if settings.workers_file is not None:
            return [follow_file(settings.workers_file, self.apply_workers)]
        return [self._apply_fixed(list(settings.workers))]

    async def _apply_fixed(self, workers: list[Worker]) -> None:
        self.apply_workers(workers)


def _port(server: asyncio.Server) -> int:
    return server.sockets[0].getsockname()[1]


def _affordable_connections(wanted: int) -> int:
    """Every client may need a worker's connection besides its own, and running out of descriptors stops everything."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = 2 * wanted + OTHER_DESCRIPTORS
    if soft < needed and soft < hard:
        soft = min(needed, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    affordable = min(wanted, max(1, (soft - OTHER_DESCRIPTORS) // 2))
    if affordable < wanted:
        log.warning(
            "fewer client connections are accepted than configured; raise the process's limit of open files",
            extra={"connections": affordable, "configured": wanted, "open_files": soft},
        )
    return affordable
