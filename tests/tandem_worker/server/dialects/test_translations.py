"""What the Responses API and the Messages API share: errors name their own fields, and events hold together however
the tokens of an answer were grouped.
"""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tandem_worker.engine.schedule.params import FinishReason, TokenDelta, TokenLogprob
from tandem_worker.server.dialects.contract import AnswerHead, Encoder
from tandem_worker.server.dialects.messages.encoder import MessagesEncoder
from tandem_worker.server.dialects.openai.chat_request import parse_chat
from tandem_worker.server.dialects.openai.chunks import ChatEncoder
from tandem_worker.server.dialects.responses import encoder as responses_encoder
from tandem_worker.server.dialects.responses import request as responses_request
from tandem_worker.server.dialects.responses.encoder import ResponsesEncoder
from tandem_worker.server.text.choice import Choice
from tandem_worker.server.text.detokenizer import TokenTable
from tandem_worker.server.text.output import Update, Usage
from tandem_worker.server.tools.contract import ToolOptions
from tandem_worker.server.tools.formats import HERMES_FORMAT
from tandem_worker.server.wire.pacing import complete

from tests.tandem_worker.server.conftest import byte_level_tokenizer
from tests.tandem_worker.server.test_harmony_api import SPECIAL as HARMONY_SPECIAL
from tests.tandem_worker.server.test_harmony_api import TEMPLATE as HARMONY_TEMPLATE

RESPONSES, MESSAGES, COUNT = "/v1/responses", "/v1/messages", "/v1/messages/count_tokens"
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}}
HI = [{"role": "user", "content": "hi"}]
OTHER_NAMES = (
    "response_format",
    "max_completion_tokens",
    "reasoning_effort",
    "function.",
    "allowed_tools.",
    "allowed_tools[",
)


def nest(levels: int) -> dict[str, Any]:
    value: dict[str, Any] = {}
    for _ in range(levels):
        value = {"a": value}
    return value


def function(**fields: Any) -> dict[str, Any]:
    return {"type": "function", "name": "f", "parameters": PARAMETERS, **fields}


def allow(**fields: Any) -> dict[str, Any]:
    return {"tools": [function()], "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [
        {"type": "function", "name": "f"}]} | fields}  # fmt: skip


def call(**fields: Any) -> dict[str, Any]:
    return {"input": [*HI, {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}", **fields}]}


def used(**fields: Any) -> dict[str, Any]:
    block = {"type": "tool_use", "id": "c", "name": "f", "input": {}, **fields}
    return {"system": "s", "messages": [*HI, {"role": "assistant", "content": [{"type": "text", "text": "x"}, block]}]}


def schema_of(schema: Any) -> dict[str, Any]:
    return {"text": {"format": {"type": "json_schema", "name": "n", "schema": schema}}}


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    (RESPONSES, {"tools": [function(parameters=nest(300))], "tool_choice": "none"}, "tools"),
    (RESPONSES, {"metadata": {"x": "y" * 3_000_000}}, "metadata"),
    (RESPONSES, allow(mode="x"), "tool_choice.mode"),
    (RESPONSES, allow(tools=None), "tool_choice"),
    (RESPONSES, allow(tools={}), "tool_choice.tools"),
    (RESPONSES, allow(tools=[3]), "tool_choice.tools[0]"),
    (RESPONSES, allow(tools=[{"type": "function"}]), "tool_choice.tools[0].name"),
    (RESPONSES, allow(tools=[{"type": "function", "name": "f", "x": 1}]), "tool_choice.tools[0].x"),
    (RESPONSES, {"tools": [function()], "tool_choice": {"type": "function"}}, "tool_choice.name"),
    (RESPONSES, {"tools": [function(x=1)]}, "tools[0].x"),
    (RESPONSES, {"instructions": "i", **call(name="")}, "input[1].name"),
    (RESPONSES, {"instructions": "i", **call(call_id="")}, "input[1].call_id"),
    (RESPONSES, schema_of({"type": "x"}), "text.format.schema"),
    (RESPONSES, schema_of(nest(150)), "text.format.schema"),
    (RESPONSES, {"text": {"format": {"type": "text", "x": 1}}}, "text.format.x"),
    (MESSAGES, used(input=nest(300)), "messages[1].content[1].input"),
    (COUNT, used(input=nest(300)), "messages[1].content[1].input"),
    (MESSAGES, used(name=""), "messages[1].content[1].name"),
    (MESSAGES, used(id=""), "messages[1].content[1].id"),
    (MESSAGES, {"output_config": {"effort": "x"}}, "output_config.effort"),
    (MESSAGES, {"output_config": {"effort": "low"}}, "output_config.effort"),
    (MESSAGES, {"output_config": {"format": {"type": "json_schema", "schema": {"type": "x"}}}},
     "output_config.format.schema"),
    (MESSAGES, {"output_config": {"format": {"schema": {}}}}, "output_config.format.type"),
    (MESSAGES, {"tools": [{"name": "f", "input_schema": {}}], "tool_choice": {"name": "f"}}, "tool_choice.type"),
]  # fmt: skip


async def refusal(worker: Any, path: str, fields: dict[str, Any]) -> dict[str, Any]:
    base = {"input": "x"} if path == RESPONSES else {"messages": HI} | ({"max_tokens": 5} if path == MESSAGES else {})
    response = await worker.http.post(path, json={"model": "tiny", **base, **fields})
    assert response.status_code == 400, (str(fields)[:200], response.text)
    return response.json()["error"]


async def test_errors_name_the_fields_of_the_api_that_was_called(worker: Any) -> None:
    for path, fields, param in REFUSED:
        error = await refusal(worker, path, fields)
        assert error["param"] == param, (str(fields)[:200], error)
        assert not any(name in error["message"] for name in OTHER_NAMES), error
    assert worker.engine.requests == []


async def test_errors_of_a_template_name_the_items_that_they_come_from(start_worker: Any) -> None:
    """Messages of the chat have other numbers: instructions are one, and a call belongs to what was said before it."""
    tokenizer = byte_level_tokenizer(HARMONY_TEMPLATE, marks=())
    tokenizer.backend_tokenizer.add_special_tokens(HARMONY_SPECIAL)
    calls = [{"type": "function_call", "call_id": each, "name": "f", "arguments": "{}"} for each in "ab"]
    blocks = [{"type": "tool_use", "id": each, "name": "f", "input": {}} for each in "ab"]
    async with start_worker(tokenizer) as worker:
        error = await refusal(
            worker, RESPONSES, {"instructions": "i", "input": [*HI, {"role": "developer", "content": "d"}]}
        )
        assert error["param"] == "input[1].role"
        error = await refusal(worker, RESPONSES, {"instructions": "i", "input": [*HI, *calls]})
        assert (error["param"], "'input[1]' has 2 calls" in error["message"]) == ("input[1]", True)
        error = await refusal(
            worker, MESSAGES, {"system": "s", "messages": [*HI, {"role": "assistant", "content": blocks}]}
        )
        assert (error["param"], "'messages[1]' has 2 calls" in error["message"]) == ("messages[1]", True)


async def test_what_was_ignored_has_the_name_that_the_request_gave_it(worker: Any) -> None:
    ask = {
        RESPONSES: {"input": "x", "reasoning": {"effort": "low"}, "text": {"verbosity": "high"},
                    "max_output_tokens": 10**6},
        MESSAGES: {"messages": HI, "output_config": {"effort": "low"}, "max_tokens": 10**6},
    }  # fmt: skip
    ignored = {
        RESPONSES: "text.verbosity, reasoning.effort, max_output_tokens",
        MESSAGES: "output_config.effort, max_tokens",
    }
    for path, body in ask.items():
        response = await worker.http.post(path, json=body, headers={"x-tandem-lenient": "true"})
        assert (response.status_code, response.headers.get("x-tandem-ignored")) == (200, ignored[path]), response.text


async def test_who_wants_no_reasoning_gets_none_whatever_its_effort(start_worker: Any) -> None:
    template = "{{ 'on' if enable_thinking else 'off' }}{% for m in messages %}{{ m.content }}{% endfor %}"
    async with start_worker(byte_level_tokenizer(template)) as worker:
        body = {"messages": HI, "max_tokens": 5, "thinking": {"type": "disabled"}, "output_config": {"effort": "high"}}
        assert (await worker.http.post(MESSAGES, json=body)).status_code == 200
        assert worker.tokenizer.decode(worker.engine.requests[0].prompt_token_ids) == "offhi"


async def test_wrong_methods_have_the_shape_of_the_api(worker: Any) -> None:
    answer = await worker.http.get(MESSAGES)
    assert (answer.status_code, answer.headers["allow"]) == (405, "POST")
    assert answer.json()["type"] == "error"


async def test_allowed_tokens_that_are_named_again_and_again_are_one(worker: Any) -> None:
    body = {"messages": HI, "allowed_token_ids": [7, 9] * 100_000, "max_tokens": 1}
    assert (await worker.http.post("/v1/chat/completions", json=body)).status_code == 200
    body["allowed_token_ids"] = [7, 9, 7]
    assert parse_chat(body, 300).common.allowed_token_ids == (7, 9)


# -- events ------------------------------------------------------------------------------------------------------------

TOKENIZER = byte_level_tokenizer()
TABLE = TokenTable(TOKENIZER)
HEAD = AnswerHead(
    id="x", created=1, model="m", fingerprint="f", service_tier=None, include_usage=False, return_token_ids=False,
    tokens_as_ids=False, with_logprobs=True,
)  # fmt: skip
USAGE = Usage(prompt_tokens=1, cached_tokens=0, completion_tokens=1, reasoning_tokens=0)
CALLS = ['{"city": "Paris"}', '{"city": "Rome", "x": [1, 2]}', "{}"]
PIECES = [f'<tool_call>\n{{"name": "f", "arguments": {each}}}\n</tool_call>' for each in CALLS]
PIECES += ["Hm. ", "and\nthen", "é"]


def read_events(data: bytes) -> list[dict[str, Any]]:
    lines = [line for line in data.decode().split("\n") if line.startswith("data: ")]
    return [json.loads(line.removeprefix("data: ")) for line in lines]


def write(encoder: Encoder, text: str, cuts: list[int]) -> list[dict[str, Any]]:
    """The events of an answer whose tokens reached the encoder in groups."""
    tokens = TOKENIZER.encode(text, add_special_tokens=False)
    borders = sorted({0, *(cut % (len(tokens) + 1) for cut in cuts), len(tokens)})
    choice = Choice(0, TABLE.new(), parser=HERMES_FORMAT.new_parser(ToolOptions(mode="auto")))
    data = complete(encoder.opening(0, [1]))
    for begin, end in itertools.pairwise(borders):
        choice.feed(TokenDelta(request_id="x", choice=0, token_ids=tuple(tokens[begin:end])))
        data += complete(encoder.long_update(0, choice.take()))
    choice.feed(TokenDelta(request_id="x", choice=0, finish_reason=FinishReason.STOP))
    data += complete(encoder.long_update(0, choice.take()))
    return read_events(data + encoder.usage(USAGE))


ANSWERS = st.lists(st.sampled_from(PIECES), min_size=1, max_size=5).map("".join)
CUTS = st.lists(st.integers(0, 400), max_size=12)


def arguments_in(text: str) -> list[Any]:
    """Of the calls in an answer, in their order."""
    return [json.loads(part.partition('"arguments": ')[2].partition("}\n</tool_call>")[0])
            for part in text.split("<tool_call>")[1:]]  # fmt: skip


@given(ANSWERS, CUTS)
def test_a_chunk_has_one_delta_of_each_call(text: str, cuts: list[int]) -> None:
    """However many tokens it has: clients such as instructor read the first one of a chunk alone."""
    events = write(ChatEncoder(HEAD, TABLE), text, cuts)
    deltas = [choice["delta"].get("tool_calls", []) for event in events for choice in event["choices"]]
    assert all(len({each["index"] for each in told}) == len(told) for told in deltas)
    joined: dict[int, str] = {}
    for each in itertools.chain.from_iterable(deltas):
        assert ("name" in each["function"]) == (each["index"] not in joined)
        joined[each["index"]] = joined.get(each["index"], "") + each["function"]["arguments"]
    assert [json.loads(arguments) for arguments in joined.values()] == arguments_in(text)


@given(ANSWERS, CUTS)
@settings(max_examples=150, deadline=None)
def test_every_piece_of_a_message_is_of_its_block_s_kind(text: str, cuts: list[int]) -> None:
    blocks: list[tuple[str, list[str]]] = []
    wanted = {"text_delta": "text", "input_json_delta": "tool_use", "thinking_delta": "thinking"}
    for event in write(MessagesEncoder(HEAD, TABLE), text, cuts):
        if event["type"] == "content_block_start":
            blocks.append((event["content_block"]["type"], []))
        elif event["type"] == "content_block_delta":
            assert event["index"] == len(blocks) - 1
            kind, pieces = blocks[-1]
            assert wanted[event["delta"].pop("type")] == kind
            pieces += event["delta"].values()
    assert [json.loads("".join(pieces)) for kind, pieces in blocks if kind == "tool_use"] == arguments_in(text)


@given(ANSWERS, CUTS)
@settings(max_examples=150, deadline=None)
def test_every_piece_of_a_response_is_of_its_item(text: str, cuts: list[int]) -> None:
    events = write(ResponsesEncoder(HEAD, TABLE, echo=b'{"tools":[]}'), text, cuts)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    output = events[-1]["response"]["output"]
    assert events[-1]["response"]["tools"] == []
    calls = [item["arguments"] for item in output if item["type"] == "function_call"]
    assert list(map(json.loads, calls)) == arguments_in(text)
    for index, item in enumerate(output):
        pieces = [event["delta"] for event in events if event.get("output_index") == index and "delta" in event]
        said = item["arguments"] if item["type"] == "function_call" else item["content"][0]["text"]
        assert "".join(pieces) == said


def say(encoder: ResponsesEncoder, num_tokens: int) -> bytes:
    token = TokenLogprob(token_id=65, logprob=-0.5, top=tuple((rank, -1.0) for rank in range(20)))
    update = Update(content="b" * num_tokens, logprobs=[token] * num_tokens, logprob_offsets=list(range(num_tokens)))
    return complete(encoder.long_update(0, update))


def test_logprobs_are_repeated_up_to_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four events repeat what an answer has; the logprobs of a long one would be hundreds of megabytes."""
    monkeypatch.setattr(responses_encoder, "MAX_REPEATED_BYTES", 20_000)
    for num_tokens, repeated in ((10, 10), (100, 0)):
        encoder = ResponsesEncoder(HEAD, TABLE, echo=b'{"a":1}')
        data = say(encoder, num_tokens // 2) + say(encoder, num_tokens - num_tokens // 2)
        told = [event["logprobs"] for event in read_events(data) if event["type"].endswith("delta")]
        assert sum(map(len, told)) == num_tokens
        end = read_events(complete(encoder.long_update(0, Update(finish="stop"))) + encoder.usage(USAGE))
        assert len(end[0]["logprobs"]) == repeated
        assert len(end[-1]["response"]["output"][0]["content"][0]["logprobs"]) == repeated
        whole = ResponsesEncoder(HEAD, TABLE, echo=b'{"a":1}')
        token = TokenLogprob(token_id=65, logprob=-0.5, top=())
        update = Update(content="b", logprobs=[token] * 1000, logprob_offsets=[0] * 1000, finish="stop")
        (answer,) = complete(whole.response([update], [[1]], USAGE))
        assert len(json.loads(answer)["output"][0]["content"][0]["logprobs"]) == 1000


def test_what_is_repeated_of_a_request_has_a_limit() -> None:
    _, echo, _ = responses_request.translate({"input": "x", "instructions": "i", "metadata": {"a": "b"}})
    assert json.loads(echo)["instructions"] == "i"
    assert responses_request.MAX_ECHO_BYTES + responses_encoder.MAX_REPEATED_BYTES < 4 * 1024 * 1024


async def test_the_end_of_a_broken_stream_leaves_out_no_event(worker: Any) -> None:
    worker.says("a long answer")
    worker.engine.fail_after, worker.engine.step_seconds = 3, 0.01
    response = await worker.http.post(RESPONSES, json={"input": "x", "stream": True})
    events = read_events(response.content)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert [event["type"] for event in events[-2:]] == ["response.output_item.done", "response.failed"]
    assert events[-2]["item"]["status"] == "incomplete"
