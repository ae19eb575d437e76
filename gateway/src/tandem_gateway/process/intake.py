"""Requests that a worker is to answer, from when they are read until they are under way."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tandem_gateway.errors import NotRouted, RequestError
from tandem_gateway.exchange.dispatching import dispatch
from tandem_gateway.exchange.exchange import Exchange
from tandem_gateway.http.connection import ClientConnection
from tandem_gateway.http.request import Request
from tandem_gateway.paths import COMPUTES, RESPONSES, TOKENIZER_INFO
from tandem_gateway.process.gateway import Gateway
from tandem_gateway.process.replies import Replies
from tandem_gateway.records.tracing import begin_trace
from tandem_gateway.requests.prompt import Said, read_inquiry
from tandem_gateway.requests.turns import LARGE_BYTES, Turns
from tandem_gateway.responses.recording import Recording
from tandem_gateway.responses.service import Asked, Responses, refuse_off


class Intake:
    def __init__(self, gateway: Gateway, replies: Replies) -> None:
        self._gateway = gateway
        self._replies = replies
        self.turns = Turns()
        """Requests that wait for one of their own."""

    def take(self, connection: ClientConnection, request: Request, request_id: bytes) -> None:
        """A request that is small enough to be read at once. Raises RequestError."""
        responses = self._gateway.responses
        if request.path != RESPONSES or responses is None:
            self.start(connection, request, request_id)
        else:
            self._begin_stored(connection, request, request_id, responses)

    def take_large(self, connection: ClientConnection, request: Request, request_id: bytes) -> None:
        """One that is read in a turn of its own."""

        def work() -> None:
            self.take(connection, request, request_id)

        self._defer(connection, request, request_id, work, held_bytes=len(request.body))

    def answer_stored(self, connection: ClientConnection, request: Request, request_id: bytes) -> None:
        """A question about responses that are kept. Raises RequestError."""
        if self._gateway.responses is None:
            raise refuse_off()
        reply = self._gateway.responses.answer(request)
        if reply.size <= LARGE_BYTES:
            self._replies.tell(connection, request, request_id, reply.build())
            return

        def work() -> None:
            self._replies.tell(connection, request, request_id, reply.build())

        self._defer(connection, request, request_id, work)

    def _begin_stored(
        self, connection: ClientConnection, request: Request, request_id: bytes, responses: Responses
    ) -> None:
        """A request for a response that may be kept. Raises RequestError."""
        if request.method != b"POST":
            raise NotRouted.wrong_method(request.method, request.path, "POST")
        asked = responses.read(request)
        if asked.size <= LARGE_BYTES:
            self._begin_response(connection, request, request_id, responses, asked)
            return

        def work() -> None:
            self._begin_response(connection, request, request_id, responses, asked)

        held = len(request.body)
        self._defer(connection, request, request_id, work, held_bytes=held, drop=responses.keep_hold(asked))

    def _begin_response(
        self, connection: ClientConnection, request: Request, request_id: bytes, responses: Responses, asked: Asked
    ) -> None:
        """A request for a response that may continue another. Raises RequestError."""
        expanded = responses.expand(asked, body=request.body, max_bytes=self._gateway.max_body_bytes)
        fields, said, recording = asked.question.fields, None, None
        if expanded is not None:
            request.body, said, recording = expanded.body, expanded.said, responses.record(asked, expanded)
        self.start(connection, request, request_id, recording, fields=fields, said=said)

    def start(
        self,
        connection: ClientConnection,
        request: Request,
        request_id: bytes,
        recording: Recording | None = None,
        *,
        fields: dict[str, Any] | None = None,
        said: Said | None = None,
    ) -> None:
        """`fields` of the body and what is `said` in it, where they are known. Raises RequestError."""
        gateway, path = self._gateway, request.path
        method = b"GET" if path == TOKENIZER_INFO else b"POST"
        if request.method != method:
            raise NotRouted.wrong_method(request.method, path, method.decode())
        inquiry = read_inquiry(
            request,
            served_names=gateway.served_names,
            estimator=gateway.scheduler.estimator,
            fields=fields,
            said=said,
            min_priority=gateway.min_priority,
        )
        for engine in gateway.kinds.others:
            gateway.engines[engine].admit(path, request.body, inquiry)
        trace, computes = None, path in COMPUTES
        if recording is not None:
            recording.hold()
        if computes and gateway.tracer.active:
            trace = begin_trace(gateway.tracer, request.headers)
        exchange = Exchange(gateway, connection, request, inquiry, request_id, recording, trace)
        connection.exchange = exchange
        if recording is not None:
            connection.account()
        is_first = not gateway.exchanges
        gateway.exchanges.add(exchange)
        if computes:
            traffic, tokens = gateway.traffic, inquiry.prompt_tokens
            if traffic.ahead:
                traffic.make_up(tokens)
            else:
                traffic.requests += 1
                traffic.prompt_tokens += tokens
                traffic.prompt_squares += tokens * tokens
        dispatch(exchange)
        if is_first and gateway.idle_watchers:
            watchers = [*gateway.idle_watchers]
            gateway.idle_watchers.clear()
            for watcher in watchers:
                watcher()

    def _defer(
        self,
        connection: ClientConnection,
        request: Request,
        request_id: bytes,
        work: Callable[[], None],
        *,
        held_bytes: int = 0,
        drop: Callable[[], None] = lambda: None,
    ) -> None:
        """Do `work` in a turn of its own; a RequestError of it is told. The rest as in `Turns.add`."""

        def attempt() -> None:
            try:
                work()
            except RequestError as error:
                self._replies.refuse(connection, request, request_id, error)

        self.turns.add(connection, attempt, held_bytes=held_bytes, drop=drop)
