"""Clients that mean no good, or know no better, on raw sockets: each gets a 4xx in OpenAI's shape."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
from typing import Any

import pytest

MODELS = b"GET /v1/models HTTP/1.1\r\nhost: x\r\n\r\n"
CLOSE = b"GET /v1/models HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n"


def split(answer: bytes) -> list[tuple[int, dict[str, str], bytes]]:
    """The responses in what a connection received; all have a Content-Length."""
    found = []
    while answer:
        head, _, rest = answer.partition(b"\r\n\r\n")
        status, *lines = head.decode().split("\r\n")
        headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
        length = int(headers.get("content-length", 0))
        found.append((int(status.split()[1]), headers, rest[:length]))
        answer = rest[length:]
    return found


def only(answer: bytes) -> tuple[int, dict[str, str], dict[str, Any]]:
    responses = split(answer)
    assert len(responses) == 1, answer
    status, headers, body = responses[0]
    return status, headers, json.loads(body)


def post(headers: str, body: str = "", path: str = "/v1/chat/completions") -> bytes:
    return f"POST {path} HTTP/1.1\r\nhost: x\r\n{headers}\r\n{body}".encode()


REFUSED = {
    "not HTTP": (b"hello\r\n\r\n", 400),
    "TLS": (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\0" * 40, 400),
    "HTTP/2 preface": (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 400),
    "unknown method": (b"BREW /v1/models HTTP/1.1\r\nhost: x\r\n\r\n", 400),
    "no host": (b"GET /v1/models HTTP/1.1\r\n\r\n", 400),
    "two hosts": (b"GET /v1/models HTTP/1.1\r\nhost: x\r\nhost: y\r\n\r\n", 400),
    "length and chunked": (post("content-length: 5\r\ntransfer-encoding: chunked\r\n", "0\r\n\r\n"), 400),
    "chunked and length": (post("transfer-encoding: chunked\r\ncontent-length: 5\r\n", "0\r\n\r\n"), 400),
    "gzip, chunked": (post("transfer-encoding: gzip, chunked\r\n", "0\r\n\r\n"), 400),
    "chunked, identity": (post("transfer-encoding: chunked, identity\r\n", "0\r\n\r\n"), 400),
    "chunked twice": (post("transfer-encoding: chunked\r\ntransfer-encoding: chunked\r\n", "0\r\n\r\n"), 400),
    "xchunked": (post("transfer-encoding: xchunked\r\n", "0\r\n\r\n"), 400),
    "vertical tab chunked": (post("transfer-encoding: \x0bchunked\r\n", "0\r\n\r\n"), 400),
    "space before colon": (post("transfer-encoding : chunked\r\n", "0\r\n\r\n"), 400),
    "two lengths": (post("content-length: 5\r\ncontent-length: 6\r\n", "hello!"), 400),
    "the same length twice": (post("content-length: 5\r\ncontent-length: 5\r\n", "hello"), 400),
    "negative length": (post("content-length: -1\r\n"), 400),
    "signed length": (post("content-length: +5\r\n", "hello"), 400),
    "hexadecimal length": (post("content-length: 0x5\r\n", "hello"), 400),
    "list of lengths": (post("content-length: 5, 5\r\n", "hello"), 400),
    "huge length": (post("content-length: 99999999999999999999999\r\n"), 400),
    "length after thousands of zeros": (post(f"content-length: {'0' * 5000}5\r\n", "hello"), 400),
    "folded header": (post("x-a: b\r\n c\r\ncontent-length: 2\r\n", "{}"), 400),
    "bare line feeds": (b"GET /v1/models HTTP/1.1\nhost: x\n\n", 400),
    "zero byte in a header": (post("x-a: b\0c\r\ncontent-length: 2\r\n", "{}"), 400),
    "bad chunk size": (post("transfer-encoding: chunked\r\n", "zz\r\n{}\r\n0\r\n\r\n"), 400),
    "chunk longer than told": (post("transfer-encoding: chunked\r\n", "2\r\n{}}\r\n0\r\n\r\n"), 400),
    "header of 40 kB": (post(f"x-a: {'a' * 40_000}\r\ncontent-length: 2\r\n", "{}"), 431),
    "300 headers": (post("x-a: b\r\n" * 300 + "content-length: 2\r\n", "{}"), 431),
    "URL of 40 kB": (f"GET /{'a' * 40_000} HTTP/1.1\r\nhost: x\r\n\r\n".encode(), 431),
    "header without end": (b"GET /v1/models HTTP/1.1\r\nx-a: " + b"a" * 60_000, 431),
    "10 MB body": (post("content-length: 10485760\r\n", "x" * 10_485_760), 413),
    "10 MB in chunks": (post("transfer-encoding: chunked\r\n", f"100000\r\n{'x' * 0x100000}\r\n" * 10), 413),
    "compressed body": (post("content-encoding: gzip\r\ncontent-length: 2\r\n", "{}"), 415),
    "HTTP/0.9": (b"GET /v1/models\r\n\r\n", 505),
    "HTTP/0.9, told": (b"GET /v1/models HTTP/0.9\r\nhost: x\r\n\r\n", 505),
    "HTTP/2.0": (b"GET /v1/models HTTP/2.0\r\nhost: x\r\n\r\n", 505),
    "CONNECT": (b"CONNECT x:80 HTTP/1.1\r\nhost: x\r\n\r\n", 400),
    "trailers of 40 kB": (post("transfer-encoding: chunked\r\n", f"0\r\nx-a: {'a' * 40_000}\r\n\r\n"), 431),
    "300 trailers": (post("transfer-encoding: chunked\r\n", "0\r\n" + "x-a: b\r\n" * 300 + "\r\n"), 431),
    "unknown expectation": (post("expect: tea\r\ncontent-length: 2\r\n", "{}"), 417),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
async def test_bad_requests_are_refused_and_end_the_connection(start_gateway, start_worker, name: str) -> None:
    worker = await start_worker()
    running = await start_gateway(worker)
    data, expected = REFUSED[name]
    status, headers, body = only(await running.raw(data))
    assert status == expected
    assert headers["connection"] == "close"
    assert headers["x-request-id"]
    assert body["error"]["message"]
    assert body["error"]["type"] == "invalid_request_error"
    assert not worker.received
    assert running.gateway.metrics.requests["other", expected] == 1


async def test_a_smuggled_request_is_never_seen(start_gateway, start_worker) -> None:
    """The classic: a front end that reads Content-Length, a back end that reads chunks, a request between them."""
    worker = await start_worker()
    running = await start_gateway(worker)
    hidden = "0\r\n\r\nGET /v1/models HTTP/1.1\r\nhost: x\r\n\r\n"
    answer = await running.raw(post(f"content-length: {len(hidden)}\r\ntransfer-encoding: chunked\r\n", hidden))
    assert [status for status, _, _ in split(answer)] == [400]


@pytest.mark.parametrize(
    ("request_line", "status", "code"),
    [
        ("GET /v1/models", 200, None),
        ("GET /v1/models?limit=3", 200, None),
        ("GET /v1/models/toy", 200, None),
        ("GET http://gateway.example:8080/v1/models", 200, None),
        ("GET HTTP://[::1]/v1/models/toy?x=http://y/z", 200, None),
        ("GET http://gateway.example", 404, "unknown_url"),
        ("GET http://gateway.example?/v1/models", 404, "unknown_url"),
        ("GET /v1/models/other", 404, "model_not_found"),
        ("POST /v1/models", 405, "method_not_allowed"),
        ("GET /v1/chat/completions", 405, "method_not_allowed"),
        ("DELETE /v1/completions", 405, "method_not_allowed"),
        ("OPTIONS /v1/embeddings", 405, "method_not_allowed"),
        ("GET /", 404, "unknown_url"),
        ("GET /healthz", 404, "unknown_url"),
        ("POST /v1/images/generations", 404, "unknown_url"),
        ("GET /v1/../etc/passwd", 404, "unknown_url"),
    ],
)
async def test_routes(start_gateway, start_worker, request_line: str, status: int, code: str | None) -> None:
    running = await start_gateway(await start_worker())
    answer = await running.raw(f"{request_line} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n".encode())
    found, headers, body = only(answer)
    assert found == status
    if code:
        assert body["error"]["code"] == code
    assert ("allow" in headers) == (status == 405)


@pytest.mark.parametrize("path", ["maker%2Ftoy", "maker%2ftoy", "maker/toy"])
async def test_a_model_with_a_slash_in_its_name(start_gateway, start_worker, path: str) -> None:
    running = await start_gateway(await start_worker(), served_name="maker/toy")
    request = f"GET /v1/models/{path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n"
    status, _, body = only(await running.raw(request.encode()))
    assert (status, body.get("id")) == (200, "maker/toy")


async def test_head_has_a_length_and_no_body(start_gateway, start_worker) -> None:
    running = await start_gateway(await start_worker())
    answer = await running.raw(b"HEAD /v1/models HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200 OK")
    assert int(re.findall(rb"content-length: (\d+)", head)[0]) > 0
    assert body == b""


async def test_pipelined_requests_are_answered_in_order(start_gateway, start_worker, chat) -> None:
    worker = await start_worker()
    running = await start_gateway(worker)
    data = chat(max_tokens=1) + MODELS + chat(max_tokens=2) + CLOSE
    responses = split(await running.raw(data))
    assert [json.loads(body)["object"] for _, _, body in responses] == [
        "chat.completion", "list", "chat.completion", "list",
    ]  # fmt: skip
    assert [request.json["max_tokens"] for request in worker.received] == [1, 2]


async def test_an_error_behind_a_good_request_is_answered_after_it(start_gateway, start_worker, chat) -> None:
    running = await start_gateway(await start_worker())
    responses = split(await running.raw(chat() + b"nonsense\r\n\r\n"))
    assert [status for status, _, _ in responses] == [200, 400]


async def test_a_thousand_pipelined_requests_are_no_recursion(start_gateway, start_worker) -> None:
    running = await start_gateway(await start_worker())
    assert len(split(await running.raw(MODELS * 1000 + CLOSE))) == 1001


async def test_a_read_that_ends_inside_the_next_header_is_fine(start_gateway, start_worker) -> None:
    running = await start_gateway(await start_worker())
    reader, writer = await running.connect()
    writer.write(MODELS * 1500 + CLOSE[:30])
    await asyncio.sleep(0.3)
    writer.write(CLOSE[30:])
    assert [status for status, _, _ in split(await reader.read())] == [200] * 1501


async def test_a_request_in_single_bytes_is_read(start_gateway, start_worker, chat) -> None:
    worker = await start_worker()
    running = await start_gateway(worker)
    reader, writer = await running.connect()
    for byte in chat(headers="connection: close\r\n"):
        writer.write(bytes([byte]))
        await writer.drain()
    assert only(await reader.read())[0] == 200
    writer.close()


async def test_a_chunked_upload_reaches_the_worker_as_one_body(start_gateway, start_worker, chat) -> None:
    worker = await start_worker()
    running = await start_gateway(worker)
    body = chat().partition(b"\r\n\r\n")[2]
    chunks = b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in (body[:7], body[7:40], body[40:]))
    data = post("transfer-encoding: chunked\r\nconnection: close\r\n").removesuffix(b"") + chunks + b"0\r\n\r\n"
    assert only(await running.raw(data))[0] == 200
    assert worker.received[0].body == body
    assert "transfer-encoding" not in worker.received[0].headers


async def test_expect_continue_is_answered_before_the_body(start_gateway, start_worker, chat) -> None:
    running = await start_gateway(await start_worker())
    head, _, body = chat(headers="expect: 100-continue\r\nconnection: close\r\n").partition(b"\r\n\r\n")
    reader, writer = await running.connect()
    writer.write(head + b"\r\n\r\n")
    assert await reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
    writer.write(body)
    assert only(await reader.read())[0] == 200
    writer.close()


async def test_expect_continue_with_a_body_too_large_is_refused_before_it_is_sent(start_gateway, start_worker) -> None:
    running = await start_gateway(await start_worker())
    assert only(await running.raw(post("expect: 100-continue\r\ncontent-length: 99999999\r\n")))[0] == 413


@pytest.mark.parametrize(
    ("sent", "status"),
    [(b"GET /v1/models HTTP/1.1\r\nhost:", 408), (post("content-length: 10\r\n", "{"), 408), (b"", None)],
)
async def test_slow_clients_are_timed_out(start_gateway, start_worker, sent: bytes, status: int | None) -> None:
    running = await start_gateway(await start_worker(), timeouts={"header_seconds": 0.3, "body_seconds": 0.3})
    answer = await running.raw(sent, wait=60)
    if status is None:
        assert answer == b""
    else:
        assert only(answer)[0] == status
        assert only(answer)[2]["error"]["code"] == "request_timeout"


async def test_drips_do_not_prolong_the_header_timeout(start_gateway, start_worker) -> None:
    running = await start_gateway(await start_worker(), timeouts={"header_seconds": 0.5})
    reader, writer = await running.connect()

    async def drip() -> None:
        for byte in b"GET /v1/models HTTP/1.1\r\n" + b"x-a: b\r\n" * 1000:
            writer.write(bytes([byte]))
            await asyncio.sleep(0.02)

    task = asyncio.create_task(drip())
    async with asyncio.timeout(60):
        answer = await reader.read()
    task.cancel()
    assert only(answer)[0] == 408
    writer.close()


async def test_http_1_0_gets_an_answer_without_chunks(start_gateway, start_worker, chat) -> None:
    running = await start_gateway(await start_worker())
    data = chat(stream=True).replace(b"HTTP/1.1", b"HTTP/1.0").replace(b"host: x\r\n", b"")
    head, _, body = (await running.raw(data)).partition(b"\r\n\r\n")
    assert b"transfer-encoding" not in head
    assert b"connection: close" in head
    assert body.startswith(b"data: ")
    assert body.endswith(b"data: [DONE]\n\n")


async def test_an_upgrade_offer_is_declined_by_answering_plainly(start_gateway, start_worker, chat) -> None:
    running = await start_gateway(await start_worker())
    data = chat(headers="connection: Upgrade, HTTP2-Settings\r\nupgrade: h2c\r\nhttp2-settings: AAM\r\n")
    assert [status for status, _, _ in split(await running.raw(data + CLOSE))] == [200, 200]


@pytest.mark.parametrize("connection", ["Upgrade, close", "close, upgrade", "CLOSE\r\nconnection: upgrade"])
async def test_who_offers_an_upgrade_and_asks_to_close_is_answered_and_closed(
    start_gateway, start_worker, chat, connection: str
) -> None:
    running = await start_gateway(await start_worker())
    reader, writer = await running.connect()
    writer.write(chat(headers=f"connection: {connection}\r\nupgrade: h2c\r\n"))
    async with asyncio.timeout(60):
        assert b"\r\nconnection: close\r\n" in await reader.read()


async def test_many_upgrade_offers_in_one_read_are_no_recursion(start_gateway, start_worker) -> None:
    running = await start_gateway(await start_worker())
    offer = MODELS.replace(b"\r\n\r\n", b"\r\nconnection: upgrade\r\nupgrade: h2c\r\n\r\n")
    assert [status for status, _, _ in split(await running.raw(offer * 3000 + CLOSE))] == [200] * 3001


async def test_trailers_change_nothing(start_gateway, start_worker, chat) -> None:
    worker = await start_worker()
    running = await start_gateway(worker)
    body = chat().partition(b"\r\n\r\n")[2]
    data = post("transfer-encoding: chunked\r\nx-request-id: mine\r\nconnection: close\r\n")
    data += b"%x\r\n%b\r\n0\r\nx-request-id: other\r\ncontent-type: x/y\r\n\r\n" % (len(body), body)
    assert only(await running.raw(data))[1]["x-request-id"] == "mine"
    assert worker.received[0].headers["x-request-id"] == "mine"
    assert "content-type" not in worker.received[0].headers


async def test_a_half_closed_client_has_gone(start_gateway, start_worker, fault, chat, until) -> None:
    worker = await start_worker(behaviours=[fault.hang])
    running = await start_gateway(worker)
    _, writer = await running.connect()
    writer.write(chat())
    await until(lambda: worker.answering)
    writer.write_eof()
    await until(lambda: worker.cancelled)
    writer.close()


async def test_a_client_that_sends_too_far_ahead_is_cut_off(start_gateway, start_worker, fault, chat, until) -> None:
    worker = await start_worker(behaviours=[fault.hang])
    running = await start_gateway(worker)
    _, writer = await running.connect()
    writer.write(chat())
    await until(lambda: worker.answering)
    with contextlib.suppress(ConnectionError):
        for _ in range(32):
            writer.write(MODELS * 10_000)
            await writer.drain()
    await until(lambda: worker.cancelled)


async def test_a_client_that_pipelines_and_leaves_cancels_its_worker(
    start_gateway, start_worker, fault, chat, until
) -> None:
    worker = await start_worker(behaviours=[fault.hang])
    running = await start_gateway(worker)
    _, writer = await running.connect()
    writer.write(chat() + chat() + MODELS + b"GET /v1/mod")
    await until(lambda: worker.answering)
    writer.transport.abort()
    await until(lambda: worker.cancelled)


async def test_random_bytes_never_hurt(start_gateway, start_worker, chat) -> None:
    running = await start_gateway(await start_worker())
    good = chat()
    for position in range(0, len(good), 7):
        broken = good[:position] + b"\xff\r\n\0" + good[position + 1 :]
        answer = await running.raw(broken, wait=0.02)
        assert not answer or answer.startswith((b"HTTP/1.1 4", b"HTTP/1.1 200"))
    assert only(await running.raw(CLOSE))[0] == 200
