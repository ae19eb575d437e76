"""Required calls of models whose chat template knows no tools."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable
from typing import Any

import numpy as np
import openai
import pytest
from tandem_worker.server.tools import harmony

PLAIN = """{% for message in messages %}{{ '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}
{%- endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""
CITY = {
    "type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"], "additionalProperties": False,
}  # fmt: skip
TOOL: Any = {"type": "function", "function": {"name": "look_up", "parameters": CITY}}
OTHER: Any = {"type": "function", "function": {"name": "stop"}}
USER = {"role": "user", "content": "Weather?"}
CALL = '{"name": "look_up", "parameters": {"city": "Paris"}}'


@pytest.fixture
async def plain(start_worker: Callable[..., Any], make_tokenizer: Callable[..., Any]) -> AsyncIterator[Any]:
    async with start_worker(make_tokenizer(PLAIN, [])) as running:
        yield running


async def create(worker: Any, messages: Any = None, **fields: Any) -> Any:
    return await worker.client.chat.completions.create(model="tiny", messages=messages or [USER], **fields)


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "look_up"}}])
@pytest.mark.parametrize("stream", [False, True])
async def test_a_required_call_is_made(plain: Any, choice: Any, stream: bool) -> None:
    plain.says(CALL)
    answer = await create(plain, tools=[TOOL, OTHER], tool_choice=choice, stream=stream)
    if stream:
        deltas = [chunk.choices[0].delta async for chunk in answer if chunk.choices]
        calls = [call for delta in deltas for call in delta.tool_calls or ()]
        assert calls[0].function.name == "look_up"
        assert json.loads("".join(call.function.arguments or "" for call in calls)) == {"city": "Paris"}
        assert not any(delta.content for delta in deltas)
    else:
        (call,) = answer.choices[0].message.tool_calls
        assert (call.function.name, json.loads(call.function.arguments)) == ("look_up", {"city": "Paris"})
        assert answer.choices[0].finish_reason == "tool_calls"
    request = plain.engine.requests[-1]
    prompt = plain.tokenizer.decode(request.prompt_token_ids)
    assert prompt.startswith("<|im_start|>system\nYou can call these functions:\n")
    assert '"name": "look_up"' in prompt
    assert admits(plain, request.sampling.grammar, CALL)
    assert not admits(plain, request.sampling.grammar, "Sunny.")
    assert not admits(plain, request.sampling.grammar, '{"name": "look_up", "parameters": {}}')
    assert admits(plain, request.sampling.grammar, '{"name": "stop", "parameters": {}}') is (choice == "required")


PLACE = {"type": "object", "properties": {"city": {"type": "string"}}}
MORE = '{"city": "Paris", "land": "France"}'


@pytest.mark.parametrize(
    ("schema", "arguments", "admitted"),
    [
        (PLACE, '{"city": "Paris"}', True),
        (PLACE, MORE, False),
        (PLACE | {"additionalProperties": True}, MORE, True),
        (PLACE | {"patternProperties": {"^l": {"type": "string"}}}, MORE, True),
        (PLACE | {"required": ["land"]}, MORE, True),
        ({"type": "object"}, MORE, True),
        ({}, MORE, True),
        ({"type": "object", "properties": {"at": {"type": "array", "items": PLACE}}}, f'{{"at": [{MORE}]}}', False),
        ({"type": "object", "properties": {"at": PLACE}}, f'{{"at": {MORE}}}', False),
        ({"type": "object", "properties": {"at": PLACE}, "allOf": [{}]}, f'{{"at": {MORE}}}', True),
    ],
)  # fmt: skip
async def test_listed_properties_are_all_there_are(plain: Any, schema: Any, arguments: str, admitted: bool) -> None:
    """Else a model that never learned to call functions adds properties until its context is full."""
    plain.says(CALL)
    tool = {"type": "function", "function": {"name": "look_up", "parameters": schema}}
    await create(plain, tools=[tool], tool_choice="required")
    grammar = plain.engine.requests[-1].sampling.grammar
    assert admits(plain, grammar, f'{{"name": "look_up", "parameters": {arguments}}}') is admitted


async def test_calls_and_results_become_text(plain: Any) -> None:
    plain.says("Sunny.")
    call = {"id": "c1", "type": "function", "function": {"name": "look_up", "arguments": '{"city": "Paris"}'}}
    messages = [
        {"role": "system", "content": "Be short."}, USER, {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "sun"}, {"role": "user", "content": "Well?"},
    ]  # fmt: skip
    await create(plain, messages)
    prompt = plain.tokenizer.decode(plain.engine.requests[-1].prompt_token_ids)
    assert f"<|im_start|>assistant\n{CALL}<|im_end|>" in prompt
    assert "<|im_start|>user\nlook_up returned: sun\nWell?<|im_end|>" in prompt
    await create(plain, messages, tools=[TOOL], tool_choice="required")
    prompt = plain.tokenizer.decode(plain.engine.requests[-1].prompt_token_ids)
    assert prompt.startswith("<|im_start|>system\nBe short.\n\nYou can call these functions:\n")


async def test_a_choice_of_its_own_is_refused(plain: Any) -> None:
    with pytest.raises(openai.BadRequestError, match="require a call with 'tool_choice'"):
        await create(plain, tools=[TOOL])
    plain.says("x")
    assert (await create(plain, tools=[TOOL], tool_choice="none")).choices[0].message.content == "x"


HERMES = '<tool_call>\n{"name": "look_up", "arguments": {"city": "Paris"}}\n</tool_call>'
NAMED = {"type": "function", "function": {"name": "look_up"}}
ASK = "You can call these functions:"
FORMS = {
    # (form, the template has a place for tools, tool_choice): how the functions are told, or why not
    ("Auto", True, "auto"): "# Tools",
    ("Auto", True, "required"): "# Tools",
    ("Auto", False, "auto"): "no place for tools, so it cannot choose",
    ("Auto", False, "required"): ASK,
    ("Template", True, "auto"): "# Tools",
    ("Template", True, "required"): "# Tools",
    ("Template", False, "auto"): "no place for tools: remove",
    ("Template", False, "required"): "no place for tools: remove",
    ("Generic", True, "auto"): ASK,
    ("Generic", True, "required"): ASK,
    ("Generic", False, "auto"): ASK,
    ("Generic", False, "required"): ASK,
    ("Off", True, "auto"): "Tools are off",
    ("Off", True, "required"): "Tools are off",
    ("Off", False, "required"): "Tools are off",
}


@pytest.mark.parametrize(("form", "has_place", "choice"), FORMS)
async def test_how_functions_are_told(
    start_worker: Any, make_tokenizer: Any, form: str, has_place: bool, choice: str
) -> None:
    expected = FORMS[form, has_place, choice]
    tokenizer = make_tokenizer() if has_place else make_tokenizer(PLAIN, [])
    async with start_worker(tokenizer, tools=form) as worker:
        if expected not in ("# Tools", ASK):
            with pytest.raises(openai.BadRequestError, match=expected) as told:
                await create(worker, tools=[TOOL], tool_choice=choice)
            assert told.value.param == "tools"
            worker.says("Sunny.")
            answer = await create(worker, tools=[TOOL], tool_choice="none")
            assert answer.choices[0].message.content == "Sunny."
            return
        worker.says(HERMES if expected == "# Tools" else CALL)
        answer = await create(worker, tools=[TOOL], tool_choice=choice)
        prompt = worker.tokenizer.decode(worker.engine.requests[-1].prompt_token_ids)
        assert [mark for mark in ("# Tools", ASK) if mark in prompt] == [expected]
        (call,) = answer.choices[0].message.tool_calls
        assert (call.function.name, json.loads(call.function.arguments)) == ("look_up", {"city": "Paris"})
        if expected == ASK:
            assert ("When no call is needed, answer in words." in prompt) is (choice == "auto")


@pytest.mark.parametrize("stream", [False, True])
async def test_a_free_choice_in_the_generic_form_may_be_words(
    start_worker: Any, make_tokenizer: Any, stream: bool
) -> None:
    async with start_worker(make_tokenizer(PLAIN, []), tools="Generic") as worker:
        worker.says('Sunny, {"name": "look_up"} or not.')
        answer = await create(worker, tools=[TOOL], stream=stream)
        if stream:
            text = "".join([chunk.choices[0].delta.content or "" async for chunk in answer if chunk.choices])
        else:
            text = answer.choices[0].message.content
            assert answer.choices[0].finish_reason == "stop"
        assert text == 'Sunny, {"name": "look_up"} or not.'
        assert worker.engine.requests[-1].sampling.grammar is None
        strict = {"type": "function", "function": TOOL["function"] | {"strict": True}}
        await create(worker, tools=[strict])
        grammar = worker.engine.requests[-1].sampling.grammar
        assert admits(worker, grammar, "Sunny.")
        assert admits(worker, grammar, CALL)
        assert not admits(worker, grammar, '{"name": "look_up", "parameters": {}}')


async def test_answers_with_a_frame_take_no_generic_form(start_worker: Any, make_tokenizer: Any) -> None:
    template = PLAIN.replace("'<|im_start|>'", "'<|start|><|channel|>'")
    async with start_worker(make_tokenizer(template, list(harmony.MARKS)), tools="Generic") as worker:
        with pytest.raises(openai.BadRequestError, match="have a frame of their own"):
            await create(worker, tools=[TOOL], tool_choice="required")


def admits(worker: Any, factory: Any, text: str) -> bool:
    grammar, mask = factory.new(), np.zeros(((len(worker.tokenizer) + 31) // 32,), dtype=np.int32)
    for token in [*worker.tokenizer.encode(text), worker.tokenizer.eos_token_id]:
        grammar.fill_mask(mask)
        if not (mask[token // 32] >> (token % 32)) & 1:
            return False
        grammar.accept(token)
    return True
