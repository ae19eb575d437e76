"""What calls to other engines have in common: one worker answers the client, and another may have to help it.

To the exchange it is one call. The helper's failures end here: it is reported, and somebody else is asked or nobody.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from dataclasses import dataclass, replace

from tandem_api.names import HEADER_DECODE_WORKER, HEADER_PREFILL_WORKER, HEADER_REQUEST_ID

from tandem_gateway.http.response import ResponseHead
from tandem_gateway.http.sse import EventStream, EventTooLarge
from tandem_gateway.scheduling import Endpoint, Outcome
from tandem_gateway.upstream.base import Call, Failure, Sink
from tandem_gateway.upstream.engines.answer import Answer
from tandem_gateway.upstream.engines.body import PAIRED, asks_usage, build_request, extend
from tandem_gateway.upstream.engines.contract import Fields, Host, Order

HELP_SHARE = 0.5
"""A prefill worker may take this share of the time that is left for a first token; then another one is asked. So the
time is never over because of prefill workers alone, for which the decode worker would be blamed."""
MAX_HELP_BYTES = 4 * 1024 * 1024
"""The most of a prefill worker's answer: one token, and the names of its blocks."""
_OWN = b"x-tandem-"
_FORWARDED = (b"accept", b"traceparent", b"tracestate")
_HEAD = b"%b %b HTTP/1.1\r\nhost: %b\r\n%b" + HEADER_REQUEST_ID.encode() + b": %b\r\ncontent-length: %d\r\n\r\n"
_OUTCOMES = {Failure.CONNECT: Outcome.REFUSED, Failure.RESET: Outcome.RESET, Failure.PROTOCOL: Outcome.RESET}


@dataclass(slots=True)
class Help:
    """How a prefill worker's part has ended."""

    head: ResponseHead | None
    body: bytes = b""
    failure: Failure | None = None
    """None: it has answered."""
    detail: str = ""


class Helper:
    """Reads a prefill worker's answer, and tells of it once."""

    def __init__(self, on_end: Callable[[Help], None]) -> None:
        self.call: Call | None = None
        self._on_end: Callable[[Help], None] | None = on_end
        self._head: ResponseHead | None = None
        self._body = bytearray()

    def cancel(self) -> None:
        self._on_end = None
        call, self.call = self.call, None
        if call is not None:
            call.cancel()

    def on_upstream_head(self, head: ResponseHead) -> None:
        self._head = head

    def on_upstream_body(self, data: bytes, *, final: bool) -> None:
        self._body += data
        if len(self._body) > MAX_HELP_BYTES:
            self.give_up(Failure.PROTOCOL, f"its answer exceeds {MAX_HELP_BYTES} bytes")

    def on_upstream_end(self) -> None:
        self._tell(Help(self._head, bytes(self._body)))

    def on_upstream_failure(self, failure: Failure, detail: str) -> None:
        self._tell(Help(self._head, failure=failure, detail=detail))

    def give_up(self, failure: Failure, detail: str) -> None:
        call, self.call = self.call, None
        if call is not None:
            call.cancel()
        self._tell(Help(self._head, failure=failure, detail=detail))

    def _tell(self, end: Help) -> None:
        self.call = None
        on_end, self._on_end = self._on_end, None
        if on_end is not None:
            on_end(end)


class ForeignCall:
    """A request to one worker of another engine. Subclasses bring in the prefill worker."""

    def __init__(self, host: Host, sink: Sink, order: Order, fields: Fields, *, worker_model: str) -> None:
        """`fields` are those of the order's body. Raises BadRequest where they cannot be written again."""
        self.order = replace(order, body=b"")
        self._host = host
        self._sink: Sink | None = sink
        """None once the call has ended."""
        self._body = build_request(fields, order.path, worker_model) if order.body else b""
        """For workers; empty once one answers, for then it is not sent again."""
        self._call: Call | None = None
        self._resent = False
        self._head: ResponseHead | None = None
        self._events: EventStream | None = None
        self._loop = asyncio.get_running_loop()
        self._helper: Helper | None = None
        self._patience: asyncio.TimerHandle | None = None
        # The same at both workers, and no other request's, whatever names clients give to theirs.
        self._id = b"%b-%b" % (order.request_id, os.urandom(4).hex().encode())
        self._deadline = self._loop.time() + host.timeouts.first_token_seconds
        paired = order.path in PAIRED
        model = fields.get("model")
        self._answer = Answer(
            reads_usage=paired,
            shows_usage=not paired or asks_usage(fields),
            worker_model=worker_model,
            client_model=model if isinstance(model, str) else host.served_names[0],
        )

    def begin(self) -> None:
        """Ask whoever is first."""
        self.decode()

    def decode(self, **more: object) -> None:
        """Ask the worker that answers the client."""
        self._call = self._ask(self.order.choice.decode, extend(self._body, more), self)

    def help(self, body: bytes, on_end: Callable[[Endpoint, Help], None]) -> None:
        """Ask the first prefill worker of the choice."""
        endpoint = self.order.choice.prefill[0]

        def end(result: Help) -> None:
            self._stop_waiting()
            self._helper = None
            if self._sink is not None:
                on_end(endpoint, result)

        helper = self._helper = Helper(end)
        seconds = HELP_SHARE * max(0.0, self._deadline - self._loop.time())
        self._patience = self._loop.call_later(
            seconds, helper.give_up, Failure.RESET, f"it has not answered within {seconds:g} s"
        )
        helper.call = self._ask(endpoint, body, helper)

    def lose(self, endpoint: Endpoint, outcome: Outcome) -> None:
        """This prefill worker did not do its part."""
        self.order.choice.prefill = [other for other in self.order.choice.prefill if other is not endpoint]
        endpoint.count_end(failed=True)
        self._host.scheduler.report(endpoint, outcome, self._loop.time())
        self._host.on_prefill_lost(endpoint, outcome.value)

    def _ask(self, endpoint: Endpoint, body: bytes, sink: Sink) -> Call:
        order, more = self.order, b""
        if body:
            more += b"content-type: application/json\r\n"
        for name in _FORWARDED:
            if name in order.headers:
                more += name + b": " + order.headers[name] + b"\r\n"
        head = _HEAD % (order.method, order.path.encode(), endpoint.host, more, self._id, len(body))
        return self._host.link(endpoint).start(sink, head, body, fresh=order.fresh)

    def _stop_waiting(self) -> None:
        timer, self._patience = self._patience, None
        if timer is not None:
            timer.cancel()

    def end(self) -> Sink | None:
        """Nothing is under way any more. Returns who is to be told, the first time."""
        self._stop_waiting()
        sink, self._sink = self._sink, None
        helper, self._helper = self._helper, None
        if helper is not None:
            helper.cancel()
        call, self._call = self._call, None
        if call is not None:
            call.cancel()
        return sink

    def fail(self, failure: Failure, detail: str) -> None:
        sink = self.end()
        if sink is not None:
            sink.on_upstream_failure(failure, detail)

    # what the exchange does with it

    @property
    def held_bytes(self) -> int:
        return 0 if self._call is None else self._call.held_bytes

    @property
    def resent(self) -> bool:
        return self._resent or (self._call is not None and self._call.resent)

    def cancel(self) -> None:
        self.end()

    def pause_reading(self) -> None:
        if self._call is not None:
            self._call.pause_reading()

    def resume_reading(self) -> None:
        if self._call is not None:
            self._call.resume_reading()

    # what the answering worker says

    def on_upstream_head(self, head: ResponseHead) -> None:
        # Words of Tandem's own workers mean nothing from others, not even that a stream may move.
        head.headers = [field for field in head.headers if not field[0].startswith(_OWN)]
        head.fields = dict(head.headers)
        choice = self.order.choice
        computed = choice.prefill[0] if choice.prefill else choice.decode
        for name, endpoint in ((HEADER_DECODE_WORKER, choice.decode), (HEADER_PREFILL_WORKER, computed)):
            field = name.encode(), endpoint.worker.name.encode()
            head.headers.append(field)
            head.fields[field[0]] = field[1]
        self._head = head
        self._body = b""
        if head.status == 200:
            if head.fields.get(b"content-type", b"").startswith(b"text/event-stream"):
                self._events = EventStream()
            head.rewrite = self._answer.body
        if self._sink is not None:
            self._sink.on_upstream_head(head)

    def on_upstream_body(self, data: bytes, *, final: bool) -> None:
        if self._events is not None:
            try:
                data = self._events.feed(data)
            except EventTooLarge:
                self.fail(Failure.PROTOCOL, "the worker sent an event without end")
                return
        self.pass_on(data, final=final)

    def pass_on(self, data: bytes, *, final: bool) -> None:
        """Whole events, or a part of an answer in one piece."""
        if self._events is not None and self._head is not None:
            data = self._answer.events(data)
            self._head.usage = self._answer.usage
        if self._sink is not None:
            self._sink.on_upstream_body(data, final=final)

    def on_upstream_end(self) -> None:
        self._call = None
        sink = self.end()
        if sink is not None:
            sink.on_upstream_end()

    def on_upstream_failure(self, failure: Failure, detail: str) -> None:
        self._resent, self._call = self.resent, None
        self.fail(failure, detail)


def outcome_of(end: Help) -> Outcome:
    """What a prefill worker's failure says about it."""
    return Outcome.RESET if end.failure is None else _OUTCOMES.get(end.failure, Outcome.RESET)
