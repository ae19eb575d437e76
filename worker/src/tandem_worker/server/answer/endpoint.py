"""One path of the API: what every request has around its handler, whatever it asks for."""

from __future__ import annotations

import logging
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from starlette.types import Message, Receive, Scope, Send
from tandem_api import names
from tandem_api.logs import find_trace
from tandem_api.openai import error_body
from tandem_api.tracing import Tracer

from tandem_worker.server.answer.request_metrics import RequestObserver, RequestOutcome
from tandem_worker.server.answer.tracing import ServerTrace, begin_trace, current_trace
from tandem_worker.server.wire.http import ClientGoneError, ServiceError, describe_error, header, request_id, send_json

_log = logging.getLogger(__name__)

Handler = Callable[[Scope, Receive, Send], Awaitable[None]]


class Endpoint:
    """Runs the handler of a method; errors become OpenAI error bodies; every response carries the request id."""

    def __init__(
        self,
        handlers: Mapping[str, Handler],
        *,
        shape: Callable[[dict[str, Any]], dict[str, Any]] | None = None,
        observer: RequestObserver | None = None,
        tracer: Tracer | None = None,
    ) -> None:
        """`shape` makes of OpenAI's error bodies those of another API. Only POST is observed and traced."""
        self._handlers = handlers
        self._shape = shape
        self._observer = observer
        self._tracer = tracer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        handler = self._handlers.get("GET" if scope["method"] == "HEAD" else scope["method"])
        if handler is None:
            await self._send_method_error(send, scope)
            return
        response = _Response(send, request_id(scope))
        started = time.perf_counter()
        trace = begin_trace(self._tracer, header(scope, "traceparent")) if "POST" in self._handlers else None
        if trace is not None:
            current_trace.set(trace)  # of this task alone
        try:
            await handler(scope, receive, response)
        except ClientGoneError:
            response.status = 499
        except Exception as error:
            await self._fail(error, scope, response)
        finally:
            if trace is not None:
                self._end_trace(trace, scope, response, started)
        if "POST" in self._handlers:
            self._report(scope, response, started)

    @staticmethod
    def _end_trace(trace: ServerTrace, scope: Scope, response: _Response, started: float) -> None:
        current_trace.set(None)
        ended = time.monotonic()
        trace.end(
            method=scope["method"],
            path=scope["path"],
            status=response.status,
            began=ended - (time.perf_counter() - started),
            ended=ended,
            request_id=response.request_id,
            usage=scope.get("tandem.usage"),
        )

    async def _fail(self, error: Exception, scope: Scope, response: _Response) -> None:
        status, body, headers = describe_error(error)
        if status == 500 and not isinstance(error, ServiceError):
            _log.exception("request failed", extra={"request_id": response.request_id, "path": scope["path"]})
        if response.status:
            # Half an answer is out; closing without its end tells the client that it is not complete.
            raise error
        await self._send_error(response, status, body, headers)

    async def _send_method_error(self, send: Send, scope: Scope) -> None:
        allowed = ", ".join(self._handlers)
        message = f"{scope['method']} is not allowed on {scope['path']}; use {allowed}."
        body = error_body(message, kind="invalid_request_error")
        await self._send_error(send, 405, body, {"allow": allowed})

    async def _send_error(self, send: Send, status: int, body: dict[str, Any], headers: Mapping[str, str]) -> None:
        await send_json(send, self._shape(body) if self._shape else body, status=status, headers=headers)

    def _report(self, scope: Scope, response: _Response, started: float) -> None:
        seconds = time.perf_counter() - started
        first = response.first_body
        outcome = RequestOutcome(
            path=scope["path"],
            status=response.status,
            seconds=seconds,
            first_token_seconds=None if first is None or response.status != 200 else first - started,
            usage=scope.get("tandem.usage"),
        )
        parent = header(scope, "traceparent")
        _log.info(
            "request",
            extra={
                "request_id": response.request_id,
                "trace_id": None if parent is None else find_trace(parent.encode("latin-1")),
                "path": outcome.path,
                "status": outcome.status,
                "seconds": seconds,
            },
        )
        if self._observer is not None:
            self._observer(outcome)


class _Response:
    """The `send` of one request: adds the request id, notes the status and the time of the first byte of the body."""

    __slots__ = ("_send", "first_body", "request_id", "status")

    def __init__(self, send: Send, request_id: str) -> None:
        self._send = send
        self.request_id = request_id
        self.status = 0
        self.first_body: float | None = None

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            message["headers"].append((names.HEADER_REQUEST_ID.encode(), self.request_id.encode("latin-1")))
        elif self.first_body is None:
            self.first_body = time.perf_counter()
        await self._send(message)
