"""The inference port of a pod that only follows: where to go instead."""

from __future__ import annotations

from starlette.types import Receive, Scope, Send
from tandem_api.openai import error_body

from tandem_worker.server.http import HEADER_RETRY, send_json
from tandem_worker.server.status import answer_lifespan


class FollowerApp:
    def __init__(self, leader: str) -> None:
        """`leader` is the name of the pod that serves the API."""
        self._leader = leader

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await answer_lifespan(receive, send)
        elif scope["type"] == "http":
            leader = self._leader
            message = f"This pod computes for the worker {leader} and takes no requests itself: ask {leader}."
            body = error_body(message, kind="overloaded_error", code="group_follower")
            await send_json(send, body, status=503, headers={HEADER_RETRY: "1"})
