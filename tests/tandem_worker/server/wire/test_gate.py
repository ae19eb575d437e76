from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import AsyncIterator, Callable

import httpx
import pytest
from starlette.types import Receive, Scope, Send
from tandem_api.keys import KEY_BYTES, OPEN_RING, KeyRing, bearer_token
from tandem_worker.server.wire.gate import TokenGate
from tandem_worker.server.wire.http import send_json
from tandem_worker.server.wire.serving import serve


def make_ring(*names: str) -> KeyRing:
    """The first name is the primary key's."""
    return KeyRing(primary=names[0], keys={name: secrets.token_bytes(KEY_BYTES) for name in names})


class Scene:
    def __init__(self, port: int, gate: TokenGate, state: dict[str, KeyRing], reached: list[str]) -> None:
        self.port, self.gate, self.state, self.reached = port, gate, state, reached
        self.url = f"http://127.0.0.1:{port}"

    async def ask(self, method: str = "GET", path: str = "/v1/models", **options: object) -> httpx.Response:
        async with httpx.AsyncClient(base_url=self.url, timeout=120, verify=False) as http:
            return await http.request(method, path, **options)

    async def raw(self, head: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        writer.write(head.replace("\n", "\r\n").encode() + b"\r\n\r\n")
        return reader, writer


@pytest.fixture
async def scene() -> AsyncIterator[Scene]:
    state, reached = {"ring": make_ring("k1")}, []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            for _ in range(2):
                await send({"type": (await receive())["type"] + ".complete"})
            return
        reached.append(scope["path"])
        await send_json(send, {"path": scope["path"]})

    gate = TokenGate(app, lambda: state["ring"])
    server = await serve(gate, "127.0.0.1", 0)
    yield Scene(server.port, gate, state, reached)
    await server.stop()


def token(ring: KeyRing) -> dict[str, str]:
    return {"x-tandem-token": bearer_token(ring)}


async def test_who_shows_a_key_gets_through(scene: Scene) -> None:
    assert (await scene.ask(headers=token(scene.state["ring"]))).json() == {"path": "/v1/models"}


async def test_a_refusal_has_openais_shape(scene: Scene) -> None:
    answer = await scene.ask("POST", "/v1/chat/completions", json={"model": "x"}, headers={"x-request-id": "abc"})
    assert answer.status_code == 401
    assert answer.headers["x-request-id"] == "abc"
    error = answer.json()["error"]
    assert (error["type"], error["code"], error["param"]) == ("authentication_error", "invalid_token", None)
    assert "x-tandem-token" in error["message"]


@pytest.mark.parametrize("method", ["GET", "HEAD", "POST", "OPTIONS", "PUT", "DELETE", "PATCH", "TRACE", "BREW"])
async def test_every_path_and_method_looks_the_same_to_strangers(scene: Scene, method: str) -> None:
    answers = [
        await scene.ask(method, path, headers={"x-request-id": "a", "origin": "http://evil"} | extra)
        for path in ("/v1/models", "/nothing", "/", "/healthz", "/v1/models/%00")
        for extra in ({}, {"x-tandem-token": "no"}, token(make_ring("k1")), {"authorization": "Bearer a"})
    ]
    assert {answer.status_code for answer in answers} == {401 if method != "BREW" else answers[0].status_code}
    assert len({(answer.content, tuple(sorted(answer.headers.items()))) for answer in answers}) == 1
    assert not any(name.startswith("access-control") or name == "allow" for name in answers[0].headers)
    assert not scene.reached


async def test_refusals_are_counted(scene: Scene) -> None:
    await scene.ask()
    await scene.ask(headers={"x-tandem-token": "k1"})
    await scene.ask(headers={"x-tandem-token": ""})
    assert scene.gate.refusals == {"no_token": 1, "wrong_token": 2}


async def test_keys_rotate_without_a_refused_request(scene: Scene) -> None:
    old, new = scene.state["ring"], make_ring("k2")
    both = {**old.keys, **new.keys}
    shown, statuses = old, []

    async def load() -> None:
        async with httpx.AsyncClient(base_url=scene.url, timeout=120, verify=False) as http:
            while shown is not None:
                statuses.append((await http.get("/v1/models", headers=token(shown))).status_code)

    clients = [asyncio.create_task(load()) for _ in range(4)]
    for ring, then in ((KeyRing(primary="k1", keys=both), old), (KeyRing(primary="k2", keys=both), new), (new, new)):
        await asyncio.sleep(0.1)
        shown = then if ring is not new else shown
        await asyncio.sleep(0.1)  # what was sent before has been answered
        scene.state["ring"] = ring
    await until(lambda: len(statuses) > 20)
    shown = None
    await asyncio.gather(*clients)
    assert set(statuses) == {200}
    assert (await scene.ask(headers=token(old))).status_code == 401


async def test_without_keys_everybody_gets_through(scene: Scene) -> None:
    scene.state["ring"] = OPEN_RING
    assert (await scene.ask()).status_code == 200


async def test_the_answer_comes_before_the_body(scene: Scene) -> None:
    reader, writer = await scene.raw("POST /v1/completions HTTP/1.1\nhost: a\ncontent-length: 1000")
    assert (await asyncio.wait_for(reader.readline(), 60)).startswith(b"HTTP/1.1 401")
    writer.close()


@pytest.mark.parametrize(
    "framing", ["transfer-encoding: chunked", "content-length: 99999999999", f"content-length: {5000 * '0'}9"]
)
async def test_bodies_without_a_bound_end_the_connection(scene: Scene, framing: str) -> None:
    reader, writer = await scene.raw(f"POST /v1/completions HTTP/1.1\nhost: a\n{framing}")
    answer = await asyncio.wait_for(reader.read(), 60)
    assert answer.startswith(b"HTTP/1.1 401")
    assert b"connection: close" in answer
    writer.close()


async def test_a_large_body_is_answered_and_the_connection_is_kept(scene: Scene) -> None:
    """Closed at once, the client would see a reset instead of the reason."""
    async with httpx.AsyncClient(base_url=scene.url, timeout=120, verify=False) as http:
        for _ in range(3):
            answer = await http.post("/v1/completions", content=b"x" * (4 << 20))
            assert answer.status_code == 401
    assert not scene.reached


async def test_expect_continue_invites_no_stranger(scene: Scene) -> None:
    reader, writer = await scene.raw("POST / HTTP/1.1\nhost: a\nexpect: 100-continue\ncontent-length: 10")
    assert (await asyncio.wait_for(reader.readline(), 60)).startswith(b"HTTP/1.1 401")
    writer.close()


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.005)


@contextlib.asynccontextmanager
async def small_server(limit: int, begun: list[str] | None = None, **options: bool) -> AsyncIterator[int]:
    """Its port. `begun`: gets the path of each request that has begun."""
    release = asyncio.Event()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            for _ in range(2):
                await send({"type": (await receive())["type"] + ".complete"})
            return
        if begun is not None:
            begun.append(scope["path"])
        if scope["path"] == "/wait":
            await release.wait()
        await send_json(send, "x" * 20_000_000 if scope["path"] == "/long" else {})

    server = await serve(app, "127.0.0.1", 0, max_connections=limit, **options)
    try:
        yield server.port
    finally:
        release.set()
        await server.stop()


async def is_closed(reader: asyncio.StreamReader) -> bool:
    with contextlib.suppress(ConnectionResetError):
        return await asyncio.wait_for(reader.read(1), 60) == b""
    return True


async def test_idle_connections_give_way() -> None:
    async with small_server(8) as port:
        idle = [await asyncio.open_connection("127.0.0.1", port) for _ in range(8)]
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", verify=False, timeout=120) as http:
            for _ in range(3):
                assert (await http.get("/")).status_code == 200
        assert await is_closed(idle[0][0])
        for _, writer in idle:
            writer.close()


async def test_connections_with_requests_do_not_give_way() -> None:
    async with small_server(4, begun := []) as port:
        busy = [await asyncio.open_connection("127.0.0.1", port) for _ in range(4)]
        for _, writer in busy:
            writer.write(b"GET /wait HTTP/1.1\r\nhost: a\r\n\r\n")
        await until(lambda: len(begun) == 4)
        late, late_writer = await asyncio.open_connection("127.0.0.1", port)
        assert await is_closed(late)
        assert not any(reader.at_eof() for reader, _ in busy)
        for _, writer in (*busy, (late, late_writer)):
            writer.close()


async def test_connections_whose_clients_do_not_read_give_way() -> None:
    async with small_server(4) as port:
        stuck = [await asyncio.open_connection("127.0.0.1", port, limit=1024) for _ in range(4)]
        for _, writer in stuck:
            writer.write(b"GET /long HTTP/1.1\r\nhost: a\r\n\r\n")
        await asyncio.sleep(1.0)
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", verify=False, timeout=120) as http:
            assert (await http.get("/")).status_code == 200
        for _, writer in stuck:
            writer.transport.abort()


async def test_a_server_that_has_stopped_holds_no_connection() -> None:
    """Whoever does not read is cut off with the rest."""
    async with small_server(4) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1024)
        writer.write(b"GET /long HTTP/1.1\r\nhost: a\r\n\r\n")
        received = len(await reader.readexactly(100))
    with contextlib.suppress(ConnectionResetError):
        while part := await asyncio.wait_for(reader.read(1 << 20), 60):
            received += len(part)
    assert received < 20_000_000
    writer.close()


async def test_where_busy_connections_give_way_a_probe_gets_in() -> None:
    async with small_server(4, begun := [], busy_give_way=True) as port:
        busy = [await asyncio.open_connection("127.0.0.1", port) for _ in range(4)]
        for _, writer in busy:
            writer.write(b"GET /wait HTTP/1.1\r\nhost: a\r\n\r\n")
        await until(lambda: len(begun) == 4)
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", verify=False, timeout=120) as http:
            assert (await http.get("/")).status_code == 200
        assert await is_closed(busy[0][0])
        assert not any(reader.at_eof() for reader, _ in busy[1:])
        for _, writer in busy:
            writer.close()
