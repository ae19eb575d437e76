"""The client that users have, against a gateway: answers, streams, errors."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable

import openai
import pytest
from tandem_api.launch import GatewayRouting, GatewayTimeouts

MESSAGES = [{"role": "user", "content": "hi"}]


@pytest.fixture
async def client() -> AsyncIterator[Callable[[object], openai.AsyncOpenAI]]:
    made: list[openai.AsyncOpenAI] = []

    def make(running) -> openai.AsyncOpenAI:
        made.append(openai.AsyncOpenAI(base_url=f"{running.url}/v1", api_key="none", max_retries=0, timeout=60))
        return made[-1]

    yield make
    for item in made:
        await item.close()


async def test_answer(start_gateway, start_worker, client) -> None:
    running = await start_gateway(await start_worker())
    raw = await client(running).chat.completions.with_raw_response.create(model="toy", messages=MESSAGES, max_tokens=3)
    answer = raw.parse()
    assert answer.choices[0].message.content == "t0 t1 t2 "
    assert answer.usage.prompt_tokens_details.cached_tokens == 3
    assert raw.headers["x-tandem-decode-worker"] == "pod-d"
    assert answer._request_id == raw.headers["x-request-id"]


async def test_stream_with_usage(start_gateway, start_worker, client) -> None:
    running = await start_gateway(await start_worker())
    stream = await client(running).chat.completions.create(
        model="toy", messages=MESSAGES, max_tokens=5, stream=True, stream_options={"include_usage": True}
    )
    chunks = [chunk async for chunk in stream]
    assert "".join(chunk.choices[0].delta.content for chunk in chunks if chunk.choices) == "t0 t1 t2 t3 t4 "
    assert chunks[-1].usage.completion_tokens == 5


async def test_completions_and_models(start_gateway, start_worker, client) -> None:
    running = await start_gateway(await start_worker())
    api = client(running)
    answer = await api.completions.create(model="toy", prompt="once", max_tokens=2)
    assert answer.choices[0].text == "t0 t1 "
    assert [model.id async for model in api.models.list()] == ["toy"]
    assert (await api.models.retrieve("toy")).owned_by == "tandem"
    with pytest.raises(openai.NotFoundError):
        await api.models.retrieve("other")


async def test_unknown_model(start_gateway, start_worker, client) -> None:
    running = await start_gateway(await start_worker())
    with pytest.raises(openai.NotFoundError) as caught:
        await client(running).chat.completions.create(model="other", messages=MESSAGES)
    assert caught.value.code == "model_not_found"
    assert "'toy'" in str(caught.value)


async def test_wrong_types(start_gateway, start_worker, client) -> None:
    running = await start_gateway(await start_worker())
    with pytest.raises(openai.BadRequestError) as caught:
        await client(running).chat.completions.create(model="toy", messages="hi")
    assert caught.value.param == "messages"


async def test_body_too_large(start_gateway, start_worker, client) -> None:
    running = await start_gateway(await start_worker())
    with pytest.raises(openai.APIStatusError) as caught:
        await client(running).completions.create(model="toy", prompt="x" * 10_485_760)
    assert caught.value.status_code == 413


@pytest.mark.parametrize("then", ["die", "eof", "hang", "error"])
async def test_a_broken_stream_raises_an_api_error(start_gateway, start_worker, fault, client, then: str) -> None:
    worker = await start_worker(behaviours=[fault.stream(2, then=then)])
    running = await start_gateway(worker, timeouts={"idle_seconds": 0.3})
    stream = await client(running).chat.completions.create(model="toy", messages=MESSAGES, stream=True)
    seen: list[str] = []

    async def collect() -> None:
        async for chunk in stream:
            seen.append(chunk.choices[0].delta.content)  # noqa: PERF401  (what came before the error counts)

    with pytest.raises(openai.APIError) as caught:
        await collect()
    assert seen == ["t0 ", "t1 "]
    assert caught.value.message


async def test_leaving_a_stream_cancels_it(start_gateway, start_worker, fault, client) -> None:
    worker = await start_worker(behaviours=[fault.stream(2, then="hang")])
    running = await start_gateway(worker)
    stream = await client(running).chat.completions.create(model="toy", messages=MESSAGES, stream=True)
    async for _ in stream:
        break
    await stream.close()
    await running.idle()
    assert worker.cancelled == 1


async def test_a_rename_while_it_runs_serves_both_names_and_then_one(start_gateway, start_worker, client) -> None:
    worker = await start_worker()
    running = await start_gateway(worker)
    api = client(running)
    running.gateway.apply_routing(GatewayRouting(served_names=["new", "toy"]))
    for name in ("new", "toy"):
        await api.chat.completions.create(model=name, messages=MESSAGES, max_tokens=1)
        assert (await api.models.retrieve(name)).id == name
    assert [request.json["model"] for request in worker.received] == ["new", "toy"], "as the client wrote it"
    assert [model.id async for model in api.models.list()] == ["new"]
    running.gateway.apply_routing(GatewayRouting(served_names=["new"]))
    with pytest.raises(openai.NotFoundError, match="serves 'new'") as caught:
        await api.chat.completions.create(model="toy", messages=MESSAGES)
    assert (caught.value.code, caught.value.param) == ("model_not_found", "model")
    with pytest.raises(openai.NotFoundError):
        await api.models.retrieve("toy")
    assert len(worker.received) == 2, "no worker was asked"


async def test_other_time_limits_hold_from_now_on(start_gateway, start_worker, fault, client) -> None:
    running = await start_gateway(await start_worker(default=fault.hang))
    changed = GatewayTimeouts(first_token_seconds=0.2, answer_seconds=0.2)
    running.gateway.apply_routing(GatewayRouting(served_names=["toy"], timeouts=changed, drain_timeout_seconds=7))
    with pytest.raises(openai.APIStatusError) as caught:
        await client(running).chat.completions.create(model="toy", messages=MESSAGES, max_tokens=1)
    assert caught.value.status_code == 504
    assert running.gateway.drain_timeout_seconds == 7
