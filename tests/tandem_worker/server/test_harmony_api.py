"""gpt-oss over HTTP: reasoning and calls are split out, and an agent gets to its answer, streamed or not."""

from __future__ import annotations

import json
from typing import Any

import pytest
from tandem_worker.server.tools import harmony

SPECIAL = [mark for mark in harmony.MARKS if mark not in (harmony.CALL, harmony.RETURN)]
# The shape of the published template: one call per message, reasoning as `thinking`, a description always printed.
TEMPLATE = """
{%- for tool in tools or [] %}{{ '// ' + tool.function.description + '\n' + tool.function.name }}{% endfor %}
{%- for message in messages %}
{%- if message.role == 'assistant' and message.tool_calls %}
{%- if message.content and message.thinking %}{{ raise_exception('not both') }}{% endif %}
{%- if message.thinking %}
{{- '<|start|>assistant<|channel|>analysis<|message|>' + message.thinking + '<|end|>' }}{% endif %}
{%- set call = message.tool_calls[0].function %}
{{- '<|start|>assistant to=functions.' + call.name + '<|channel|>commentary json<|message|>' }}
{{- call.arguments | tojson }}{{ '<|call|>' }}
{%- elif message.role == 'tool' %}
{{- '<|start|>functions.f to=assistant<|channel|>commentary<|message|>' + message.content + '<|end|>' }}
{%- elif message.role == 'assistant' %}
{{- '<|start|>assistant<|channel|>final<|message|>' + message.content + '<|end|>' }}
{%- else %}{{ '<|start|>' + message.role + '<|message|>' + message.content + '<|end|>' }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|start|>assistant' }}{% endif %}"""
TOOL: Any = {"type": "function", "function": {"name": "get_sky", "parameters": {"type": "object"}}}
ASK: Any = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "How is the sky?"}]
CALL = (
    "<|channel|>analysis<|message|>I must look.<|end|><|start|>assistant"
    "<|channel|>commentary<|message|>One moment.<|end|><|start|>assistant"
    '<|channel|>commentary to=functions.get_sky <|constrain|>json<|message|>{"city": "Paris"}'
)
ANSWER = "<|channel|>analysis<|message|>Sunny.<|end|><|start|>assistant<|channel|>final<|message|>It is sunny."


@pytest.fixture
async def worker(start_worker: Any, make_tokenizer: Any) -> Any:
    tokenizer = make_tokenizer(TEMPLATE, marks=())
    tokenizer.backend_tokenizer.add_special_tokens(SPECIAL)
    async with start_worker(tokenizer) as running:
        yield running


async def collect(stream: Any) -> dict[str, Any]:
    """The message that a client puts together."""
    message: dict[str, Any] = {"role": "assistant", "content": "", "reasoning_content": ""}
    calls: list[dict[str, Any]] = []
    async for chunk in stream:
        delta = chunk.choices[0].delta
        message["content"] += delta.content or ""
        message["reasoning_content"] += getattr(delta, "reasoning_content", None) or ""
        for part in delta.tool_calls or []:
            if part.id:
                calls.append(
                    {"id": part.id, "type": "function", "function": {"name": part.function.name, "arguments": ""}}
                )
            calls[part.index]["function"]["arguments"] += part.function.arguments or ""
    return {**message, "tool_calls": calls} if calls else message


@pytest.mark.parametrize("stream", [False, True])
async def test_agent_loop(worker: Any, stream: bool) -> None:
    def script(request: Any, _choice: int) -> list[int]:
        prompt = worker.tokenizer.decode(request.prompt_token_ids)
        return [*worker.tokenizer.encode(ANSWER if "sunny" in prompt else CALL), worker.tokenizer.eos_token_id]

    worker.engine.script = script
    messages = list(ASK)
    for _ in range(3):
        answer = await worker.client.chat.completions.create(
            model="tiny", messages=messages, tools=[TOOL], stream=stream
        )
        message = await collect(answer) if stream else answer.choices[0].message.model_dump(exclude_none=True)
        messages.append(message)
        if not message.get("tool_calls"):
            break
        assert (message["content"], message["reasoning_content"]) == ("One moment.", "I must look.")
        (call,) = message["tool_calls"]
        assert json.loads(call["function"]["arguments"]) == {"city": "Paris"}
        messages.append({"role": "tool", "tool_call_id": call["id"], "content": "sunny"})
    assert (message["content"], message["reasoning_content"]) == ("It is sunny.", "Sunny.")
    second = worker.tokenizer.decode(worker.engine.requests[1].prompt_token_ids)
    assert "analysis<|message|>I must look.\n\nOne moment.<|end|>" in second
    assert 'to=functions.get_sky<|channel|>commentary json<|message|>{"city": "Paris"}<|call|>' in second


async def test_reasoning_is_split_without_tools(worker: Any) -> None:
    worker.says(ANSWER)
    answer = await worker.client.chat.completions.create(model="tiny", messages=ASK)
    assert answer.choices[0].message.content == "It is sunny."
    assert answer.choices[0].message.reasoning_content == "Sunny."
    assert answer.usage.completion_tokens_details.reasoning_tokens == 7  # with the mark that opens it
    worker.says(" and warm.")
    body = {"continue_final_message": True}
    messages = [*ASK, {"role": "assistant", "content": "It is sunny"}]
    # The template closes the message: transformers cuts the prompt behind its text.
    answer = await worker.client.chat.completions.create(model="tiny", messages=messages, extra_body=body)
    assert answer.choices[0].message.content == " and warm."


async def test_schemas_are_enforced_inside_the_frame(worker: Any) -> None:
    worker.says('<|channel|>final<|message|>{"a": 1}')
    schema = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object"}}}
    answer = await worker.client.chat.completions.create(model="tiny", messages=ASK, response_format=schema)
    assert answer.choices[0].message.content == '{"a": 1}'
    grammar = worker.engine.requests[-1].sampling.grammar.new()
    for token in worker.tokenizer.encode(
        '<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>{"'
    ):
        grammar.accept(token)


async def test_conversations_that_the_template_would_cut_are_refused(worker: Any) -> None:
    function = {"name": "get_sky", "arguments": "{}"}
    calls = [{"id": str(index), "type": "function", "function": function} for index in range(2)]
    for messages, param in (
        ([*ASK, {"role": "assistant", "content": None, "tool_calls": calls}], "messages[2].tool_calls"),
        ([*ASK, {"role": "system", "content": "late"}], "messages[2].role"),
    ):
        response = await worker.http.post("/v1/chat/completions", json={"model": "tiny", "messages": messages})
        assert response.status_code == 400
        assert response.json()["error"]["param"] == param
