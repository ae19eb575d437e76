"""`/healthz`, `/readyz` and `/metrics`."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import AsyncExitStack

from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest


async def serve(stack: AsyncExitStack, *, health_port: int, metrics_port: int, is_ready: Callable[[], bool]) -> None:
    """Serve until `stack` is closed. Liveness is answering at all: the event loop that reconciles also answers here."""

    async def health(request: web.Request) -> web.Response:
        return web.Response(text="ok\n")

    async def ready(request: web.Request) -> web.Response:
        return web.Response(text="ok\n") if is_ready() else web.Response(status=503, text="not ready\n")

    async def metrics(request: web.Request) -> web.Response:
        text = await asyncio.to_thread(generate_latest)  # of a thousand models it takes longer than probes should wait
        return web.Response(body=text, headers={"Content-Type": CONTENT_TYPE_LATEST})

    await _listen(stack, health_port, [web.get("/healthz", health), web.get("/readyz", ready)])
    await _listen(stack, metrics_port, [web.get("/metrics", metrics)])


async def _listen(stack: AsyncExitStack, port: int, routes: list[web.RouteDef]) -> None:
    app = web.Application()
    app.add_routes(routes)
    runner = web.AppRunner(app, handle_signals=False, access_log=None, shutdown_timeout=1.0)
    await runner.setup()
    stack.push_async_callback(runner.cleanup)
    await web.TCPSite(runner, None, port).start()
