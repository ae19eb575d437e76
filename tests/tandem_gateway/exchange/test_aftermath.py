"""What is written down of attempts that have failed, and what they leave behind."""

from __future__ import annotations

from collections.abc import Callable

from tandem_gateway.http.response import ResponseHead
from tandem_gateway.upstream.base import Call, Failure, Sink

RESUMABLE = [(b"content-type", b"text/event-stream"), (b"x-tandem-resume", b"head")]
JSON = [(b"content-type", b"application/json")]


class Sent:
    """A request at a worker that does what the test says."""

    held_bytes = 0
    resent = False

    def __init__(self, sink: Sink) -> None:
        self.sink = sink

    def answer(self, headers: list[tuple[bytes, bytes]], *body: bytes) -> None:
        self.sink.on_upstream_head(ResponseHead(200, headers, dict(headers)))
        for part in body:
            self.sink.on_upstream_body(part, final=False)

    def refuse(self, status: int, *headers: tuple[bytes, bytes]) -> None:
        self.sink.on_upstream_head(ResponseHead(status, [*JSON, *headers], dict(headers)))

    def fail(self, failure: Failure) -> None:
        self.sink.on_upstream_failure(failure, "it broke")

    def cancel(self) -> None: ...

    def pause_reading(self) -> None: ...

    def resume_reading(self) -> None: ...


class Links:
    """To all workers."""

    def __init__(self) -> None:
        self.sent: list[Sent] = []

    def start(
        self, sink: Sink, head: bytes, body: bytes, *, fresh: bool = False, elsewhere: Callable[[], bool] | None = None
    ) -> Call:
        self.sent.append(Sent(sink))
        return self.sent[-1]

    def reap(self, now: float) -> None: ...

    def close(self) -> None: ...


class Spans:
    """Satisfies what an exchange wants of its trace."""

    def __init__(self) -> None:
        self.ended: list[tuple[str | None, int | None]] = []

    def chose(self, *_: object, **__: object) -> None: ...

    def queued(self) -> None: ...

    def left_queue(self, outcome: str) -> None: ...

    def attempt_ended(self, _: object, error: str | None, status: int | None) -> None:
        self.ended.append((error, status))

    def end(self, *_: object) -> None: ...


async def begin(start_gateway, start_worker, request: bytes, until):
    """A gateway with two workers, its links, the client's connection, and its request's exchange."""
    running = await start_gateway(await start_worker("d1"), await start_worker("d2"))
    links = Links()
    running.gateway.link = lambda _: links
    reader, writer = await running.connect()
    writer.write(request)
    await until(lambda: links.sent)
    (exchange,) = running.gateway.exchanges
    return running, links, reader, exchange


async def test_an_attempt_has_the_status_of_its_own_answer(start_gateway, start_worker, chat, until) -> None:
    running, links, _, exchange = await begin(start_gateway, start_worker, chat(stream=True), until)
    exchange.trace = spans = Spans()
    links.sent[0].refuse(503, (b"x-tandem-retry", b"1"))
    links.sent[1].answer(RESUMABLE, b'data: {"choices":[]}\n\n: j\n')
    links.sent[1].fail(Failure.RESET)
    running.gateway.place_waiting()
    links.sent[2].fail(Failure.LOCAL)
    running.gateway.place_waiting()
    links.sent[3].fail(Failure.CONNECT)
    for endpoint in running.gateway.scheduler.endpoints.values():
        endpoint.pool.admit(endpoint)
    running.gateway.place_waiting()
    links.sent[4].refuse(409)
    reasons = [("draining", 503), ("reset", 200), ("local", None), ("refused", None), ("declined", 409)]
    assert spans.ended == reasons
    assert not running.gateway.exchanges


async def test_a_slow_client_of_a_failure_holds_no_answer(start_gateway, start_worker, chat, until) -> None:
    running, links, reader, exchange = await begin(start_gateway, start_worker, chat(), until)
    for attempt in range(2):
        links.sent[attempt].answer(JSON, b"x" * 1_000_000)
        exchange.connection.blocked = attempt == 1  # it has not taken the answer before
        assert exchange.held_bytes > 1_000_000
        links.sent[attempt].fail(Failure.RESET)
    assert exchange.delivering
    assert exchange.held_bytes < 1000
    exchange.connection.resume_writing()
    assert (await reader.readline()).split()[1] == b"502"
    assert not running.gateway.exchanges
