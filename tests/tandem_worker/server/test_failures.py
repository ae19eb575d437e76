"""Clients that go away, engines that fail, workers that drain, requests that are no HTTP."""

from __future__ import annotations

import asyncio
import gc
import socket
from typing import Any

import openai
import orjson
import pytest
from tandem_worker.engine.errors import EngineStoppedError, RequestError
from tandem_worker.server.wire.http import describe_error
from tandem_worker.server.wire.serving import WorkerProtocol

HELLO: Any = [{"role": "user", "content": "hello"}]
BODY = {"model": "tiny", "messages": HELLO}


async def until(condition: Any, seconds: float = 60.0) -> None:
    async with asyncio.timeout(seconds):
        while not condition():  # noqa: ASYNC110 - what is waited for happens in other threads and connections
            await asyncio.sleep(0.005)


async def raw(worker: Any, data: bytes) -> bytes:
    reader, writer = await asyncio.open_connection("127.0.0.1", worker.port)
    writer.write(data)
    try:
        return await asyncio.wait_for(reader.read(65536), 60)
    finally:
        writer.close()


async def test_disconnect_while_streaming_aborts(worker: Any) -> None:
    worker.says("many words " * 100)
    worker.engine.step_seconds = 0.01
    stream = await worker.client.chat.completions.create(**BODY, stream=True)
    await anext(aiter(stream))
    await stream.close()
    await until(lambda: worker.engine.requests[0].request_id in worker.engine.aborted)
    await until(lambda: worker.hub.num_open == 0)
    await until(lambda: worker.outcomes)
    assert worker.outcomes[0].status == 499


@pytest.mark.parametrize("stream", [False, True])
async def test_disconnect_before_the_first_token_aborts(worker: Any, stream: bool) -> None:
    worker.engine.gate.clear()
    task = asyncio.create_task(worker.client.chat.completions.create(**BODY, stream=stream))
    await until(lambda: worker.engine.requests)
    task.cancel()
    await until(lambda: worker.engine.requests[0].request_id in worker.engine.aborted)
    await until(lambda: worker.hub.num_open == 0)


async def test_disconnect_of_one_prompt_list_aborts_all(worker: Any) -> None:
    worker.engine.gate.clear()
    task = asyncio.create_task(worker.client.completions.create(model="tiny", prompt=["a", "b", "c"]))
    await until(lambda: len(worker.engine.requests) == 3)
    task.cancel()
    await until(lambda: len(set(worker.engine.aborted)) == 3)


async def test_error_before_the_first_token_is_a_500(worker: Any) -> None:
    worker.engine.fail_after = 0
    with pytest.raises(openai.InternalServerError, match="The GPU is gone"):
        await worker.client.chat.completions.create(**BODY, stream=True)
    with pytest.raises(openai.InternalServerError, match="The GPU is gone"):
        await worker.client.chat.completions.create(**BODY)


@pytest.mark.parametrize("status", [400, 429])
async def test_an_end_that_is_the_requests_fault_says_so(worker: Any, status: int) -> None:
    """What a grammar takes beyond its limits was answered 500, as if the worker were broken."""
    worker.says("many words")
    worker.engine.fail_after = 0
    worker.engine.error = RequestError("The grammar is too complex.", code="grammar_too_complex", status=status)
    for stream in (False, True):
        response = await worker.http.post("/v1/chat/completions", json={**BODY, "stream": stream})
        assert response.status_code == status
        assert response.json()["error"]["code"] == "grammar_too_complex"
    worker.engine.fail_after = 3
    worker.engine.step_seconds = 0.02
    response = await worker.http.post("/v1/chat/completions", json={**BODY, "stream": True})
    assert response.status_code == 200
    assert b"[DONE]" not in response.content
    assert '"grammar_too_complex"' in response.text.split("\n\n")[-2]


async def test_error_in_mid_stream_is_an_event(worker: Any) -> None:
    worker.says("many words")
    worker.engine.fail_after = 3
    worker.engine.step_seconds = 0.02
    stream = await worker.client.chat.completions.create(**BODY, stream=True)
    with pytest.raises(openai.APIError, match="The GPU is gone"):
        async for _ in stream:
            pass
    response = await worker.http.post("/v1/chat/completions", json={**BODY, "stream": True})
    assert b"[DONE]" not in response.content
    assert response.text.split("\n\n")[-2].startswith('data: {"error":')
    with pytest.raises(openai.InternalServerError, match="The GPU is gone"):
        await worker.client.chat.completions.create(**BODY)


async def test_engine_that_stops_admitting(worker: Any) -> None:
    worker.engine.submit_error = EngineStoppedError("The engine is draining.")
    response = await worker.http.post("/v1/chat/completions", json=BODY)
    assert response.status_code == 503
    assert response.headers["x-tandem-retry"] == "1"
    assert response.json()["error"]["message"] == "The engine is draining."
    assert worker.hub.num_open == 0


async def test_full_queue(worker: Any) -> None:
    worker.engine.submit_error = RequestError("The queue is full.", status=429, code="queue_full")
    with pytest.raises(openai.RateLimitError) as caught:
        await worker.client.chat.completions.create(**BODY)
    assert caught.value.response.headers["retry-after"] == "1"
    assert caught.value.body["type"] == "rate_limit_error"


def test_who_refuses_large_requests_alone_says_so() -> None:
    """A gateway leaves out who answers 429 to everything, for a while."""
    for code, expected in (("queue_full", "full"), ("too_many_large_requests", "request")):
        status, _, headers = describe_error(RequestError("no", status=429, code=code))
        assert (status, headers.get("x-tandem-retry")) == (429, expected)


async def test_a_bug_is_a_500_and_the_server_lives(worker: Any) -> None:
    worker.engine.submit_error = ZeroDivisionError("secret detail")
    response = await worker.http.post("/v1/chat/completions", json=BODY)
    assert response.status_code == 500
    assert "secret" not in response.text
    worker.engine.submit_error = None
    assert (await worker.http.post("/v1/chat/completions", json=BODY)).status_code == 200


async def test_draining_and_loading(worker: Any) -> None:
    worker.state["draining"] = True
    response = await worker.http.post("/v1/chat/completions", json=BODY)
    assert response.status_code == 503
    assert response.headers["x-tandem-retry"] == "1"
    assert response.json()["error"]["type"] == "overloaded_error"
    worker.state.update(draining=False, ready=False)
    assert (await worker.http.post("/v1/completions", json={})).status_code == 503


async def test_running_streams_end_while_draining(worker: Any) -> None:
    worker.says("still here")
    worker.engine.step_seconds = 0.01
    stream = await worker.client.chat.completions.create(**BODY, stream=True)
    worker.state["draining"] = True
    text = "".join([chunk.choices[0].delta.content or "" async for chunk in stream])
    assert text == "still here"


async def test_a_dead_engine_ends_its_requests(worker: Any) -> None:
    worker.engine.gate.clear()
    task = asyncio.create_task(worker.http.post("/v1/chat/completions", json=BODY))
    await until(lambda: worker.engine.requests)
    worker.engine.failure = RuntimeError("illegal memory access")
    response = await task
    assert response.status_code == 503
    assert response.headers["x-tandem-retry"] == "1", "another worker may take it"
    assert (await worker.http.post("/v1/chat/completions", json=BODY)).status_code == 503


async def test_body_limit(worker: Any) -> None:
    big = b'{"model": "tiny", "messages": "' + b"x" * (10 * 1024 * 1024) + b'"}'
    response = await worker.http.post("/v1/chat/completions", content=big)
    assert response.status_code == 413
    assert "8 MiB" in response.json()["error"]["message"]

    async def chunks() -> Any:
        for _ in range(10):
            yield b"x" * (1024 * 1024)

    response = await worker.http.post("/v1/chat/completions", content=chunks())
    assert response.status_code == 413
    assert (await worker.http.get("/v1/models")).status_code == 200


@pytest.mark.parametrize("journal", [b"", b'{"id":"a","created":1,"fingerprint":"b","seed":1,"digest":"c"}\n'])
async def test_a_length_of_thousands_of_digits(worker: Any, journal: bytes) -> None:
    """The parser of HTTP takes any number of zeros before it. It is read to take a journal off it, too."""
    fields = b"host: a\r\nconnection: close\r\nx-tandem-resume: %d\r\n" % len(journal)
    head = b"POST /v1/chat/completions HTTP/1.1\r\n" + fields
    body = journal + orjson.dumps(BODY)
    answer = await raw(worker, head + b"content-length: %05000d\r\n\r\n" % len(body) + body)
    assert answer.startswith(b"HTTP/1.1 400 ")
    assert b"content-length must be a number of bytes" in answer


@pytest.mark.parametrize(
    "data",
    [
        b"GET\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00",
        b"POST /v1/models HTTP/1.1\r\nHost: a\r\nContent-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        b"POST /v1/chat/completions HTTP/1.1\r\nHost: a\r\nContent-Length: 3\r\nContent-Length: 4\r\n\r\nabc",
        b"POST /v1/chat/completions HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: xchunked\r\n\r\n0\r\n\r\n",
    ],
)
async def test_what_is_no_http_is_refused(worker: Any, data: bytes) -> None:
    answer = await raw(worker, data)
    assert answer.startswith(b"HTTP/1.1 400 ")
    assert b'"invalid_http"' in answer
    assert (await worker.http.get("/v1/models")).status_code == 200


@pytest.mark.parametrize(
    "data",
    [
        b"GET /v1/models HTTP/1.1\r\nHost: a\r\n" + b"a: b\r\n" * 129,
        b"GET /v1/models HTTP/1.1\r\nHost: a\r\n" + b"a: b\r\n" * 128 + b"\r\n",
        b"GET /v1/models HTTP/1.1\r\nHost: a\r\nb: " + b"x" * 33_000,
        b"GET /v1/models HTTP/1.1\r\nHost: a\r\nb: " + b"x" * 33_000 + b"\r\n\r\n",
        b"GET /" + b"x" * 33_000,
        b"POST /v1/chat/completions HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n"
        + b"a: b\r\n" * 129,
        b"POST /v1/chat/completions HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\nb: "
        + b"x" * 400_000,  # more than one read: what a read has beside a body is not counted
    ],
    ids=["begun", "many", "long-begun", "long", "a-path", "trailers", "a-trailer"],
)
async def test_headers_are_bounded(worker: Any, data: bytes) -> None:
    """They are kept before anybody has shown a key: megabytes of them took forty times as many."""
    answer = await raw(worker, data)
    assert answer.startswith(b"HTTP/1.1 431 ")
    assert b'"headers_too_large"' in answer


async def test_headers_within_the_bounds_are_taken(worker: Any) -> None:
    for headers in (b"a: b\r\n" * 126, b"a: " + b"x" * 30_000 + b"\r\n"):
        head = b"GET /v1/models HTTP/1.1\r\nHost: a\r\nConnection: close\r\n" + headers
        assert (await raw(worker, head + b"\r\n")).startswith(b"HTTP/1.1 200 ")
    # Neither a body nor the request before counts to a header.
    body = b'{"model":"tiny","messages":[{"role":"user","content":"' + b"x" * 20_000 + b'"}],"max_tokens":1}'
    chunks = b"".join(b"%x\r\n%s\r\n" % (len(part), part) for part in (body[i : i + 3] for i in range(0, len(body), 3)))
    lines = b"POST /v1/chat/completions HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n"
    request = lines + b"a: b\r\n" * 100 + b"\r\n" + chunks + b"0\r\nc: d\r\n\r\n"
    reader, writer = await asyncio.open_connection("127.0.0.1", worker.port)
    for _ in range(5):
        writer.write(request)
        status = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 60)
        assert status.startswith(b"HTTP/1.1 "), status
        assert not status.startswith(b"HTTP/1.1 431 ")
        length = int(status.lower().partition(b"content-length: ")[2].partition(b"\r")[0])
        await reader.readexactly(length)
    writer.close()


async def test_slow_headers_are_cut_off(worker: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tandem_worker.server.wire.serving.HEADER_TIMEOUT_SECONDS", 0.2)
    answer = await raw(worker, b"POST /v1/chat/completions HTTP/1.1\r\nHost: a\r\n")
    assert answer.startswith(b"HTTP/1.1 408 ")
    assert b'"timeout_error"' in answer


async def test_a_client_that_does_not_read_does_not_stop_others(worker: Any) -> None:
    worker.says("word " * 400)
    _, writer = await asyncio.open_connection("127.0.0.1", worker.port)
    body = b'{"model":"tiny","messages":[{"role":"user","content":"x"}],"stream":true}'
    writer.write(b"POST /v1/chat/completions HTTP/1.1\r\nHost: a\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body))
    answer = await worker.client.chat.completions.create(**BODY)
    assert answer.choices[0].message.content == "word " * 400
    writer.close()


async def test_many_streams_at_once(worker: Any) -> None:
    worker.engine.script = lambda request, _choice: [
        *worker.tokenizer.encode(worker.tokenizer.decode(request.prompt_token_ids)),
        worker.tokenizer.backend_tokenizer.token_to_id("<|endoftext|>"),
    ]

    async def one(index: int) -> bool:
        stream = await worker.client.completions.create(
            model="tiny", prompt=f"request {index}", stream=True, max_tokens=100
        )
        return "".join([chunk.choices[0].text async for chunk in stream]) == f"request {index}"

    assert all(await asyncio.gather(*(one(index) for index in range(50))))
    assert worker.hub.num_open == 0


async def test_a_connection_that_was_reset_is_forgotten(worker: Any) -> None:
    """An answered one keeps a timer for its next request; it must not keep what it has read until that is over."""

    def alive() -> int:
        gc.collect()
        return sum(issubclass(type(each), WorkerProtocol) for each in gc.get_objects())

    before = alive()
    for _ in range(20):
        with socket.create_connection(("127.0.0.1", worker.port)) as client:
            client.sendall(b"GET /nothing HTTP/1.1\r\nhost: x\r\n\r\n")
            await asyncio.sleep(0.02)  # what it does not read makes its end a reset
    await until(lambda: alive() <= before)
