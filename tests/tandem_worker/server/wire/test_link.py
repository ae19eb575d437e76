"""The worker's end of the native link, spoken to by hand."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import socket
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, cast

import pytest
from tandem_api import link
from tandem_api.keys import KeyRing, bearer_token, open_ring
from tandem_api.link import FrameReader, Hello
from tandem_worker.server.wire.link.connection import MAX_UNSENT_BYTES, SLICE_BYTES
from tandem_worker.server.wire.link.listener import LinkListener
from tandem_worker.server.wire.link.stream import LinkStream

WAITS = b"POST /wait HTTP/1.1\r\n\r\n"
LONG = b"POST /long HTTP/1.1\r\n\r\n"
HEAD = b"POST /echo HTTP/1.1\r\nhost: x\r\ncontent-type: text/plain\r\n\r\n"
RING = KeyRing(primary="a", keys={"a": bytes(32)})
WAIT = 20.0


class Peer:
    """A gateway that a test drives."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer
        self.frames = FrameReader(link.FROM_WORKER)
        self.unread: list[link.Frame] = []
        self.ended = False

    @property
    def transport(self) -> asyncio.Transport:
        return cast(asyncio.Transport, self.writer.transport)

    def send(self, *frames: bytes) -> None:
        self.writer.write(b"".join(frames))

    async def next(self, *tags: int) -> link.Frame:
        """The next frame of one of these kinds; others are passed over."""
        async with asyncio.timeout(WAIT):
            while True:
                while self.unread:
                    frame = self.unread.pop(0)
                    if not tags or frame[0] in tags:
                        return frame
                data = await self.reader.read(65536)
                assert data, "the worker ended the link"
                self.unread += self.frames.feed(data)
                assert self.frames.error is None, self.frames.error

    async def answer(self, number: int) -> tuple[int, bytes]:
        """Status and body of a stream."""
        status, body = 0, b""
        while True:
            tag, stream, payload = await self.next(link.HEAD, link.DATA, link.DATA_LAST)
            assert stream == number
            if tag == link.HEAD:
                status, _ = link.read_response_head(payload)
                continue
            body += payload
            if tag == link.DATA_LAST:
                return status, body
            self.send(link.encode_credit(number, len(payload)))

    async def goodbye(self) -> str:
        """Why the worker ends the link."""
        _, _, payload = await self.next(link.BYE)
        async with asyncio.timeout(WAIT):
            assert await self.reader.read() is not None
        return link.read_reason(payload)


class App:
    """Echoes bodies; `/long` sends as much as `size` says, `/wait` waits until its client has gone."""

    def __init__(self) -> None:
        self.sent = 0
        self.gone = 0
        self.scopes: list[dict[str, Any]] = []

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        self.scopes.append(scope)
        start = {"type": "http.response.start", "status": 200, "headers": [(b"Content-Type", b"text/plain")]}
        if scope["path"] == "/wait":
            await send(start)
            await send({"type": "http.response.body", "body": b"first", "more_body": True})
            while (await receive())["type"] != "http.disconnect":
                pass
            self.gone += 1
            return
        if scope["path"] == "/fail":
            await send(start)
            raise RuntimeError("half an answer")
        if scope["path"] == "/long":
            await send(start)
            for _ in range(1000):
                await send({"type": "http.response.body", "body": bytes(1000), "more_body": True})
                self.sent += 1000
            await send({"type": "http.response.body", "body": b""})
            return
        body, more = b"", True
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                return
            body, more = body + message["body"], message["more_body"]
        await send(start)
        await send({"type": "http.response.body", "body": body})


Connect = Callable[..., Awaitable[Peer]]


@pytest.fixture
def app() -> App:
    return App()


@pytest.fixture
async def listen(app: App) -> AsyncIterator[Callable[..., Awaitable[LinkListener]]]:
    started: list[LinkListener] = []

    async def start(**options: Any) -> LinkListener:
        ring = options.pop("ring", open_ring)
        options = {"name": "pod-1", "telemetry": lambda: b'{"sample": 1}'} | options
        listener = LinkListener(options.pop("app", app), ring, **options)
        await listener.start("127.0.0.1", 0)
        started.append(listener)
        return listener

    yield start
    for listener in started:
        await listener.stop(0.1)
        assert listener.num_links == listener.num_streams == 0


@pytest.fixture
async def connect() -> AsyncIterator[Connect]:
    peers: list[Peer] = []

    async def open_one(listener: LinkListener, *, greet: bool = True, **hello: Any) -> Peer:
        peer = Peer(*await asyncio.open_connection("127.0.0.1", listener.port))
        peers.append(peer)
        if greet:
            peer.send(link.encode_hello(Hello(**hello)))
            assert (await peer.next())[0] == link.HELLO
        return peer

    yield open_one
    for peer in peers:
        peer.writer.transport.abort()


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(WAIT):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.005)


def request(number: int, head: bytes = HEAD, body: bytes = b"") -> bytes:
    if not body:
        return link.encode(link.REQUEST_LAST, number, head)
    return link.encode(link.REQUEST, number, head) + link.encode(link.DATA_LAST, number, body)


async def test_an_answer_and_what_the_application_is_told(listen: Any, connect: Connect, app: App) -> None:
    peer = await connect(await listen())
    peer.send(request(1, HEAD.replace(b"/echo", b"/echo%20x?a=1"), b"hello"))
    _, number, payload = await peer.next(link.HEAD)
    assert link.read_response_head(payload) == (200, [(b"content-type", b"text/plain")])
    assert (number, await peer.next(link.DATA_LAST)) == (1, (link.DATA_LAST, 1, b"hello"))
    (scope,) = app.scopes
    assert (scope["method"], scope["path"], scope["query_string"]) == ("POST", "/echo x", b"a=1")
    assert (b"content-type", b"text/plain") in scope["headers"]


async def test_large_bodies_come_as_they_are_taken(listen: Any, connect: Connect) -> None:
    peer = await connect(await listen())
    body = random.Random(1).randbytes(5 * link.WINDOW + 17)
    peer.send(link.encode(link.REQUEST, 1, HEAD))
    left, room = body, link.WINDOW
    while left:
        part, left = left[:room], left[room:]
        peer.send(link.encode(link.DATA if left else link.DATA_LAST, 1, part))
        if left:
            room = link.read_credit((await peer.next(link.CREDIT))[2])
    assert await peer.answer(1) == (200, body)


async def test_a_stream_that_nobody_takes_stands_still_alone(listen: Any, connect: Connect, app: App) -> None:
    peer = await connect(await listen())
    peer.send(request(1, LONG))
    received = 0
    while received < link.WINDOW:
        received += len((await peer.next(link.DATA))[2])
    assert received == link.WINDOW
    for number in range(2, 30):
        peer.send(request(number, body=b"quick"))
        assert await peer.answer(number) == (200, b"quick")
    assert app.sent < link.WINDOW
    peer.send(link.encode_credit(1, 5000))
    assert len((await peer.next(link.DATA))[2]) == 5000
    peer.send(link.encode(link.RESET, 1))


async def test_a_reset_tells_the_application(listen: Any, connect: Connect, app: App) -> None:
    listener = await listen()
    peer = await connect(listener)
    peer.send(request(1, WAITS))
    assert (await peer.next(link.DATA))[2] == b"first"
    peer.send(link.encode(link.RESET, 1))
    await until(lambda: app.gone == 1 and not listener.num_streams)


async def test_the_end_of_the_link_tells_every_application(listen: Any, connect: Connect, app: App) -> None:
    listener = await listen()
    peer = await connect(listener)
    peer.send(*(request(number, WAITS) for number in range(1, 11)))
    await until(lambda: listener.num_streams == 10)
    peer.writer.transport.abort()
    await until(lambda: app.gone == 10 and not listener.num_streams)


async def test_tokens_of_one_turn_leave_in_one_write(listen: Any, connect: Connect, app: App) -> None:
    listener = await listen()
    peer = await connect(listener, telemetry_seconds=3600)
    step = asyncio.Event()

    async def stream(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"0", "more_body": True})
        await step.wait()
        await send({"type": "http.response.body", "body": b"1", "more_body": True})
        await send({"type": "http.response.body", "body": b"2"})

    listener.app = stream
    peer.send(*(request(number) for number in range(1, 41)))
    for _ in range(40):
        await peer.next(link.DATA)
    (connection,) = listener._links
    writes: list[bytes] = []
    transport = connection.transport
    connection.transport = type("Transport", (), {"write": lambda self, data: writes.append(data)})()  # type: ignore
    step.set()
    await until(lambda: not listener.num_streams)
    connection.transport = transport
    await until(lambda: writes)
    assert len(writes) == 1
    reader = FrameReader(link.FROM_WORKER)
    reader.feed(link.encode_hello(Hello()))
    assert reader.feed(writes[0]) == [(link.DATA_LAST, number, b"12") for number in range(1, 41)]


async def test_an_application_that_fails_ends_its_stream(listen: Any, connect: Connect) -> None:
    peer = await connect(await listen())
    peer.send(request(1, HEAD.replace(b"/echo", b"/fail")))
    assert link.read_reason((await peer.next(link.RESET))[2]) == "the answer broke off"
    peer.send(request(2, body=b"next"))
    assert await peer.answer(2) == (200, b"next")


async def test_signs_of_life_samples_and_drain(listen: Any, connect: Connect) -> None:
    listener = await listen()
    peer = await connect(listener)
    assert json.loads((await peer.next(link.TELEMETRY))[2]) == {"sample": 1}
    assert json.loads((await peer.next(link.TELEMETRY))[2]) == {"sample": 1}
    peer.send(link.encode(link.PING, 0, b"12345678"))
    assert await peer.next(link.PONG) == (link.PONG, 0, b"12345678")
    listener.drain()
    await peer.next(link.DRAIN)
    late = await connect(listener)
    await late.next(link.DRAIN)
    peer.send(request(1, body=b"still"))
    assert await peer.answer(1) == (200, b"still")


async def test_who_shows_no_key_is_told_so(listen: Any, connect: Connect, app: App) -> None:
    listener = await listen(ring=lambda: RING)
    for hello in (Hello(), Hello(token="a." + "1" * 64)):
        peer = await connect(listener, greet=False)
        peer.send(link.encode_hello(hello), request(1))
        assert (await peer.goodbye()).startswith("unauthorized: ")
    assert listener.refusals["unauthorized"] == 2
    assert not app.scopes
    peer = await connect(listener, token=bearer_token(RING))
    peer.send(request(1, body=b"x"))
    assert await peer.answer(1) == (200, b"x")


async def test_a_link_whose_key_is_withdrawn_ends_with_its_last_answer(listen: Any, connect: Connect, app: App) -> None:
    rings = [RING]
    listener = await listen(ring=lambda: rings[-1])
    idle, busy = [await connect(listener, token=bearer_token(RING)) for _ in range(2)]
    busy.send(request(1, WAITS))
    await busy.next(link.DATA)
    rings.append(KeyRing(primary="b", keys={"a": bytes(32), "b": bytes([1] * 32)}))
    idle.send(request(1, body=b"x"))
    assert await idle.answer(1) == (200, b"x"), "a key that is added ends nothing"
    rings.append(KeyRing(primary="b", keys={"b": bytes([1] * 32)}))
    assert await idle.goodbye() == "unauthorized: the key that this link has shown is no longer good"
    kept = await connect(listener, token=bearer_token(rings[-1]))
    busy.send(request(2, body=b"judged by its own key"))
    assert await busy.answer(2) == (200, b"judged by its own key")
    busy.send(link.encode(link.RESET, 1))
    assert (await busy.goodbye()).startswith("unauthorized: ")
    assert app.gone == 1
    kept.send(request(1, body=b"x"))
    assert await kept.answer(1) == (200, b"x")


async def test_an_answer_without_end_does_not_keep_a_link_whose_key_was_withdrawn(
    listen: Any, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tandem_worker.server.wire.link.listener.WITHDRAWN_SECONDS", 0.5)
    rings = [RING]
    listener = await listen(ring=lambda: rings[-1])
    busy = await connect(listener, token=bearer_token(RING))
    busy.send(request(1, WAITS))
    await busy.next(link.DATA)
    rings.append(KeyRing(primary="b", keys={"b": bytes([1] * 32)}))
    assert (await busy.goodbye()).startswith("unauthorized: ")


async def test_strangers_make_room(listen: Any, connect: Connect) -> None:
    listener = await listen(max_links=3)
    known = await connect(listener)
    strangers = [await connect(listener, greet=False) for _ in range(2)]
    await until(lambda: listener.num_links == 3)
    others = [await connect(listener) for _ in range(2)]
    for stranger in strangers:
        assert (await stranger.goodbye()).startswith("full: ")
    last = await connect(listener, greet=False)
    assert (await last.goodbye()).startswith("full: ")
    for number, peer in enumerate([known, *others], 1):
        peer.send(request(number, body=b"x"))
        assert await peer.answer(number) == (200, b"x")


async def test_more_requests_than_the_worker_takes(listen: Any, connect: Connect) -> None:
    listener = await listen(max_streams=2)
    peer = await connect(listener)
    peer.send(*(request(number, WAITS) for number in (1, 2, 3)))
    _, number, reason = await peer.next(link.RESET)
    assert (number, link.read_reason(reason)) == (3, "full: this worker has as many requests as it may")


def opening(number: int) -> bytes:
    """A request whose body does not come."""
    return link.encode(link.REQUEST, number, HEAD)


async def refused(peer: Peer, count: int) -> list[int]:
    """The numbers of so many requests that the worker did not begin with."""
    frames = [await peer.next(link.RESET) for _ in range(count)]
    assert all(link.read_reason(payload).startswith(link.NOT_BEGUN) for _, _, payload in frames)
    return [number for _, number, _ in frames]


async def test_a_link_leaves_others_their_share_of_places(listen: Any, connect: Connect) -> None:
    listener = await listen(max_streams=8)
    greedy, other = await connect(listener), await connect(listener)
    greedy.send(*(opening(number) for number in range(1, 9)))
    assert await refused(greedy, 4) == [5, 6, 7, 8]
    other.send(*(request(number, WAITS) for number in range(1, 5)))
    for _ in range(4):
        assert (await other.next(link.DATA))[2] == b"first"
    other.send(request(5, WAITS))
    assert await refused(other, 1) == [5]


async def test_a_link_that_is_alone_has_all_places_and_gives_up_what_never_came(
    listen: Any, connect: Connect, app: App
) -> None:
    """Only requests that nobody has begun with: those that run go on, also beyond its share."""
    listener = await listen(max_streams=8)
    alone = await connect(listener)
    alone.send(request(1, WAITS), request(2, WAITS))
    for _ in range(2):
        await alone.next(link.DATA)
    alone.send(*(opening(number) for number in range(3, 9)))
    await until(lambda: listener.num_streams == 8)
    others = [await connect(listener) for _ in range(3)]
    for other in others:
        other.send(*(request(number, WAITS) for number in (1, 2)))
        for _ in range(2):
            assert (await other.next(link.DATA))[2] == b"first"
    assert await refused(alone, 6) == [3, 4, 5, 6, 7, 8]
    alone.send(request(9, WAITS))
    assert await refused(alone, 1) == [9]
    alone.send(link.encode(link.RESET, 1))
    await until(lambda: app.gone == 1 and listener.num_streams == 7)
    alone.send(request(10, body=b"x"))
    assert await alone.answer(10) == (200, b"x")


async def test_what_runs_is_not_given_up_for_another_link(listen: Any, connect: Connect) -> None:
    listener = await listen(max_streams=4)
    alone = await connect(listener)
    early = link.encode(link.REQUEST, 1, WAITS)  # is answered although its body has not come
    alone.send(early, *(request(number, WAITS) for number in (2, 3, 4)))
    for _ in range(4):
        await alone.next(link.DATA)
    other = await connect(listener)
    other.send(request(1, body=b"x"))
    assert await refused(other, 1) == [1]
    alone.send(link.encode(link.RESET, 2), request(5, WAITS))
    assert await refused(alone, 1) == [5]
    other.send(request(2, body=b"x"))
    assert await other.answer(2) == (200, b"x")


async def test_headers_that_are_too_many(listen: Any, connect: Connect, app: App) -> None:
    peer = await connect(await listen())
    fields = b"".join(b"x-%d: y\r\n" % number for number in range(200))
    peer.send(request(1, b"POST /echo HTTP/1.1\r\n" + fields + b"\r\n"))
    status, body = await peer.answer(1)
    assert (status, json.loads(body)["error"]["code"]) == (431, "headers_too_large")
    assert not app.scopes


@pytest.mark.parametrize("length", ["9" * 5000, "0" * 5000, "\xb2", "-1", "1_0", ""])
async def test_a_length_that_is_none(
    listen: Any, connect: Connect, start_worker: Any, tokenizer: Any, length: str
) -> None:
    """Frames say where a body ends, so nothing has read it before the application does."""
    async with start_worker(tokenizer) as worker:
        peer = await connect(await listen(app=worker.app))
        lines = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: " + length.encode("latin-1")
        peer.send(request(1, lines + b"\r\n\r\n", body=b"{}"))
        status, body = await peer.answer(1)
    assert status == 400
    assert "content-length must be a number of bytes" in json.loads(body)["error"]["message"]


@pytest.mark.parametrize(
    ("frames", "problem"),
    [
        ([request(2), request(2)], "protocol: stream 2 begins after stream 2"),
        ([link.encode(link.DATA, 5, b"x")], "protocol: stream 5 has not begun"),
        ([link.encode(link.REQUEST_LAST, 1, b"nonsense")], "protocol: a REQUEST that is not the head"),
        ([request(1, WAITS), link.encode_credit(1, 2**31)], "protocol: stream 1 is granted"),
        ([link.encode(link.REQUEST, 1, LONG), *[link.encode(link.DATA, 1, bytes(40000))] * 2],
         "protocol: stream 1 has more of a body"),
        ([request(1, WAITS), link.encode(link.DATA, 1, b"x")], "protocol: stream 1 has more"),
        ([link.encode(link.TELEMETRY, 0, b"{}")], "protocol: a frame TELEMETRY"),
        ([b"GET / HTTP/1.1\r\nhost: x\r\n\r\n"], "version: it speaks version 71"),
    ],
)  # fmt: skip
async def test_what_a_gateway_may_not_send(listen: Any, connect: Connect, frames: list[bytes], problem: str) -> None:
    listener = await listen()
    peer = await connect(listener)
    peer.send(*frames)
    assert (await peer.goodbye()).startswith(problem)
    assert sum(listener.refusals.values()) == 1
    other = await connect(listener)
    other.send(request(1, body=b"x"))
    assert await other.answer(1) == (200, b"x")


async def test_anything_at_all_ends_with_a_reason(listen: Any, connect: Connect, app: App) -> None:
    """Real conversations, damaged and cut anywhere: no error that nobody catches, and nothing left of them."""
    listener = await listen()
    problems: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: problems.append(context))
    chance = random.Random(7)
    for _ in range(150):
        peer = await connect(listener, greet=False)
        numbers = range(1, chance.randrange(2, 8))
        frames = [link.encode_hello(Hello()), *(request(number, body=b"body") for number in numbers)]
        frames += [link.encode(link.PING, 0, bytes(8)), link.encode(link.RESET, 1), link.encode_credit(1, 1)]
        data = bytearray(b"".join(frames))
        for _ in range(chance.randrange(6)):
            data[chance.randrange(len(data))] = chance.randrange(256)
        place = 0
        with contextlib.suppress(ConnectionError):
            while place < len(data):
                size = chance.choice((1, 3, 12, 50, 1000))
                peer.send(bytes(data[place : place + size]))
                place += size
                await asyncio.sleep(0)
            await peer.writer.drain()
        peer.writer.close()
    await until(lambda: not listener.num_links and not listener.num_streams)
    assert not problems
    peer = await connect(listener)
    peer.send(request(1, body=b"x"))
    assert await peer.answer(1) == (200, b"x")


async def test_who_asks_and_reads_nothing_is_not_listened_to(listen: Any, connect: Connect) -> None:
    listener = await listen()
    peer, other = await connect(listener, telemetry_seconds=3600), await connect(listener)
    connection = next(iter(listener._links))
    connection.transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 2**16)
    peer.transport.pause_reading()
    pings = [number.to_bytes(link.PING_BYTES, "big") for number in range(500_000)]
    for start in range(0, len(pings), 1000):
        peer.send(*(link.encode(link.PING, 0, ping) for ping in pings[start : start + 1000]))
        await asyncio.sleep(0)
    await until(lambda: connection.blocked)
    other.send(request(1, body=b"x"))
    assert await other.answer(1) == (200, b"x")
    assert connection.transport.get_write_buffer_size() < 2 * MAX_UNSENT_BYTES
    peer.transport.resume_reading()
    pongs: list[bytes] = []
    async with asyncio.timeout(WAIT):
        while len(pongs) < len(pings):
            pongs += [frame[2] for frame in peer.frames.feed(await peer.reader.read(2**20)) if frame[0] == link.PONG]
    assert pongs == pings


async def test_many_small_requests_leave_others_their_turns(listen: Any, connect: Connect, app: App) -> None:
    listener = await listen()
    peer = await connect(listener, telemetry_seconds=3600)
    turn, begun = 0, Counter[int]()

    async def note(scope: Any, receive: Any, send: Any) -> None:
        begun[turn] += 1

    listener.app = note
    head, count = b"GET / HTTP/1.1\r\n\r\n", 3000
    peer.send(*(request(number, head) + link.encode(link.RESET, number) for number in range(1, count + 1)))
    async with asyncio.timeout(WAIT):
        while begun.total() < count:
            await asyncio.sleep(0)
            turn += 1
    assert max(begun.values()) <= SLICE_BYTES / (2 * link.HEADER_BYTES + len(head)) + 1


async def test_a_link_ends_although_its_gateway_reads_nothing(listen: Any, connect: Connect) -> None:
    listener = await listen()
    peer = await connect(listener, telemetry_seconds=3600)
    (connection,) = listener._links
    peer.transport.pause_reading()
    while not connection.blocked:
        peer.send(link.encode(link.PING, 0, bytes(8)) * 1000)
        await asyncio.sleep(0)
    connection.end("protocol", "a test says so")
    async with asyncio.timeout(60):
        await until(lambda: not listener.num_links)


async def test_strangers_do_not_fill_the_log(listen: Any, connect: Connect, caplog: pytest.LogCaptureFixture) -> None:
    listener = await listen()
    for _ in range(30):
        peer = await connect(listener, greet=False)
        peer.send(b"GET / HTTP/1.1\r\n\r\n")
        assert (await peer.goodbye()).startswith("version: ")
    peer = await connect(listener)
    peer.send(request(1), request(1))
    assert (await peer.goodbye()).startswith("protocol: ")
    assert (listener.refusals["version"], listener.refusals["protocol"]) == (30, 1)
    assert [record.args for record in caplog.records if "was ended" in record.msg] == [
        ("it speaks version 71 of the link, or something else; this is version 1",),
        ("stream 1 begins after stream 1",),
    ]


@pytest.mark.parametrize("sample", [lambda: bytes(link.MAX_TELEMETRY + 1), lambda: 1 // 0])
async def test_a_sample_that_cannot_be_sent_costs_no_link(
    listen: Any, connect: Connect, sample: Callable[[], bytes], caplog: pytest.LogCaptureFixture
) -> None:
    listener = await listen(telemetry=sample)
    peer = await connect(listener)
    await asyncio.sleep(2 * link.TELEMETRY_SECONDS)
    assert listener._ticking is not None
    assert not listener._ticking.done()  # it is what ends links of gateways that have gone
    listener.drain()
    await peer.next(link.DRAIN)
    peer.send(request(1, body=b"x"))
    assert await peer.answer(1) == (200, b"x")
    assert sum("sample" in record.msg for record in caplog.records) == 1


async def test_a_large_answer_is_not_copied_for_each_part_that_leaves() -> None:
    class Wire:
        blocked = False

        def touch(self, stream: LinkStream) -> None: ...

        def put(self, frame: bytes) -> None: ...

    body = random.Random(3).randbytes(10 * link.WINDOW + 5)
    stream = LinkStream(Wire(), 1, method=b"GET", body_follows=False)
    sending = asyncio.create_task(stream.send({"type": "http.response.body", "body": body}))
    received = b""
    while not sending.done():
        await asyncio.sleep(0)
        out: list[bytes | memoryview] = []
        stream.collect(out)
        parts = [part for part in out if isinstance(part, memoryview)]
        assert all(part.obj is body for part in parts)
        received += b"".join(parts)
        stream.take_credit(sum(map(len, parts)))
    assert received == body
