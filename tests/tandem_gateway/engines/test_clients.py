"""The client that users have, through the gateway to doubles of vLLM and SGLang: with prefill workers and without."""

from __future__ import annotations

import asyncio
import json

import openai
import pytest
from engine_double import count_tokens, read_prompt, write_text
from tandem_api.names import Role

MESSAGES = [{"role": "user", "content": "how long is a piece of string? " * 8}]
TOOLS = [{"type": "function", "function": {"name": "measure", "parameters": {"type": "object", "properties": {}}}}]
ENGINES = pytest.mark.parametrize("kind", ["VLLM", "SGLang"])
SHAPES = pytest.mark.parametrize("prefills", [0, 1], ids=["aggregated", "disaggregated"])


def expected(tokens: int = 5, **body: object) -> str:
    path = "/v1/completions" if "prompt" in body else "/v1/chat/completions"
    return "".join(write_text(read_prompt(path, body), tokens))


PROMPT_TOKENS = count_tokens(read_prompt("/v1/chat/completions", {"messages": MESSAGES}))


def check_work(running, prefills: int, requests: int) -> None:
    """Every prompt was computed once, by a prefill worker where there is one."""
    computed = [worker.computed for worker in running.workers]
    assert computed == ([requests, 0] if prefills else [requests])


@ENGINES
@SHAPES
async def test_answer(start_pair, client, kind, prefills) -> None:
    running = await start_pair(kind, prefills=prefills)
    raw = await client(running).chat.completions.with_raw_response.create(model="toy", messages=MESSAGES)
    answer = raw.parse()
    assert answer.choices[0].message.content == expected(messages=MESSAGES)
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (PROMPT_TOKENS, 5)
    assert raw.headers["x-tandem-decode-worker"] == "pod-d0"
    assert raw.headers["x-tandem-prefill-worker"] == ("pod-p0" if prefills else "pod-d0")
    assert "kv_transfer_params" not in raw.text or not prefills
    check_work(running, prefills, 1)


@ENGINES
@SHAPES
async def test_cached_tokens_are_those_of_who_computed_the_prompt(start_pair, client, kind, prefills) -> None:
    running = await start_pair(kind, prefills=prefills)
    api, cached = client(running), []
    for _ in range(2):
        answer = await api.chat.completions.create(model="toy", messages=MESSAGES)
        details = answer.usage.prompt_tokens_details
        cached.append(0 if details is None else details.cached_tokens)
    assert cached == [0, PROMPT_TOKENS - 1]
    stream = await api.chat.completions.create(
        model="toy", messages=MESSAGES, stream=True, stream_options={"include_usage": True}
    )
    last = [chunk async for chunk in stream][-1]
    assert last.usage.prompt_tokens_details.cached_tokens == PROMPT_TOKENS - 1
    assert running.gateway.traffic.computed_prompt_tokens == 3 * PROMPT_TOKENS
    assert running.gateway.traffic.computed_tokens == PROMPT_TOKENS + 2


@ENGINES
@SHAPES
@pytest.mark.parametrize("asks", [False, True], ids=["silent", "asks"])
async def test_stream_counts_usage_whether_or_not_the_client_asks(start_pair, client, kind, prefills, asks) -> None:
    running = await start_pair(kind, prefills=prefills)
    options = {"stream_options": {"include_usage": True}} if asks else {}
    stream = await client(running).chat.completions.create(model="toy", messages=MESSAGES, stream=True, **options)
    chunks = [chunk async for chunk in stream]
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == expected(messages=MESSAGES)
    assert [chunk.usage is not None for chunk in chunks] == [False] * (len(chunks) - asks) + [True] * asks
    assert all(chunk.choices for chunk in chunks) or asks
    traffic = running.gateway.traffic
    assert (traffic.computed_prompt_tokens, traffic.output_tokens, traffic.finished) == (PROMPT_TOKENS, 5, 1)
    check_work(running, prefills, 1)


@ENGINES
@SHAPES
async def test_completions(start_pair, client, kind, prefills) -> None:
    running = await start_pair(kind, prefills=prefills)
    api = client(running)
    prompt = "once upon a time " * 20
    answer = await api.completions.create(model="toy", prompt=prompt, max_tokens=3)
    assert answer.choices[0].text == expected(3, prompt=prompt)
    stream = await api.completions.create(model="toy", prompt=prompt, max_tokens=4, stream=True)
    assert "".join([chunk.choices[0].text async for chunk in stream]) == expected(4, prompt=prompt)
    check_work(running, prefills, 2)


@ENGINES
@SHAPES
async def test_tools(start_pair, client, kind, prefills) -> None:
    running = await start_pair(kind, prefills=prefills)
    api = client(running)
    said = {"said": expected(messages=MESSAGES, tools=TOOLS)}
    answer = await api.chat.completions.create(model="toy", messages=MESSAGES, tools=TOOLS, tool_choice="auto")
    call = answer.choices[0].message.tool_calls[0]
    assert (answer.choices[0].finish_reason, call.function.name) == ("tool_calls", "measure")
    assert json.loads(call.function.arguments) == said
    stream = await api.chat.completions.create(model="toy", messages=MESSAGES, tools=TOOLS, stream=True)
    parts = [chunk.choices[0].delta.tool_calls async for chunk in stream]
    assert json.loads("".join(part[0].function.arguments for part in parts if part)) == said


@ENGINES
@SHAPES
async def test_sync_client(start_pair, kind, prefills) -> None:
    running = await start_pair(kind, prefills=prefills)

    def ask() -> tuple[str, str]:
        with openai.OpenAI(base_url=f"{running.url}/v1", api_key="none", max_retries=0, timeout=20) as api:
            whole = api.chat.completions.create(model="toy", messages=MESSAGES).choices[0].message.content
            stream = api.chat.completions.create(model="toy", messages=MESSAGES, stream=True)
            return whole, "".join(chunk.choices[0].delta.content or "" for chunk in stream)

    assert await asyncio.to_thread(ask) == (expected(messages=MESSAGES), expected(messages=MESSAGES))


@ENGINES
@SHAPES
async def test_many_at_once_never_get_each_others_blocks(start_pair, client, kind, prefills) -> None:
    running = await start_pair(kind, prefills=2 * prefills, decodes=2)
    api = client(running)

    async def ask(number: int) -> bool:
        messages = [{"role": "user", "content": f"{number} " * (20 + number)}]
        answer = await api.chat.completions.create(model="toy", messages=messages)
        return answer.choices[0].message.content == expected(messages=messages)

    assert all(await asyncio.gather(*map(ask, range(40))))
    await running.idle()


@ENGINES
@SHAPES
async def test_clients_see_the_served_name_and_workers_their_own(start_pair, client, kind, prefills) -> None:
    running = await start_pair(kind, prefills=prefills, model="object-name", config={"model_name": "object-name"})
    api = client(running)
    answer = await api.chat.completions.create(model="toy", messages=MESSAGES)
    stream = await api.chat.completions.create(model="toy", messages=MESSAGES, stream=True)
    assert {answer.model} | {chunk.model async for chunk in stream} == {"toy"}
    assert {asked.body["model"] for worker in running.workers for asked in worker.asked} == {"object-name"}
    with pytest.raises(openai.NotFoundError, match="does not exist here"):
        await api.chat.completions.create(model="object-name", messages=MESSAGES)


@ENGINES
async def test_clients_name_no_machines(start_pair, client, kind) -> None:
    running = await start_pair(kind)
    for field in ({"kv_transfer_params": {"remote_host": "10.0.0.1"}}, {"bootstrap_host": "10.0.0.1"}):
        with pytest.raises(openai.BadRequestError, match="written by the gateway"):
            await client(running).chat.completions.create(model="toy", messages=MESSAGES, extra_body=field)
    assert not any(worker.asked for worker in running.workers)


@ENGINES
async def test_what_clients_may_not_say_of_keys_stays_here(start_pair, client, kind) -> None:
    running = await start_pair(kind)
    await client(running).chat.completions.create(
        model="toy", messages=MESSAGES, extra_headers={"x-tandem-prefill": "10.0.0.1:1", "traceparent": "00-1-2-01"}
    )
    for worker in running.workers:
        headers = worker.asked[0].headers
        assert headers["traceparent"] == "00-1-2-01"
        assert not {"authorization", "x-tandem-prefill", "x-tandem-token"} & set(headers)


@ENGINES
@SHAPES
async def test_streams_that_arrive_byte_by_byte(start_pair, client, kind, prefills) -> None:
    running = await start_pair(kind, prefills=prefills)
    running.workers[-1].cut = lambda data: [data[n : n + 1] for n in range(len(data))]
    stream = await client(running).chat.completions.create(
        model="toy", messages=MESSAGES, max_tokens=3, stream=True, stream_options={"include_usage": True}
    )
    chunks = [chunk async for chunk in stream]
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == expected(
        3, messages=MESSAGES
    )
    assert chunks[-1].usage.completion_tokens == 3
    assert running.gateway.traffic.output_tokens == 3


@ENGINES
async def test_a_rollout_from_one_engine_to_another_serves_from_both(
    start_worker, start_double, start_gateway, client, kind
):
    """Workers say what they run: a gateway asks each in its own words, whatever the others are."""
    own = await start_worker("pod-d")
    pair = [
        await start_double(kind, "pod-p", Role.PREFILL, revision="r2"),
        await start_double(kind, "pod-other", Role.DECODE, revision="r2"),
    ]
    running = await start_gateway(own, *pair)
    api, seen = client(running), set()
    for number in range(200):
        messages = [{"role": "user", "content": f"session {number}"}]
        raw = await api.chat.completions.with_raw_response.create(model="toy", messages=messages)
        seen.add(raw.headers["x-tandem-decode-worker"])
        if raw.headers["x-tandem-decode-worker"] == "pod-other":
            assert raw.parse().choices[0].message.content == expected(messages=messages)
        if len(seen) == 2:
            break
    assert seen == {"pod-d", "pod-other"}
    assert all("x-tandem-prefill" not in asked.headers for worker in pair for asked in worker.asked)
    assert "kv_transfer_params" not in own.received[0].json
    assert "bootstrap_room" not in own.received[0].json
