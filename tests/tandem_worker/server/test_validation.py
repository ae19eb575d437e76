"""Malformed and unsupported requests: a 4xx in OpenAI's error shape that names the parameter."""

from __future__ import annotations

from typing import Any

import pytest

HELLO: Any = [{"role": "user", "content": "hello"}]
TOOL: Any = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}


def message(**fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": "x", **fields}]}


CHAT: list[tuple[dict[str, Any], str | None]] = [
    ({"temperature": "1"}, "temperature"),
    ({"temperature": True}, "temperature"),
    ({"temperature": 2.1}, "temperature"),
    ({"temperature": -0.1}, "temperature"),
    ({"top_p": 1.5}, "top_p"),
    ({"max_tokens": 1.0}, "max_tokens"),
    ({"max_tokens": "5"}, "max_tokens"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_completion_tokens": -1}, "max_completion_tokens"),
    ({"max_tokens": 3, "max_completion_tokens": 4}, "max_tokens"),
    ({"n": 0}, "n"),
    ({"n": 17}, "n"),
    ({"n": [1]}, "n"),
    ({"cache_salt": 3}, "cache_salt"),
    ({"cache_salt": "s" * 257}, "cache_salt"),
    ({"stop": 3}, "stop"),
    ({"stop": [""]}, "stop[0]"),
    ({"stop": ["a", "b", "c", "d", "e"]}, "stop"),
    ({"stop": ["a", 1]}, "stop[1]"),
    ({"seed": 2**63}, "seed"),
    ({"seed": 0.5}, "seed"),
    ({"presence_penalty": 3}, "presence_penalty"),
    ({"frequency_penalty": -3}, "frequency_penalty"),
    ({"logit_bias": {"more than one token": 1}}, "logit_bias"),
    ({"logit_bias": {"01": 1}}, "logit_bias"),
    ({"logit_bias": {"99999": 1}}, "logit_bias.99999"),
    ({"logit_bias": {"1": 101}}, "logit_bias.1"),
    ({"logit_bias": {"9" * 5000: 1}}, "logit_bias"),
    ({"logit_bias": []}, "logit_bias"),
    ({"logprobs": 5}, "logprobs"),
    ({"top_logprobs": 5}, "top_logprobs"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ({"stream": "true"}, "stream"),
    ({"stream_options": {"include_usage": True}}, "stream_options"),
    ({"stream": True, "stream_options": {"x": 1}}, "stream_options.x"),
    ({"response_format": {"type": "xml"}}, "response_format.type"),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
    ({"response_format": {"type": "json_schema", "json_schema": {"schema": {}}}}, "response_format.json_schema.name"),
    ({"response_format": "json"}, "response_format"),
    ({"response_format": {"type": "grammar", "grammar": {"syntax": "ebnf", "definition": "x"}}},
     "response_format.grammar.syntax"),
    ({"response_format": {"type": "grammar", "grammar": {"syntax": "regex", "definition": "("}}},
     "response_format.grammar.definition"),
    ({"response_format": {"type": "grammar", "grammar": {"syntax": "lark", "definition": "start: missing"}}},
     "response_format.grammar.syntax"),
    ({"tools": [{"type": "custom", "custom": {"name": "x"}}]}, "tools[0].type"),
    ({"tools": [{"type": "function", "function": {"name": "bad name"}}]}, "tools[0].function.name"),
    ({"tools": [{"type": "function", "function": {"name": "f", "x": 1}}]}, "tools[0].function.x"),
    ({"tools": [TOOL, TOOL]}, "tools[1].function.name"),
    ({"tools": {}}, "tools"),
    ({"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "g"}}}, "tool_choice"),
    ({"tools": [TOOL], "tool_choice": "always"}, "tool_choice"),
    ({"tools": [TOOL], "tool_choice": {"type": "custom", "custom": {"name": "f"}}}, "tool_choice.type"),
    ({"tools": [TOOL], "tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": []}}},
     "tool_choice.allowed_tools"),
    ({"tools": [TOOL], "tool_choice": {"type": "allowed_tools", "allowed_tools": {
        "mode": "auto", "tools": [{"type": "function", "function": {"name": "g"}}]}}}, "tool_choice"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"functions": []}, "functions"),
    ({"function_call": "auto"}, "function_call"),
    ({"audio": {"voice": "x", "format": "wav"}}, "audio"),
    ({"modalities": ["text", "audio"]}, "modalities"),
    ({"prediction": "x"}, "prediction"),
    ({"prediction": {"type": "content"}}, "prediction.content"),
    ({"prediction": {"type": "file", "content": "x"}}, "prediction.type"),
    ({"prediction": {"type": "content", "content": 7}}, "prediction.content"),
    ({"prediction": {"type": "content", "content": [{"type": "image_url"}]}}, "prediction.content[0]"),
    ({"prediction": {"type": "content", "content": "x", "more": 1}}, "prediction.more"),
    ({"web_search_options": {}}, "web_search_options"),
    ({"store": True}, "store"),
    ({"service_tier": "priority"}, "service_tier"),
    ({"verbosity": "low"}, "verbosity"),
    ({"metadata": {"a": 1}}, "metadata.a"),
    ({"user": 7}, "user"),
    ({"best_of": 2}, "best_of"),
    ({"echo": True}, "echo"),
    ({"unknown_option": 1}, "unknown_option"),
    ({"resume_token_ids": [1]}, "resume_token_ids"),
    ({"min_tokens": 5, "max_tokens": 3}, "min_tokens"),
    ({"stop_token_ids": [-1]}, "stop_token_ids[0]"),
    ({"chat_template_kwargs": {"tokenize": True}}, "chat_template_kwargs.tokenize"),
    ({"messages": []}, "messages"),
    ({"messages": "hi"}, "messages"),
    ({"messages": ["hi"]}, "messages[0]"),
    ({"messages": [{"content": "x"}]}, "messages[0].role"),
    ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role"),
    ({"messages": [{"role": "function", "name": "f", "content": "x"}]}, "messages[0].role"),
    ({"messages": [{"role": "user"}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": None}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": 3}]}, "messages[0].content"),
    ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].tool_call_id"),
    (message(extra=1), "messages[0].extra"),
    (message(content=[{"type": "text"}]), "messages[0].content[0].text"),
    (message(content=[{"type": "image_url", "image_url": {"url": "x"}}]), "messages[0].content[0]"),
    (message(content=[{"type": "input_audio", "input_audio": {}}]), "messages[0].content[0]"),
    (message(content=[{"type": "text", "text": "a", "x": 1}]), "messages[0].content[0].x"),
    (
        {"messages": [{"role": "assistant", "tool_calls": [{"id": "a", "function": {"name": "f"}}]}]},
        "messages[0].tool_calls[0].function.arguments",
    ),
    ({"model": 3}, "model"),
    ({"continue_final_message": True}, "continue_final_message"),
    ({"reasoning_effort": "extreme"}, "reasoning_effort"),
]  # fmt: skip


@pytest.fixture(scope="module")
def sane() -> dict[str, Any]:
    return {"model": "tiny", "messages": HELLO, "max_tokens": 4}


async def check(worker: Any, path: str, body: dict[str, Any], param: str | None) -> None:
    response = await worker.http.post(path, json=body)
    assert response.status_code == 400, (body, response.text)
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["type"] == "invalid_request_error"
    assert error["param"] == param, error
    assert error["message"].endswith((".", "'")) or ":" in error["message"]


async def test_chat_table(worker: Any, sane: dict[str, Any]) -> None:
    for change, param in CHAT:
        await check(worker, "/v1/chat/completions", {**sane, **change}, param)
    assert worker.engine.requests == []
    await check(worker, "/v1/chat/completions", {"model": "tiny"}, "messages")
    assert (await worker.http.post("/v1/chat/completions", json=sane)).status_code == 200


COMPLETIONS: list[tuple[dict[str, Any], str | None]] = [
    ({"prompt": []}, "prompt"),
    ({"prompt": {}}, "prompt"),
    ({"prompt": [1, "a"]}, "prompt[1]"),
    ({"prompt": ["a", [1]]}, "prompt[1]"),
    ({"prompt": [[1], "a"]}, "prompt[1]"),
    ({"prompt": [True]}, "prompt[0]"),
    ({"prompt": [1, -1]}, "prompt[1]"),
    ({"prompt": [[1, 10**6]]}, "prompt[0][1]"),
    ({"prompt": [[]]}, "prompt[0]"),
    ({"suffix": "x"}, "suffix"),
    ({"best_of": 3}, "best_of"),
    ({"logprobs": True}, "logprobs"),
    ({"logprobs": 21}, "logprobs"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"messages": HELLO}, "messages"),
    ({"top_logprobs": 1}, "top_logprobs"),
]


async def test_completion_table(worker: Any) -> None:
    for change, param in COMPLETIONS:
        await check(worker, "/v1/completions", {"model": "tiny", "prompt": "x", **change}, param)
    assert worker.engine.requests == []


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'"x"', b"null", b'{"model": NaN}', b"\xff\xfe", b"[" * 5000])
async def test_bodies_that_are_no_json_objects(worker: Any, content: bytes) -> None:
    for path in ("/v1/chat/completions", "/v1/completions", "/tokenize", "/detokenize"):
        response = await worker.http.post(path, content=content)
        assert response.status_code == 400
        assert response.json()["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize("depth", [200, 1000])
async def test_deep_nesting_ends_in_an_answer(worker: Any, sane: dict[str, Any], depth: int) -> None:
    schema: dict[str, Any] = {"type": "integer"}
    for _ in range(depth // 2):
        schema = {"type": "array", "items": schema}
    tool = {"type": "function", "function": {"name": "f", "parameters": schema}}
    answer = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    for options in ({"tools": [tool], "tool_choice": "required"}, {"response_format": answer}, {"metadata": schema}):
        response = await worker.http.post("/v1/chat/completions", json={**sane, **options})
        assert response.status_code in (200, 400), response.text
    assert (await worker.http.get("/v1/models")).status_code == 200


async def test_unknown_model(worker: Any) -> None:
    response = await worker.http.post("/v1/chat/completions", json={"model": "gpt-9", "messages": HELLO})
    assert response.status_code == 404
    assert response.json()["error"]["code"] == "model_not_found"


async def test_harmless_fields_are_accepted(worker: Any, sane: dict[str, Any]) -> None:
    harmless = {
        "user": "u", "metadata": {"a": "b"}, "store": False, "service_tier": "auto", "prompt_cache_key": "k",
        "safety_identifier": "s", "modalities": ["text"], "verbosity": "medium", "functions": None, "n": None,
        "stop": None, "tools": None, "response_format": {"type": "text"}, "parallel_tool_calls": True,
    }  # fmt: skip
    response = await worker.http.post("/v1/chat/completions", json={**sane, **harmless})
    assert response.status_code == 200, response.text


async def test_a_prefill_header_must_be_endpoints(worker: Any, sane: dict[str, Any]) -> None:
    for value in ("nonsense", "a:b", "h:1,,x", ",".join(["h:1"] * 9)):
        response = await worker.http.post("/v1/chat/completions", json=sane, headers={"x-tandem-prefill": value})
        assert response.status_code == 400, value
        assert response.json()["error"]["param"] == "x-tandem-prefill"


async def test_a_step_header_must_be_seconds(worker: Any, sane: dict[str, Any]) -> None:
    for value in ("soon", "0", "0.0", "-1", "nan", "inf", "1e9", "61", "1_0", "٣", ""):
        headers = {b"x-tandem-step-seconds": value.encode()}
        response = await worker.http.post("/v1/chat/completions", json=sane, headers=headers)
        assert response.status_code == 400, value
        assert response.json()["error"]["param"] == "x-tandem-step-seconds"


async def test_unknown_paths_and_methods(worker: Any) -> None:
    response = await worker.http.get("/v2/nothing")
    assert response.status_code == 404
    assert response.json()["error"]["code"] == "unknown_url"
    response = await worker.http.get("/v1/chat/completions")
    assert response.status_code == 405
    assert response.headers["allow"] == "POST"
    assert "error" in response.json()


async def test_embeddings_are_refused(worker: Any) -> None:
    response = await worker.http.post("/v1/embeddings", json={"model": "tiny", "input": "x"})
    assert response.status_code == 400
    assert "embeddings" in response.json()["error"]["message"]


@pytest.mark.parametrize("path", ["/v1/score", "/score", "/v1/rerank", "/rerank"])
async def test_texts_are_compared_by_embedding_models_alone(path: str, worker: Any) -> None:
    response = await worker.http.post(path, json={"model": "tiny", "query": "x", "documents": ["y"]})
    assert response.status_code == 404
    assert response.json()["error"]["code"] == "unknown_url"


async def test_a_template_that_refuses(start_worker: Any, make_tokenizer: Any) -> None:
    template = "{{ raise_exception('Roles must alternate.') }}"
    async with start_worker(make_tokenizer(template)) as worker:
        response = await worker.http.post("/v1/chat/completions", json={"model": "tiny", "messages": HELLO})
        assert response.status_code == 400
        assert "Roles must alternate" in response.json()["error"]["message"]
        response = await worker.http.post(
            "/v1/chat/completions", json={"model": "tiny", "messages": HELLO, "tools": [TOOL]}
        )
        assert response.json()["error"]["param"] == "tools"


async def test_a_model_without_a_template(start_worker: Any, make_tokenizer: Any) -> None:
    async with start_worker(make_tokenizer(None)) as worker:
        response = await worker.http.post("/v1/chat/completions", json={"model": "tiny", "messages": HELLO})
        assert response.status_code == 400
        assert "/v1/completions" in response.json()["error"]["message"]
