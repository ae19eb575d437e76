"""What the client gets of an exchange, and its end."""

from __future__ import annotations

from time import monotonic
from urllib.parse import quote

from tandem_api.names import HEADER_QUEUE_SECONDS, HEADER_ROUTE

from tandem_gateway.errors import GatewayFull, RequestError, UpstreamFailed
from tandem_gateway.exchange.resume import Continuation, may_keep
from tandem_gateway.exchange.state import DELIVERING, OVER, STREAMING, ExchangeState
from tandem_gateway.http.budget import FREE_BYTES
from tandem_gateway.http.journal import JournaledStream
from tandem_gateway.http.response import LAST_CHUNK, build_chunk, build_error, build_head
from tandem_gateway.http.sse import EventStream, build_failure, find_usage
from tandem_gateway.upstream.base import Call

MAX_HELD_BYTES = 32 * 1024 * 1024
"""An answer in one piece up to this size is held until it is complete, so that a broken one can still be retried."""
SMALL_PART_BYTES = 1024
"""Parts of an answer below this size are held joined: two bytes in an object of their own take twenty times as much."""
_CHUNKED = b"\r\ntransfer-encoding: chunked"
_ROUTE = HEADER_ROUTE.encode()


def begin(x: ExchangeState, *, last: bool) -> bytes:
    """The first event is here: from now on the client sees a stream, which begins with the returned header. `last`:
    its end is here, too."""
    head, reservation, choice, request = x.head, x.reservation, x.choice, x.request
    assert head is not None
    assert reservation is not None
    assert choice is not None
    x.phase = STREAMING
    x.status = head.status
    x.first_byte_at = monotonic()
    if x.slot is not None:
        x.slot.end(answered=True)
    now = x.loop.time()
    choice.measured = seconds = now - reservation.since
    choice.decode.count_first_token(seconds)
    reservation.first_token(now, last=last)
    stream = x.stream
    if isinstance(stream, JournaledStream) and stream.keeps and may_keep(x.context.budget, len(request.body)):
        x.continuation = Continuation(stream, choice.decode.worker.revision)
    else:
        request.body = b""
        x.connection.uncount()
    if _ROUTE in request.headers:
        explain(x)
    framing = request.answer_fields if request.http10 else _CHUNKED + request.answer_fields
    x.keep_alive_after = keep_alive = request.keep_alive and not x.context.draining
    return build_head(head, x.request_id, framing, keep_alive=keep_alive)


def end_stream(x: ExchangeState, stream: EventStream) -> None:
    """All events are here, the one that ends the answer or says that it failed among them."""
    head, choice = x.head, x.choice
    assert head is not None
    assert choice is not None
    x.connection.transport.write(x.unsent if x.request.http10 else x.unsent + LAST_CHUNK)
    x.usage = usage = find_usage(stream.tail) or head.usage
    if usage is None and isinstance(stream, JournaledStream):
        x.usage = stream.read_usage()
    failed = stream.failed
    if failed:
        x.error = "worker"
    choice.decode.count_end(failed=failed)
    # As its head has said, also when this gateway ends by now: the client's next request may be on its way.
    finish(x, keep_alive=x.keep_alive_after)


def hold(x: ExchangeState, data: bytes) -> None:
    """Keep a part of an answer in one piece. What is too much ends the request."""
    held = x.held
    if held and len(data) < SMALL_PART_BYTES:
        if not isinstance(held[-1], bytearray):
            held.append(bytearray())
        held[-1] += data
    else:
        held.append(data)
    x.held_size += len(data)
    if x.held_size > MAX_HELD_BYTES:
        drop_call(x)
        fail(x, UpstreamFailed(f"the worker's answer exceeds {MAX_HELD_BYTES} bytes; ask for a stream"))
    elif x.held_size > FREE_BYTES and not x.connection.account():
        drop_call(x)
        fail(x, GatewayFull("the gateway holds as many bytes as it may; ask for a stream, or try again shortly"))


def complete(x: ExchangeState) -> None:
    """An answer in one piece has arrived."""
    assert x.head is not None
    if x.reservation is not None:
        x.reservation.complete(x.loop.time())
        if x.slot is not None:
            x.slot.end(answered=True)
        if _ROUTE in x.request.headers:
            explain(x)
    body = bytes(x.held[0]) if len(x.held) == 1 else b"".join(x.held)
    x.held = []
    if x.head.rewrite is not None:
        body = x.head.rewrite(body)
    x.status = x.head.status
    assert x.choice is not None
    x.choice.decode.count_end(failed=x.status >= 500)
    if x.status == 200 and b'"usage"' in body:
        x.usage = find_usage(body)
    framing = b"\r\ncontent-length: %d" % len(body) + x.request.answer_fields
    keep_alive = keeps_alive(x)
    head = build_head(x.head, x.request_id, framing, keep_alive=keep_alive)
    x.bytes_out = len(body)
    x.connection.write(head + body)
    finish(x, keep_alive=keep_alive)


def fail(x: ExchangeState, error: RequestError) -> None:
    """End it with an error: as its answer, or as the last event of a stream that has begun."""
    drop_call(x)
    x.error = error.code or error.kind
    if x.begun:
        event = build_failure(x.request.path, error.body())
        x.connection.write(x.unsent + (event if x.request.http10 else build_chunk(event) + LAST_CHUNK))
        finish(x, keep_alive=False)
        return
    x.status = error.status
    x.stream, x.held, x.held_size = None, [], 0  # of an answer that the client does not get
    if x.queue_seconds:
        error.headers += ((HEADER_QUEUE_SECONDS, f"{x.queue_seconds:.3f}"),)
    fields = x.request.answer_fields
    x.connection.write(build_error(error, x.request_id, keep_alive=keeps_alive(x), more=fields))
    finish(x, keep_alive=keeps_alive(x))


def explain(x: ExchangeState) -> None:
    """For who asks: where the request went, and what was expected of it there."""
    if not x.context.explains or x.request.headers.get(_ROUTE) != b"explain":
        return
    assert x.head is not None
    assert x.choice is not None
    choice, expected, canary = x.choice, x.choice.expected, x.inquiry.canary
    behind = None if choice.conversion is None else choice.conversion.prefill_seconds
    fields = {
        "decode": choice.decode.worker.name,
        "prefill": ",".join(endpoint.worker.name for endpoint in choice.prefill),
        "converted": "true" if x.converted else "",
        "prefill_ms": round(1000 * behind) if x.converted and behind is not None else "",
        "revision": choice.decode.worker.revision,
        "canary": "" if canary is None else str(canary).lower(),
        "attempts": x.attempts,
        "uncached_tokens": choice.uncached_tokens,
        "cached_tokens": choice.cached_tokens,
        "ttft_ms": "" if expected is None else round(1000 * expected),
    }
    text = "; ".join(f"{name}={quote(str(value), safe=',:[]')}" for name, value in fields.items() if value != "")
    x.head.headers.append((_ROUTE, text.encode()))


def take_call(x: ExchangeState) -> Call | None:
    """The call under way, if there is one, which is over or is to be."""
    call, x.call = x.call, None
    if call is not None and call.resent:
        x.resets += 1
    return call


def drop_call(x: ExchangeState) -> None:
    """Nothing more is wanted of the worker."""
    call = take_call(x)
    if call is not None:
        call.cancel()


def release(x: ExchangeState) -> None:
    """Give back what it holds at its workers."""
    if x.slot is not None:
        x.slot.end(answered=False)
        x.slot = None
    if x.reservation is not None:
        x.reservation.release()
        x.reservation = None


def finish(x: ExchangeState, *, keep_alive: bool) -> None:
    """What is left is the client's to take."""
    if x.phase >= DELIVERING:
        return
    x.phase = DELIVERING
    if x.slot is not None:
        x.slot.end(answered=False)
    if x.reservation is not None:
        x.reservation.release()
        x.reservation = None
    x.keep_alive_after = keep_alive
    connection = x.connection
    if not connection.blocked or connection.closed:
        conclude(x)


def conclude(x: ExchangeState) -> None:
    """The client has everything, or is gone."""
    x.phase = OVER
    x.held_size = 0
    x.request.body = b""
    x.context.on_exchange_end(x)
    x.continuation = None
    x.connection.finish(keep_alive=x.keep_alive_after)


def keeps_alive(x: ExchangeState) -> bool:
    """Whether the client may ask again over the same connection."""
    return x.request.keep_alive and not x.context.draining
