"""The metrics port: probes from the process's first moment to its last, and figures as soon as there are any.

It is a port of its own so that whoever may scrape or probe does not reach the inference API, and the other way round.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from starlette.types import Receive, Scope, Send
from tandem_api.names import STARTED_PATH
from tandem_api.telemetry import WorkerTelemetry

from tandem_worker.server.wire.http import send_bytes


class FigureSource(Protocol):
    """What `/metrics` and `/telemetry` answer with."""

    def metrics_text(self) -> str:
        """Prometheus text of this moment."""
        ...

    def telemetry(self) -> WorkerTelemetry:
        """The same figures as the gateway and the operator read them."""
        ...


class StatusApp:
    """`/healthz`, `/readyz`, `/startz`, `/metrics`, `/telemetry`; nothing else."""

    def __init__(
        self,
        *,
        problems: Callable[[], list[str]],
        waits_for: Callable[[], str | None],
        rests: Callable[[], bool] = lambda: False,
    ) -> None:
        """`problems` are sentences that make the process unhealthy; `waits_for` is None when it takes requests; `rests`
        is true when it has started as far as it is to for now."""
        self._problems = problems
        self._waits_for = waits_for
        self._rests = rests
        self.figures: FigureSource | None = None
        """Set when the worker is built. Processes that follow in a group have none."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await answer_lifespan(receive, send)
        elif scope["type"] == "http" and scope["method"] not in {"GET", "HEAD"}:
            await send_text(send, 405, f"{scope['method']} is not allowed here; use GET.")
        elif scope["type"] == "http":
            await self._answer(scope["path"], send)

    async def _answer(self, path: str, send: Send) -> None:
        if path == "/healthz":
            problems = self._problems()
            await send_text(send, 500 if problems else 200, "\n".join(problems) or "ok")
        elif path in {"/readyz", STARTED_PATH}:
            started = path == STARTED_PATH and self._rests()
            reason = None if started else self._waits_for() or "\n".join(self._problems())
            await send_text(send, 503 if reason else 200, reason or "ok")
        elif path not in {"/metrics", "/telemetry"}:
            await send_text(send, 404, "There are /healthz, /readyz, /startz, /metrics and /telemetry here.")
        elif self.figures is None:
            await send_text(send, 503, "There are no figures of this process (yet).")
        elif path == "/metrics":
            text = self.figures.metrics_text().encode()
            await send_bytes(send, 200, text, content_type="text/plain; version=0.0.4; charset=utf-8")
        else:
            await send_bytes(send, 200, self.figures.telemetry().to_json().encode())


async def answer_lifespan(receive: Receive, send: Send) -> None:
    """For an application that has nothing to set up."""
    await receive()
    await send({"type": "lifespan.startup.complete"})
    await receive()
    await send({"type": "lifespan.shutdown.complete"})


async def send_text(send: Send, status: int, line: str) -> None:
    """Send a whole response of one line of plain text."""
    await send_bytes(send, status, f"{line}\n".encode(), content_type="text/plain; charset=utf-8")
