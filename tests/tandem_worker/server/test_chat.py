"""Chat completions with the real OpenAI client, whole and streamed."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest

HELLO: Any = [{"role": "user", "content": "hello"}]


async def test_whole_answer(worker: Any) -> None:
    worker.says("Paris is in the north – ja 🌍!")
    worker.engine.num_cached_tokens = 3
    answer = await worker.client.chat.completions.create(model="tiny", messages=HELLO)
    assert answer.choices[0].message.content == "Paris is in the north – ja 🌍!"
    assert answer.choices[0].finish_reason == "stop"
    assert answer.object == "chat.completion"
    assert answer.usage is not None
    prompt = len(worker.engine.requests[0].prompt_token_ids)
    assert answer.usage.prompt_tokens == prompt
    assert answer.usage.total_tokens == prompt + answer.usage.completion_tokens
    assert answer.usage.prompt_tokens_details.cached_tokens == 3
    text = worker.tokenizer.decode(worker.engine.requests[0].prompt_token_ids)
    assert text == "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.parametrize("tokens_per_delta", [1, 3, 100])
async def test_streamed_answer(worker: Any, tokens_per_delta: int) -> None:
    worker.says("Paris is in the north – ja 🌍!")
    worker.engine.tokens_per_delta = tokens_per_delta
    stream = await worker.client.chat.completions.create(
        model="tiny", messages=HELLO, stream=True, stream_options={"include_usage": True}
    )
    chunks = [chunk async for chunk in stream]
    assert chunks[0].choices[0].delta.role == "assistant"
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == "Paris is in the north – ja 🌍!"
    assert "\ufffd" not in "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert [c.choices[0].finish_reason for c in chunks if c.choices].count("stop") == 1
    assert chunks[-2].choices[0].finish_reason == "stop"
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == len(worker.tokenizer.encode(text)) + 1
    assert all(chunk.usage is None for chunk in chunks[:-1])
    assert len({chunk.id for chunk in chunks}) == 1


async def test_wire_format(worker: Any) -> None:
    worker.says("a\n")
    response = await worker.http.post("/v1/chat/completions", json={"model": "tiny", "messages": HELLO, "stream": True})
    assert response.headers["content-type"].startswith("text/event-stream")
    events = response.text.split("\n\n")
    assert events[-1] == ""
    assert events[-2] == "data: [DONE]"
    first = json.loads(events[0].removeprefix("data: "))
    assert first["choices"] == [
        {
            "index": 0,
            "delta": {"role": "assistant", "content": "", "refusal": None},
            "logprobs": None,
            "finish_reason": None,
        }
    ]
    assert set(first) == {"id", "object", "created", "model", "system_fingerprint", "choices"}
    deltas = [json.loads(event.removeprefix("data: "))["choices"][0] for event in events[1:-2]]
    end = {"finish_reason": "stop", "stop_reason": None, "matched_stop": worker.tokenizer.eos_token_id}
    assert deltas[-1] == {"index": 0, "delta": {}, "logprobs": None, **end}
    assert "".join(delta["delta"].get("content", "") for delta in deltas) == "a\n"


async def test_several_choices(worker: Any) -> None:
    texts = ["alpha", "b", "the end of it"]
    ids = [[*worker.tokenizer.encode(text), worker.tokenizer.eos_token_id] for text in texts]
    worker.engine.script = lambda _request, choice: ids[choice]
    answer = await worker.client.chat.completions.create(model="tiny", messages=HELLO, n=3)
    assert [choice.message.content for choice in answer.choices] == texts
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    stream = await worker.client.chat.completions.create(model="tiny", messages=HELLO, n=3, stream=True)
    joined = ["", "", ""]
    roles = 0
    async for chunk in stream:
        for choice in chunk.choices:
            roles += choice.delta.role == "assistant"
            joined[choice.index] += choice.delta.content or ""
    assert joined == texts
    assert roles == 3


async def test_length_finish(worker: Any) -> None:
    worker.says("the end of it", end=False)
    answer = await worker.client.chat.completions.create(model="tiny", messages=HELLO, max_completion_tokens=4)
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage.completion_tokens == 4
    assert worker.engine.requests[0].sampling.max_tokens == 4


async def test_a_choice_that_meets_a_stop_string_ends_alone(worker: Any) -> None:
    """Its blocks are free while the others go on; a stop string may end in the middle of a token, or with one."""
    rest = " and so on" * 40
    answers = [
        worker.tokenizer.encode(text) for text in ("on and" + rest, "one STOP two" + rest, "the Paris STO" + rest)
    ]
    worker.engine.script = lambda _request, choice: answers[choice]
    worker.engine.step_seconds = 0.001
    answer = await worker.client.chat.completions.create(model="tiny", messages=HELLO, stop=["STOP", "ari"], n=3)
    request = worker.engine.requests[0].request_id
    assert sorted(worker.engine.aborted_choices) == [(request, 1), (request, 2)]
    assert not worker.engine.aborted
    said = [(choice.message.content, choice.finish_reason) for choice in answer.choices]
    assert said == [("on and" + rest, "length"), ("one ", "stop"), ("the P", "stop")]


async def test_stop_string_across_tokens(worker: Any) -> None:
    worker.says("one two STOP three and much more that nobody will read")
    worker.engine.step_seconds = 0.005
    answer = await worker.client.chat.completions.create(model="tiny", messages=HELLO, stop=["STOP", "never"])
    assert answer.choices[0].message.content == "one two "
    assert answer.choices[0].finish_reason == "stop"
    assert worker.engine.aborted_choices == [(worker.engine.requests[0].request_id, 0)]
    stream = await worker.client.chat.completions.create(model="tiny", messages=HELLO, stop="STOP", stream=True)
    chunks = [chunk async for chunk in stream]
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == "one two "
    assert chunks[-1].choices[0].finish_reason == "stop"


async def test_beginning_of_stop_string_is_not_lost(worker: Any) -> None:
    worker.says("one STO")
    answer = await worker.client.chat.completions.create(model="tiny", messages=HELLO, stop="STOP")
    assert answer.choices[0].message.content == "one STO"


@pytest.mark.parametrize("stream", [False, True])
async def test_logprobs(worker: Any, stream: bool) -> None:
    worker.says("the 🌍")
    arguments: dict[str, Any] = {"model": "tiny", "messages": HELLO, "logprobs": True, "top_logprobs": 2}
    if stream:
        events = await worker.client.chat.completions.create(**arguments, stream=True)
        entries = [
            entry
            async for chunk in events
            for entry in (chunk.choices[0].logprobs.content if chunk.choices[0].logprobs else [])
        ]
    else:
        answer = await worker.client.chat.completions.create(**arguments)
        entries = answer.choices[0].logprobs.content
    assert b"".join(bytes(entry.bytes) for entry in entries).decode() == "the 🌍"
    assert all(entry.logprob == -0.5 for entry in entries)
    assert all(len(entry.top_logprobs) == 2 for entry in entries)


async def test_logprobs_end_with_the_text_before_a_stop_string(worker: Any) -> None:
    worker.says("ab STOP cd")
    answer = await worker.client.chat.completions.create(model="tiny", messages=HELLO, stop="STOP", logprobs=True)
    assert "".join(entry.token for entry in answer.choices[0].logprobs.content) == "ab "


async def test_sampling_options_reach_the_engine(worker: Any) -> None:
    worker.says("x")
    await worker.client.chat.completions.create(
        model="tiny",
        messages=HELLO,
        temperature=0.3,
        top_p=0.9,
        seed=-7,
        presence_penalty=0.5,
        frequency_penalty=-0.5,
        logit_bias={"5": -100},
        max_tokens=9,
        extra_body={
            "top_k": 5, "min_p": 0.1, "repetition_penalty": 1.1, "min_tokens": 2, "stop_token_ids": [7],
            "cache_salt": "tenant", "priority": 3,
        },
    )  # fmt: skip
    request = worker.engine.requests[0]
    sampling = request.sampling
    assert (sampling.temperature, sampling.top_p, sampling.seed, sampling.top_k) == (0.3, 0.9, -7, 5)
    assert (sampling.presence_penalty, sampling.frequency_penalty, sampling.min_p) == (0.5, -0.5, 0.1)
    assert (sampling.repetition_penalty, sampling.min_tokens, sampling.max_tokens) == (1.1, 2, 9)
    assert sampling.logit_bias == {5: -100.0}
    assert {7, worker.tokenizer.eos_token_id} <= sampling.stop_token_ids
    assert (request.cache_salt, request.priority) == ("tenant", 3)


@pytest.mark.parametrize(
    ("top_k", "expected"), [(-1, 0), (0, 0), (1, 1), (2**32 + 1, 2**30), (2**63, 2**30), (2**64 - 1, 2**30)]
)
async def test_top_k_fits_what_samplers_hold(worker: Any, top_k: int, expected: int) -> None:
    worker.says("x")
    await worker.client.chat.completions.create(model="tiny", messages=HELLO, extra_body={"top_k": top_k})
    assert worker.engine.requests[0].sampling.top_k == expected


@pytest.mark.parametrize("salt", ["s" * 256, "\N{GRINNING FACE}" * 256, "a\0b", " ", "e\u0301", ""])
async def test_a_salt_reaches_the_engine_as_it_is(worker: Any, salt: str) -> None:
    worker.says("x")
    await worker.client.chat.completions.create(model="tiny", messages=HELLO, extra_body={"cache_salt": salt})
    assert worker.engine.requests[0].cache_salt == salt


async def test_a_salt_that_is_no_text_is_refused(worker: Any) -> None:
    body = b'{"model": "tiny", "messages": [{"role": "user", "content": "x"}], "cache_salt": "\\ud800"}'
    answer = await worker.http.post("/v1/chat/completions", content=body, headers={"content-type": "application/json"})
    assert answer.status_code == 400, answer.text


async def test_ignore_eos(worker: Any) -> None:
    worker.says("x")
    await worker.client.chat.completions.create(model="tiny", messages=HELLO, extra_body={"ignore_eos": True})
    assert worker.engine.requests[0].sampling.stop_token_ids == frozenset()


async def test_without_a_seed_requests_differ(worker: Any) -> None:
    worker.says("x")
    for _ in range(2):
        await worker.client.chat.completions.create(model="tiny", messages=HELLO)
    assert worker.engine.requests[0].sampling.seed != worker.engine.requests[1].sampling.seed


@pytest.mark.parametrize("tokens_per_delta", [1, 4])
async def test_token_ids_travel_with_the_text(worker: Any, tokens_per_delta: int) -> None:
    worker.says("the 🌍 STOPS")
    worker.engine.tokens_per_delta = tokens_per_delta
    stream = await worker.client.chat.completions.create(
        model="tiny", messages=HELLO, stop="STOPPED", stream=True, extra_body={"return_token_ids": True}
    )
    chunks = [chunk async for chunk in stream]
    ids = [token for chunk in chunks for token in getattr(chunk.choices[0], "token_ids", None) or []]
    assert worker.tokenizer.decode(ids) == "the 🌍 STOPS<|im_end|>"
    assert chunks[0].prompt_token_ids == list(worker.engine.requests[0].prompt_token_ids)


@pytest.mark.parametrize("path", ["chat/completions", "completions"])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("logprobs", [False, True])
async def test_token_ids_have_the_end_token(worker: Any, path: str, stream: bool, logprobs: bool) -> None:
    worker.says("ab")
    written = [*worker.tokenizer.encode("ab"), worker.tokenizer.eos_token_id]
    for fields, expected in (
        ({}, written),
        ({"max_tokens": 1}, written[:1]),
        ({"stop_token_ids": written[1:2]}, written[:2]),
    ):
        body = {"messages": HELLO, "prompt": "hi", "return_token_ids": True, "stream": stream, **fields}
        del body["prompt" if path.startswith("chat") else "messages"]
        if logprobs:
            body["logprobs"] = True if path.startswith("chat") else 1
        response = await worker.http.post(f"/v1/{path}", json=body)
        lines = [line[6:] for line in response.text.splitlines() if line.startswith("data: {")]
        parts = [json.loads(line) for line in lines] if stream else [response.json()]
        assert [token for part in parts for token in part["choices"][0].get("token_ids", [])] == expected


async def test_headers(worker: Any) -> None:
    worker.says("x")
    worker.engine.prefill_worker = "prefill-3"
    response = await worker.http.post(
        "/v1/chat/completions",
        json={"model": "tiny", "messages": HELLO},
        headers={"x-tandem-prefill": "10.0.0.1:7000, 10.0.0.2:7000", "x-request-id": "abc"},
    )
    assert worker.engine.requests[0].prefill_endpoints == ("10.0.0.1:7000", "10.0.0.2:7000")
    assert response.headers["x-request-id"] == "abc"
    assert response.headers["x-tandem-decode-worker"] == "pod-0"
    assert response.headers["x-tandem-prefill-worker"] == "prefill-3"
    worker.engine.prefill_worker = None
    response = await worker.http.post("/v1/chat/completions", json={"model": "tiny", "messages": HELLO, "stream": True})
    assert response.headers["x-tandem-prefill-worker"] == "pod-0"
    assert response.headers["x-request-id"]


async def test_how_long_steps_may_be_with_a_prompt_is_the_gateways_to_say(worker: Any) -> None:
    for headers in ({"x-tandem-step-seconds": "0.050000"}, {}):
        worker.says("x")
        body = {"model": "tiny", "prompt": ["a", "b"], "max_tokens": 1}
        response = await worker.http.post("/v1/completions", json=body, headers=headers)
        assert response.status_code == 200, response.text
    assert [request.step_seconds for request in worker.engine.requests] == [0.05, 0.05, None, None]


async def test_the_trace_that_a_client_names_is_in_the_log(worker: Any, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    for parent in ({}, {"traceparent": f"00-{'a1' * 16}-{'b2' * 8}-01"}):
        worker.says("x")
        await worker.http.post("/v1/chat/completions", json={"model": "tiny", "messages": HELLO}, headers=parent)
    lines = [vars(record) for record in caplog.records if record.getMessage() == "request"]
    assert [line["trace_id"] for line in lines] == [None, "a1" * 16]


async def test_context_length(worker: Any) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        await worker.client.chat.completions.create(model="tiny", messages=[{"role": "user", "content": "x " * 5000}])
    assert caught.value.code == "context_length_exceeded"
    assert "4096" in caught.value.message
    assert str(10000 + 30)[:3] in caught.value.message
    with pytest.raises(openai.BadRequestError, match="4096"):
        await worker.client.chat.completions.create(model="tiny", messages=HELLO, max_tokens=4096)


async def test_content_parts_and_roles(worker: Any) -> None:
    worker.says("x")
    messages: Any = [
        {"role": "developer", "content": "be brief"},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
    ]
    await worker.client.chat.completions.create(model="tiny", messages=messages)
    text = worker.tokenizer.decode(worker.engine.requests[0].prompt_token_ids)
    assert text.startswith("<|im_start|>system\nbe brief<|im_end|>\n<|im_start|>user\nab<|im_end|>")
