"""The Responses and Messages APIs through a gateway process in front of a worker process."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import httpx
import openai
import pytest
from tandem_api.launch import StoreLimits
from tandem_gateway.errors import BadRequest
from tandem_gateway.http.request import Request
from tandem_gateway.http.sse import EventStream, find_usage
from tandem_gateway.paths import MESSAGES, RESPONSES
from tandem_gateway.requests.prompt import Inquiry, read_inquiry
from tandem_gateway.scheduling.demand import Estimator

from tests.tandem_gateway.chaos import build_model
from tests.tandem_worker.process.conftest import WorkerProcess, eventually, run_worker
from tests.tandem_worker.process.forking import Forker
from tests.tandem_worker.server.conftest import byte_level_tokenizer

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer", "minimum": 0, "maximum": 9}}, "required": ["a"],
          "additionalProperties": False}  # fmt: skip
FUNCTION: Any = {"type": "function", "name": "look_up", "parameters": SCHEMA, "strict": True}
THINK = byte_level_tokenizer().backend_tokenizer.token_to_id("<think>")
WITHOUT_REASONING: Any = {"logit_bias": {str(THINK): -100}}
ALL_TOKENS = WITHOUT_REASONING | {"ignore_eos": True}  # the model says anything, the end too
"""The model is random, and its reasoning might have no end."""


@pytest.fixture(scope="module")
def worker(tmp_path_factory: pytest.TempPathFactory, forker: Forker) -> Iterator[WorkerProcess]:
    folder = tmp_path_factory.mktemp("responses")
    model, names = build_model(folder / "model"), {"modelName": "toy", "servedName": "toy"}
    with run_worker(folder, "unified", model, forker=forker, **names) as process:
        eventually(lambda: is_ready(process), 150, "the worker is ready")
        yield process


def is_ready(process: WorkerProcess) -> bool:
    try:
        return process.get("/readyz").status_code == 200
    except httpx.TransportError:
        return False


@pytest.fixture
async def client(worker: WorkerProcess, launch: Callable[..., Any]) -> AsyncIterator[openai.AsyncOpenAI]:
    address = worker.url.removeprefix("http://")
    gateway = await launch("--worker", f"role=unified,url={address},revision=r1,name=w")
    base = f"http://127.0.0.1:{gateway.http_port}/v1"
    async with openai.AsyncOpenAI(base_url=base, api_key="none", max_retries=0, timeout=60) as made:
        yield made


async def test_text_schema_and_tools(client: openai.AsyncOpenAI) -> None:
    raw = await client.responses.with_raw_response.create(
        model="toy", input="hi", max_output_tokens=8, extra_body=ALL_TOKENS
    )
    answer = raw.parse()
    assert raw.headers["x-tandem-decode-worker"] == "unified-0"
    assert (answer.status, answer.output[0].type, answer.usage.output_tokens) == ("incomplete", "message", 8)
    form: Any = {"type": "json_schema", "name": "n", "schema": SCHEMA, "strict": True}
    answer = await client.responses.create(model="toy", input="hi", text={"format": form}, extra_body=WITHOUT_REASONING)
    assert 0 <= json.loads(answer.output_text)["a"] <= 9
    answer = await client.responses.create(
        model="toy", input="hi", tools=[FUNCTION], tool_choice="required", parallel_tool_calls=False,
        max_output_tokens=200, extra_body=WITHOUT_REASONING,
    )  # fmt: skip
    (call,) = answer.output
    assert (call.type, call.name) == ("function_call", "look_up")
    assert 0 <= json.loads(call.arguments)["a"] <= 9


async def test_streams(client: openai.AsyncOpenAI) -> None:
    """With the helper of the client, which puts the answer together by itself."""
    async with client.responses.stream(
        model="toy", input="hi", tools=[FUNCTION], tool_choice="required", parallel_tool_calls=False,
        max_output_tokens=200, extra_body=WITHOUT_REASONING,
    ) as stream:  # fmt: skip
        kinds = [event.type async for event in stream]
        answer = await stream.get_final_response()
    assert kinds[:3] == ["response.created", "response.in_progress", "response.output_item.added"]
    assert kinds[-3:] == ["response.function_call_arguments.done", "response.output_item.done", "response.completed"]
    assert 0 <= json.loads(answer.output[0].arguments)["a"] <= 9
    async with client.responses.stream(model="toy", input="hi", max_output_tokens=10, extra_body=ALL_TOKENS) as stream:
        events = [event async for event in stream]
    text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    last = events[-1].response
    assert (events[-1].type, last.output[0].content[0].text) == ("response.incomplete", text)
    assert last.usage.output_tokens == 10


async def test_errors_reach_the_client(client: openai.AsyncOpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        await client.responses.create(model="toy", input="hi", previous_response_id="resp_1")
    assert caught.value.param == "previous_response_id"
    assert "spec.gateway.responseStore" in caught.value.message
    with pytest.raises(openai.NotFoundError):
        await client.responses.create(model="other", input="hi")


@pytest.fixture
async def storing(worker: WorkerProcess, launch: Callable[..., Any]) -> AsyncIterator[openai.AsyncOpenAI]:
    """The client of a gateway that keeps responses."""
    address, limits = worker.url.removeprefix("http://"), StoreLimits(max_bytes=16 << 20, ttl_seconds=600)
    gateway = await launch("--worker", f"role=unified,url={address},revision=r1,name=w", response_store=limits)
    base = f"http://127.0.0.1:{gateway.http_port}/v1"
    async with openai.AsyncOpenAI(base_url=base, api_key="none", max_retries=0, timeout=60) as made:
        yield made


async def test_conversations_by_ids_are_what_they_are_written_out(storing: openai.AsyncOpenAI) -> None:
    """Text, reasoning and calls: the worker reads the same whether the gateway or the client sends what was before."""
    sampled: Any = {"model": "toy", "max_output_tokens": 24, "temperature": 0.8, "extra_body": {"seed": 7}}
    first = await storing.responses.create(input="hi", instructions="be brief", store=True, **sampled)
    assert (first.store, first.previous_response_id) == (True, None)
    tools: Any = {"tools": [FUNCTION], "tool_choice": "required", "parallel_tool_calls": False}
    second = await storing.responses.create(
        model="toy", input="look it up", previous_response_id=first.id, max_output_tokens=200,
        extra_body=WITHOUT_REASONING, **tools,
    )  # fmt: skip
    (call,) = second.output
    result: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "7"}
    by_id = await storing.responses.create(input=[result], previous_response_id=second.id, **sampled)
    written: list[Any] = [{"role": "user", "content": "hi"}, *(item.to_dict() for item in first.output)]
    written += [{"role": "user", "content": "look it up"}, call.to_dict(), result]
    whole = await storing.responses.create(input=written, store=False, **sampled)
    assert by_id.usage.input_tokens == whole.usage.input_tokens > first.usage.input_tokens
    assert [item.content for item in by_id.output] == [item.content for item in whole.output]
    assert (by_id.previous_response_id, whole.previous_response_id, whole.store) == (second.id, None, False)
    assert by_id.usage.input_tokens_details.cached_tokens > 0 or whole.usage.input_tokens_details.cached_tokens > 0
    assert (await storing.responses.retrieve(by_id.id)).output[0].content == by_id.output[0].content
    listed = [item.type async for item in storing.responses.input_items.list(by_id.id, order="asc")]
    assert listed == [item.get("type", "message") for item in written]


async def test_streams_are_kept(storing: openai.AsyncOpenAI) -> None:
    name, seen = None, []
    for _ in range(3):
        more: Any = {} if name is None else {"previous_response_id": name}
        async with storing.responses.stream(
            model="toy", input="go on", max_output_tokens=10, extra_body=ALL_TOKENS, **more
        ) as stream:
            events = [event async for event in stream]
        last = events[-1].response
        assert {event.response.id for event in events if hasattr(event, "response")} == {last.id}
        assert (events[-1].type, last.previous_response_id, last.store) == ("response.incomplete", name, True)
        read = await storing.responses.retrieve(last.id)
        assert (read.output_text, read.usage, read.status) == (last.output_text, last.usage, "incomplete")
        name = last.id
        seen.append(last.usage.input_tokens)
    assert seen[0] < seen[1] < seen[2]
    await storing.responses.delete(name)
    with pytest.raises(openai.NotFoundError, match="may have expired"):
        await storing.responses.create(model="toy", input="x", previous_response_id=name)
    for refused in ({"background": True}, {"conversation": "c"}):
        with pytest.raises(openai.BadRequestError) as caught:
            await storing.responses.create(model="toy", input="x", **refused)
        assert caught.value.param == next(iter(refused))


async def test_the_models_have_what_the_worker_knows(client: openai.AsyncOpenAI) -> None:
    async with httpx.AsyncClient(base_url=str(client.base_url).removesuffix("/v1/")) as http:
        card: dict[str, Any] = {}
        while "max_model_len" not in card:
            (card,) = (await http.get("/v1/models")).json()["data"]
        assert card["root"].startswith("file://")
        assert (await http.get("/health")).status_code == 200
        assert (await http.get("/tokenizer_info")).json()["eos_token"] == "<|im_end|>"
        answer = await http.post(
            "/v1/chat/completions",
            json={"messages": [{"role": "user", "content": "x"}], "verbosity": "high", "max_tokens": 2},
            headers={"x-tandem-lenient": "true"},
        )
        assert (answer.status_code, answer.headers["x-tandem-ignored"]) == (200, "verbosity")


async def test_messages(client: openai.AsyncOpenAI) -> None:
    """The API next to it, without a client of its makers."""
    body = {"model": "toy", "max_tokens": 200, "messages": [{"role": "user", "content": "hi"}], **WITHOUT_REASONING,
            "tools": [{"name": "look_up", "input_schema": SCHEMA, "strict": True}],
            "tool_choice": {"type": "any", "disable_parallel_tool_use": True}}  # fmt: skip
    async with httpx.AsyncClient(base_url=str(client.base_url), timeout=60) as http:
        answer = (await http.post("messages", json=body)).json()
        assert (answer["stop_reason"], answer["content"][0]["name"]) == ("tool_use", "look_up")
        assert 0 <= answer["content"][0]["input"]["a"] <= 9
        streamed = (await http.post("messages", json=body | {"stream": True})).text
        kinds = [line.removeprefix("event: ") for line in streamed.split("\n") if line.startswith("event: ")]
        assert kinds[:2] == ["message_start", "content_block_start"]
        assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]
        count = {"model": "toy", "messages": body["messages"], "tools": body["tools"]}
        counted = (await http.post("messages/count_tokens", json=count)).json()["input_tokens"]
        usage = answer["usage"]
        assert counted == usage["input_tokens"] + usage["cache_read_input_tokens"]


def read(path: str = RESPONSES, **fields: Any) -> Inquiry:
    body = json.dumps({"model": "toy", **fields}).encode()
    request = Request(method=b"POST", path=path, headers={}, http10=False, content_length=len(body), body=body)
    return read_inquiry(request, served_names=["toy"], estimator=Estimator())


def test_what_routing_reads() -> None:
    short, long = read(input="x" * 2000), read(input=[{"role": "user", "content": "x" * 2000}, {"type": "reasoning"}])
    assert long.prefix[0] == short.prefix[0]
    assert long.affinity == short.affinity
    assert read(input="x", max_output_tokens=7).max_tokens == 7
    assert read(input="x", instructions="y" * 3000).prompt_bytes > 3000
    question = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 5}
    assert read(MESSAGES, system="y" * 3000, **question).prompt_bytes > 3000
    assert read(MESSAGES, system=[{"type": "text", "text": "y" * 3000}], **question).max_tokens == 5
    for wrong in ({"input": 3}, {"input": []}, {}, {"input": ["x"]}):
        with pytest.raises(BadRequest):
            read(**wrong)


@pytest.mark.parametrize("last", ["completed", "incomplete", "failed"])
def test_where_streams_end(last: str) -> None:
    stream = EventStream()
    usage = {"input_tokens": 3, "output_tokens": 2, "input_tokens_details": {"cached_tokens": 1}}
    stream.feed(b'event: response.output_text.delta\ndata: {"delta": "event: response.completed\\n"}\n\n')
    assert not stream.done
    data = {"type": f"response.{last}", "response": {"usage": usage}}
    stream.feed(f"event: response.{last}\ndata: {json.dumps(data)}\n\n".encode())
    assert (stream.done, stream.failed) == (True, last == "failed")
    expected = {"prompt_tokens": 3, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 1}}
    assert find_usage(stream.tail) == expected
    assert find_usage(json.dumps({"usage": usage}).encode()) == expected


def test_where_streams_of_messages_end() -> None:
    stream = EventStream()
    usage = {"input_tokens": 3, "cache_read_input_tokens": 4, "output_tokens": 2}
    delta = json.dumps({"type": "message_delta", "usage": usage})
    stream.feed(f"event: message_delta\ndata: {delta}\n\n".encode())
    assert not stream.done
    stream.feed(b'event: message_stop\ndata: {"type": "message_stop"}\n\n')
    assert (stream.done, stream.failed) == (True, False)
    expected = {"prompt_tokens": 7, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 4}}
    assert find_usage(stream.tail) == expected
    broken = EventStream()
    broken.feed(b'event: error\ndata: {"type": "error", "error": {"type": "api_error", "message": "m"}}\n\n')
    assert broken.failed
