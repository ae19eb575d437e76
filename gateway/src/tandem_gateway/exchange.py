"""The life of one inference request: choose workers, send, pass the answer on, retry while nothing reached the client.

Invariants: every exchange ends exactly once, in `_finish`, which releases its reservation; whatever the client has
received ends as a complete answer, an OpenAI error, or a stream whose last event is an error event. A stream that has
begun goes on at another worker where it can (`resume`).
"""

from __future__ import annotations

import logging
from collections import Counter, deque
from collections.abc import Collection
from time import monotonic
from typing import Protocol
from urllib.parse import quote

from tandem_api.launch import GatewayTimeouts
from tandem_api.names import (
    HEADER_DECODE_WORKER,
    HEADER_KV_SOURCE,
    HEADER_LENIENT,
    HEADER_PREFILL,
    HEADER_PREFILL_WORKER,
    HEADER_PROMPT,
    HEADER_QUEUE_SECONDS,
    HEADER_REQUEST_ID,
    HEADER_RESUME,
    HEADER_RETRY,
    HEADER_ROUTE,
    HEADER_STEP_SECONDS,
    RETRY_FULL,
    Role,
)

from tandem_gateway.errors import (
    GatewayFull,
    NoEndpoint,
    RequestError,
    UpstreamFailed,
    UpstreamTimeout,
    WorkerFull,
    retry_after,
)
from tandem_gateway.http.budget import FREE_BYTES, Budget
from tandem_gateway.http.connection import ClientConnection
from tandem_gateway.http.request import Request
from tandem_gateway.http.response import LAST_CHUNK, build_chunk, build_error, build_head
from tandem_gateway.prompt import Inquiry
from tandem_gateway.queueing import RequestQueue, Waiter
from tandem_gateway.responses.recording import Recording
from tandem_gateway.resume import Continuation, JournaledStream, may_keep
from tandem_gateway.scheduling import (
    KEPT,
    REQUESTS_FAULT,
    SHORT_CHUNKS,
    Choice,
    Decision,
    Endpoint,
    Outcome,
    Reservation,
    Scheduler,
    Worker,
    classify_status,
)
from tandem_gateway.scheduling.isolation import LONGEST_WAIT_SECONDS, Isolation
from tandem_gateway.scheduling.queue import Slot, Ticket
from tandem_gateway.sse import EventStream, EventTooLarge, build_failure, find_usage
from tandem_gateway.tracing import ExchangeTrace
from tandem_gateway.upstream.base import Call, Failure, Link, ResponseHead
from tandem_gateway.upstream.engines.contract import Engine, Order

log = logging.getLogger(__name__)

MAX_ATTEMPTS = 3
MAX_RESETS = 2
"""So many of the times that it is sent may end in a reset: a request that kills its worker must not meet all of
them."""
GRACE_SECONDS = 5.0
"""A request waits this long for what a connection needs where this gateway itself lacks it."""
MAX_HELD_BYTES = 32 * 1024 * 1024
"""An answer in one piece up to this size is held until it is complete, so that a broken one can still be retried."""
SLOWEST_TOKENS_PER_SECOND = 4
"""An answer in one piece shows no sign of life: beyond the first token it may take this long for its tokens."""
SMALL_PART_BYTES = 1024
"""Parts of an answer below this size are held joined: two bytes in an object of their own take twenty times as much."""
DEFAULT_MAX_TOKENS = 4096
CLIENT_GONE = 499
TOO_MANY = 429
HELD_SECONDS = 5.0
"""A worker may end a connection that takes nothing from it. Where an answer breaks so soon after it was held back for a
slow client, or while it is, the worker is not to blame."""
_DECODE_WORKER = HEADER_DECODE_WORKER.encode()
_PREFILL_WORKER = HEADER_PREFILL_WORKER.encode()
_PREFILL = HEADER_PREFILL.encode()
_KV_SOURCE = HEADER_KV_SOURCE.encode()
_PROMPT = HEADER_PROMPT.encode() + b": %b\r\n"
_QUEUE_SECONDS = HEADER_QUEUE_SECONDS.encode()
_REQUEST_ID = HEADER_REQUEST_ID.encode()
_RESUME = HEADER_RESUME.encode()
_RETRY = HEADER_RETRY.encode()
_RETRY_FULL = RETRY_FULL.encode()
_ROUTE = HEADER_ROUTE.encode()
_STEP_SECONDS = HEADER_STEP_SECONDS.encode()
_REQUEST_HEAD = b"%b %b HTTP/1.1\r\nhost: %b\r\n%b" + _REQUEST_ID + b": %b\r\ncontent-length: %d\r\n\r\n"
_FORWARDED = (b"content-type", b"accept", b"traceparent", b"tracestate", HEADER_LENIENT.encode())
"""What a worker may learn of the client's header. Never other x-tandem ones, which name machines to connect to and tell
who asks."""


# The phases of an exchange, in order. Plain numbers: members of an enumeration are slow to get at.
NEW = 0
WAITING = 1
"""For an endpoint."""
SENT = 2
"""Nothing has reached the client: everything can still be retried."""
STREAMING = 3
DELIVERING = 4
"""The worker has done its part, the client has not taken all of it."""
OVER = 5
_ANSWERED = Outcome.ANSWERED
_NO_NAMES: frozenset[str] = frozenset()
_BROKEN = frozenset({Failure.RESET, Failure.STALE})
"""A connection to the worker ended: it may have died."""


class Context(Protocol):
    """What exchanges share: the gateway as they see it."""

    scheduler: Scheduler
    decisions: deque[Decision]
    """The last ones."""
    timeouts: GatewayTimeouts
    budget: Budget
    queue: RequestQueue
    isolation: Isolation
    draining: bool
    explains: bool
    """Who asks is told where their request went."""
    token_line: bytes
    """The header line that tells workers who asks; empty without keys."""
    engines: dict[str, Engine]
    """How workers of other engines than Tandem's are asked."""

    def link(self, endpoint: Endpoint) -> Link: ...

    def on_exchange_end(self, exchange: Exchange) -> None: ...

    def on_retry(self, exchange: Exchange, reason: str) -> None: ...

    def on_resumed(self, reason: str) -> None:
        """A stream goes on at another worker."""
        ...

    def on_resume_failed(self, reason: str) -> None:
        """A stream ends because no worker could go on with it."""
        ...

    def on_unauthorized(self, endpoint: Endpoint) -> None: ...


class Exchange:
    """Sink of its upstream calls and conversation of its client connection."""

    __slots__ = (
        "_arrived", "_call", "_connect_by", "_connection", "_context", "_continuation", "_deadline", "_displaced",
        "_excluded",
        "_give_up_at", "_head", "_held", "_held_back_until", "_held_bytes", "_isolate_by", "_keep_alive_after", "_loop",
        "_phase", "_reads", "_reads_seen", "_reservation", "_resets", "_slot", "_slow", "_stream", "_suspects",
        "_ticket", "_tokens_seen", "_unsent", "attempts", "bytes_out", "choice", "error", "first_byte_at", "inquiry",
        "queue_seconds", "recording", "request", "request_id", "started_at", "status", "trace", "usage",
    )  # fmt: skip

    def __init__(
        self, context: Context, connection: ClientConnection, request: Request, inquiry: Inquiry, request_id: bytes
    ) -> None:
        self._context = context
        self._connection = connection
        self._loop = connection.loop
        self.request = request
        self.inquiry = inquiry
        self.request_id = request_id
        self.started_at = monotonic()
        self._arrived = self._deadline = self._loop.time()
        self.first_byte_at = 0.0
        """Set for streams alone. When the first token of an answer in one piece was there, only its worker knows."""
        self.status = 0
        self.bytes_out = 0
        self.attempts = 0
        self.choice: Choice | None = None
        self.usage: dict[str, object] | None = None
        self.error: str | None = None
        self.queue_seconds = 0.0
        """Time that it waited for a worker, so far."""
        self.trace: ExchangeTrace | None = None
        """None: its spans are not recorded."""
        self.recording: Recording | None = None
        """None: its answer is nothing to a store of responses."""
        self._phase = NEW
        self._ticket: Ticket[Waiter] | None = None
        """Its place in the queue that it waits in."""
        self._slot: Slot | None = None
        """Its place at the endpoint that the queue sent it to."""
        self._call: Call | None = None
        self._reservation: Reservation | None = None
        self._excluded = _NO_NAMES
        """Workers that are not to be asked again."""
        self._suspects: tuple[tuple[Endpoint, Outcome], ...] = ()
        """Failed in a way that may be the request's fault: an answer from another worker tells."""
        self._give_up_at = 0.0
        """When it waits no longer for a worker."""
        self._connect_by = self._isolate_by = 0.0
        """When this gateway must have what a connection needs; when it is sent to any worker, may it have killed
        one."""
        self._resets = 0
        """Connections that ended under it without an answer: as many workers may have died of it."""
        self._slow = self._displaced = False
        """The client is slow; somebody else has made room for it at a worker."""
        self._held_back_until = -HELD_SECONDS
        self._keep_alive_after = False
        self._unsent = b""
        self._head: ResponseHead | None = None
        self._stream: EventStream | None = None
        self._continuation: Continuation | None = None
        """The journal of a stream that has begun and can go on elsewhere."""
        self._held: list[bytes | bytearray] = []
        self._held_bytes = self._reads = self._reads_seen = self._tokens_seen = 0

    @property
    def waiting(self) -> bool:
        """For a worker, or for what a connection to one needs."""
        return self._phase == WAITING and not self._slow

    @property
    def queued(self) -> bool:
        """It waits in the queue: not because its stream is to move, or a connection is lacking."""
        return self._ticket is not None

    @property
    def delivering(self) -> bool:
        return self._phase == DELIVERING

    @property
    def held_bytes(self) -> int:
        kept = self._continuation.held_bytes if self._continuation is not None else 0
        waits = self._call.held_bytes if self._call is not None else 0
        recorded = self.recording.held_bytes if self.recording is not None else 0
        events = self._stream.held_bytes if self._stream is not None else 0
        return len(self.request.body) + self._held_bytes + kept + waits + recorded + events

    @property
    def resumes(self) -> int:
        """Times that another worker went on with this stream."""
        return self._continuation.moves if self._continuation is not None else 0

    @property
    def _begun(self) -> bool:
        """The client sees a stream."""
        return self.first_byte_at > 0

    @property
    def answered_status(self) -> int | None:
        """What the worker that was asked last has answered; None where it has not."""
        return self._head.status if self._head is not None else None

    @property
    def events(self) -> int:
        return self._stream.events if self._stream is not None else 0

    def dispatch(self, full: Collection[str] = _NO_NAMES) -> bool:
        """Send the request to the best endpoint that is not `full`, or wait for one. False: it waits, or has failed.

        Called again whenever endpoints change.
        """
        now = self._loop.time()
        context, continuation, demand = self._context, self._continuation, self.inquiry.demand
        began = 0.0 if self.trace is None else monotonic()
        if self._phase == NEW and context.queue.line.size and context.queue.enabled:
            self._join_queue(now)  # others were here before
            return False
        suspect = self._resets > 0 and not self.first_byte_at
        apart = _NO_NAMES
        if suspect:
            choice, apart = self._choose_apart(full, now)
        else:
            choice = context.scheduler.choose(demand, now, full or self._excluded)
        if continuation is not None and choice is not None and not _may_go_on(choice.decode.worker, continuation):
            choice = self._choose_to_go_on(continuation, now)
        if choice is None:
            if self._ticket is None:
                self._wait_for_worker(now, apart)
            return False
        if self._ticket is not None:
            self._leave_queue("placed")
            self._slot = context.queue.take(choice.decode, now, stream=demand.stream)
        self.choice = choice
        self.attempts += 1
        self._reservation = reservation = context.scheduler.reserve(choice, demand, now)
        if suspect:
            context.isolation.add(choice.decode.worker.name, reservation, now)
        decisions = context.decisions
        if len(decisions) == KEPT:
            decisions[0][-1].offers = []  # its request may run for long
        reservation.holder = self
        choice.expected, choice.work = reservation.expected, reservation.work
        decisions.append((self.request_id, now, self.attempts, self.queue_seconds, choice))
        self._phase = SENT
        self._reads_seen = self._reads
        self._deadline = now + self._answer_seconds()
        request = self.request
        if self.trace is not None:
            self.trace.chose(self, choice, began, resumes=continuation is not None)
        if choice.decode.worker.engine != "Tandem":
            return self._start_elsewhere(choice, fresh=suspect)
        journal = continuation.stream.build_prefix() if continuation is not None else b""
        keeps = demand.stream and not demand.local
        line = context.token_line
        if len(demand.prefix) >= SHORT_CHUNKS:
            line += _PROMPT % context.scheduler.name_prompt(choice, demand).encode()
        head = build_request_head(request, choice, self.request_id, line, len(journal) if keeps else None)
        self._call = context.link(choice.decode).start(
            self, head, journal + request.body, fresh=suspect, elsewhere=self._can_go_elsewhere
        )
        return True

    def _start_elsewhere(self, choice: Choice, *, fresh: bool) -> bool:
        """Send the request to a worker of another project's engine. False: it has failed."""
        request = self.request
        order = Order(
            method=request.method, path=request.path, headers=request.headers, body=request.body,
            request_id=self.request_id, choice=choice, fresh=fresh,
        )  # fmt: skip
        try:
            self._call = self._context.engines[choice.decode.worker.engine].start(self, order)
        except RequestError as error:
            self._fail(error)
            return False
        return True

    def _can_go_elsewhere(self) -> bool:
        """Another worker is there for a request of which nobody can tell whether it ended the one that had it."""
        assert self.choice is not None
        excluded = self._excluded | {self.choice.decode.worker.name}
        return self._context.scheduler.choose(self.inquiry.demand, self._loop.time(), excluded) is not None

    def _wait_for_worker(self, now: float, apart: Collection[str]) -> None:
        if apart:
            self._phase = WAITING  # until one of those has no suspect any more
            self._deadline = self._isolate_by + GRACE_SECONDS
            return
        # Everyone was tried: whoever comes back first from its back-off may try again.
        self._excluded = _NO_NAMES
        if self.first_byte_at:
            self._phase = WAITING
        else:
            self._join_queue(now)

    def _choose_apart(self, full: Collection[str], now: float) -> tuple[Choice | None, frozenset[str]]:
        """A worker without another request that may kill it, and those that this one is kept from meanwhile."""
        self._isolate_by = self._isolate_by or now + LONGEST_WAIT_SECONDS
        scheduler, isolation, demand = self._context.scheduler, self._context.isolation, self.inquiry.demand
        kept_from = {*full, *self._excluded}
        occupied = isolation.find_occupied(now)
        choice = scheduler.choose(demand, now, kept_from | occupied)
        if choice is not None or not occupied:
            return choice, occupied
        closed = isolation.find_closed(now) if now < self._isolate_by else _NO_NAMES
        if len(closed) == len(occupied):
            return None, closed  # the same ones
        return scheduler.choose(demand, now, kept_from | closed), closed

    def _join_queue(self, now: float) -> None:
        """Nobody serves: wait for somebody."""
        queue = self._context.queue
        self._give_up_at = self._give_up_at or now + queue.settings.ttl_seconds
        if now >= self._give_up_at:
            self._fail(queue.refuse())
            return
        tokens = self.inquiry.demand.prompt_tokens
        try:
            self._ticket = queue.join(
                self, arrived=self._arrived, tokens=tokens, now=now, source=self._connection.source
            )
        except RequestError as error:
            self._fail(error)
            return
        if self.trace is not None:
            self.trace.queued()
        self._phase = WAITING
        self._deadline = self._give_up_at

    def _leave_queue(self, outcome: str) -> None:
        ticket, self._ticket = self._ticket, None
        if ticket is not None:
            self.queue_seconds += self._context.queue.leave(ticket, outcome, self._loop.time())
            if self.trace is not None:
                self.trace.left_queue(outcome)

    def turn_away(self, error: RequestError) -> None:
        """Its place in the queue is somebody else's."""
        self._leave_queue("full")
        self._fail(error)

    def _choose_to_go_on(self, continuation: Continuation, now: float) -> Choice | None:
        scheduler = self._context.scheduler
        workers = [endpoint.worker for endpoint in scheduler.endpoints.values()]
        others = {worker.name for worker in workers if not _may_go_on(worker, continuation)}
        return scheduler.choose(self.inquiry.demand, now, self._excluded | others)

    def tick(self, now: float) -> None:
        """Work off tokens and enforce deadlines; called a few times a second."""
        if self._reads != self._reads_seen:
            self._reads_seen = self._reads
            if self._phase != WAITING:
                self._deadline = now + self._context.timeouts.idle_seconds
        events = self.events
        if events != self._tokens_seen and self._reservation is not None:
            self._reservation.progress(events - self._tokens_seen, now)
            self._tokens_seen = events
        if not self.inquiry.stream and self._reservation is not None:
            self._reservation.assume(now)
        if self._continuation is not None and self._phase == STREAMING and self.request.body:
            self._account_for(self._continuation)
        if self._slow or self._phase == DELIVERING:
            # The worker is not to blame: it is the client that takes nothing.
            if not self._connection.account() or self._connection.is_stuck(now):
                self._connection.transport.abort()
        elif now >= self._deadline:
            self._time_out()

    def _account_for(self, continuation: Continuation) -> None:
        """What is kept of a stream: nothing any more where there is no room for it."""
        if not continuation.has_changed():
            return
        if not self._connection.account():
            continuation.stream.stop_keeping()
        if not continuation.stream.keeps:
            self.request.body = b""
            self._connection.account()

    def stop(self, error: RequestError) -> None:
        """End it from outside."""
        if self._phase == DELIVERING:
            self.error = error.code
            self._conclude()
        elif self._phase != OVER:
            self._leave_queue("stopped")
            self._fail(error)

    # the worker's side

    def on_upstream_head(self, head: ResponseHead) -> None:
        fields = head.fields
        outcome = _ANSWERED if head.status == 200 else classify_status(head.status, fields.get(_RETRY))
        if (outcome is not _ANSWERED or self.first_byte_at) and not self._may_take(outcome, head):
            return
        self._take_answer(outcome, head)
        if head.status == TOO_MANY:
            _tell_when(head, self._context.queue.find_backlog())
        self._head = head
        self._reads += 1
        if self.queue_seconds:
            head.headers.append((_QUEUE_SECONDS, b"%.3f" % self.queue_seconds))
        if fields.get(b"content-type", b"").startswith(b"text/event-stream"):
            journal = fields.get(_RESUME)
            self._stream = EventStream() if journal is None else JournaledStream(journal)
        if self.recording is not None and head.status == 200:
            self._stream = self.recording.follow(head, self._stream)

    def _may_take(self, outcome: Outcome, head: ResponseHead) -> bool:
        """Whether this answer, which is a failure or not the first one, is for the client. Where it is not, what is to
        be done instead is done.
        """
        assert self.choice is not None
        if outcome is Outcome.DRAINING:
            self._drop_call()
            self._recover(outcome, "the worker is shutting down", failed=None)
        elif outcome is Outcome.UNAUTHORIZED:
            # About this gateway's key, never about the client, who has shown the worker nothing.
            self._drop_call()
            self._context.on_unauthorized(self.choice.decode)
            self._recover(outcome, "the worker does not take this gateway's key")
        elif self._begun:
            self._go_on(outcome, head)
        elif outcome is not _ANSWERED and self._can_move():
            self._drop_call()
            self._recover(outcome, f"the worker answered {head.status}", failed=head.status >= 500)
        elif head.fields.get(_RETRY) != _RETRY_FULL or not self._displace():
            return True
        return False

    def _displace(self) -> bool:
        """The worker has as many requests waiting as it takes: let the newest of whoever has most there go instead of
        this one, where that is somebody else with more than one more. False: this one is refused."""
        choice = self.choice
        assert choice is not None
        endpoint, now = choice.decode, self._loop.time()
        if self._displaced or self._phase != SENT:
            return False
        newest: dict[str, Exchange] = {}
        counts: Counter[str] = Counter()
        for reservation in endpoint.owing:
            holder = reservation.holder
            if isinstance(holder, Exchange) and holder.choice is not None and holder.choice.decode is endpoint:
                counts[holder.source] += 1
                newest[holder.source] = holder
        source, most = counts.most_common(1)[0] if counts else ("", 0)
        if source == self.source or most <= counts[self.source]:
            return False
        self._displaced = True
        self._drop_call()
        self._count_end(failed=False)
        if self.trace is not None:
            self.trace.attempt_ended(self, Outcome.BUSY.value, self.answered_status)
        self._release()
        others = (other.worker for other in self._context.scheduler.endpoints.values() if other is not endpoint)
        self._excluded = frozenset(worker.name for worker in others if worker.role is not Role.PREFILL)
        self._phase, self._deadline = WAITING, now + GRACE_SECONDS
        newest[source].turn_away(
            WorkerFull(
                "as many requests wait at the worker as it takes, and most of them are of this client's address; try"
                " again later",
                self._context.queue.find_backlog(),
            )
        )
        return True

    @property
    def source(self) -> str:
        """The client whose request it is, as far as an address tells."""
        return self._connection.source

    def _can_move(self) -> bool:
        """Nothing of this answer has reached the client, and another worker is free to give a better one."""
        assert self.choice is not None
        scheduler = self._context.scheduler
        if self.attempts >= MAX_ATTEMPTS or self._phase != SENT:
            return False
        excluded = self._excluded | {self.choice.decode.worker.name}
        return scheduler.choose(self.inquiry.demand, self._loop.time(), excluded) is not None and scheduler.may_retry()

    def _recover(self, outcome: Outcome, detail: str, *, failed: bool | None = True, blame: bool = True) -> None:
        """This attempt has ended without an answer, or within it. `failed`: whether the worker failed; None where it
        did nothing, and rightly so. `blame`: the outcome says something about the worker.
        """
        if failed is not None:
            self._count_end(failed=failed)
        if self.trace is not None:
            self.trace.attempt_ended(self, outcome.value, self.answered_status)
        if blame:
            self._blame(outcome)
        if not self._begun:
            self._retry(outcome, detail)
        elif not self._move(outcome, detail):
            error = UpstreamTimeout if outcome is Outcome.TIMEOUT else UpstreamFailed
            self._fail(error(f"the answer broke off: {detail}"))

    def _blame(self, outcome: Outcome) -> None:
        """What may be the fault of a request that nobody has answered yet waits until another worker has."""
        assert self.choice is not None
        decode, scheduler, now = self.choice.decode, self._context.scheduler, self._loop.time()
        if outcome is Outcome.TIMEOUT:
            timeouts = self._context.timeouts
            allowed = self._answer_seconds() if self._head is None else timeouts.idle_seconds
            scheduler.report_timeout(decode, allowed, now)
        elif outcome in REQUESTS_FAULT and not self._begun:
            self._suspects += ((decode, outcome),)
        else:
            scheduler.report(decode, outcome, now)

    def _move(self, outcome: Outcome, detail: str) -> bool:
        """Let another worker go on with a stream that has begun. False: that cannot be."""
        continuation, now = self._continuation, self._loop.time()
        assert self.choice is not None
        decode, reason = self.choice.decode, outcome.value
        problem = "unkept" if continuation is None else continuation.start_move(reason, now)
        if continuation is None or problem is not None:
            self._context.on_resume_failed(problem or "unkept")
            return False
        log.info("a stream moves", extra={"request_id": self.request_id.decode(), "reason": reason, "detail": detail,
                                          "worker": decode.worker.name})  # fmt: skip
        self._call = None
        self._release()
        self._excluded |= {decode.worker.name}
        unsent, self._unsent = self._unsent, b""
        if unsent:
            self._connection.transport.write(unsent)
        self._deadline = continuation.deadline
        if self._slow:
            self._phase = WAITING  # for its client: nothing would hold the next worker back
        else:
            self.dispatch()
        return True

    def _go_on(self, outcome: Outcome, head: ResponseHead) -> None:
        """What a worker answers that was to take over a stream."""
        continuation = self._continuation
        assert continuation is not None
        assert self._reservation is not None
        now = self._loop.time()
        if head.status == 200 and _RESUME in head.fields:
            self._take_answer(outcome, head)
            self._phase = STREAMING
            self._reads += 1
            self._reservation.first_token(now)
            self._context.on_resumed(continuation.end_move())
            return
        self._drop_call()
        if outcome is _ANSWERED:
            self._count_end(failed=False)
            self._context.on_resume_failed("refused")
            self._fail(UpstreamFailed(f"the answer broke off, and no other worker could go on with it ({head.status})"))
        else:
            self._recover(outcome, f"the worker answered {head.status}", failed=head.status >= 500)

    def _take_answer(self, outcome: Outcome, head: ResponseHead) -> None:
        """This is the answer that the client gets: what it says about the workers."""
        assert self.choice is not None
        assert self._reservation is not None
        scheduler, choice, now = self._context.scheduler, self.choice, self._loop.time()
        if self._suspects:
            if outcome is _ANSWERED:
                for endpoint, failure in self._suspects:
                    scheduler.report(endpoint, failure, now)
            self._suspects = ()
        if outcome is not Outcome.ERROR:  # it may be the request's fault, and nobody else is there to tell
            scheduler.report(choice.decode, outcome, now)
        if head.status == 200:
            scheduler.accept(choice, self.inquiry.demand, self._reservation, now)
            if choice.prefill:
                scheduler.report_prefill(choice, head.fields.get(_PREFILL_WORKER, b"").decode("latin-1"), now)

    def on_upstream_body(self, data: bytes, *, final: bool) -> None:
        self._reads += 1
        stream = self._stream
        if stream is None:
            self._hold(data)
            return
        try:
            data = stream.feed(data)
        except EventTooLarge:
            self._drop_call()
            self._count_end(failed=True)
            self._fail(UpstreamFailed("the worker sent an event without end"))
            return
        if not data:
            return
        self.bytes_out += len(data)
        # Inlined build_chunk: this line runs once per token.
        out = data if self.request.http10 else b"%x\r\n%b\r\n" % (len(data), data)
        if self._phase != STREAMING:
            out = self._begin() + out
        if final:
            self._unsent = out
        else:
            self._connection.transport.write(out)

    def on_upstream_end(self) -> None:
        call, self._call = self._call, None
        stream = self._stream
        if stream is None:
            self._complete()
        elif stream.done or stream.failed:
            self._end_stream(stream)
        else:
            self._resets += call is not None and call.resent
            moved = isinstance(stream, JournaledStream) and stream.moved
            detail = "the worker ended its stream before the answer was complete"
            self._recover(Outcome.DRAINING if moved else Outcome.RESET, detail, failed=None if moved else True)

    def on_upstream_failure(self, failure: Failure, detail: str) -> None:
        self._take_call()
        if failure in _BROKEN:
            assert self.choice is not None
            self._context.isolation.report_death(self.choice.decode.worker.name, self._loop.time())
        if self._stream is not None and self._stream.done:
            self._end_stream(self._stream)
        elif failure is Failure.LOCAL:
            self._wait(detail)
        elif failure in (Failure.HELPER, Failure.STALE):
            self._recover(Outcome.RESET, detail, failed=None, blame=False)
        else:
            # A worker may end what nobody takes from it.
            streams = self._phase == STREAMING
            held = streams and (self._slow or self._loop.time() < self._held_back_until)
            outcome = Outcome.REFUSED if failure is Failure.CONNECT else Outcome.RESET
            self._recover(outcome, detail, failed=None if held else True, blame=not held)

    # the client's side

    def on_client_gone(self) -> None:
        if self._phase == OVER:
            return
        self._drop_call()
        self._leave_queue("left")
        if self._reservation is not None:
            self._reservation.desert(self._loop.time())
        self._release()
        self.status = CLIENT_GONE
        self._conclude()

    def on_client_slow(self) -> None:
        self._slow = True
        if self._call is not None:
            self._call.pause_reading()

    def on_client_ready(self) -> None:
        if self._phase == DELIVERING:
            self._conclude()
            return
        if self._slow and self._phase == WAITING:
            self._slow = False
            self._deadline = self._loop.time() + GRACE_SECONDS
            self.dispatch()
            return
        self._slow = False
        self._held_back_until = self._loop.time() + HELD_SECONDS
        self._reads += 1
        if self._call is not None:
            self._call.resume_reading()
            self._loop.call_soon(self._connection.uncount)

    # decisions

    def _answer_seconds(self) -> float:
        timeouts = self._context.timeouts
        if self.first_byte_at:
            return min(timeouts.idle_seconds, timeouts.first_token_seconds)
        if self.inquiry.stream:
            return timeouts.first_token_seconds
        tokens = self.inquiry.max_tokens or DEFAULT_MAX_TOKENS
        longest = max(timeouts.answer_seconds, timeouts.first_token_seconds)
        return min(timeouts.first_token_seconds + tokens / SLOWEST_TOKENS_PER_SECOND, longest)

    def _time_out(self) -> None:
        if self._phase == WAITING:
            if self._begun:
                self._context.on_resume_failed("time")
            if self._ticket is not None and self._stay_in_queue():
                return
            self._leave_queue("expired")
            self._fail(self._context.queue.refuse())
            return
        moves = self.inquiry.stream and (self._begun or self._can_move())
        self._drop_call()
        if moves:
            self._recover(Outcome.TIMEOUT, "the worker was silent for too long")
            return
        self._count_end(failed=True)
        self._blame(Outcome.TIMEOUT)
        if self._head is None:
            self._fail(UpstreamTimeout("the worker did not begin its answer in time"))
        else:
            self._fail(UpstreamTimeout("the worker was silent for too long"))

    def _stay_in_queue(self) -> bool:
        """Its time in the queue is over. Where somebody serves by now, its turn comes: in as much time again it goes to
        a worker, be there many before it.
        """
        now = self._loop.time()
        if self._deadline > self._give_up_at:
            return self.dispatch()
        self._deadline = now + self._context.queue.settings.ttl_seconds
        return self._context.scheduler.choose(self.inquiry.demand, now) is not None

    def _wait(self, detail: str) -> None:
        """The gateway itself lacks what a connection needs. Others may soon give some back."""
        self._release()
        if self.trace is not None:
            self.trace.attempt_ended(self, Failure.LOCAL.value, None)
        now = self._loop.time()
        self._connect_by = self._connect_by or now + GRACE_SECONDS
        if now >= self._connect_by:
            self._fail(GatewayFull(f"the gateway cannot connect to a worker: {detail}; try again shortly"))
            return
        self._context.on_retry(self, Failure.LOCAL.value)
        self.attempts -= 1
        self._deadline = self._connect_by + GRACE_SECONDS
        self._phase = WAITING

    def _retry(self, outcome: Outcome, detail: str) -> None:
        """Nothing reached the client: hand the request to another worker, unless it has been round enough."""
        assert self.choice is not None
        decode = self.choice.decode
        now = self._loop.time()
        self._release()
        self._head = self._stream = None
        self._held.clear()
        self._held_bytes = 0
        self._excluded |= {decode.worker.name}
        self._resets += outcome in (Outcome.RESET, Outcome.TIMEOUT)
        exhausted = self.attempts >= MAX_ATTEMPTS or self._resets >= MAX_RESETS
        if outcome in (Outcome.REFUSED, Outcome.UNAUTHORIZED):
            # Costs nothing but time: a pod that restarts in place is back soon, keys arrive, or another takes over.
            self._give_up_at = self._give_up_at or now + self._context.queue.settings.ttl_seconds
            exhausted = exhausted and now >= self._give_up_at
        elif outcome is not Outcome.DRAINING:
            self._give_up_at = 0.0  # this worker had begun with it: should nobody be there, the wait begins anew
        if exhausted and not self._resets:
            self._fail(NoEndpoint(f"no worker is available: {detail}; try again shortly"))
            return
        if exhausted:
            self._fail(
                UpstreamFailed(f"no worker could answer after {self.attempts} attempts; the last said: {detail}")
            )
            return
        self._context.on_retry(self, outcome.value)
        self.dispatch()

    # what the client gets

    def _begin(self) -> bytes:
        """The first event is here: from now on the client sees a stream, which begins with the returned header."""
        assert self._head is not None
        assert self._reservation is not None
        assert self.choice is not None
        self._phase = STREAMING
        self.status = self._head.status
        self.first_byte_at = monotonic()
        if self._slot is not None:
            self._slot.end(answered=True)
        reservation, now = self._reservation, self._loop.time()
        self.choice.decode.count_first_token(now - reservation.since)
        self.choice.measured = now - reservation.since
        reservation.first_token(now)
        stream, size = self._stream, len(self.request.body)
        if isinstance(stream, JournaledStream) and stream.keeps and may_keep(self._context.budget, size):
            self._continuation = Continuation(stream, self.choice.decode.worker.revision)
        else:
            self.request.body = b""
            self._connection.uncount()
        if _ROUTE in self.request.headers:
            self._explain()
        framing = b"" if self.request.http10 else b"\r\ntransfer-encoding: chunked"
        self._keep_alive_after = keep_alive = self.request.keep_alive and not self._context.draining
        return build_head(self._head, self.request_id, framing + self.request.answer_fields, keep_alive=keep_alive)

    def _end_stream(self, stream: EventStream) -> None:
        self._connection.transport.write(self._unsent if self.request.http10 else self._unsent + LAST_CHUNK)
        assert self._head is not None
        self.usage = find_usage(stream.tail) or self._head.usage
        if self.usage is None and isinstance(stream, JournaledStream):
            self.usage = stream.read_usage()
        failed = stream.failed
        if failed:
            self.error = "worker"
        assert self.choice is not None
        self.choice.decode.count_end(failed=failed)
        # As its head has said, also when this gateway ends by now: the client's next request may be on its way.
        self._finish(keep_alive=self._keep_alive_after)

    def _hold(self, data: bytes) -> None:
        held = self._held
        if held and len(data) < SMALL_PART_BYTES:
            if not isinstance(held[-1], bytearray):
                held.append(bytearray())
            held[-1] += data
        else:
            held.append(data)
        self._held_bytes += len(data)
        if self._held_bytes > MAX_HELD_BYTES:
            self._drop_call()
            self._fail(UpstreamFailed(f"the worker's answer exceeds {MAX_HELD_BYTES} bytes; ask for a stream"))
        elif self._held_bytes > FREE_BYTES and not self._connection.account():
            self._drop_call()
            self._fail(GatewayFull("the gateway holds as many bytes as it may; ask for a stream, or try again shortly"))

    def _complete(self) -> None:
        """An answer in one piece has arrived."""
        assert self._head is not None
        if self._reservation is not None:
            self._reservation.complete(self._loop.time())
            if self._slot is not None:
                self._slot.end(answered=True)
            if _ROUTE in self.request.headers:
                self._explain()
        body = bytes(self._held[0]) if len(self._held) == 1 else b"".join(self._held)
        self._held = []
        if self._head.rewrite is not None:
            body = self._head.rewrite(body)
        self.status = self._head.status
        self._count_end(failed=self.status >= 500)
        if self.status == 200 and b'"usage"' in body:
            self.usage = find_usage(body)
        framing = b"\r\ncontent-length: %d" % len(body) + self.request.answer_fields
        head = build_head(self._head, self.request_id, framing, keep_alive=self._keep_alive)
        self.bytes_out = len(body)
        self._connection.write(head + body)
        self._finish(keep_alive=self._keep_alive)

    def _fail(self, error: RequestError) -> None:
        self._drop_call()
        self.error = error.code or error.kind
        if self._begun:
            event = build_failure(self.request.path, error.body())
            self._connection.write(self._unsent + (event if self.request.http10 else build_chunk(event) + LAST_CHUNK))
            self._finish(keep_alive=False)
            return
        self.status = error.status
        if self.queue_seconds:
            error.headers += ((HEADER_QUEUE_SECONDS, f"{self.queue_seconds:.3f}"),)
        fields = self.request.answer_fields
        self._connection.write(build_error(error, self.request_id, keep_alive=self._keep_alive, more=fields))
        self._finish(keep_alive=self._keep_alive)

    @property
    def _keep_alive(self) -> bool:
        return self.request.keep_alive and not self._context.draining

    def _explain(self) -> None:
        """For who asks: where the request went, and what was expected of it there."""
        if not self._context.explains or self.request.headers.get(_ROUTE) != b"explain":
            return
        assert self._head is not None
        assert self.choice is not None
        choice, expected, canary = self.choice, self.choice.expected, self.inquiry.demand.canary
        behind = None if choice.conversion is None else choice.conversion.prefill_seconds
        fields = {
            "decode": choice.decode.worker.name,
            "prefill": ",".join(endpoint.worker.name for endpoint in choice.prefill),
            "converted": "true" if self.converted else "",
            "prefill_ms": round(1000 * behind) if self.converted and behind is not None else "",
            "revision": choice.decode.worker.revision,
            "canary": "" if canary is None else str(canary).lower(),
            "attempts": self.attempts,
            "uncached_tokens": choice.uncached_tokens,
            "cached_tokens": choice.cached_tokens,
            "ttft_ms": "" if expected is None else round(1000 * expected),
        }
        text = "; ".join(f"{name}={quote(str(value), safe=',:[]')}" for name, value in fields.items() if value != "")
        self._head.headers.append((_ROUTE, text.encode()))

    # endings

    def _count_end(self, *, failed: bool) -> None:
        assert self.choice is not None
        self.choice.decode.count_end(failed=failed)

    def _take_call(self) -> Call | None:
        """It is over, or is to be."""
        call, self._call = self._call, None
        if call is not None and call.resent:
            self._resets += 1
        return call

    def _drop_call(self) -> None:
        call = self._take_call()
        if call is not None:
            call.cancel()

    def _release(self) -> None:
        if self._slot is not None:
            self._slot.end(answered=False)
            self._slot = None
        if self._reservation is not None:
            self._reservation.release()
            self._reservation = None

    def _finish(self, *, keep_alive: bool) -> None:
        """What is left is the client's to take."""
        if self._phase >= DELIVERING:
            return
        self._phase = DELIVERING
        if self._slot is not None:
            self._slot.end(answered=False)
        if self._reservation is not None:
            self._reservation.release()
            self._reservation = None
        self._keep_alive_after = keep_alive
        if not self._connection.blocked or self._connection.closed:
            self._conclude()

    def _conclude(self) -> None:
        self._phase = OVER
        self._held_bytes = 0
        self.request.body = b""
        self._context.on_exchange_end(self)
        self._continuation = None
        self._connection.finish(keep_alive=self._keep_alive_after)

    # records

    @property
    def converted(self) -> bool:
        """Its decode worker was to compute the prompt because prefill workers were behind."""
        choice = self.choice
        return choice is not None and choice.conversion is not None and choice.conversion.converted

    def worker_names(self) -> tuple[str | None, str | None]:
        """Decode and prefill worker: as the worker told, else as chosen."""
        if self.choice is None:
            return None, None
        prefill = self.choice.prefill[0] if self.choice.prefill else self.choice.decode
        fields = self._head.fields if self._head is not None else {}
        decode_name = fields.get(_DECODE_WORKER) or self.choice.decode.worker.name.encode()
        prefill_name = fields.get(_PREFILL_WORKER) or prefill.worker.name.encode()
        return decode_name.decode("latin-1"), prefill_name.decode("latin-1")


def _tell_when(head: ResponseHead, seconds: float | None) -> None:
    """When to come back, by what this gateway knows of all that waits; else as the worker says."""
    if seconds is not None or b"retry-after" not in head.fields:
        ((name, value),) = retry_after(seconds)
        head.headers = [field for field in head.headers if field[0] != b"retry-after"]
        head.headers.append((name.lower().encode(), value.encode()))


def _may_go_on(worker: Worker, continuation: Continuation) -> bool:
    """Whether a stream can move there: engines of other projects know nothing of journals."""
    return worker.revision == continuation.revision and worker.engine == "Tandem"


def build_request_head(
    request: Request, choice: Choice, request_id: bytes, own_lines: bytes, journal_bytes: int | None
) -> bytes:
    """The header that goes to the decode worker. Built from an allow-list; the body follows unchanged.

    `own_lines` are the gateway's token and the name of the prompt.
    `journal_bytes` go before the body of a stream: 0 where it begins. None: the answer has no journal.
    """
    more, length, headers = own_lines, len(request.body), request.headers
    for name in _FORWARDED:
        if name in headers:
            more += name + b": " + headers[name] + b"\r\n"
    if choice.prefill:
        addresses = b",".join([endpoint.prefill_address for endpoint in choice.prefill])
        more += _PREFILL + b": " + addresses + b"\r\n"
    elif choice.conversion is not None:
        more += _STEP_SECONDS + b": %.6f\r\n" % choice.conversion.step_seconds
    if choice.source is not None:
        tokens = choice.cached_tokens
        more += _KV_SOURCE + b": " + choice.source.prefill_address + b";tokens=%d\r\n" % tokens
    if journal_bytes is not None:
        more += _RESUME + b": %d\r\n" % journal_bytes
        length += journal_bytes
    return _REQUEST_HEAD % (request.method, request.path.encode(), choice.decode.host, more, request_id, length)
