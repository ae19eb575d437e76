"""Requests and answers that mean harm to a gateway in front of other engines."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import openai
import orjson
import pytest
from engine_double import Asked, send_json
from tandem_api.names import Role
from tandem_gateway.upstream.engines import call, sglang

MESSAGES = [{"role": "user", "content": "hello there"}]
CHAT = "/v1/chat/completions"
ENGINES = pytest.mark.parametrize("kind", ["VLLM", "SGLang"])
PREFILLS = pytest.mark.parametrize("prefills", [0, 1])
DEEP = "[" * 300 + "]" * 300


def by_name(running: Any) -> dict[str, Any]:
    return {worker.name: worker for worker in running.workers}


async def post(running: Any, body: str | bytes, path: str = CHAT, method: str = "POST") -> tuple[int, bytes]:
    data = body.encode() if isinstance(body, str) else body
    head = f"{method} {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: {len(data)}\r\n\r\n"
    answer = await running.raw(head.encode() + data, wait=20)
    assert answer, "no answer at all"
    return int(answer.split(b" ", 2)[1]), answer


@pytest.fixture
def raised(request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    """What went wrong in callbacks of the loop."""
    return []


@pytest.fixture(autouse=True)
async def no_stray_errors(raised: list[dict[str, Any]]):
    asyncio.get_running_loop().set_exception_handler(lambda _, context: raised.append(context))
    yield
    assert not raised


@ENGINES
@PREFILLS
@pytest.mark.parametrize("name", ["stream_options", "min_tokens", "max_completion_tokens", "vllm_xargs", "tools"])
async def test_fields_that_cannot_be_written_again(start_pair, kind, prefills, name) -> None:
    running = await start_pair(kind, prefills=prefills)
    body = f'{{"stream": true, "messages": {json.dumps(MESSAGES)}, "{name}": {{"include_usage": true, "x": {DEEP}}}}}'
    status, answer = await post(running, body)
    assert (status, b"nested too deeply" in answer) == (400, True)
    assert not any(worker.asked for worker in running.workers)
    await running.idle()


@ENGINES
async def test_a_get_has_no_model(start_pair, kind) -> None:
    running = await start_pair(kind)
    for model in (DEEP, "7", "{}", "null", '"other"'):
        status, _ = await post(running, f'{{"model": {model}}}', "/tokenizer_info", "GET")
        assert status in (400, 404)
    await running.idle()


@ENGINES
@PREFILLS
async def test_an_answer_too_deep_to_be_written_again_stays_as_it_is(start_pair, kind, prefills, monkeypatch) -> None:
    running = await start_pair(kind, prefills=prefills, config={"model_name": "inner"}, model="inner")
    worker = by_name(running)["pod-d0"]

    async def respond(asked: Asked, writer: asyncio.StreamWriter) -> None:
        usage = f'"usage":{{"prompt_tokens":1}},"x":{DEEP}'
        if asked.body.get("stream"):
            event = f'data: {{"model":"inner","choices":[{{}}],{usage}}}\n\ndata: [DONE]\n\n'
            await worker._stream(writer, [event.encode()])
            return
        text = f'{{"model":"inner","choices":[],{usage}}}'
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%b"
                     % (len(text), text.encode()))  # fmt: skip

    monkeypatch.setattr(worker, "respond", respond)
    for stream in ("true", "false"):
        status, answer = await post(running, f'{{"stream": {stream}, "messages": {json.dumps(MESSAGES)}}}')
        assert status == 200
        assert DEEP.encode() in answer
    await running.idle()


async def test_a_place_of_blocks_too_deep_to_be_sent_on(start_pair, monkeypatch) -> None:
    running = await start_pair("VLLM")
    for depth in range(245, 258):
        place = {"x": orjson.loads("[" * depth + "]" * depth)}
        monkeypatch.setattr(by_name(running)["pod-p0"], "_keep", lambda prompt, place=place: place)
        status, _ = await post(running, orjson.dumps({"messages": MESSAGES}))
        assert status in (200, 400)  # the double refuses what it does not know, where it gets it
    assert by_name(running)["pod-d0"].computed
    await running.idle()


@ENGINES
@PREFILLS
@pytest.mark.parametrize("body", ['{"vllm_xargs": {"%s": "x"}}', '{"vllm_xargs": {"%s": "x"}, "%s": null}'])
@pytest.mark.parametrize(
    "name", ["kv_transfer_params", "kv_tr\\u0061nsfer_params", "bootstrap_host", "rid", "session_params", "r\\u0069d"]
)
async def test_engines_are_not_steered_through_a_field_of_fields(start_pair, kind, prefills, body, name) -> None:
    running = await start_pair(kind, prefills=prefills)
    fields = body.replace("%s", name)[1:]
    status, answer = await post(running, f'{{"messages": {json.dumps(MESSAGES)}, {fields}')
    if "\\u" in name:
        assert status == 200
        assert all(asked.body["vllm_xargs"] == {} for worker in running.workers for asked in worker.asked)
    else:
        assert (status, name.encode() in answer) == (400, True)
        assert not any(worker.asked for worker in running.workers)


@pytest.mark.parametrize("odd", [{"n": 2.0}, {"n": "2"}, {"best_of": "3"}, {"use_beam_search": True}])
async def test_what_engines_read_as_several_answers_is_not_shared(start_pair, odd) -> None:
    running = await start_pair("VLLM")
    status, _ = await post(running, orjson.dumps({"messages": MESSAGES} | odd))
    assert status == 200
    assert not by_name(running)["pod-p0"].asked


async def test_sglang_takes_no_several_answers_to_several_prompts_in_other_words(start_pair) -> None:
    running = await start_pair("SGLang")
    status, answer = await post(running, orjson.dumps({"prompt": ["a", "b"], "n": "2"}), "/v1/completions")
    assert (status, b"one request for each prompt" in answer) == (400, True)


@ENGINES
@PREFILLS
async def test_requests_are_forgotten_once_they_are_answered(start_pair, kind, prefills, until) -> None:
    """What the gateway holds for clients is counted, and it counts no request beyond its first token."""
    running = await start_pair(kind, prefills=prefills)
    worker, go = by_name(running)["pod-d0"], asyncio.Event()
    stream = worker._stream

    async def slowly(writer: asyncio.StreamWriter, events: list[bytes]) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
                     b"%x\r\n%b\r\n" % (len(events[0]), events[0]))  # fmt: skip
        await go.wait()
        writer.transport.abort()

    worker._stream = slowly
    asked = asyncio.create_task(post(running, orjson.dumps({"messages": MESSAGES, "stream": True})))
    await until(lambda: any(exchange.first_byte_at for exchange in running.gateway.exchanges), wait=60)
    exchange = next(iter(running.gateway.exchanges))
    call = exchange.call
    kept = [value for each in type(call).__mro__ for value in vars(call).values() if value is not None]
    assert not any(isinstance(value, bytes | dict) and b"hello there" in orjson.dumps(value, default=repr)
                   if isinstance(value, dict) else isinstance(value, bytes) and b"hello there" in value
                   for value in kept)  # fmt: skip
    assert b"hello there" not in call.order.body
    go.set()
    await asked
    worker._stream = stream
    await running.idle()


async def hang(asked: Asked, writer: asyncio.StreamWriter) -> None:
    await asyncio.Event().wait()


@ENGINES
async def test_a_decode_worker_is_not_blamed_for_prefill_workers_that_say_nothing(
    start_pair, kind, monkeypatch
) -> None:
    monkeypatch.setattr(call, "HELP_SHARE", 0.1)  # what is left after three is enough for a busy machine
    more = {"room_seconds": 60.0} if kind == "SGLang" else {}
    config = {"queue": {"ttl_seconds": 0.2}}
    running = await start_pair(kind, prefills=3, timeouts={"first_token_seconds": 6.0}, config=config, **more)
    for worker in running.workers[:3]:
        monkeypatch.setattr(worker, "respond", hang)
    await post(running, orjson.dumps({"messages": MESSAGES, "stream": True}))
    decode = running.gateway.scheduler.endpoints["pod-d0"]
    assert (decode.failed, decode.health.total) == (0, 0)
    await running.idle()


async def test_a_tail_without_end_is_not_kept(start_pair, monkeypatch) -> None:
    running = await start_pair("SGLang", slow_prefill=30.0, room_seconds=60.0)
    monkeypatch.setattr(sglang, "USAGE_SECONDS", 3600.0)
    worker = by_name(running)["pod-d0"]
    first = b'data: {"choices":[{"delta":{"content":"a"}}],"usage":{"prompt_tokens":1}}\n\n'
    many = b'data: {"choices":[{"delta":{"content":"%b"}}]}\n\n' % (b"x" * 60_000)

    async def respond(asked: Asked, writer: asyncio.StreamWriter) -> None:
        worker_prompt = asked.body["bootstrap_room"]
        await worker._join(json.dumps([MESSAGES, None]), "127.0.0.1", asked.body["bootstrap_port"], worker_prompt)
        await worker._stream(writer, [first, *[many] * 40, b"data: [DONE]\n\n"])

    monkeypatch.setattr(worker, "respond", respond)
    reader, writer = await running.connect()
    body = orjson.dumps({"messages": MESSAGES, "stream": True, "stream_options": {"include_usage": True}})
    writer.write(b"POST %b HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n%b" % (CHAT.encode(), len(body), body))
    async with asyncio.timeout(60):
        await reader.readuntil(b"x" * 100)
    writer.transport.abort()
    await running.idle()


@pytest.mark.parametrize("words", ["x-tandem-retry: 1", "x-tandem-resume: 1", "x-tandem-decode-worker: me"])
async def test_headers_of_tandems_own_workers_mean_nothing_from_others(start_pair, words, monkeypatch) -> None:
    running = await start_pair("VLLM", prefills=0, decodes=2)
    for worker in running.workers:

        async def respond(asked: Asked, writer: asyncio.StreamWriter) -> None:
            writer.write(f"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n{words}\r\n"
                         "content-length: 14\r\n\r\ndata: [DONE]\n\n".encode())  # fmt: skip

        monkeypatch.setattr(worker, "respond", respond)
    status, answer = await post(running, orjson.dumps({"messages": MESSAGES, "stream": True}))
    assert status == 200
    assert words.encode() not in answer
    await running.idle()


async def test_workers_of_two_engines_are_no_pair_whatever_their_revision(start_double, start_gateway) -> None:
    prefill = await start_double("VLLM", "pod-p", Role.PREFILL)
    decode = await start_double("SGLang", "pod-d", Role.DECODE)
    running = await start_gateway(prefill, decode, queue={"ttl_seconds": 0.2})
    status, answer = await post(running, orjson.dumps({"messages": MESSAGES}))
    assert status == 503, answer
    assert not prefill.asked
    assert not decode.asked


async def test_what_one_engine_does_not_serve_is_another_ones_to_answer(
    start_double, start_gateway, monkeypatch
) -> None:
    workers = [await start_double("VLLM", "pod-v", revision="r1")]
    workers += [await start_double("SGLang", f"pod-{role.value}", role, revision="r2")
                for role in (Role.PREFILL, Role.DECODE)]  # fmt: skip

    async def respond(asked: Asked, writer: asyncio.StreamWriter) -> None:
        await send_json(writer, 200, {"object": "response"})

    monkeypatch.setattr(workers[0], "respond", respond)
    running = await start_gateway(*workers)
    statuses = [
        (await post(running, orjson.dumps({"input": f"hi {index}"}), "/v1/responses"))[0] for index in range(20)
    ]
    assert 200 in statuses
    assert set(statuses) <= {200, 404}
    for index in range(20):
        body = {"messages": [{"role": "user", "content": f"{index}"}], "n": 2}
        await post(running, orjson.dumps(body))
    decode = workers[2]
    assert all(asked.body.get("bootstrap_host") for asked in decode.asked if asked.path == CHAT)
    await running.idle()


@ENGINES
@PREFILLS
@pytest.mark.parametrize("number", ["-5", "1.5", '"7"', "1e308", "9" * 400, "true", "{}", "null"])
async def test_usage_that_cannot_be(start_pair, kind, prefills, number, monkeypatch) -> None:
    running = await start_pair(kind, prefills=prefills)
    worker = by_name(running)["pod-d0"]

    async def respond(asked: Asked, writer: asyncio.StreamWriter) -> None:
        details = f'"prompt_tokens_details":{{"cached_tokens":{number}}}'
        usage = f'{{"prompt_tokens":{number},"completion_tokens":{number},{details}}}'
        event = f'data: {{"choices":[],"usage":{usage}}}\n\ndata: [DONE]\n\n'
        await worker._stream(writer, [event.encode()])

    monkeypatch.setattr(worker, "respond", respond)
    body = {"messages": MESSAGES, "stream": True}
    for shown in ({}, {"stream_options": {"include_usage": True}}):
        status, _ = await post(running, orjson.dumps(body | shown))
        assert status == 200
    await running.idle()


@ENGINES
@PREFILLS
@pytest.mark.parametrize("body", [b'\xef\xbb\xbf{"messages": []}', b'{"messages": [], "x": NaN}', b'{"x": "\\ud800"}'])
async def test_what_is_no_json(start_pair, kind, prefills, body) -> None:
    running = await start_pair(kind, prefills=prefills)
    assert (await post(running, body))[0] == 400
    assert not any(worker.asked for worker in running.workers)


async def test_openai_is_still_served(start_pair) -> None:
    running = await start_pair("SGLang")
    api = openai.AsyncOpenAI(base_url=f"{running.url}/v1", api_key="none", max_retries=0, timeout=60)
    answer = await api.chat.completions.create(model="toy", messages=MESSAGES)
    assert answer.choices[0].message.content
    await api.close()
