"""One inference request on its way: what it is, how far it has come, and what it holds. What is done with it stands in
`delivery`, `dispatching` and `aftermath`; `exchange` puts them together.
"""

from __future__ import annotations

from collections import deque
from time import monotonic
from typing import Protocol

from tandem_api.launch import GatewayTimeouts
from tandem_api.names import HEADER_DECODE_WORKER, HEADER_PREFILL_WORKER

from tandem_gateway.exchange.queueing import RequestQueue, Waiter
from tandem_gateway.exchange.resume import Continuation
from tandem_gateway.http.budget import Budget
from tandem_gateway.http.connection import ClientConnection, Conversation
from tandem_gateway.http.request import Request
from tandem_gateway.http.response import ResponseHead
from tandem_gateway.http.sse import EventStream
from tandem_gateway.records.metrics import Metrics
from tandem_gateway.records.tracing import ExchangeTrace
from tandem_gateway.requests.prompt import Inquiry
from tandem_gateway.responses.recording import Recording
from tandem_gateway.scheduling import Choice, Decision, Endpoint, Outcome, Reservation, Scheduler
from tandem_gateway.scheduling.isolation import Isolation
from tandem_gateway.scheduling.queue import Slot, Ticket
from tandem_gateway.upstream.base import Call, Link, Sink
from tandem_gateway.upstream.engines.contract import Engine

GRACE_SECONDS = 5.0
"""A request waits this long for what a connection needs where this gateway itself lacks it."""
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
HELD_SECONDS = 5.0
"""A worker may end a connection that takes nothing from it. Where an answer breaks so soon after it was held back for a
slow client, or while it is, the worker is not to blame."""
NO_NAMES: frozenset[str] = frozenset()
_DECODE_WORKER = HEADER_DECODE_WORKER.encode()
_PREFILL_WORKER = HEADER_PREFILL_WORKER.encode()


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
    metrics: Metrics
    engines: dict[str, Engine]
    """How workers of other engines than Tandem's are asked."""

    def link(self, endpoint: Endpoint) -> Link: ...

    def on_exchange_end(self, exchange: ExchangeState) -> None: ...

    def on_unauthorized(self, endpoint: Endpoint) -> None: ...


class Timed(Protocol):
    """What the clock wants of an exchange."""

    __slots__ = ()

    def tick(self, now: float) -> None:
        """Work off tokens and enforce deadlines; called a few times a second."""
        ...


class ExchangeState(Sink, Waiter, Conversation, Timed):
    """All that is known of one request. Satisfies `records.contract.RecordedExchange`."""

    __slots__ = (
        "arrived", "attempts", "bytes_out", "call", "choice", "connect_by", "connection", "context", "continuation",
        "deadline", "displaced", "error", "excluded", "first_byte_at", "give_up_at", "head", "held", "held_back_until",
        "held_size", "inquiry", "isolate_by", "keep_alive_after", "loop", "phase", "queue_seconds", "reads",
        "reads_seen", "recording", "request", "request_id", "reservation", "resets", "slot", "slow", "started_at",
        "status", "stream", "suspects", "ticket", "tokens_seen", "trace", "unsent", "usage",
    )  # fmt: skip

    def __init__(
        self,
        context: Context,
        connection: ClientConnection,
        request: Request,
        inquiry: Inquiry,
        request_id: bytes,
        recording: Recording | None = None,
        trace: ExchangeTrace | None = None,
    ) -> None:
        """Without a `recording` its answer is nothing to a store of responses, without a `trace` its spans are not
        recorded."""
        self.context = context
        self.connection = connection
        self.loop = connection.loop
        self.request = request
        self.inquiry = inquiry
        self.request_id = request_id
        self.started_at = monotonic()
        self.arrived = self.deadline = self.loop.time()
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
        self.trace = trace
        self.recording = recording
        self.phase = NEW
        self.ticket: Ticket[Waiter] | None = None
        """Its place in the queue that it waits in."""
        self.slot: Slot | None = None
        """Its place at the endpoint that the queue sent it to."""
        self.call: Call | None = None
        self.reservation: Reservation | None = None
        self.excluded = NO_NAMES
        """Workers that are not to be asked again."""
        self.suspects: tuple[tuple[Endpoint, Outcome], ...] = ()
        """Failed in a way that may be the request's fault: an answer from another worker tells."""
        self.give_up_at = 0.0
        """When it waits no longer for a worker."""
        self.connect_by = self.isolate_by = 0.0
        """When this gateway must have what a connection needs; when it is sent to any worker, may it have killed
        one."""
        self.resets = 0
        """Connections that ended under it without an answer: as many workers may have died of it."""
        self.slow = self.displaced = False
        """The client is slow; somebody else has made room for it at a worker."""
        self.held_back_until = -HELD_SECONDS
        self.keep_alive_after = False
        self.unsent = b""
        self.head: ResponseHead | None = None
        self.stream: EventStream | None = None
        self.continuation: Continuation | None = None
        """The journal of a stream that has begun and can go on elsewhere."""
        self.held: list[bytes | bytearray] = []
        self.held_size = self.reads = self.reads_seen = self.tokens_seen = 0

    @property
    def waiting(self) -> bool:
        """For a worker, or for what a connection to one needs."""
        return self.phase == WAITING and not self.slow

    @property
    def queued(self) -> bool:
        """It waits in the queue: not because its stream is to move, or a connection is lacking."""
        return self.ticket is not None

    @property
    def delivering(self) -> bool:
        return self.phase == DELIVERING

    @property
    def held_bytes(self) -> int:
        kept = self.continuation.held_bytes if self.continuation is not None else 0
        waits = self.call.held_bytes if self.call is not None else 0
        recorded = self.recording.held_bytes if self.recording is not None else 0
        events = self.stream.held_bytes if self.stream is not None else 0
        return len(self.request.body) + self.held_size + kept + waits + recorded + events

    @property
    def resumes(self) -> int:
        """Times that another worker went on with this stream."""
        return self.continuation.moves if self.continuation is not None else 0

    @property
    def begun(self) -> bool:
        """The client sees a stream."""
        return self.first_byte_at > 0

    @property
    def answered_status(self) -> int | None:
        """What the worker that was asked last has answered; None where it has not."""
        return self.head.status if self.head is not None else None

    @property
    def events(self) -> int:
        return self.stream.events if self.stream is not None else 0

    @property
    def source(self) -> str:
        """The client whose request it is, as far as an address tells."""
        return self.connection.source

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
        fields = self.head.fields if self.head is not None else {}
        decode_name = fields.get(_DECODE_WORKER) or self.choice.decode.worker.name.encode()
        prefill_name = fields.get(_PREFILL_WORKER) or prefill.worker.name.encode()
        return decode_name.decode("latin-1"), prefill_name.decode("latin-1")

    def can_go_elsewhere(self) -> bool:
        """Another worker is there for a request of which nobody can tell whether it ended the one that had it."""
        assert self.choice is not None
        excluded = self.excluded | {self.choice.decode.worker.name}
        return self.context.scheduler.choose(self.inquiry, self.loop.time(), excluded) is not None
