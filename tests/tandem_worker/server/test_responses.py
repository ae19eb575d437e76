"""The Responses API over a scripted engine, read by the client that its makers give out."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

FUNCTION = {
    "type": "function", "name": "look_up", "description": "d", "strict": False,
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}  # fmt: skip
CALL = '<tool_call>\n{"name": "look_up", "arguments": {"city": "Paris"}}\n</tool_call>'
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}
CREATED = ["response.created", "response.in_progress"]
MESSAGE = [
    "response.output_item.added", "response.content_part.added", "response.output_text.delta",
    "response.output_text.done", "response.content_part.done", "response.output_item.done",
]  # fmt: skip
REASONING = [kind.replace("output_text", "reasoning_text") for kind in MESSAGE]
FUNCTION_CALL = [
    "response.output_item.added", "response.function_call_arguments.delta", "response.function_call_arguments.done",
    "response.output_item.done",
]  # fmt: skip


def kinds(events: list[Any]) -> list[str]:
    """Deltas of one item are one, however many there are."""
    found: list[str] = []
    for event in events:
        if not (event.type.endswith(".delta") and found[-1] == event.type):
            found.append(event.type)
    return found


async def collect(worker: Any, **fields: Any) -> tuple[list[Any], Response]:
    """The events, checked against the types of the client, and the answer that they add up to."""
    raw = await worker.http.post("/v1/responses", json={"model": "tiny", "stream": True, **fields})
    assert raw.headers["content-type"].startswith("text/event-stream"), raw.text
    adapter: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
    for block in raw.text.strip().split("\n\n"):
        name, data = block.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        adapter.validate_python(event)
    stream = await worker.client.responses.create(model="tiny", stream=True, **fields)
    events = [event async for event in stream]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    return events, events[-1].response


async def test_plain_answer(worker: Any) -> None:
    worker.says("Paris.")
    answer = await worker.client.responses.create(model="tiny", input="Capital?", instructions="Be short.")
    assert answer.output_text == "Paris."
    assert (answer.status, answer.object, answer.store if hasattr(answer, "store") else False) == (
        "completed", "response", False,
    )  # fmt: skip
    assert answer.instructions == "Be short."
    assert answer.usage.total_tokens == answer.usage.input_tokens + answer.usage.output_tokens
    assert answer.usage.output_tokens == len(worker.tokenizer.encode("Paris.")) + 1
    text = worker.tokenizer.decode(worker.engine.requests[0].prompt_token_ids)
    assert (
        text == "<|im_start|>system\nBe short.<|im_end|>\n<|im_start|>user\nCapital?<|im_end|>\n<|im_start|>assistant\n"
    )
    Response.model_validate(answer.model_dump())


async def test_stream_of_text(worker: Any) -> None:
    worker.says("The rain.")
    events, answer = await collect(worker, input="x")
    assert kinds(events) == [*CREATED, *MESSAGE, "response.completed"]
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == "The rain."
    assert answer.output_text == "The rain."
    assert {event.item_id for event in events if hasattr(event, "item_id")} == {answer.output[0].id}
    assert events[0].response.status == "in_progress"
    assert answer.usage.output_tokens == len(worker.tokenizer.encode("The rain.")) + 1


async def test_stream_equals_the_whole_answer(worker: Any) -> None:
    worker.says(f"<think>Hm.</think>Let me see.{CALL}")
    fields: dict[str, Any] = {"input": "x", "tools": [FUNCTION], "temperature": 0.5, "metadata": {"a": "b"}}
    _, streamed = await collect(worker, **fields)
    whole = await worker.client.responses.create(model="tiny", **fields)

    def reduce(answer: Response) -> dict[str, Any]:
        plain = answer.model_dump(exclude={"id", "created_at", "completed_at"})
        for item in plain["output"]:
            item.pop("id")
            item.pop("call_id", None)
        return plain

    assert reduce(streamed) == reduce(whole)
    assert whole.temperature == 0.5


async def test_stream_of_reasoning_text_and_calls(worker: Any) -> None:
    worker.says(f"<think>Hm.</think>Let me see.{CALL}{CALL}")
    events, answer = await collect(worker, input="x", tools=[FUNCTION])
    assert kinds(events) == [*CREATED, *REASONING, *MESSAGE, *FUNCTION_CALL, *FUNCTION_CALL, "response.completed"]
    reasoning, message, first, second = answer.output
    assert reasoning.content[0].text == "Hm."
    assert message.content[0].text == "Let me see."
    assert (first.type, first.name, json.loads(first.arguments)) == ("function_call", "look_up", {"city": "Paris"})
    assert first.call_id != second.call_id
    assert [item.status for item in answer.output] == ["completed"] * 4
    indices = [event.output_index for event in events if event.type == "response.output_item.added"]
    assert indices == [0, 1, 2, 3]
    assert answer.usage.output_tokens_details.reasoning_tokens > 0


async def test_an_answer_that_is_cut_off(worker: Any) -> None:
    worker.says("a long answer")
    events, answer = await collect(worker, input="x", max_output_tokens=3)
    assert events[-1].type == "response.incomplete"
    assert (answer.status, answer.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert answer.output[0].status == "incomplete"
    assert answer.max_output_tokens == 3


async def test_an_empty_answer_is_an_empty_message(worker: Any) -> None:
    worker.says("")
    events, answer = await collect(worker, input="x")
    assert [kind for kind in MESSAGE if "delta" not in kind] == kinds(events)[2:-1]
    assert answer.output_text == ""


async def test_logprobs(worker: Any) -> None:
    worker.says("ab")
    fields: dict[str, Any] = {"input": "x", "include": ["message.output_text.logprobs"], "top_logprobs": 2}
    events, answer = await collect(worker, **fields)
    tokens = [entry.token for entry in answer.output[0].content[0].logprobs]
    assert tokens == ["a", "b"]
    deltas = [entry.token for event in events if event.type == "response.output_text.delta" for entry in event.logprobs]
    assert deltas == tokens
    assert len(answer.output[0].content[0].logprobs[0].top_logprobs) == 2


async def test_structured_output(worker: Any) -> None:
    worker.says('{"a":1}')
    form = {"type": "json_schema", "name": "n", "schema": SCHEMA, "strict": True}
    answer = await worker.client.responses.create(model="tiny", input="x", text={"format": form})
    assert answer.output_text == '{"a":1}'
    assert answer.text.format.type == "json_schema"
    assert worker.engine.requests[0].sampling.grammar is not None
    await worker.client.responses.create(model="tiny", input="x", text={"format": {"type": "json_object"}})
    assert worker.engine.requests[1].sampling.grammar is not None
    error = await refusal(worker, text={"format": {**form, "schema": {"not": {}}}})
    assert error["param"] == "text.format.schema"
    named = {"structured_outputs": {"json": SCHEMA}}  # as vLLM calls it
    await worker.client.responses.create(model="tiny", input="x", extra_body=named)
    assert worker.engine.requests[2].sampling.grammar is not None
    error = await refusal(worker, structured_outputs={"json": {"not": {}}})
    assert error["param"] == "structured_outputs.json"


@pytest.mark.parametrize("dumped", [False, True])
async def test_a_conversation_goes_back_and_forth(worker: Any, dumped: bool) -> None:
    """What was answered is sent back as it came."""
    worker.says(f"<think>Hm.</think>Let me see.{CALL}")
    first = await worker.client.responses.create(model="tiny", input="Weather?", tools=[FUNCTION])
    call = next(item for item in first.output if item.type == "function_call")
    worker.says("Sunny.")
    history: Any = [
        {"role": "user", "content": [{"type": "input_text", "text": "Weather?"}]},
        *(item.model_dump() if dumped else item for item in first.output),
        {"type": "function_call_output", "call_id": call.call_id, "output": "sun"},
    ]
    second = await worker.client.responses.create(model="tiny", input=history, tools=[FUNCTION])
    assert second.output_text == "Sunny."
    text = worker.tokenizer.decode(worker.engine.requests[-1].prompt_token_ids)
    assert "<|im_start|>assistant\nLet me see.<tool_call>" in text
    assert '"arguments": {"city": "Paris"}' in text
    assert "<tool_response>\nsun\n</tool_response>" in text
    assert text.count("<|im_start|>assistant") == 2


async def test_tool_choice(worker: Any) -> None:
    worker.says(CALL)
    for choice in (
        "required", {"type": "function", "name": "look_up"},
        {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "look_up"}]},
    ):  # fmt: skip
        answer = await worker.client.responses.create(model="tiny", input="x", tools=[FUNCTION], tool_choice=choice)
        assert answer.output[0].name == "look_up"
        assert worker.engine.requests[-1].sampling.grammar is not None


async def refusal(worker: Any, **fields: Any) -> dict[str, Any]:
    response = await worker.http.post("/v1/responses", json={"model": "tiny", "input": "x", **fields})
    assert response.status_code == 400, (fields, response.text)
    return response.json()["error"]


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"previous_response_id": "resp_1"}, "previous_response_id"), ({"conversation": "c"}, "conversation"),
    ({"background": True}, "background"), ({"prompt": {"id": "p"}}, "prompt"), ({"store": True}, "store"),
    ({"truncation": "auto"}, "truncation"), ({"max_tool_calls": 1}, "max_tool_calls"), ({"x": 1}, "x"),
    ({"input": None}, "input"), ({"input": []}, "input"), ({"input": 3}, "input"), ({"input": ["x"]}, "input[0]"),
    ({"input": [{"role": "robot", "content": "x"}]}, "input[0].role"),
    ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0]"),
    ({"input": [{"role": "user", "content": [{"type": "input_text"}]}]}, "input[0].content[0].text"),
    ({"input": [{"type": "item_reference", "id": "i"}]}, "input[0].type"),
    ({"input": [{"type": "function_call", "name": "f", "arguments": "{}"}]}, "input[0].call_id"),
    ({"input": [{"role": "user", "content": "x", "y": 1}]}, "input[0].y"),
    ({"include": ["file_search_call.results"]}, "include[0]"), ({"temperature": 3}, "temperature"),
    ({"max_output_tokens": 0}, "max_output_tokens"), ({"max_output_tokens": 10**6}, "input"),
    ({"tools": [{"type": "web_search"}]}, "tools[0].type"), ({"tools": [{"type": "function"}]}, "tools[0].name"),
    ({"tools": [{**FUNCTION, "x": 1}]}, "tools[0].x"), ({"tool_choice": "required"}, "tool_choice"),
    ({"tools": [{**FUNCTION, "strict": True, "parameters": {"not": {}}}], "tool_choice": "required"},
     "tools[0].parameters"),
    ({"text": {"format": {"type": "xml"}}}, "text.format.type"), ({"text": {"verbosity": "high"}}, "text.verbosity"),
    ({"reasoning": {"effort": "low"}}, "reasoning.effort"),
    ({"reasoning": {"summary": "detailed"}}, "reasoning.summary"),
    ({"stream_options": {"x": True}}, "stream_options.x"), ({"n": 2}, "n"),
    ({"stream_options": {"include_usage": False}}, "stream_options.include_usage"),
    ({"enable_response_messages": True}, "enable_response_messages"),
]  # fmt: skip


async def test_what_changes_nothing_is_taken(worker: Any) -> None:
    worker.says("x")
    for fields in ({"enable_response_messages": False}, {"previous_input_messages": None}, {"vllm_xargs": {}},
                   {"return_hidden_states": False}, {"session_id": "s"}, {"x": None}):  # fmt: skip
        await worker.client.responses.create(model="tiny", input="x", extra_body=fields)
    stream = await worker.client.responses.create(
        model="tiny", input="x", stream=True, extra_body={"stream_options": {"include_usage": True}}
    )
    assert [event async for event in stream][-1].response.usage.output_tokens == 2
    error = await refusal(worker, kv_transfer_params={"a": 1})
    assert (error["param"], error["code"]) == ("kv_transfer_params", "unsupported_parameter")


async def test_refusals_name_the_field(worker: Any) -> None:
    for fields, param in REFUSED:
        assert (await refusal(worker, **fields))["param"] == param, fields
    assert worker.engine.requests == []
    with pytest.raises(openai.NotFoundError):
        await worker.client.responses.create(model="other", input="x")


@pytest.mark.parametrize("after", [0, 3])
async def test_failures(worker: Any, after: int) -> None:
    """Before the first event they have a status; later they are the last event."""
    worker.says("a long answer")
    worker.engine.fail_after = after
    if not after:
        with pytest.raises(openai.InternalServerError):
            await worker.client.responses.create(model="tiny", input="x", stream=True)
        return
    worker.engine.step_seconds = 0.01
    stream = await worker.client.responses.create(model="tiny", input="x", stream=True)
    events = [event async for event in stream]
    assert events[-1].type == "response.failed"
    assert events[-1].response.status == "failed"
    assert events[-1].response.error.message == "The GPU is gone."


async def test_large_requests_are_prepared_apart(worker: Any) -> None:
    worker.says("a")
    answer = await worker.client.responses.create(
        model="tiny",
        input="x",
        instructions="be",
        metadata={"note": "y" * 40_000},
        tools=[FUNCTION],
        tool_choice="none",
    )
    assert (answer.output_text, answer.instructions) == ("a", "be")
    assert answer.tools[0].name == "look_up"
