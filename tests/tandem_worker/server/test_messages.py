"""The Messages API over a scripted engine: answers, streams and errors as its documentation has them."""

from __future__ import annotations

import json
from typing import Any

import pytest
from tandem_worker.server.dialects.messages.request import translate

PATH = "/v1/messages"
TOOL = {
    "name": "look_up", "description": "d",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}  # fmt: skip
CALL = '<tool_call>\n{"name": "look_up", "arguments": {"city": "Paris"}}\n</tool_call>'
BLOCK = ["content_block_start", "content_block_delta", "content_block_stop"]
HI = [{"role": "user", "content": "hi"}]


async def ask(worker: Any, **fields: Any) -> dict[str, Any]:
    response = await worker.http.post(PATH, json={"model": "tiny", "max_tokens": 200, "messages": HI, **fields})
    assert response.status_code == 200, response.text
    return response.json()


async def stream(worker: Any, **fields: Any) -> list[dict[str, Any]]:
    body = {"model": "tiny", "max_tokens": 200, "messages": HI, "stream": True, **fields}
    response = await worker.http.post(PATH, json=body)
    events: list[dict[str, Any]] = []
    for block in response.text.strip().split("\n\n"):
        name, data = block.split("\n")
        events.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {events[-1]['type']}"
    return events


def kinds(events: list[dict[str, Any]]) -> list[str]:
    """Deltas of one block are one, however many there are."""
    found: list[str] = []
    for event in events:
        if not (event["type"] == "content_block_delta" and found[-1] == event["type"]):
            found.append(event["type"])
    return found


def build(events: list[dict[str, Any]]) -> dict[str, Any]:
    """The message that a client puts together."""
    message = dict(events[0]["message"])
    partial: dict[int, str] = {}
    for event in events:
        match event["type"]:
            case "content_block_start":
                assert event["index"] == len(message["content"])
                message["content"].append(dict(event["content_block"]))
            case "content_block_delta":
                block, delta = message["content"][event["index"]], event["delta"]
                if delta["type"] == "input_json_delta":
                    partial[event["index"]] = partial.get(event["index"], "") + delta["partial_json"]
                else:
                    key = delta["type"].removesuffix("_delta")
                    block[key] += delta[key]
            case "message_delta":
                message |= event["delta"] | {"usage": event["usage"]}
            case _:
                pass
    for index, text in partial.items():
        message["content"][index]["input"] = json.loads(text)
    return message


async def test_plain_answer(worker: Any) -> None:
    worker.says("Paris.")
    worker.engine.num_cached_tokens = 3
    answer = await ask(worker, system=[{"type": "text", "text": "Be short.", "cache_control": {"type": "ephemeral"}}])
    assert (answer["type"], answer["role"], answer["model"]) == ("message", "assistant", "tiny")
    assert answer["content"] == [{"type": "text", "text": "Paris."}]
    assert (answer["stop_reason"], answer["stop_sequence"]) == ("end_turn", None)
    prompt = worker.engine.requests[0].prompt_token_ids
    assert answer["usage"]["input_tokens"] + answer["usage"]["cache_read_input_tokens"] == len(prompt)
    assert answer["usage"]["cache_read_input_tokens"] == 3
    assert worker.tokenizer.decode(prompt).startswith("<|im_start|>system\nBe short.<|im_end|>\n<|im_start|>user\nhi")


async def test_why_it_stopped(worker: Any) -> None:
    worker.says("one two")
    assert (await ask(worker, max_tokens=2))["stop_reason"] == "max_tokens"
    stopped = await ask(worker, stop_sequences=["tw", "x"])
    assert (stopped["stop_reason"], stopped["stop_sequence"]) == ("stop_sequence", "tw")
    assert stopped["content"] == [{"type": "text", "text": "one "}]


async def test_stream_of_thinking_text_and_calls(worker: Any) -> None:
    worker.says(f"<think>Hm.</think>Let me see.{CALL}{CALL}")
    events = await stream(worker, tools=[TOOL])
    assert kinds(events) == ["message_start", *4 * BLOCK, "message_delta", "message_stop"]
    assert events[0]["message"]["usage"]["output_tokens"] == 0
    streamed, whole = build(events), await ask(worker, tools=[TOOL])
    assert [block["type"] for block in whole["content"]] == ["thinking", "text", "tool_use", "tool_use"]
    assert whole["content"][2]["input"] == {"city": "Paris"}
    assert whole["stop_reason"] == "tool_use"
    for message in (streamed, whole):
        message.pop("id")
        for block in message["content"]:
            block.pop("id", None)
    assert streamed == whole


async def test_a_conversation_with_tools(worker: Any) -> None:
    worker.says("Sunny.")
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "Weather?"}]},
        {"role": "assistant", "content": [
            {"type": "thinking", "thinking": "Hm.", "signature": ""}, {"type": "text", "text": "Let me see."},
            {"type": "tool_use", "id": "t1", "name": "look_up", "input": {"city": "Paris"}}]},
        {"role": "user", "content": [
            {"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "text", "text": "sun"}]},
            {"type": "text", "text": "Well?"}]},
    ]  # fmt: skip
    assert (await ask(worker, messages=messages, tools=[TOOL]))["content"][0]["text"] == "Sunny."
    text = worker.tokenizer.decode(worker.engine.requests[-1].prompt_token_ids)
    assert "<|im_start|>assistant\nLet me see.<tool_call>" in text
    assert '"arguments": {"city": "Paris"}' in text
    assert text.index("<tool_response>\nsun\n</tool_response>") < text.index("<|im_start|>user\nWell?")


@pytest.mark.parametrize(
    "content", ["In French.", [{"type": "text", "text": "In "}, {"type": "text", "text": "French."}]]
)
async def test_instructions_between_turns(worker: Any, content: Any) -> None:
    worker.says("Oui.")
    await ask(worker, messages=[*HI, {"role": "system", "content": content}, *HI], system="Be kind.")
    text = worker.tokenizer.decode(worker.engine.requests[-1].prompt_token_ids)
    turns = ["system\nBe kind.", "user\nhi", "system\nIn French.", "user\nhi", "assistant\n"]
    assert text == "<|im_end|>\n".join(f"<|im_start|>{turn}" for turn in turns)


@pytest.mark.parametrize("kind", ["any", "tool"])
async def test_calls_that_are_required(worker: Any, kind: str) -> None:
    worker.says(CALL)
    choice = {"type": kind, "disable_parallel_tool_use": True} | ({"name": "look_up"} if kind == "tool" else {})
    answer = await ask(worker, tools=[TOOL], tool_choice=choice)
    assert answer["content"][0]["name"] == "look_up"
    assert worker.engine.requests[-1].sampling.grammar is not None


async def test_structured_output(worker: Any) -> None:
    worker.says('{"a":1}')
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    await ask(worker, output_config={"format": {"type": "json_schema", "schema": schema}})
    assert worker.engine.requests[-1].sampling.grammar is not None


async def test_counting(worker: Any) -> None:
    worker.says("x")
    answer = await ask(worker, tools=[TOOL], system="s")
    response = await worker.http.post(
        f"{PATH}/count_tokens", json={"model": "tiny", "messages": HI, "tools": [TOOL], "system": "s"}
    )
    assert response.json() == {"input_tokens": answer["usage"]["input_tokens"]}


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"max_tokens": None}, "max_tokens"), ({"max_tokens": 0}, "max_tokens"), ({"messages": []}, "messages"),
    ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role"),
    ({"messages": [*HI, {"role": "system"}]}, "messages[1].content"),
    ({"messages": [*HI, {"role": "system", "content": [{"type": "image"}]}]}, "messages[1].content[0]"),
    ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "messages[0].content[0]"),
    ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text"),
    ({"messages": [{"role": "user", "content": 3}]}, "messages[0].content"),
    ({"stop_sequences": ["a", ""]}, "stop_sequences[1]"), ({"metadata": {"user_id": 3}}, "metadata.user_id"),
    ({"thinking": {"type": "enabled", "budget_tokens": 1024}}, "thinking"), ({"x": 1}, "x"),
    ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0].type"),
    ({"tools": [{"name": "bad name", "input_schema": {}}]}, "tools[0].name"),
    ({"tools": [{**TOOL, "x": 1}]}, "tools[0].x"), ({"tool_choice": {"type": "any"}}, "tool_choice"),
    ({"mcp_servers": [{"name": "x"}]}, "mcp_servers"), ({"max_tokens": 10**6}, "messages"),
]  # fmt: skip


async def test_refusals_have_the_shape_of_this_api(worker: Any) -> None:
    for fields, param in REFUSED:
        body = {"model": "tiny", "max_tokens": 5, "messages": HI, **fields}
        response = await worker.http.post(PATH, json=body)
        assert response.status_code == 400, fields
        answer = response.json()
        assert (answer["type"], answer["error"]["type"]) == ("error", "invalid_request_error")
        assert answer["error"]["param"] == param, fields
    missing = (await worker.http.post(PATH, json={"model": "other", "max_tokens": 5, "messages": HI})).json()
    assert missing["error"]["type"] == "not_found_error"
    lenient = await worker.http.post(
        PATH, headers={"x-tandem-lenient": "true"},
        json={"max_tokens": 5, "messages": HI, "thinking": {"type": "enabled", "budget_tokens": 1024}},
    )  # fmt: skip
    assert (lenient.status_code, lenient.headers["x-tandem-ignored"]) == (200, "thinking")


async def test_a_stream_that_breaks_off(worker: Any) -> None:
    worker.says("a long answer")
    worker.engine.fail_after, worker.engine.step_seconds = 3, 0.01
    events = await stream(worker)
    assert events[-1]["type"] == "error"
    assert events[-1]["error"]["type"] == "api_error"
    assert events[-1]["error"]["message"] == "The GPU is gone."


@pytest.mark.parametrize(
    "system", ["{}You are a fox.", [{"type": "text", "text": "{}"}, {"type": "text", "text": "You are a fox."}]]
)
def test_the_line_that_claude_code_puts_first_is_no_part_of_the_prompt(system: Any) -> None:
    """It differs in each request: nothing after it would ever be found in a cache."""

    def render(first: str) -> list[dict[str, Any]]:
        given = json.loads(json.dumps(system).replace("{}", json.dumps(first)[1:-1]))
        return translate({"model": "tiny", "max_tokens": 5, "system": given, "messages": HI})[0]["messages"]

    wanted = render("")
    assert render("x-anthropic-billing-header: cc_version=2.1.3; cch=00a1f;\n") == wanted
    assert render("x-anthropic-billing-header: cc_version=2.1.4; cch=ffff0;\n\n") == wanted
    for kept in ("Note: x-anthropic-billing-header: a\n", "\nx-anthropic-billing-header: a\n", "x-anthropic: a\n"):
        assert render(kept)[0]["content"] == kept + "You are a fox."
    asked = {
        "model": "tiny",
        "max_tokens": 5,
        "messages": [{"role": "user", "content": "x-anthropic-billing-header: a"}],
    }
    assert translate(asked)[0]["messages"] == asked["messages"], "what a user writes stays"
