"""The inference port while the worker starts: requests are sent elsewhere until the API is built.

One ASGI application for the whole life of the server. Until `install` it tells what the worker waits for; from then on
it is the installed application.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from starlette.types import ASGIApp, Message, Receive, Scope, Send
from tandem_api.names import HEADER_RETRY, RETRY_WORKER
from tandem_api.openai import error_body

from tandem_worker.server.wire.http import send_json


class StagedApp:
    def __init__(self, phase: Callable[[], str]) -> None:
        self._phase = phase
        self._app: ASGIApp | None = None
        self._lifespan: _InnerLifespan | None = None

    async def install(self, app: ASGIApp) -> None:
        """Start the application and let it answer from now on. On the server's event loop."""
        self._lifespan = _InnerLifespan(app)
        await self._lifespan.start()
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._live(receive, send)
        elif self._app is not None:
            await self._app(scope, receive, send)
        elif scope["type"] == "http":
            body = error_body(f"This worker is still {self._phase()}.", kind="overloaded_error")
            await send_json(send, body, status=503, headers={HEADER_RETRY: RETRY_WORKER})

    async def _live(self, receive: Receive, send: Send) -> None:
        """The server's own lifespan; the installed application's ends with it."""
        await receive()
        await send({"type": "lifespan.startup.complete"})
        await receive()
        if self._lifespan is not None:
            await self._lifespan.stop()
        await send({"type": "lifespan.shutdown.complete"})


class _InnerLifespan:
    """Drives the ASGI lifespan of an application that is installed after the server has started."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._to_app: asyncio.Queue[Message] = asyncio.Queue()
        self._from_app: asyncio.Queue[Message] = asyncio.Queue()
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        scope = {"type": "lifespan", "asgi": {"version": "3.0", "spec_version": "2.0"}, "state": {}}
        self._task = asyncio.ensure_future(self._run(scope))
        await self._exchange("startup")

    async def stop(self) -> None:
        await self._exchange("shutdown")
        if self._task is not None:
            await self._task

    async def _run(self, scope: Scope) -> None:
        await self._app(scope, self._to_app.get, self._from_app.put)

    async def _exchange(self, event: str) -> None:
        await self._to_app.put({"type": f"lifespan.{event}"})
        answer = await self._from_app.get()
        if answer["type"] != f"lifespan.{event}.complete":
            raise RuntimeError(f"the application refused its {event}: {answer.get('message', '')}")
