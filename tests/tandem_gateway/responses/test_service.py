"""A gateway that keeps responses, over workers that answer as a test tells them to; its clients are the real one and
such as mean no good.
"""

from __future__ import annotations

import asyncio
import json
import socket
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import httpx
import openai
import orjson
import pytest
from tandem_api.launch import CORSRules, GatewayRouting, StoreLimits
from tandem_gateway.process.settings import parse_settings
from tandem_gateway.responses.conversation import MAX_DEPTH

from tests.tandem_gateway.conftest import FakeWorker, Received, Running, begin_stream, chunk, send_json, until

KEPT = StoreLimits(max_bytes=4 << 20, ttl_seconds=600)
REASONING = {"id": "rs_1", "type": "reasoning", "status": "completed", "summary": [],
             "content": [{"type": "reasoning_text", "text": "let me see"}]}  # fmt: skip
CALL = {"id": "fc_1", "type": "function_call", "status": "completed", "call_id": "call_1", "name": "look_up",
        "arguments": '{"a": 1}'}  # fmt: skip


NO_EVENT = "event: response.completed\n\n"
"""A text that a model may well write."""


def message(text: str) -> dict[str, Any]:
    part = {"type": "output_text", "annotations": [], "logprobs": [{"token": text, "logprob": -1.0}], "text": text}
    return {"id": f"msg_{text}", "type": "message", "status": "completed", "role": "assistant", "content": [part]}


def response(request: Received, status: str, output: list[dict[str, Any]]) -> dict[str, Any]:
    usage = {"input_tokens": 7, "output_tokens": 2, "input_tokens_details": {"cached_tokens": 3}, "total_tokens": 9}
    return {
        "id": "resp_workers", "object": "response", "created_at": 1, "status": status, "error": None, "model": "toy",
        "output": output, "usage": usage if status != "in_progress" else None, "previous_response_id": None,
        "store": False, "instructions": request.json.get("instructions"), "parallel_tool_calls": True,
        "tool_choice": "auto", "tools": [],
    }  # fmt: skip


def event(kind: str, **fields: Any) -> bytes:
    return f"event: response.{kind}\ndata: {json.dumps({'type': f'response.{kind}', **fields})}\n\n".encode()


def events(request: Received, *, last: str = "completed", output: list[dict[str, Any]] | None = None) -> list[bytes]:
    """Of a stream, one after another."""
    items = [message(f"answer {len(request.json['input'])}")] if output is None else output
    begun = response(request, "in_progress", [])
    place = {"output_index": 0, "content_index": 0, "item_id": items[0]["id"]}
    part = {"type": "output_text", "annotations": [], "logprobs": [], "text": ""}
    told = [
        event("created", sequence_number=0, response=begun),
        event("in_progress", sequence_number=1, response=begun),
        event("output_item.added", sequence_number=2, output_index=0, item=items[0] | {"content": []}),
        event("content_part.added", sequence_number=3, part=part, **place),
        event("output_text.delta", sequence_number=4, delta=NO_EVENT, logprobs=[], **place),
    ]
    told += [event("output_item.done", sequence_number=5, output_index=0, item=each) for each in items]
    return [*told, event(last, sequence_number=6, response=response(request, last, items))]


async def answer(worker: FakeWorker, request: Received, writer: asyncio.StreamWriter) -> None:
    assert "authorization" not in request.headers, "a client's key is none of a worker's business"
    assert "previous_response_id" not in request.json
    items = [message(f"answer {len(request.json['input'])}")]
    if not request.json.get("stream"):
        await send_json(writer, 200, response(request, "completed", items))
        return
    begin_stream(worker, writer)
    for each in events(request):
        writer.write(chunk(each))
    writer.write(b"0\r\n\r\n")
    await writer.drain()


def answer_with(*items: dict[str, Any], status: str = "completed") -> Callable[..., Awaitable[None]]:
    async def behave(_worker: FakeWorker, request: Received, writer: asyncio.StreamWriter) -> None:
        await send_json(writer, 200, response(request, status, list(items)))

    return behave


def stream_pieces(
    cut: Callable[[Received], list[bytes]], *, end: bytes = b"0\r\n\r\n"
) -> Callable[..., Awaitable[None]]:
    async def behave(worker: FakeWorker, request: Received, writer: asyncio.StreamWriter) -> None:
        begin_stream(worker, writer)
        for piece in cut(request):
            writer.write(chunk(piece))
            await writer.drain()
            await asyncio.sleep(0)
        if end:
            writer.write(end)
            await writer.drain()
        else:
            await asyncio.sleep(0.02)
            writer.transport.abort()

    return behave


Start = Callable[..., Awaitable[tuple[Running, FakeWorker]]]


@pytest.fixture
def start(start_gateway: Any, start_worker: Any) -> Start:
    async def begin(response_store: StoreLimits | None = KEPT, **fields: Any) -> tuple[Running, FakeWorker]:
        worker = await start_worker(default=answer)
        return await start_gateway(worker, response_store=response_store, **fields), worker

    return begin


def connect(running: Running, key: str = "mine") -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{running.url}/v1", api_key=key, max_retries=0, timeout=60)


@pytest.fixture
async def client(start: Start) -> AsyncIterator[tuple[openai.AsyncOpenAI, FakeWorker, Running]]:
    running, worker = await start()
    async with connect(running) as made:
        yield made, worker, running


def stored(running: Running) -> Any:
    assert running.gateway.responses is not None
    return running.gateway.responses.store


async def test_a_conversation_by_ids(client: tuple[openai.AsyncOpenAI, FakeWorker, Running]) -> None:
    asks, worker, _ = client
    first = await asks.responses.create(model="toy", input="tell me a joke", instructions="be brief")
    assert (first.store, first.previous_response_id, first.output_text) == (True, None, "answer 1")
    assert first.id != "resp_workers"
    second = await asks.responses.create(model="toy", input="explain it", previous_response_id=first.id, store=True)
    assert (second.store, second.previous_response_id, second.output_text) == (True, first.id, "answer 3")
    third = await asks.responses.create(model="toy", input="more", previous_response_id=second.id, store=False)
    assert (third.store, third.previous_response_id, third.output_text) == (False, second.id, "answer 5")
    told = worker.received[-1].json
    assert [item["role"] for item in told["input"]] == ["user", "assistant", "user", "assistant", "user"]
    assert (told["store"], told["input"][0]["content"], "instructions" in told) == (False, "tell me a joke", False)
    with pytest.raises(openai.NotFoundError):
        await asks.responses.create(model="toy", input="x", previous_response_id=third.id)
    branch = await asks.responses.create(model="toy", input="another", previous_response_id=first.id)
    assert branch.output_text == "answer 3"


async def test_what_is_kept_can_be_read_and_deleted(client: tuple[openai.AsyncOpenAI, FakeWorker, Running]) -> None:
    asks, worker, running = client
    worker.behaviours += [answer_with(REASONING, message("hm"), CALL)]
    first = await asks.responses.create(model="toy", input="hi", metadata={"a": "b"})
    second = await asks.responses.create(
        model="toy",
        previous_response_id=first.id,
        input=[{"type": "function_call_output", "call_id": "call_1", "output": "7"}],
    )
    told = worker.received[-1].json["input"]
    assert told[1:4] == [REASONING, message("hm") | {"content": [message("hm")["content"][0] | {"logprobs": []}]}, CALL]
    assert told[4] == {"type": "function_call_output", "call_id": "call_1", "output": "7"}
    read = await asks.responses.retrieve(first.id)
    assert (read.id, read.store, [item.type for item in read.output]) == (
        first.id, True, ["reasoning", "message", "function_call"],
    )  # fmt: skip
    assert read.usage is not None
    assert read.usage.input_tokens == 7
    page = await asks.responses.input_items.list(second.id)
    assert [item.type for item in page.data] == [
        "function_call_output", "function_call", "message", "reasoning", "message",
    ]  # fmt: skip
    ids = [item.id async for item in asks.responses.input_items.list(second.id, order="asc", limit=2)]
    assert ids == [item.id for item in reversed(page.data)]
    assert len(set(ids)) == 5
    assert page.data[-1].content[0].text == "hi"
    await asks.responses.delete(first.id)
    for gone in (asks.responses.retrieve(first.id), asks.responses.delete(first.id)):
        with pytest.raises(openai.NotFoundError):
            await gone
    third = await asks.responses.create(model="toy", input="on", previous_response_id=second.id)
    assert third.output_text == "answer 7", "what came before the deleted one is still a part of it"
    for each in (second.id, third.id):
        await asks.responses.delete(each)
    assert (stored(running).used_bytes, running.gateway.budget.used) == (0, 0)


async def test_streams(client: tuple[openai.AsyncOpenAI, FakeWorker, Running]) -> None:
    asks, worker, _ = client
    async with asks.responses.stream(model="toy", input="hi") as stream:
        told = [event async for event in stream]
    ids = {each.response.id for each in told if hasattr(each, "response")}
    (name,) = ids
    assert [each.type for each in told[:2]] == ["response.created", "response.in_progress"]
    assert NO_EVENT in [each.delta for each in told if each.type == "response.output_text.delta"]
    assert told[-1].response.store is True
    async with asks.responses.stream(model="toy", input="and?", previous_response_id=name) as stream:
        last = await stream.get_final_response()
    assert (last.previous_response_id, last.output_text) == (name, "answer 3")
    assert (await asks.responses.retrieve(last.id)).output_text == "answer 3"
    assert [item["role"] for item in worker.received[-1].json["input"]] == ["user", "assistant", "user"]


@pytest.mark.parametrize("size", [3, 100, 5000])
async def test_a_stream_is_kept_however_it_arrives(
    client: tuple[openai.AsyncOpenAI, FakeWorker, Running], size: int
) -> None:
    asks, worker, _ = client

    def cut(request: Received) -> list[bytes]:
        text = b"".join(events(request))
        return [text[place : place + size] for place in range(0, len(text), size)]

    worker.behaviours += [stream_pieces(cut)]
    async with asks.responses.stream(model="toy", input="hi") as stream:
        last = await stream.get_final_response()
    read = await asks.responses.retrieve(last.id)
    assert (read.id, read.status, read.usage, read.output_text) == (last.id, "completed", last.usage, last.output_text)
    assert (read.output[0].content[0].logprobs, last.output[0].content[0].logprobs[0].logprob) == ([], -1)


def go_on(place: int, then: str) -> Callable[..., Awaitable[None]]:
    """From the event at `place`, in a stream that may move, up to the event at which the worker is gone: at `then`
    (`dies`, within it) or, at the end, nowhere."""

    async def behave(_worker: FakeWorker, request: Received, writer: asyncio.StreamWriter) -> None:
        size = int(request.headers["x-tandem-resume"])
        journal = request.body[:size]
        asked = Received(request.method, request.path, {}, request.body[size:])
        assert journal == (HEAD + b"\n" + b"".join(MARK % number for number in range(place)) if size else b"")
        writer.write(
            b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n"
            b"x-tandem-resume: " + HEAD + b"\r\n\r\n"
        )
        told = [each + MARK % number for number, each in enumerate(events(asked))]
        if then == "ends":
            writer.write(chunk(b"".join(told[place:])) + b"0\r\n\r\n")
            return
        end = int(then)
        writer.write(chunk(b"".join(told[place:end]) + told[end][: len(told[end]) // 2]))
        await writer.drain()
        await asyncio.sleep(0.05)
        writer.transport.abort()

    return behave


HEAD = b'{"id":"resp_workers"}'
MARK = b": e 0 %d 1\n"


@pytest.mark.parametrize("cut", range(1, 7))
async def test_a_stream_that_moves_is_kept_once_and_as_its_client_saw_it(
    start_gateway: Any, start_worker: Any, cut: int
) -> None:
    workers = [await start_worker(f"d{number}") for number in range(2)]
    left = [go_on(0, str(cut)), go_on(cut, "ends")]

    async def behave(worker: FakeWorker, request: Received, writer: asyncio.StreamWriter) -> None:
        await (left.pop(0) if left else answer)(worker, request, writer)

    for worker in workers:
        worker.default = behave
    running = await start_gateway(*workers, response_store=KEPT)
    async with connect(running) as asks:
        told = [each async for each in await asks.responses.create(model="toy", input="hi", stream=True)]
        assert [each.sequence_number for each in told] == list(range(7))
        names = {each.response.id for each in told if hasattr(each, "response")}
        last = told[-1].response
        assert names == {last.id}
        assert last.id != "resp_workers"
        assert running.gateway.metrics.resumes["reset"] == 1
        assert len(stored(running)) == 1
        read = await asks.responses.retrieve(last.id)
        seen = last.to_dict()
        seen["output"][0]["content"][0]["logprobs"] = []
        assert read.to_dict() == seen
        second = await asks.responses.create(model="toy", input="and?", previous_response_id=last.id)
        assert second.output_text == "answer 3"
    await running.idle()


async def test_what_was_cut_at_its_limit_goes_on(client: tuple[openai.AsyncOpenAI, FakeWorker, Running]) -> None:
    asks, worker, _ = client
    worker.behaviours += [answer_with(message("begun"), status="incomplete")]
    first = await asks.responses.create(model="toy", input="hi")
    assert (first.status, first.store) == ("incomplete", True)
    second = await asks.responses.create(model="toy", input="go on", previous_response_id=first.id)
    assert second.output_text == "answer 3"


@pytest.mark.parametrize("status", ["failed", "cancelled"])
async def test_an_answer_in_one_piece_that_is_none_is_not_kept(
    client: tuple[openai.AsyncOpenAI, FakeWorker, Running], status: str
) -> None:
    asks, worker, running = client
    worker.behaviours += [answer_with(message("begun"), status=status)]
    made = await asks.responses.create(model="toy", input="hi")
    assert (made.status, made.store, len(stored(running))) == (status, False, 0)


@pytest.mark.parametrize(("last", "pieces"), [("completed", 3), ("failed", 99)], ids=["breaks off", "fails"])
async def test_what_breaks_off_or_fails_is_not_kept(
    client: tuple[openai.AsyncOpenAI, FakeWorker, Running], last: str, pieces: int
) -> None:
    asks, worker, running = client
    whole = stream_pieces(lambda request: events(request, last=last)[:pieces], end=b"" if pieces < 9 else b"0\r\n\r\n")
    worker.behaviours += [whole]
    names: set[str] = set()
    stores: list[bool] = []

    async def read() -> None:
        async for each in await asks.responses.create(model="toy", input="hi", stream=True):
            if hasattr(each, "response"):
                names.add(each.response.id)
                stores.append(each.response.store)

    if pieces < 9:
        with pytest.raises(openai.APIError):
            await read()
    else:
        await read()
        assert stores[-1] is False
    with pytest.raises(openai.NotFoundError):
        await asks.responses.retrieve(names.pop())
    await running.idle()
    assert (len(stored(running)), running.gateway.budget.used) == (0, 0)


async def test_a_client_that_leaves_a_stream_unread_keeps_nothing(
    client: tuple[openai.AsyncOpenAI, FakeWorker, Running],
) -> None:
    asks, worker, running = client
    first = await asks.responses.create(model="toy", input="hi")
    used = stored(running).used_bytes
    worker.default = stream_pieces(lambda request: events(request)[:3] * 500)
    for _ in range(5):
        stream = await asks.responses.create(model="toy", input="x", previous_response_id=first.id, stream=True)
        async for _each in stream:
            break
        await stream.close()
    await running.idle()
    assert (len(stored(running)), stored(running).used_bytes) == (1, used)
    await asks.responses.delete(first.id)
    assert running.gateway.budget.used == 0, "no request under way was forgotten"


async def test_what_is_deleted_while_it_is_continued_stays_for_that(
    client: tuple[openai.AsyncOpenAI, FakeWorker, Running],
) -> None:
    asks, worker, _ = client
    first = await asks.responses.create(model="toy", input="hi")
    free = asyncio.Event()

    async def wait(worker: FakeWorker, request: Received, writer: asyncio.StreamWriter) -> None:
        await free.wait()
        await answer(worker, request, writer)

    worker.behaviours += [wait]
    job = asyncio.create_task(asks.responses.create(model="toy", input="x", previous_response_id=first.id))
    await until(lambda: len(worker.received) == 2)
    await asks.responses.delete(first.id)
    free.set()
    second = await job
    third = await asks.responses.create(model="toy", input="y", previous_response_id=second.id)
    assert third.output_text == "answer 5"


async def test_an_id_is_of_no_use_to_another_tenant(client: tuple[openai.AsyncOpenAI, FakeWorker, Running]) -> None:
    asks, worker, running = client
    first = await asks.responses.create(model="toy", input="a secret")
    unknown = "resp_" + "0" * 48
    async with connect(running, "other") as thief:
        for ask in (
            thief.responses.retrieve,
            thief.responses.delete,
            thief.responses.input_items.list,
            thief.responses.cancel,
            lambda name: thief.responses.create(model="toy", input="x", previous_response_id=name),
        ):
            said = []
            for name in (first.id, unknown):
                with pytest.raises(openai.NotFoundError) as caught:
                    await ask(name)
                said.append(caught.value.message.replace(name, "ID"))
            assert said[0] == said[1]
            assert "may have expired" in said[0]
    async with httpx.AsyncClient() as http:  # nor to one without a key
        assert (await http.get(f"{running.url}/v1/responses/{first.id}")).status_code == 404
    assert len(worker.received) == 1
    assert (await asks.responses.retrieve(first.id)).id == first.id


async def test_one_tenant_cannot_push_out_another(client: tuple[openai.AsyncOpenAI, FakeWorker, Running]) -> None:
    asks, _, running = client
    first = await asks.responses.create(model="toy", input="hi")
    async with connect(running, "greedy") as greedy:
        for _ in range(40):
            await greedy.responses.create(model="toy", input="x" * 200_000)
    assert stored(running).events["evicted"] > 10
    assert (await asks.responses.retrieve(first.id)).id == first.id
    assert stored(running).used_bytes <= 4 << 20


async def test_conversations_end_at_the_size_of_a_request(start: Start) -> None:
    running, worker = await start(max_body_bytes=64 * 1024)
    async with connect(running) as asks:
        name = None
        for _ in range(6):
            name = (await asks.responses.create(model="toy", input="x" * 10_000, previous_response_id=name)).id
        with pytest.raises(openai.APIStatusError) as caught:
            await asks.responses.create(model="toy", input="x" * 10_000, previous_response_id=name)
        error = caught.value
        assert (error.status_code, error.code, error.param) == (413, "conversation_too_long", "previous_response_id")
        assert "at most 65536 are accepted" in error.message
        assert max(len(request.body) for request in worker.received) <= 64 * 1024


async def test_conversations_end_at_a_number_of_turns(
    client: tuple[openai.AsyncOpenAI, FakeWorker, Running], monkeypatch: pytest.MonkeyPatch
) -> None:
    asks, _, _ = client
    assert MAX_DEPTH == 1000
    monkeypatch.setattr("tandem_gateway.responses.conversation.MAX_DEPTH", 3)
    name = None
    for _ in range(3):
        name = (await asks.responses.create(model="toy", input="x", previous_response_id=name)).id
    with pytest.raises(openai.BadRequestError, match="3 turns, as many as can be continued"):
        await asks.responses.create(model="toy", input="x", previous_response_id=name)


async def test_a_small_request_cannot_make_it_hold_more_than_it_may(start: Start) -> None:
    """A hundred bytes that continue megabytes are counted as megabytes."""
    running, worker = await start(max_held_bytes=8 << 20)
    async with connect(running) as asks:
        first = await asks.responses.create(model="toy", input="x" * 400_000)
        free = asyncio.Event()

        async def wait(worker: FakeWorker, request: Received, writer: asyncio.StreamWriter) -> None:
            await free.wait()
            await answer(worker, request, writer)

        worker.default = wait
        ask = [asks.responses.create(model="toy", input="y", previous_response_id=first.id) for _ in range(40)]
        jobs = [asyncio.ensure_future(each) for each in ask]
        await until(lambda: sum(job.done() for job in jobs) > 10)
        assert running.gateway.budget.used <= 8 << 20
        free.set()
        done = await asyncio.gather(*jobs, return_exceptions=True)
    full = [each for each in done if isinstance(each, openai.InternalServerError)]
    assert {each.code for each in full} == {"gateway_full"}
    assert len(full) + sum(each.__class__.__name__ == "Response" for each in done) == 40


async def test_long_conversations_are_continued_one_in_a_turn(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    """A hundred bytes ask for megabytes to be read, on many connections at once; nobody else waits for all of them."""
    running, _ = await start(StoreLimits(max_bytes=64 << 20, ttl_seconds=600))
    gateway = running.gateway
    turn = 0
    continued: list[int] = []
    expand = gateway.responses.expand
    monkeypatch.setattr(
        gateway.responses, "expand", lambda asked, **more: continued.append(turn) or expand(asked, **more)
    )
    async with connect(running) as asks:
        first = await asks.responses.create(model="toy", input="x" * 600_000)
        used = gateway.budget.used
        body = json.dumps({"model": "toy", "input": "y", "previous_response_id": first.id})
        head = "host: x\r\nauthorization: Bearer mine\r\n"
        post = f"POST /v1/responses HTTP/1.1\r\n{head}content-length: {len(body)}\r\n\r\n{body}".encode()
        listing = f"GET /v1/responses/{first.id}/input_items HTTP/1.1\r\n{head}\r\n".encode()
        clients = [await running.connect() for _ in range(17)]
        await asyncio.sleep(0.1)
        continued.clear()
        for number, (_, writer) in enumerate(clients):
            writer.write(listing if number == 5 else post)
        leaves = clients.pop()[1]
        await asyncio.sleep(0)
        leaves.transport.abort()
        async with asyncio.timeout(60):
            while (len(continued) < 16 and running.server.intake.turns) or len(continued) < 15:
                await asyncio.sleep(0)
                turn += 1
        assert max(Counter(continued).values()) == 1
        assert len(continued) in (15, 16), "one of them has left, perhaps before its turn"
        for reader, _ in clients:
            assert (await reader.readline()).startswith(b"HTTP/1.1 200")
        await running.idle()
        for _, writer in clients:
            writer.transport.abort()
        for name in [*stored(running)._responses]:
            await asks.responses.delete(name)
        await until(lambda: gateway.budget.used == 0)
        assert used > 600_000


async def test_a_turn_that_fails_ends_its_connection_and_no_other(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody else would answer it."""
    running, _ = await start(StoreLimits(max_bytes=64 << 20, ttl_seconds=600))
    gateway = running.gateway
    async with connect(running) as asks:
        first = await asks.responses.create(model="toy", input="x" * 600_000)
        asyncio.get_running_loop().set_exception_handler(lambda _loop, told: failures.append(told["exception"]))
        failures: list[BaseException] = []
        with monkeypatch.context() as patch:
            patch.setattr(gateway.responses, "expand", lambda asked, **more: 1 // 0)
            with pytest.raises(openai.APIConnectionError) as caught:
                await asks.responses.create(model="toy", input="y", previous_response_id=first.id, timeout=20)
        assert not isinstance(caught.value, openai.APITimeoutError)
        assert {type(error) for error in failures} == {ZeroDivisionError}, "it is told"
        await asks.responses.create(model="toy", input="y", previous_response_id=first.id)
    await running.idle()


async def test_a_body_is_read_once(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    running, _ = await start()
    async with connect(running) as asks:
        first = await asks.responses.create(model="toy", input="what was said " * 1000)
        read: list[int] = []
        loads = orjson.loads
        monkeypatch.setattr(orjson, "loads", lambda text: read.append(len(text)) or loads(text))
        for more in ({"previous_response_id": first.id}, {"store": False}, {}):
            read.clear()
            options: Any = {"model": "toy", "input": "tell me " * 100, **more}
            await asks.responses.create(**options)
            assert sum(size > 800 for size in read) == 1, "and an answer, which is shorter"
            assert max(read) < 1500, "what was said before is not read again"


async def test_answers_that_nobody_reads_are_counted(start: Start) -> None:
    """A hundred bytes ask for a large response, on several connections and many times on each."""
    running, worker = await start(max_held_bytes=4 << 20, response_store=StoreLimits(max_bytes=2 << 20))
    async with httpx.AsyncClient(base_url=running.url, timeout=60) as http:
        worker.behaviours += [answer_with(message("x" * 100_000))]  # twice: its id has the text, too
        made = (await http.post("/v1/responses", json={"model": "toy", "input": "x"})).json()
        assert made["store"] is True
        path = f"/v1/responses/{made['id']}"
        size, before = len((await http.get(path)).content), running.gateway.budget.used
        # Of each answer the kernel may take all but the 64 KiB that make the gateway wait.
        writers = [(await running.connect(limit=1024))[1] for _ in range(64)]
        for writer in writers:
            writer.transport.pause_reading()  # type: ignore[attr-defined]
            writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            writer.write(f"GET {path} HTTP/1.1\r\nhost: x\r\n\r\n".encode() * 50)
        await until(lambda: running.gateway.budget.used + size > 4 << 20, wait=30)
        assert (await http.get(path)).json()["error"]["code"] == "gateway_full"
        assert running.gateway.budget.used <= running.gateway.budget.limit
        assert sum(connection.unsent for connection in running.server.reception.connections) < 8 << 20
        for writer in writers:
            writer.transport.abort()
        await until(lambda: running.gateway.budget.used == before, wait=30)
        assert (await http.get(path)).status_code == 200


async def test_what_is_too_large_to_be_kept_says_so(client: tuple[openai.AsyncOpenAI, FakeWorker, Running]) -> None:
    asks, worker, running = client
    large = "x" * (600 << 10)
    with pytest.raises(openai.APIStatusError, match="more than is stored of one response") as caught:
        await asks.responses.create(model="toy", input=large, store=True)
    assert (caught.value.status_code, caught.value.param) == (413, "store")
    made = await asks.responses.create(model="toy", input=large)
    assert made.store is False, "who has not asked for it gets an answer"
    worker.behaviours += [answer_with(message(large))]
    made = await asks.responses.create(model="toy", input="x", store=True)
    assert made.store is False
    assert len(stored(running)) == 0


@pytest.mark.parametrize(
    ("fields", "status", "param"),
    [
        ({"store": "yes"}, 400, "store"),
        ({"store": 1}, 400, "store"),
        ({"previous_response_id": 7}, 400, "previous_response_id"),
        ({"previous_response_id": "resp_x"}, 404, "previous_response_id"),
        ({"previous_response_id": ""}, 404, "previous_response_id"),
        ({"previous_response_id": "x" * 100_000}, 404, "previous_response_id"),
        ({"input": []}, 400, "input"),
        ({"input": None}, 400, "input"),
        ({"input": 7}, 400, "input"),
        ({"input": ["x"]}, 400, "input[0]"),
        ({"model": "other"}, 404, "model"),
    ],
)
async def test_bad_requests_reach_no_worker(start: Start, fields: dict[str, Any], status: int, param: str) -> None:
    running, worker = await start()
    async with httpx.AsyncClient() as http:
        answered = await http.post(f"{running.url}/v1/responses", json={"model": "toy", "input": "x"} | fields)
    assert (answered.status_code, answered.json()["error"]["param"]) == (status, param)
    assert len(answered.content) < 1000
    assert not worker.received
    assert (len(stored(running)), running.gateway.budget.used) == (0, 0)


async def test_what_is_nested_too_deeply_is_refused_before_anybody_computes(start: Start) -> None:
    """What can be read but not written again, here or inside an answer."""
    running, worker = await start()
    async with httpx.AsyncClient() as http:
        for depth in range(235, 262):
            schema = b'{"a":' * depth + b"1" + b"}" * depth
            body = b'{"model":"toy","input":"x","metadata":%b}' % schema
            answered = await http.post(f"{running.url}/v1/responses", content=body)
            assert answered.status_code in (200, 400), answered.text
            if answered.status_code == 400:
                assert "nested too deeply" in answered.json()["error"]["message"]
        assert answered.status_code == 400
    assert len(worker.received) == len(stored(running)) > 5


@pytest.mark.parametrize("words", [1, 400_000], ids=["at once", "in a turn"])
async def test_whatever_is_kept_of_an_input_can_be_listed(start: Start, words: int) -> None:
    """The list has its items further inside than the request had them."""
    running, worker = await start(StoreLimits(max_bytes=64 << 20, ttl_seconds=600))
    refused = 0
    async with httpx.AsyncClient() as http:
        for depth in range(245, 256):
            deep = b"[" * depth + b"]" * depth
            body = b'{"model":"toy","input":[{"role":"user","content":"%b","more":%b}]}' % (b"x" * words, deep)
            answered = await http.post(f"{running.url}/v1/responses", content=body)
            if answered.status_code == 400:
                assert "nested too deeply" in answered.json()["error"]["message"]
                refused += 1
                continue
            listed = await http.get(f"{running.url}/v1/responses/{answered.json()['id']}/input_items", timeout=10)
            assert listed.status_code == 200
            assert len(listed.json()["data"]) == 1
    assert len(worker.received) == 11 - refused > 5
    assert refused


@pytest.mark.parametrize(
    ("method", "path", "status", "words"),
    [
        ("GET", "", 200, '"object":"response"'),
        ("GET", "?include[]=reasoning.encrypted_content&stream=false", 200, '"object":"response"'),
        ("GET", "?stream=true", 400, "sent whole"),
        ("GET", "?include=message.output_text.logprobs", 400, "logprobs are not stored"),
        ("GET", "?x=1", 400, "no parameter"),
        ("POST", "", 405, "use GET, HEAD, DELETE"),
        ("DELETE", "/input_items", 405, "use GET, HEAD"),
        ("GET", "/input_items?limit=0", 400, "from 1 to 100"),
        ("GET", "/input_items?limit=999999999999999999999", 400, "from 1 to 100"),
        ("GET", "/input_items?limit=0100000000", 400, "from 1 to 100"),
        ("GET", "/input_items?limit=0001" + "0" * 5000, 400, "from 1 to 100"),
        ("GET", "/input_items?order=up", 400, "asc or desc"),
        ("GET", "/input_items?after=nobody", 400, "names no item"),
        ("GET", "/input_items?before=x", 400, "no parameter"),
        ("POST", "/cancel", 400, "in the background"),
        ("GET", "/elsewhere", 404, "unknown path"),
    ],
)
async def test_questions_about_a_response(start: Start, method: str, path: str, status: int, words: str) -> None:
    running, _ = await start()
    async with httpx.AsyncClient(base_url=running.url) as http:
        name = (await http.post("/v1/responses", json={"model": "toy", "input": "x"})).json()["id"]
        answered = await http.request(method, f"/v1/responses/{name}{path}")
        assert answered.status_code == status
        assert words in answered.text
        assert not (await http.head(f"/v1/responses/{name}")).content


async def test_without_a_store_it_says_how_to_get_one(start: Start) -> None:
    running, worker = await start(None)
    async with httpx.AsyncClient(base_url=running.url) as http:
        for method, path in (("GET", ""), ("DELETE", ""), ("GET", "/input_items")):
            answered = await http.request(method, f"/v1/responses/resp_1{path}")
            assert answered.status_code == 404
            assert "spec.gateway.responseStore" in answered.json()["error"]["message"]
        body = b'{"model":"toy" ,"input":"x", "store":true}'
        await http.post("/v1/responses", content=body)
    assert worker.received[-1].body == body, "byte for byte, for the worker to refuse"


async def test_a_running_gateway_follows_its_model(start: Start) -> None:
    running, _ = await start(None)
    async with connect(running) as asks:
        assert (await asks.responses.create(model="toy", input="x")).store is False
        running.gateway.apply_routing(GatewayRouting(served_names=["toy"], response_store=KEPT))
        first = await asks.responses.create(model="toy", input="x")
        running.gateway.apply_routing(GatewayRouting(served_names=["toy"], response_store=KEPT))
        assert (await asks.responses.retrieve(first.id)).store is True
        running.gateway.apply_routing(
            GatewayRouting(served_names=["toy"], response_store=StoreLimits(max_bytes=1 << 20, ttl_seconds=0.001))
        )
        with pytest.raises(openai.NotFoundError, match="may have expired"):
            await asks.responses.retrieve(first.id)
        running.gateway.apply_routing(GatewayRouting(served_names=["toy"]))
        with pytest.raises(openai.NotFoundError, match="responseStore"):
            await asks.responses.retrieve(first.id)
    assert running.gateway.budget.used == 0


async def test_store_false_is_passed_byte_for_byte(client: tuple[openai.AsyncOpenAI, FakeWorker, Running]) -> None:
    _, worker, running = client
    body = b'{"model":"toy" ,"input":"x", "store":false}'
    async with httpx.AsyncClient() as http:
        answered = await http.post(f"{running.url}/v1/responses", content=body)
    assert (worker.received[-1].body, answered.json()["id"], len(stored(running))) == (body, "resp_workers", 0)


async def test_a_retry_keeps_one_response(start_gateway: Any, start_worker: Any) -> None:
    async def die(_worker: FakeWorker, _request: Received, writer: asyncio.StreamWriter) -> None:
        writer.transport.abort()

    workers = [await start_worker(f"w{number}", default=answer) for number in range(2)]
    for worker in workers:
        worker.behaviours += [die]
    running = await start_gateway(*workers, response_store=KEPT)
    async with connect(running) as asks:
        for worker in workers[1:]:
            worker.behaviours.clear()
        made = [await asks.responses.create(model="toy", input=f"x{number}") for number in range(4)]
        assert len({each.id for each in made}) == len(stored(running)) == 4


async def test_turns_are_routed_as_one_conversation(client: tuple[openai.AsyncOpenAI, FakeWorker, Running]) -> None:
    """What was a prompt before begins the next one, as routing reads them."""
    asks, _, running = client
    seen: list[Any] = []
    choose = running.gateway.scheduler.choose

    def watch(demand: Any, *more: Any) -> Any:
        seen.append(demand)
        return choose(demand, *more)

    running.gateway.scheduler.choose = watch  # type: ignore[method-assign]
    first = await asks.responses.create(model="toy", input="x" * 3000, instructions="be brief")
    await asks.responses.create(model="toy", input="z", previous_response_id=first.id, instructions="be brief")
    before, after = seen
    assert len(before.prefix) >= 2
    assert after.prefix[: len(before.prefix)] == before.prefix
    assert after.affinity == before.affinity


async def test_it_is_seen_in_metrics_and_for_people(client: tuple[openai.AsyncOpenAI, FakeWorker, Running]) -> None:
    asks, _, running = client
    first = await asks.responses.create(model="toy", input="hi")
    await asks.responses.retrieve(first.id)
    text = running.server.reports.render_metrics().decode()
    assert "tandem_gateway_stored_responses 1.0" in text
    assert f"tandem_gateway_stored_response_bytes {float(stored(running).used_bytes)}" in text
    assert 'tandem_gateway_stored_response_events_total{event="kept"} 1.0' in text
    assert 'tandem_gateway_requests_total{code="200",path="/v1/responses/{id}"} 1.0' in text
    assert first.id not in text
    async with httpx.AsyncClient() as http:
        told = (await http.get(f"http://127.0.0.1:{running.server.metrics_port}/debug/responses")).json()
    assert (told["enabled"], told["responses"], told["tenants"], told["maxBytes"]) == (True, 1, 1, 4 << 20)
    assert running.server.admin.answer(b"GET", "/debug/responses", from_here=False)[0] == 403


async def test_pages_of_other_origins_may_delete(start: Start) -> None:
    running, _ = await start(cors=CORSRules(allow_origins=["https://app.example.com"]))
    headers = {"origin": "https://app.example.com", "access-control-request-method": "DELETE"}
    async with httpx.AsyncClient() as http:
        told = await http.options(f"{running.url}/v1/responses/resp_1", headers=headers)
    assert "DELETE" in told.headers["access-control-allow-methods"]


def test_flags_without_kubernetes(capsys: pytest.CaptureFixture[str]) -> None:
    worker = "--worker=url=127.0.0.1:1"
    assert parse_settings([worker]).config.response_store is None
    told = parse_settings([worker, "--response-store", "64Mi", "--response-ttl", "30m"]).config.response_store
    assert told == StoreLimits(max_bytes=64 << 20, ttl_seconds=1800)
    for flag, value, sentence in (
        ("--response-store", "much", "is not a quantity"),
        ("--response-store", "257Mi", "write between 1Mi and 256Mi"),
        ("--response-ttl", "0s", "at least 1s"),
    ):
        with pytest.raises(SystemExit):
            parse_settings([worker, flag, value])
        assert sentence in capsys.readouterr().err
