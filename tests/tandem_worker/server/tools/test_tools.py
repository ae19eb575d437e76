"""Tool calls and reasoning through the API, with an agent that calls a tool and answers."""

from __future__ import annotations

import contextlib
import json
from typing import Any

import pytest
from tandem_worker.server.answer import shaping
from tandem_worker.server.structured import compiler
from tandem_worker.server.structured.contract import GrammarError
from tandem_worker.server.structured.limits import GrammarLimits
from tandem_worker.server.tools.formats import build_grammar

WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Weather of a city",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
ASK: Any = [{"role": "user", "content": "How is the weather in Paris?"}]
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>'


async def collect(stream: Any) -> tuple[dict[str, Any], str]:
    """The message that a client puts together from a stream, and why it ended."""
    message: dict[str, Any] = {"role": "assistant", "content": ""}
    finish = ""
    async for chunk in stream:
        choice = chunk.choices[0]
        message["content"] += choice.delta.content or ""
        finish = choice.finish_reason or finish
        for part in choice.delta.tool_calls or []:
            calls = message.setdefault("tool_calls", [])
            if part.id:
                calls.append(
                    {"id": part.id, "type": part.type, "function": {"name": part.function.name, "arguments": ""}}
                )
            calls[part.index]["function"]["arguments"] += part.function.arguments or ""
    return message, finish


@pytest.mark.parametrize("stream", [False, True])
async def test_agent_loop(worker: Any, stream: bool) -> None:
    """The model calls the tool, the tool answers, the model uses what it said."""

    def script(request: Any, _choice: int) -> list[int]:
        prompt = worker.tokenizer.decode(request.prompt_token_ids)
        text = "It is sunny." if "<tool_response>\n{'sky': 'sunny'}" in prompt else CALL
        return [*worker.tokenizer.encode(text), worker.tokenizer.eos_token_id]

    worker.engine.script = script
    messages = list(ASK)
    for _ in range(3):
        answer = await worker.client.chat.completions.create(
            model="tiny", messages=messages, tools=[WEATHER], stream=stream
        )
        if stream:
            message, finish = await collect(answer)
        else:
            message, finish = answer.choices[0].message.model_dump(), answer.choices[0].finish_reason
        messages.append(message)
        if not message.get("tool_calls"):
            break
        assert finish == "tool_calls"
        for call in message["tool_calls"]:
            assert call["function"]["name"] == "get_weather"
            assert json.loads(call["function"]["arguments"]) == {"city": "Paris"}
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": "{'sky': 'sunny'}"})
    assert message["content"] == "It is sunny."
    assert finish == "stop"
    assert len(worker.engine.requests) == 2
    second = worker.tokenizer.decode(worker.engine.requests[1].prompt_token_ids)
    assert '{"name": "get_weather", "arguments": {"city": "Paris"}}' in second
    assert '"description": "Weather of a city"' in second


@pytest.mark.parametrize("tokens_per_delta", [1, 5, 1000])
async def test_streamed_calls_equal_whole_ones(worker: Any, tokens_per_delta: int) -> None:
    worker.says(f"Let me look.\n{CALL}\n{CALL.replace('Paris', 'Tōkyō')}")
    worker.engine.tokens_per_delta = tokens_per_delta
    arguments: dict[str, Any] = {"model": "tiny", "messages": ASK, "tools": [WEATHER]}
    whole = (await worker.client.chat.completions.create(**arguments)).choices[0]
    stream = await worker.client.chat.completions.create(**arguments, stream=True)
    content, calls, finish = "", [], None
    async for chunk in stream:
        choice = chunk.choices[0]
        content += choice.delta.content or ""
        finish = choice.finish_reason or finish
        for delta in choice.delta.tool_calls or []:
            if delta.id:
                calls.append([delta.function.name, ""])
            calls[delta.index][1] += delta.function.arguments or ""
    assert content == whole.message.content == "Let me look."
    assert calls == [[call.function.name, call.function.arguments] for call in whole.message.tool_calls]
    assert finish == whole.finish_reason == "tool_calls"
    assert len(calls) == 2


async def test_without_tools_marks_are_text(worker: Any) -> None:
    worker.says(CALL)
    for options in ({}, {"tools": [WEATHER], "tool_choice": "none"}):
        answer = await worker.client.chat.completions.create(model="tiny", messages=ASK, **options)
        assert answer.choices[0].message.content == CALL
        assert answer.choices[0].message.tool_calls is None
    assert "get_weather" not in worker.tokenizer.decode(worker.engine.requests[1].prompt_token_ids)


async def test_one_call_at_most(worker: Any) -> None:
    worker.says(CALL + "\n" + CALL)
    answer = await worker.client.chat.completions.create(
        model="tiny", messages=ASK, tools=[WEATHER], parallel_tool_calls=False
    )
    assert len(answer.choices[0].message.tool_calls) == 1
    assert answer.choices[0].finish_reason == "tool_calls"


async def test_a_required_call_is_constrained(worker: Any) -> None:
    worker.says(CALL)
    for choice in ("required", {"type": "function", "function": {"name": "get_weather"}}):
        answer = await worker.client.chat.completions.create(
            model="tiny", messages=ASK, tools=[WEATHER], tool_choice=choice
        )
        assert answer.choices[0].message.tool_calls[0].function.name == "get_weather"
        assert worker.engine.requests[-1].sampling.grammar is not None
    await worker.client.chat.completions.create(model="tiny", messages=ASK, tools=[WEATHER])
    assert worker.engine.requests[-1].sampling.grammar is None


@pytest.mark.parametrize("mode", ["auto", "required"])
async def test_only_allowed_tools_are_called(worker: Any, mode: str) -> None:
    """The others stay in the prompt, so that it does not change from turn to turn."""
    worker.says(CALL)
    other = {"type": "function", "function": {"name": "get_time", "parameters": {"type": "object"}}}
    choice: Any = {
        "type": "allowed_tools",
        "allowed_tools": {"mode": mode, "tools": [{"type": "function", "function": {"name": "get_weather"}}]},
    }
    await worker.client.chat.completions.create(model="tiny", messages=ASK, tools=[WEATHER, other], tool_choice=choice)
    request = worker.engine.requests[-1]
    assert "get_time" in worker.tokenizer.decode(request.prompt_token_ids)

    def follow(text: str) -> None:
        grammar = request.sampling.grammar.new()
        for token in worker.tokenizer.encode(text):
            grammar.accept(token)

    follow(CALL)
    with pytest.raises(GrammarError):
        follow(CALL.replace("get_weather", "get_time"))
    with contextlib.nullcontext() if mode == "auto" else pytest.raises(GrammarError):
        follow("No")


async def test_schemas_that_cannot_be_enforced(worker: Any) -> None:
    worker.says(CALL)
    odd = {"type": "object", "not": {"required": ["x"]}}
    tool: Any = {"type": "function", "function": {"name": "f", "parameters": odd}}
    body = {"model": "tiny", "messages": ASK, "tools": [tool], "tool_choice": "required"}
    assert (await worker.http.post("/v1/chat/completions", json=body)).status_code == 200
    tool["function"]["strict"] = True
    response = await worker.http.post("/v1/chat/completions", json=body)
    assert response.status_code == 400
    assert response.json()["error"]["code"] == "invalid_json_schema"


async def test_types_that_there_are_not_are_refused_where_a_call_is_required(worker: Any) -> None:
    worker.says("no")
    parameters = {"type": "object", "properties": {"a": {"type": "float"}}}
    tools = [{"type": "function", "function": {"name": name}} for name in ("e", "f")]
    tools[1]["function"]["parameters"] = parameters
    body: dict[str, Any] = {"model": "tiny", "messages": ASK, "tools": tools}
    assert (await worker.http.post("/v1/chat/completions", json=body)).status_code == 200
    response = await worker.http.post("/v1/chat/completions", json=body | {"tool_choice": "required"})
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, "tools[1].function.parameters")
    assert "Invalid 'parameters' schema" in error["message"]
    assert "'float' is no type of JSON Schema" in error["message"]


@pytest.mark.parametrize("stream", [False, True])
async def test_reasoning_is_split_out(worker: Any, stream: bool) -> None:
    worker.says("<think>\nHm, Paris.\n</think>\n\nIn the north.")
    answer = await worker.client.chat.completions.create(model="tiny", messages=ASK, stream=stream)
    if stream:
        deltas = [chunk.choices[0].delta async for chunk in answer]
        reasoning = "".join(getattr(delta, "reasoning_content", None) or "" for delta in deltas)
        content = "".join(delta.content or "" for delta in deltas)
    else:
        reasoning = answer.choices[0].message.reasoning_content
        content = answer.choices[0].message.content
        assert answer.usage.completion_tokens_details.reasoning_tokens > 5
    assert (reasoning, content) == ("Hm, Paris.", "In the north.")


async def test_reasoning_that_the_template_opens(worker: Any) -> None:
    worker.says("Hm.\n</think>\nYes.")
    answer = await worker.client.chat.completions.create(
        model="tiny", messages=ASK, extra_body={"chat_template_kwargs": {"force_thinking": True}}
    )
    assert answer.choices[0].message.reasoning_content == "Hm."
    assert answer.choices[0].message.content == "Yes."


async def test_tools_need_a_known_format(start_worker: Any, make_tokenizer: Any) -> None:
    template = "{% if tools %}{{ tools | length }}{% endif %}{{ messages[0].content }}"
    async with start_worker(make_tokenizer(template, marks=())) as worker:
        body = {"model": "tiny", "messages": ASK, "tools": [WEATHER]}
        response = await worker.http.post("/v1/chat/completions", json=body)
        assert response.status_code == 400
        assert response.json()["error"]["param"] == "tools"
    async with start_worker(make_tokenizer(template, marks=()), tool_format="llama") as worker:
        worker.says('{"name": "get_weather", "parameters": {"city": "Paris"}}')
        answer = await worker.client.chat.completions.create(model="tiny", messages=ASK, tools=[WEATHER])
        assert answer.choices[0].message.tool_calls[0].function.arguments == '{"city": "Paris"}'


async def test_templates_that_want_arguments_as_text(start_worker: Any, make_tokenizer: Any) -> None:
    template = (
        "{% for m in messages %}{% if m.tool_calls %}{{ '<tool_call>' + m.tool_calls[0].function.arguments }}"
        "{% else %}{{ m.content }}{% endif %}{% endfor %}{{ tools }}"
    )
    async with start_worker(make_tokenizer(template)) as worker:
        worker.says("x")
        call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"a":  1}'}}
        messages = [*ASK, {"role": "assistant", "content": None, "tool_calls": [call]}]
        response = await worker.http.post("/v1/chat/completions", json={"model": "tiny", "messages": messages})
        assert response.status_code == 200, response.text
        assert '<tool_call>{"a":  1}' in worker.tokenizer.decode(worker.engine.requests[0].prompt_token_ids)


def guess(request: Any, tokenizer: Any, said: str) -> str:
    """What is guessed behind the beginning of an answer, by the texts of its functions or its schema."""
    follower, text = request.literals(), []
    for token in tokenizer.encode(said):
        text.append(token)
        follower.feed(text)
    return tokenizer.decode(follower.read(99))


def see_requests(worker: Any) -> list[Any]:
    """The requests that reach the engine from now on, which says nothing to any."""
    seen: list[Any] = []

    def script(request: Any, _choice: int) -> list[int]:
        seen.append(request)
        return [worker.tokenizer.eos_token_id]

    worker.engine.script = script
    return seen


@pytest.mark.parametrize(
    ("options", "said", "guessed"),
    [
        ({"tools": [WEATHER]}, "", ""),
        ({"tools": [WEATHER]}, 'I look. <tool_call>\n{"na', 'me": "get_weather", "arguments": {"city": "'),
        (
            {"tools": [WEATHER], "tool_choice": "required"},
            "", '<tool_call>\n{"name": "get_weather", "arguments": {"city": "',
        ),
        ({"tools": [WEATHER], "tool_choice": "required"}, CALL.removesuffix("</tool_call>"), "</tool_call>\n"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {
                "type": "object", "properties": {"größe": {"enum": [1.5]}}, "required": ["größe"]}}}},
            "", '{"größe": 1.5}',
        ),
        ({"response_format": {"type": "json_object"}}, "", "{"),
    ],
)  # fmt: skip
async def test_the_texts_of_functions_and_schemas_are_guessed(
    worker: Any, options: dict[str, Any], said: str, guessed: str
) -> None:
    seen = see_requests(worker)
    await worker.client.chat.completions.create(model="tiny", messages=ASK, **options)
    assert guess(seen[0], worker.tokenizer, said) == guessed


async def test_nothing_is_guessed_where_nothing_is_known_or_much_would_have_to_be_read(
    worker: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = see_requests(worker)
    monkeypatch.setattr(shaping, "_LITTLE", GrammarLimits(values=40, depth=30))

    def function(parameters: dict[str, Any]) -> dict[str, Any]:
        return {"type": "function", "function": {**WEATHER["function"], "parameters": parameters}}

    large = function({"type": "object", "properties": {f"p{number}": {} for number in range(40)}})
    nested: Any = {}
    for _ in range(18):
        nested = {"items": nested}
    for options in ({}, {"tools": [large]}, {"tools": [function(nested)]}, {"tools": [WEATHER], "tool_choice": "none"}):
        await worker.client.chat.completions.create(model="tiny", messages=ASK, max_tokens=4, **options)
    assert [request.literals is None for request in seen] == [True, True, False, True]


async def test_the_texts_of_equal_functions_are_read_once(worker: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """On the thread of all requests: of a thousand that bring the same functions, one pays; and so where nothing can be
    known of them."""
    seen, written = see_requests(worker), []

    def write(*arguments: Any, **options: Any) -> str:
        written.append(options["most_bytes"])
        return build_grammar(*arguments, **options)

    monkeypatch.setattr(shaping, "build_grammar", write)
    monkeypatch.setattr(compiler, "MOST_READ", 1000)
    read_once, other = ({**WEATHER["function"], "name": name} for name in ("read_once", "another_one"))
    described = {**read_once, "description": "of a place"}
    many = [{"name": f"do_{number}"} for number in range(8)]
    asked: list[tuple[list[dict[str, Any]], dict[str, Any]]] = [
        *3 * (([read_once], {}),),
        ([described], {}),
        *2 * ((many, {}),),
        ([other], {}),
        ([read_once], {"parallel_tool_calls": False}),
    ]
    for functions, options in asked:
        tools: Any = [{"type": "function", "function": function} for function in functions]
        await worker.client.chat.completions.create(model="tiny", messages=ASK, tools=tools, max_tokens=4, **options)
    assert [request.literals is None for request in seen] == [False] * 4 + [True] * 2 + [False] * 2
    assert written == [16 << 10] * 4
    ways = {id(request.literals().__dict__["_literals"]) for request in seen if request.literals is not None}
    assert len(ways) == 3
