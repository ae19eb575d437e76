"""The life of one inference request: choose workers, send, pass the answer on, retry while nothing reached the client.

Invariants: every exchange ends exactly once, in `delivery.finish`, which releases its reservation; whatever the client
has received ends as a complete answer, an OpenAI error, or a stream whose last event is an error event. A stream that
has begun goes on at another worker where it can (`resume`).

What is known of one request is its state (`state`); what is done with it stands beside, as functions: `dispatching`
chooses and sends, `delivery` gives the client what is due, `aftermath` carries out what follows a failed attempt. Here
are the calls that come from outside.
"""

from __future__ import annotations

from collections.abc import Collection

from tandem_api.names import HEADER_PREFILL_WORKER, HEADER_QUEUE_SECONDS, HEADER_RESUME, HEADER_RETRY, RETRY_FULL

from tandem_gateway.errors import RequestError, retry_after
from tandem_gateway.exchange import state
from tandem_gateway.exchange.aftermath import end_attempt, time_out
from tandem_gateway.exchange.delivery import (
    begin,
    complete,
    conclude,
    drop_call,
    end_stream,
    fail,
    hold,
    release,
    take_call,
)
from tandem_gateway.exchange.dispatching import dispatch, leave_queue
from tandem_gateway.exchange.recovery import Ending, name_answer, name_failure
from tandem_gateway.exchange.resume import Continuation
from tandem_gateway.exchange.state import DELIVERING, HELD_SECONDS, NO_NAMES, OVER, STREAMING, WAITING, ExchangeState
from tandem_gateway.http.journal import JournaledStream
from tandem_gateway.http.response import ResponseHead
from tandem_gateway.http.sse import EventStream, EventTooLarge
from tandem_gateway.scheduling import Outcome, classify_status
from tandem_gateway.upstream.base import Failure

CLIENT_GONE = 499
TOO_MANY = 429
_QUEUE_SECONDS = HEADER_QUEUE_SECONDS.encode()
_PREFILL_WORKER = HEADER_PREFILL_WORKER.encode()
_RESUME = HEADER_RESUME.encode()
_RETRY = HEADER_RETRY.encode()
_RETRY_FULL = RETRY_FULL.encode()
_ANSWERED, _ERROR = Outcome.ANSWERED, Outcome.ERROR
_DETAILS = {
    Ending.DRAINING: "the worker is shutting down",
    # About this gateway's key, never about the client, who has shown the worker nothing.
    Ending.UNAUTHORIZED: "the worker does not take this gateway's key",
}
"""What there is to say of an answer beyond its status."""
_BROKEN = frozenset({Failure.RESET, Failure.STALE})
"""A connection to the worker ended: it may have died."""


class Exchange(ExchangeState):
    """Sink of its upstream calls, conversation of its client connection, and waiter of the queue."""

    __slots__ = ()

    def dispatch(self, full: Collection[str] = NO_NAMES) -> bool:
        return dispatch(self, full)

    def on_upstream_head(self, head: ResponseHead) -> None:
        fields, status = head.fields, head.status
        outcome = _ANSWERED if status == 200 else classify_status(status, fields.get(_RETRY))
        if (outcome is not _ANSWERED or self.first_byte_at) and not self._takes(outcome, head):
            return
        self._take_answer(outcome, head)
        if status == TOO_MANY:
            _tell_when(head, self.context.queue.find_backlog())
        self.head = head
        self.reads += 1
        if self.queue_seconds:
            head.headers.append((_QUEUE_SECONDS, b"%.3f" % self.queue_seconds))
        if fields.get(b"content-type", b"").startswith(b"text/event-stream"):
            journal = fields.get(_RESUME)
            self.stream = EventStream() if journal is None else JournaledStream(journal)
        if self.recording is not None and status == 200:
            self.stream = self.recording.follow(head, self.stream)

    def _takes(self, outcome: Outcome, head: ResponseHead) -> bool:
        """Whether the client is to get this answer, which is a failure or not the first one. Where it is not, what is
        to be done instead is done.
        """
        if self.begun and head.status == 200 and _RESUME in head.fields:
            self._go_on(head)
            return False
        assert self.choice is not None
        ending = name_answer(outcome, full=head.fields.get(_RETRY) == _RETRY_FULL)
        if ending is Ending.UNAUTHORIZED:
            self.context.on_unauthorized(self.choice.decode)
        detail = _DETAILS.get(ending) or f"the worker answered {head.status}"
        return not end_attempt(self, ending, detail, head.status)

    def _go_on(self, head: ResponseHead) -> None:
        """Another worker takes over a stream."""
        continuation = self.continuation
        assert continuation is not None
        assert self.reservation is not None
        self._take_answer(_ANSWERED, head)
        self.phase = STREAMING
        self.reads += 1
        self.reservation.first_token(self.loop.time())
        self.context.metrics.resumes[continuation.end_move()] += 1

    def _take_answer(self, outcome: Outcome, head: ResponseHead) -> None:
        """This is the answer that the client gets: what it says about the workers."""
        scheduler, choice, reservation, now = self.context.scheduler, self.choice, self.reservation, self.loop.time()
        assert choice is not None
        assert reservation is not None
        if self.suspects:
            if outcome is _ANSWERED:
                for endpoint, failure in self.suspects:
                    scheduler.report(endpoint, failure, now)
            self.suspects = ()
        if outcome is not _ERROR:  # it may be the request's fault, and nobody else is there to tell
            scheduler.report(choice.decode, outcome, now)
        if head.status == 200:
            scheduler.accept(choice, self.inquiry, reservation, now)
            if choice.prefill:
                scheduler.report_prefill(choice, head.fields.get(_PREFILL_WORKER, b"").decode("latin-1"), now)

    def on_upstream_body(self, data: bytes, *, final: bool) -> None:
        self.reads += 1
        stream = self.stream
        if stream is None:
            hold(self, data)
            return
        try:
            data = stream.feed(data)
        except EventTooLarge:
            end_attempt(self, Ending.ENDLESS, "an event without end")
            return
        if not data:
            return
        self.bytes_out += len(data)
        # Inlined build_chunk: this line runs once per token.
        out = data if self.request.http10 else b"%x\r\n%b\r\n" % (len(data), data)
        if self.phase != STREAMING:
            out = begin(self, last=final) + out
        if final:
            self.unsent = out
        else:
            self.connection.transport.write(out)

    def on_upstream_end(self) -> None:
        call, self.call = self.call, None
        stream = self.stream
        if stream is None:
            complete(self)
        elif stream.done or stream.failed:
            end_stream(self, stream)
        else:
            self.resets += call is not None and call.resent
            moved = isinstance(stream, JournaledStream) and stream.moved
            detail = "the worker ended its stream before the answer was complete"
            end_attempt(self, Ending.HANDED_ON if moved else Ending.RESET, detail)

    def on_upstream_failure(self, failure: Failure, detail: str) -> None:
        take_call(self)
        if failure in _BROKEN:
            assert self.choice is not None
            self.context.isolation.report_death(self.choice.decode.worker.name, self.loop.time())
        if self.stream is not None and self.stream.done:
            end_stream(self, self.stream)
        else:
            # A worker may end what nobody takes from it.
            slow = self.slow or self.loop.time() < self.held_back_until
            end_attempt(self, name_failure(failure, held_back=slow and self.phase == STREAMING), detail)

    def turn_away(self, error: RequestError) -> None:
        """Its place in the queue is somebody else's."""
        leave_queue(self, "full")
        fail(self, error)

    def tick(self, now: float) -> None:
        """Work off tokens and enforce deadlines; called a few times a second."""
        if self.reads != self.reads_seen:
            self.reads_seen = self.reads
            if self.phase != WAITING:
                self.deadline = now + self.context.timeouts.idle_seconds
        events = self.events
        if events != self.tokens_seen and self.reservation is not None:
            self.reservation.progress(events - self.tokens_seen, now)
            self.tokens_seen = events
        if not self.inquiry.stream and self.reservation is not None:
            self.reservation.assume(now)
        if self.continuation is not None and self.phase == STREAMING and self.request.body:
            self._account_for(self.continuation)
        if self.slow or self.phase == DELIVERING:
            # The worker is not to blame: it is the client that takes nothing.
            if not self.connection.account() or self.connection.is_stuck(now):
                self.connection.transport.abort()
        elif now >= self.deadline:
            time_out(self)

    def _account_for(self, continuation: Continuation) -> None:
        """What is kept of a stream: nothing any more where there is no room for it."""
        if not continuation.has_changed():
            return
        if not self.connection.account():
            continuation.stream.stop_keeping()
        if not continuation.stream.keeps:
            self.request.body = b""
            self.connection.account()

    def stop(self, error: RequestError) -> None:
        """End it from outside."""
        if self.phase == DELIVERING:
            self.error = error.code
            conclude(self)
        elif self.phase != OVER:
            leave_queue(self, "stopped")
            fail(self, error)

    def on_client_gone(self) -> None:
        if self.phase == OVER:
            return
        drop_call(self)
        leave_queue(self, "left")
        if self.reservation is not None:
            self.reservation.desert(self.loop.time())
        release(self)
        self.status = CLIENT_GONE
        conclude(self)

    def on_client_slow(self) -> None:
        self.slow = True
        if self.call is not None:
            self.call.pause_reading()

    def on_client_ready(self) -> None:
        if self.phase == DELIVERING:
            conclude(self)
            return
        if self.slow and self.phase == WAITING:
            self.slow = False
            self.deadline = self.loop.time() + state.GRACE_SECONDS
            dispatch(self)
            return
        self.slow = False
        self.held_back_until = self.loop.time() + HELD_SECONDS
        self.reads += 1
        if self.call is not None:
            self.call.resume_reading()
            self.loop.call_soon(self.connection.uncount)


def _tell_when(head: ResponseHead, seconds: float | None) -> None:
    """When to come back, by what this gateway knows of all that waits; else as the worker says."""
    if seconds is not None or b"retry-after" not in head.fields:
        ((name, value),) = retry_after(seconds)
        head.headers = [field for field in head.headers if field[0] != b"retry-after"]
        head.headers.append((name.lower().encode(), value.encode()))
