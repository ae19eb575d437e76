"""The two HTTP ports of a process: inference, and what watches it."""

from __future__ import annotations

import resource
from dataclasses import dataclass

from starlette.types import ASGIApp
from tandem_api.launch import WorkerConfig

from tandem_worker.host.errors import StartupError
from tandem_worker.server.wire.serving import MAX_CONNECTIONS, RunningServer, serve

_METRICS_CONNECTIONS = 128
"""The kubelet and a few scrapers; one connection each."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpPorts:
    api: RunningServer
    status: RunningServer

    async def close(self) -> None:
        """Probes are answered until the last request is."""
        await self.api.stop()
        await self.status.stop()


async def open_ports(config: WorkerConfig, host: str, *, api: ASGIApp, status: ASGIApp) -> HttpPorts:
    """Raises StartupError when a port is taken. A quarter of the process's descriptors is never a port's."""
    descriptors = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    most = descriptors if descriptors >= 0 else 1 << 20
    # Whoever keeps all of its connections busy must not keep the kubelet out: it would restart the worker.
    few = min(_METRICS_CONNECTIONS, most // 4)
    watching = await _open(status, host, config.metrics_port, few, busy_give_way=True)
    try:
        serving = await _open(api, host, config.http_port, min(MAX_CONNECTIONS, most // 2))
    except StartupError:
        await watching.stop()
        raise
    return HttpPorts(api=serving, status=watching)


async def _open(
    app: ASGIApp, host: str, port: int, max_connections: int, *, busy_give_way: bool = False
) -> RunningServer:
    try:
        return await serve(app, host, port, max_connections=max_connections, busy_give_way=busy_give_way)
    except OSError as error:
        raise StartupError("PortInUse", f"Port {port} cannot be opened at {host}: {error}") from error
