"""Doubles of vLLM and SGLang that die, refuse or say nothing: what the client gets, and who is blamed."""

from __future__ import annotations

import asyncio

import openai
import pytest
from engine_double import read_prompt, write_text
from tandem_api.engines import FOREIGN_ENGINES
from tandem_gateway.upstream.engines import ADAPTERS, call

MESSAGES = [{"role": "user", "content": "how long is a piece of string? " * 8}]
TEXT = "".join(write_text(read_prompt("/v1/chat/completions", {"messages": MESSAGES}), 5))
ENGINES = pytest.mark.parametrize("kind", ["VLLM", "SGLang"])
STREAMS = pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])


async def ask(api: openai.AsyncOpenAI, *, stream: bool = False, **fields: object) -> str:
    answer = await api.chat.completions.create(model="toy", messages=MESSAGES, stream=stream, **fields)
    if not stream:
        return answer.choices[0].message.content
    return "".join([chunk.choices[0].delta.content or "" async for chunk in answer if chunk.choices])


def repr_of(value: object) -> str:
    return repr(value)[:30]


def fail_once(running, prefix: str, fault: str) -> list:
    """Whichever of these workers is asked first does it, and no other. Returns the workers."""
    workers, faults = [worker for worker in running.workers if worker.name.startswith(prefix)], [fault]
    for worker in workers:
        worker.faults = faults
    return workers


def by_name(running) -> dict[str, object]:
    return {worker.name: worker for worker in running.workers}


@ENGINES
@STREAMS
@pytest.mark.parametrize("fault", ["die", "busy", "error"])
async def test_a_failed_prefill_worker_costs_time_not_the_request(start_pair, client, kind, stream, fault) -> None:
    running = await start_pair(kind, prefills=2)
    prefills = fail_once(running, "pod-p", fault)
    assert await ask(client(running), stream=stream) == TEXT
    assert running.gateway.metrics.retries["prefill"] == 1
    assert [len(worker.asked) for worker in prefills] == [1, 1]
    assert running.workers[-1].computed == 0
    assert running.gateway.scheduler.endpoints["pod-d0"].failed == 0
    await running.idle()


@STREAMS
async def test_vllm_computes_on_the_decode_worker_when_all_prefill_workers_are_gone(start_pair, client, stream) -> None:
    running = await start_pair("VLLM", prefills=2)
    workers = by_name(running)
    await workers["pod-p0"].stop()
    await workers["pod-p1"].stop()
    api = client(running)
    assert await ask(api, stream=stream) == TEXT
    assert workers["pod-d0"].computed == 1
    states = {name: endpoint.state for name, endpoint in running.gateway.scheduler.endpoints.items()}
    assert states["pod-p0"] == "ejected"
    assert states["pod-d0"] == "available"
    assert await ask(api, stream=stream) == TEXT


@STREAMS
async def test_sglang_waits_for_a_prefill_worker(start_pair, start_double, client, stream, until) -> None:
    running = await start_pair("SGLang")
    workers = by_name(running)
    prefill = workers["pod-p0"]
    await prefill.stop()
    asked = asyncio.create_task(ask(client(running), stream=stream))
    await until(lambda: running.gateway.queue.line.size, wait=60)
    assert running.gateway.queue.explain().startswith("no prefill worker of this model is ready")
    await prefill.start()  # at its old port
    assert await asyncio.wait_for(asked, 60) == TEXT
    assert workers["pod-d0"].computed == 0


async def test_sglang_without_prefill_workers_is_answered_503(start_pair, client) -> None:
    running = await start_pair("SGLang", config={"queue": {"ttl_seconds": 0.2}})
    await by_name(running)["pod-p0"].stop()
    with pytest.raises(openai.APIStatusError) as caught:
        await ask(client(running))
    assert caught.value.status_code in (502, 503)
    assert "prefill worker" in caught.value.message


async def test_sglang_ends_the_decode_request_with_its_prefill_worker(start_pair, client, until) -> None:
    running = await start_pair("SGLang", prefills=2, room_seconds=60.0)
    fail_once(running, "pod-p", "die")  # it opens no room: the decode worker would wait for a minute
    assert await asyncio.wait_for(ask(client(running)), 60) == TEXT
    await until(lambda: by_name(running)["pod-d0"].cancelled == 1)
    await running.idle()


@ENGINES
async def test_a_prefill_worker_that_says_nothing_is_passed_over(start_pair, client, kind, monkeypatch) -> None:
    more = {"room_seconds": 60.0} if kind == "SGLang" else {}
    running = await start_pair(kind, prefills=2, timeouts={"first_token_seconds": 20.0}, **more)
    monkeypatch.setattr(call, "HELP_SHARE", 0.05)
    prefills = fail_once(running, "pod-p", "hang")
    assert await asyncio.wait_for(ask(client(running)), 60) == TEXT
    assert [len(worker.asked) for worker in prefills] == [1, 1]
    assert running.gateway.metrics.retries["prefill"] == 1
    assert running.gateway.scheduler.endpoints["pod-d0"].failed == 0


@ENGINES
@STREAMS
@pytest.mark.parametrize("prefills", [0, 1])
@pytest.mark.parametrize("fault", ["die", "busy", "error"])
async def test_a_decode_worker_that_fails_before_its_first_byte_is_replaced(
    start_pair, client, kind, stream, prefills, fault
) -> None:
    running = await start_pair(kind, prefills=prefills, decodes=2)
    decodes = fail_once(running, "pod-d", fault)
    assert await ask(client(running), stream=stream) == TEXT
    assert [len(worker.asked) for worker in decodes] == [1, 1]
    assert running.gateway.metrics.retries.total() >= 1
    await running.idle()


@ENGINES
@pytest.mark.parametrize("prefills", [0, 1])
async def test_a_stream_that_breaks_ends_in_an_error(start_pair, client, kind, prefills) -> None:
    running = await start_pair(kind, prefills=prefills, decodes=2)
    for worker in running.workers:
        if worker.name.startswith("pod-d"):
            worker.faults.append("late-die")
    with pytest.raises(openai.APIError, match="broke off"):
        await ask(client(running), stream=True)
    await running.idle()


@ENGINES
@pytest.mark.parametrize("prefills", [0, 1])
async def test_an_engines_own_error_in_a_stream_is_the_clients(start_pair, client, kind, prefills) -> None:
    running = await start_pair(kind, prefills=prefills)
    by_name(running)["pod-d0"].faults.append("late-error")
    with pytest.raises(openai.APIError, match="out of blocks"):
        await ask(client(running), stream=True)
    assert running.gateway.scheduler.endpoints["pod-d0"].failed == 1
    await running.idle()


@ENGINES
@pytest.mark.parametrize("prefills", [0, 1])
async def test_a_refusal_is_in_the_engines_words(start_pair, client, kind, prefills) -> None:
    running = await start_pair(kind, prefills=prefills)
    wrong = {"min_tokens": 50, "max_tokens": 5} if kind == "VLLM" else {"max_tokens": -1}
    words = "min_tokens must be" if kind == "VLLM" else "max_tokens must be positive"
    with pytest.raises(openai.BadRequestError, match=words):
        await client(running).chat.completions.create(
            model="toy", messages=MESSAGES, max_tokens=wrong["max_tokens"],
            extra_body={name: value for name, value in wrong.items() if name != "max_tokens"},
        )  # fmt: skip
    assert all(endpoint.failed == 0 for endpoint in running.gateway.scheduler.endpoints.values())
    await running.idle()


@ENGINES
async def test_a_client_that_leaves_frees_both_workers(start_pair, client, kind, until) -> None:
    running = await start_pair(kind, **({"room_seconds": 60.0} if kind == "SGLang" else {}))
    workers = by_name(running)
    workers["pod-p0"].faults.append("hang")
    asked = asyncio.create_task(ask(client(running)))
    await until(lambda: workers["pod-p0"].answering, wait=60)
    asked.cancel()
    await until(lambda: not any(worker.answering for worker in running.workers), wait=60)
    assert workers["pod-p0"].cancelled == 1
    await running.idle()


async def test_vllm_started_without_a_connector_still_serves(start_pair, client) -> None:
    running = await start_pair("VLLM", has_connector=False)
    assert await ask(client(running)) == TEXT
    assert by_name(running)["pod-d0"].computed == 1


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("chat", {"n": 2}),
        ("completions", {"prompt": ["one", "two"]}),
        ("completions", {"prompt": "one", "echo": True}),
        ("completions", {"prompt": "one", "prompt_logprobs": 1}),
    ],
)
async def test_what_vllm_does_not_share_the_decode_worker_computes(start_pair, client, path, body) -> None:
    running = await start_pair("VLLM")
    asked = {"model": "toy", "extra_body": body}
    api = client(running)
    if path == "chat":
        await api.chat.completions.create(messages=MESSAGES, **asked)
    else:
        await api.completions.create(prompt="x", **asked)
    workers = by_name(running)
    assert not workers["pod-p0"].asked
    assert workers["pod-d0"].computed == 1


async def test_connections_are_not_used_when_the_engine_is_about_to_close_them(start_pair, client, until) -> None:
    running = await start_pair("VLLM", prefills=0)
    api = client(running)
    assert await ask(api) == TEXT
    link = next(iter(running.gateway.upstreams.links.values()))
    assert link._idle
    assert link._idle_seconds < running.workers[0].keep_alive
    await until(lambda: not link._idle, wait=running.workers[0].keep_alive + 20)
    assert await ask(api) == TEXT
    assert running.gateway.metrics.retries["stale"] == 0


@pytest.mark.parametrize("slow", [0.0, 0.3])
async def test_sglang_usage_waits_for_the_prefill_workers_word(start_pair, client, slow) -> None:
    running = await start_pair("SGLang", slow_prefill=slow)
    api = client(running)
    await ask(api)
    for stream in (False, True):
        more = {"stream_options": {"include_usage": True}} if stream else {}
        answer = await api.chat.completions.create(model="toy", messages=MESSAGES, stream=stream, **more)
        usage = [chunk async for chunk in answer][-1].usage if stream else answer.usage
        assert usage.prompt_tokens_details.cached_tokens == usage.prompt_tokens - 1
    await running.idle()


async def test_sglang_does_not_wait_for_it_for_ever(start_pair, client) -> None:
    running = await start_pair("SGLang", slow_prefill=30.0, room_seconds=60.0)
    for stream in (False, True):
        assert await asyncio.wait_for(ask(client(running), stream=stream), 60) == TEXT


async def test_sglang_serves_several_prompts_in_rooms_of_their_own(start_pair, client) -> None:
    running = await start_pair("SGLang")
    with pytest.raises(openai.APIError):  # the double takes single rooms only
        await client(running).completions.create(model="toy", prompt=["one", "two"])
    rooms = by_name(running)["pod-p0"].asked[0].body["bootstrap_room"]
    assert len(rooms) == len(set(rooms)) == 2
    with pytest.raises(openai.BadRequestError, match="one request for each prompt"):
        await client(running).completions.create(model="toy", prompt=["one", "two"], n=2)
    with pytest.raises(openai.NotFoundError, match="/v1/chat/completions"):
        await client(running).responses.create(model="toy", input="hi")


@ENGINES
@pytest.mark.parametrize("prefills", [0, 1])
async def test_what_cannot_be_written_again_is_the_clients_fault(start_pair, kind, prefills) -> None:
    running = await start_pair(kind, prefills=prefills)
    deep = "[" * 300 + "]" * 300
    body = f'{{"model": "toy", "messages": [{{"role": "user", "content": "x"}}], "metadata": {deep}}}'
    head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: {len(body)}\r\n\r\n"
    answer = await running.raw((head + body).encode())
    assert answer.startswith(b"HTTP/1.1 400 ")
    assert b"nested too deeply" in answer
    await running.idle()


@ENGINES
@pytest.mark.parametrize("junk", [b"", b"null", b"[]", b"{", b'{"kv_transfer_params": 7, "bootstrap_host": 1}'])
async def test_a_get_with_a_body_is_only_a_get(start_pair, kind, junk) -> None:
    running = await start_pair(kind)
    head = f"GET /tokenizer_info HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: {len(junk)}\r\n\r\n"
    answer = await running.raw(head.encode() + junk)
    assert answer.startswith((b"HTTP/1.1 404 ", b"HTTP/1.1 400 "))
    await running.idle()


@pytest.mark.parametrize("params", [None, 7, [], {}, "text", {"remote_block_ids": "x" * 5_000_000}], ids=repr_of)
async def test_a_vllm_worker_that_does_not_say_where_its_blocks_are(start_pair, client, params, monkeypatch) -> None:
    running = await start_pair("VLLM")
    monkeypatch.setattr(by_name(running)["pod-p0"], "_keep", lambda prompt: params)
    assert await ask(client(running)) == TEXT
    assert by_name(running)["pod-d0"].computed == 1
    await running.idle()


@pytest.mark.parametrize("wrong", [{"remote_block_ids": [999]}, {"remote_port": 1}, {"remote_engine_id": "x"}])
async def test_blocks_that_are_not_there_give_no_answer(start_pair, client, wrong, monkeypatch) -> None:
    running = await start_pair("VLLM")
    prefill = by_name(running)["pod-p0"]
    keep = prefill._keep
    monkeypatch.setattr(prefill, "_keep", lambda prompt: keep(prompt) | wrong)
    with pytest.raises(openai.InternalServerError, match=r"no such blocks|side channel"):
        await ask(client(running))
    await running.idle()


def test_every_engine_has_its_adapter() -> None:
    assert set(ADAPTERS) == set(FOREIGN_ENGINES)
