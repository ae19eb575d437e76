"""The HTTP face of a pod that only follows: probes, and where to go for everything else."""

from __future__ import annotations

from collections.abc import Callable

from starlette.types import Receive, Scope, Send
from tandem_api.openai import error_body

from tandem_worker.server.http import HEADER_RETRY, send_bytes, send_json


class FollowerApp:
    def __init__(self, leader: str, *, phase: Callable[[], str], ready: Callable[[], bool]) -> None:
        """`leader` is the name of the pod that serves the API."""
        self._leader = leader
        self._phase = phase
        self._ready = ready

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await receive()
            await send({"type": "lifespan.startup.complete"})
            await receive()
            await send({"type": "lifespan.shutdown.complete"})
        elif scope["type"] == "http":
            await self._answer(scope["path"], send)

    async def _answer(self, path: str, send: Send) -> None:
        if path == "/healthz":
            await _send_text(send, 200, "ok")
        elif path == "/readyz":
            ready = self._ready()
            await _send_text(send, 200 if ready else 503, "ok" if ready else self._phase())
        else:
            leader = self._leader
            message = f"This pod computes for the worker {leader} and takes no requests itself: ask {leader}."
            body = error_body(message, kind="overloaded_error", code="group_follower")
            await send_json(send, body, status=503, headers={HEADER_RETRY: "1"})


async def _send_text(send: Send, status: int, line: str) -> None:
    await send_bytes(send, status, f"{line}\n".encode(), content_type="text/plain; charset=utf-8")
