"""Which worker gets a request, how it is sent there, and what it waits for while there is none."""

from __future__ import annotations

from collections.abc import Collection
from time import monotonic

from tandem_api.names import HEADER_PROMPT

from tandem_gateway.errors import RequestError
from tandem_gateway.exchange import state
from tandem_gateway.exchange.delivery import fail
from tandem_gateway.exchange.resume import Continuation
from tandem_gateway.exchange.state import NEW, NO_NAMES, SENT, WAITING, ExchangeState
from tandem_gateway.scheduling import KEPT, SHORT_CHUNKS, Choice, Worker
from tandem_gateway.scheduling.isolation import LONGEST_WAIT_SECONDS
from tandem_gateway.upstream.engines.contract import Order
from tandem_gateway.upstream.head import build_request_head

SLOWEST_TOKENS_PER_SECOND = 4
"""An answer in one piece shows no sign of life: beyond the first token it may take this long for its tokens."""
DEFAULT_MAX_TOKENS = 4096
_PROMPT = HEADER_PROMPT.encode() + b": %b\r\n"


def dispatch(x: ExchangeState, full: Collection[str] = NO_NAMES) -> bool:
    """Send the request to the best endpoint that is not `full`, or wait for one. False: it waits, or has failed.

    Called again whenever endpoints change.
    """
    context, continuation, demand = x.context, x.continuation, x.inquiry
    began = 0.0 if x.trace is None else monotonic()
    suspect, apart = False, NO_NAMES
    if x.phase == NEW:
        now = x.arrived
        if context.queue.line.size and context.queue.enabled:
            join_queue(x, now)  # others were here before
            return False
        choice = context.scheduler.choose(demand, now)
    else:
        now, suspect = x.loop.time(), x.resets > 0 and not x.first_byte_at
        choice, apart = choose_again(x, full, now, suspect=suspect)
    if choice is None:
        if x.ticket is None:
            wait_for_worker(x, now, apart)
        return False
    decode = choice.decode
    if x.ticket is not None:
        leave_queue(x, "placed")
        x.slot = context.queue.take(decode, now, stream=demand.stream)
    x.choice = choice
    x.attempts += 1
    x.reservation = reservation = context.scheduler.reserve(choice, demand, now)
    if suspect:
        context.isolation.add(decode.worker.name, reservation, now)
    decisions = context.decisions
    if len(decisions) == KEPT:
        decisions[0][-1].offers = []  # its request may run for long
    reservation.holder = x
    choice.expected, choice.work = reservation.expected, reservation.work
    decisions.append((x.request_id, now, x.attempts, x.queue_seconds, choice))
    x.phase = SENT
    x.reads_seen = x.reads
    x.deadline = now + answer_seconds(x)
    request = x.request
    if x.trace is not None:
        x.trace.chose(x, choice, began, resumes=continuation is not None)
    if decode.worker.engine != "Tandem":
        return start_elsewhere(x, choice, fresh=suspect)
    line, body = context.token_line, request.body
    if len(demand.prefix) >= SHORT_CHUNKS:
        line += _PROMPT % context.scheduler.name_prompt(choice, demand).encode()
    journal_bytes = 0 if demand.stream and not demand.local else None
    if continuation is not None:
        journal = continuation.stream.build_prefix()
        journal_bytes, body = len(journal), journal + body
    head = build_request_head(request, choice, x.request_id, line, len(body), journal_bytes)
    x.call = context.link(decode).start(x, head, body, fresh=suspect, elsewhere=x.can_go_elsewhere)
    return True


def choose_again(
    x: ExchangeState, full: Collection[str], now: float, *, suspect: bool
) -> tuple[Choice | None, frozenset[str]]:
    """A worker for a request that has waited, or was sent before; and those that a suspect is kept from meanwhile."""
    if suspect:
        return choose_apart(x, full, now)
    choice, continuation = x.context.scheduler.choose(x.inquiry, now, full or x.excluded), x.continuation
    if continuation is not None and choice is not None and not _may_go_on(choice.decode.worker, continuation):
        choice = choose_to_go_on(x, continuation, now)
    return choice, NO_NAMES


def start_elsewhere(x: ExchangeState, choice: Choice, *, fresh: bool) -> bool:
    """Send the request to a worker of another project's engine. False: it has failed."""
    request = x.request
    order = Order(
        method=request.method, path=request.path, headers=request.headers, body=request.body,
        request_id=x.request_id, choice=choice, fresh=fresh,
    )  # fmt: skip
    try:
        x.call = x.context.engines[choice.decode.worker.engine].start(x, order)
    except RequestError as error:
        fail(x, error)
        return False
    return True


def wait_for_worker(x: ExchangeState, now: float, apart: Collection[str]) -> None:
    """No worker is free for it. `apart`: those that it is kept from because a suspect is there."""
    if apart:
        x.phase = WAITING  # until one of those has no suspect any more
        x.deadline = x.isolate_by + state.GRACE_SECONDS
        return
    # Everyone was tried: whoever comes back first from its back-off may try again.
    x.excluded = NO_NAMES
    if x.first_byte_at:
        x.phase = WAITING
    else:
        join_queue(x, now)


def choose_apart(x: ExchangeState, full: Collection[str], now: float) -> tuple[Choice | None, frozenset[str]]:
    """A worker without another request that may kill it, and those that this one is kept from meanwhile."""
    x.isolate_by = x.isolate_by or now + LONGEST_WAIT_SECONDS
    scheduler, isolation, demand = x.context.scheduler, x.context.isolation, x.inquiry
    kept_from = {*full, *x.excluded}
    occupied = isolation.find_occupied(now)
    choice = scheduler.choose(demand, now, kept_from | occupied)
    if choice is not None or not occupied:
        return choice, occupied
    closed = isolation.find_closed(now) if now < x.isolate_by else NO_NAMES
    if len(closed) == len(occupied):
        return None, closed  # the same ones
    return scheduler.choose(demand, now, kept_from | closed), closed


def join_queue(x: ExchangeState, now: float) -> None:
    """Nobody serves: wait for somebody."""
    queue = x.context.queue
    x.give_up_at = x.give_up_at or now + queue.settings.ttl_seconds
    if now >= x.give_up_at:
        fail(x, queue.refuse())
        return
    tokens = x.inquiry.prompt_tokens
    try:
        x.ticket = queue.join(x, arrived=x.arrived, tokens=tokens, now=now, source=x.connection.source)
    except RequestError as error:
        fail(x, error)
        return
    if x.trace is not None:
        x.trace.queued()
    x.phase = WAITING
    x.deadline = x.give_up_at


def leave_queue(x: ExchangeState, outcome: str) -> None:
    """It waits no longer. `outcome`: why, in one word."""
    ticket, x.ticket = x.ticket, None
    if ticket is not None:
        x.queue_seconds += x.context.queue.leave(ticket, outcome, x.loop.time())
        if x.trace is not None:
            x.trace.left_queue(outcome)


def choose_to_go_on(x: ExchangeState, continuation: Continuation, now: float) -> Choice | None:
    """A worker that can take over the stream, or None."""
    scheduler = x.context.scheduler
    workers = [endpoint.worker for endpoint in scheduler.endpoints.values()]
    others = {worker.name for worker in workers if not _may_go_on(worker, continuation)}
    return scheduler.choose(x.inquiry, now, x.excluded | others)


def answer_seconds(x: ExchangeState) -> float:
    """How long the worker may take until it shows something of the answer: all of it, where it comes in one piece."""
    timeouts = x.context.timeouts
    if x.first_byte_at:
        return min(timeouts.idle_seconds, timeouts.first_token_seconds)
    if x.inquiry.stream:
        return timeouts.first_token_seconds
    tokens = x.inquiry.max_tokens or DEFAULT_MAX_TOKENS
    longest = max(timeouts.answer_seconds, timeouts.first_token_seconds)
    return min(timeouts.first_token_seconds + tokens / SLOWEST_TOKENS_PER_SECOND, longest)


def stay_in_queue(x: ExchangeState) -> bool:
    """Its time in the queue is over. Where somebody serves by now, its turn comes: in as much time again it goes to
    a worker, be there many before it.
    """
    now = x.loop.time()
    if x.deadline > x.give_up_at:
        return dispatch(x)
    x.deadline = now + x.context.queue.settings.ttl_seconds
    return x.context.scheduler.choose(x.inquiry, now) is not None


def _may_go_on(worker: Worker, continuation: Continuation) -> bool:
    """Whether a stream can move there: engines of other projects know nothing of journals."""
    return worker.revision == continuation.revision and worker.engine == "Tandem"
