"""A stream that is cut anywhere and goes on at another worker is the stream that nobody cut."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import json
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tandem_api.journal import COMMIT, MARK, MOVED, USAGE
from tandem_api.launch import KVConfig, ModelSource, SchedulerConfig, WorkerConfig
from tandem_api.names import HEADER_RESUME, Role
from tandem_gateway.http.journal import JournaledStream
from tandem_worker.engine.build import build_engine
from tandem_worker.engine.errors import RequestError
from tandem_worker.server.answer.deltas import DeltaHub
from tandem_worker.server.answer.journal import read_journal
from tandem_worker.server.app import build_app
from tandem_worker.server.wire.pacing import complete as complete_steps

from tests.tandem_worker.engine.history_model import HistoryModel
from tests.tandem_worker.server.conftest import byte_level_tokenizer, share_compiler

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
RESPONSES, BLOCKS = "/v1/responses", "/v1/messages"
TOKENIZER = byte_level_tokenizer()
THINK = TOKENIZER.backend_tokenizer.token_to_id("<think>")
THINK_END = TOKENIZER.backend_tokenizer.token_to_id("</think>")
IM_END = TOKENIZER.eos_token_id
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"enum": ["one", "two"]}},
          "required": ["a", "b"], "additionalProperties": False}  # fmt: skip
TOOLS = [{"type": "function", "function": {"name": "look_up", "parameters": {
    "type": "object", "properties": {"x": {"enum": ["sun", "moon"]}, "y": {"type": "boolean"}},
    "required": ["x", "y"], "additionalProperties": False}}}]  # fmt: skip
LETTERS = dict.fromkeys(map(str, map(TOKENIZER.backend_tokenizer.token_to_id, "abc")), 100.0)
"""Nothing else is said, so that stop strings are met."""
TAGS = {"type": "structural_tag", "triggers": ["a", "bc"], "structures": [
    {"begin": "bc", "end": "</f>", "schema": {
        "type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"], "additionalProperties": False}},
    {"begin": "ab", "schema": {"type": "integer", "minimum": 0, "maximum": 9}, "end": "!"}]}  # fmt: skip
MESSAGES = [{"role": "user", "content": "Tell me of the sun."}]


def chat(**fields: Any) -> tuple[str, dict[str, Any]]:
    body = {"model": "tiny", "messages": MESSAGES, "stream": True, "stream_options": {"include_usage": True}}
    return CHAT, body | {"max_tokens": 24, "seed": 7} | fields


def complete(**fields: Any) -> tuple[str, dict[str, Any]]:
    body = {"model": "tiny", "prompt": "The sun", "stream": True, "stream_options": {"include_usage": True}}
    return COMPLETIONS, body | {"max_tokens": 16, "seed": 7} | fields


def respond(**fields: Any) -> tuple[str, dict[str, Any]]:
    body = {"model": "tiny", "input": MESSAGES, "stream": True, "max_output_tokens": 24, "seed": 7}
    return RESPONSES, body | fields


def message(**fields: Any) -> tuple[str, dict[str, Any]]:
    body = {"model": "tiny", "messages": MESSAGES, "stream": True, "max_tokens": 24, "seed": 7}
    return BLOCKS, body | fields


THINKS: dict[str, Any] = {"chat_template_kwargs": {"force_thinking": True}, "logit_bias": {str(THINK_END): 5.0}}
FUNCTIONS: list[Any] = [{"type": "function", "strict": True, **TOOLS[0]["function"]}]
SCHEMA_OF_TEXT = {"format": {"type": "json_schema", "name": "s", "schema": SCHEMA, "strict": True}}
LIKELIHOODS: dict[str, Any] = {"include": ["message.output_text.logprobs"], "top_logprobs": 2}

KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "greedy": chat(temperature=0, ignore_eos=True),
    "seeded": chat(ignore_eos=True),
    "nucleus and penalties": chat(top_p=0.9, presence_penalty=0.5, repetition_penalty=1.2, ignore_eos=True),
    "ends by itself": chat(logit_bias={str(IM_END): 3.0}, max_tokens=60),
    "schema": chat(
        response_format={"type": "json_schema", "json_schema": {"name": "s", "schema": SCHEMA, "strict": True}},
        max_tokens=40,
        logit_bias={str(THINK_END): 6.0},
    ),
    "tools": chat(tools=TOOLS, tool_choice="required", max_tokens=90, logit_bias={str(THINK_END): 6.0}),
    "reasoning": chat(
        chat_template_kwargs={"force_thinking": True}, logit_bias={str(THINK_END): 5.0}, max_tokens=30, ignore_eos=True
    ),
    "logprobs": chat(logprobs=True, top_logprobs=3, ignore_eos=True),
    "logprobs and stop": chat(
        logprobs=True, top_logprobs=1, stop=["abca", "bcab", "ccca"], logit_bias=LETTERS, ignore_eos=True, max_tokens=90
    ),
    "stop": chat(stop=["abca", "bcab", "cbca"], logit_bias=LETTERS, ignore_eos=True, max_tokens=70),
    "token ids": chat(return_token_ids=True, ignore_eos=True),
    "token ids and their logprobs": chat(
        return_token_ids=True,
        logprobs=True,
        stop=["cbcab"],
        stop_token_ids=[THINK],
        logit_bias=LETTERS,
        n=2,
        max_tokens=70,
    ),
    "structural tags": chat(response_format=TAGS, logit_bias=LETTERS | {str(THINK): -100.0}, max_tokens=60),
    "four choices": chat(n=4, max_tokens=12, stop=["aba", "cc"], logit_bias=LETTERS),
    "completion": complete(ignore_eos=True),
    "prompts": complete(prompt=["The sun", "Paris", "the"], n=2, echo=True, logprobs=2, max_tokens=6),
    "scored": complete(prompt=["The sun", "the"], echo=True, logprobs=1, max_tokens=0),
    "no usage": chat(stream_options=None, ignore_eos=True),
    "kept stop": chat(
        stop=["abca", "bcab", "cbca"],
        include_stop_str_in_output=True,
        logprobs=True,
        logit_bias=LETTERS,
        ignore_eos=True,
        max_tokens=70,
    ),
    "kept stop token": chat(
        stop_token_ids=[int(next(iter(LETTERS)))],
        include_stop_str_in_output=True,
        min_tokens=9,
        logit_bias=LETTERS,
        return_token_ids=True,
        max_tokens=70,
    ),
    "bad words": chat(bad_words=["a", "the", "e "], max_tokens=40),
    "allowed tokens": chat(allowed_token_ids=[*map(int, LETTERS), IM_END], max_tokens=40),
    "special tokens": chat(skip_special_tokens=False, ignore_eos=True, logit_bias={str(IM_END): 4.0}),
    "tokens by number": chat(
        logprobs=True,
        top_logprobs=2,
        return_tokens_as_token_ids=True,
        stop=["abca"],
        logit_bias=LETTERS,
        ignore_eos=True,
        max_tokens=40,
    ),
    "usage all along": chat(
        stream_options={"include_usage": True, "continuous_usage_stats": True}, n=2, ignore_eos=True
    ),
    "a choice": complete(guided_choice=["abc", "abcab"], n=2),
    "regex and token ids": complete(regex="[abc]{12}", return_token_ids=True, prompt=[[1, 2, 3], [4]], max_tokens=20),
    "response": respond(temperature=0, ignore_eos=True, instructions="Be short.", metadata={"a": "b"}),
    "response with reasoning": respond(**THINKS, max_output_tokens=40, ignore_eos=True),
    "response with calls": respond(
        tools=FUNCTIONS,
        tool_choice="required",
        max_output_tokens=150,
        **(THINKS | {"logit_bias": {str(THINK_END): 6.0}}),
    ),
    "response of a schema": respond(text=SCHEMA_OF_TEXT, max_output_tokens=60, logit_bias={str(THINK_END): 6.0}),
    "response with logprobs": respond(**LIKELIHOODS, max_output_tokens=40, ignore_eos=True),
    "response with logprobs and stop": respond(
        **LIKELIHOODS, stop=["abca", "bcab", "ccca"], logit_bias=LETTERS, ignore_eos=True, max_output_tokens=90, seed=5
    ),
    "response that ends by itself": respond(logit_bias={str(IM_END): 3.0}, max_output_tokens=60),
    "message": message(temperature=0, ignore_eos=True),
    "message with thinking": message(**THINKS, max_tokens=40, ignore_eos=True),
    "message with calls": message(
        tools=[{"name": "look_up", "input_schema": TOOLS[0]["function"]["parameters"]}],
        tool_choice={"type": "any"},
        max_tokens=150,
        seed=5,
        **(THINKS | {"logit_bias": {str(THINK_END): 6.0}}),
    ),
    "message and stop": message(
        stop_sequences=["abca", "bcab", "cbca"], logit_bias=LETTERS, ignore_eos=True, max_tokens=70
    ),
    "prediction": chat(
        prediction={"type": "content", "content": "abcabcbcaab" * 4}, logit_bias=LETTERS, n=2, max_tokens=40, seed=8
    ),
    "cut prompt": complete(prompt="The sun and the rain", truncate_prompt_tokens=3, add_special_tokens=False),
}


EAGER = {"method": "Lookup", "adaptive": False}


@contextmanager
def serving(**changes: Any) -> Iterator[httpx.AsyncClient]:
    """A worker that needs no port. Its model's next token depends on every token before it."""
    hub = DeltaHub()
    fields: dict[str, Any] = {
        "model_name": "tiny", "served_name": "tiny", "role": Role.UNIFIED, "revision": "r1",
        "model": ModelSource(uri="file:///m"), "max_model_len": 2048,
        "kv": KVConfig(memory_bytes=1 << 20, block_size=8), "scheduler": SchedulerConfig(),
    }  # fmt: skip
    config = WorkerConfig(**(fields | changes))
    engine = build_engine(HistoryModel(len(TOKENIZER)), config, hub.deliver)
    app = build_app(
        engine, TOKENIZER, config, hub=hub, pod_name="pod-0", ready=lambda: True, draining=lambda: False,
        grammars=share_compiler(TOKENIZER),
    )  # fmt: skip
    client = httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://worker", timeout=60)
    client.hub = hub  # type: ignore[attr-defined]
    client.engine = engine  # type: ignore[attr-defined]
    try:
        yield client
        assert engine.failure is None
        assert hub.num_open == 0
    finally:
        engine.stop()


@pytest.fixture(scope="module")
def pair() -> Iterator[tuple[httpx.AsyncClient, httpx.AsyncClient]]:
    """Where streams begin, and where they go on: the second one guesses what they say."""
    with serving() as first, serving(speculative=EAGER) as second:
        yield first, second


async def ask(client: httpx.AsyncClient, request: tuple[str, dict[str, Any]]) -> bytes:
    path, body = request
    response = await client.post(path, json=body)
    assert response.status_code == 200, response.text
    assert HEADER_RESUME not in response.headers
    return response.content


async def record(
    client: httpx.AsyncClient, request: tuple[str, dict[str, Any]]
) -> tuple[str, list[tuple[bytes, bytes]]]:
    """The head of the journal, and what each of its lines commits."""
    path, body = request
    response = await client.post(path, json=body, headers={HEADER_RESUME: "0"})
    assert response.status_code == 200, response.text
    return response.headers[HEADER_RESUME], cut_units(response.content)


def cut_units(stream: bytes) -> list[tuple[bytes, bytes]]:
    units: list[tuple[bytes, bytes]] = []
    events = b""
    for line in stream.splitlines(keepends=True):
        if line.startswith(MARK):
            units.append((events, line))
            events = b""
        else:
            events += line
    assert events == b"", "the last line commits everything"
    return units


async def resume(
    client: httpx.AsyncClient, request: tuple[str, dict[str, Any]], head: str, marks: list[bytes]
) -> httpx.Response:
    path, body = request
    journal = head.encode() + b"\n" + b"".join(marks)
    headers = {HEADER_RESUME: str(len(journal)), "content-type": "application/json"}
    return await client.post(path, content=journal + orjson.dumps(body), headers=headers)


def read_events(stream: bytes) -> list[dict[str, Any]]:
    events = [line[6:] for line in stream.split(b"\n") if line.startswith(b"data: ")]
    assert events[-1] == b"[DONE]"
    assert events.count(b"[DONE]") == 1
    return [json.loads(event) for event in events[:-1]]


def is_over(stream: bytes) -> bool:
    """Whether these events end the answer."""
    names = [line for line in stream.split(b"\n") if line.startswith(b"event: ")]
    last = names[-1].removeprefix(b"event: ") if names else b""
    return stream.endswith(b"[DONE]\n\n") or last in (b"response.completed", b"response.incomplete", b"message_stop")


def read_usage(stream: bytes) -> dict[str, Any] | None:
    """As its last events tell it."""
    if not stream.startswith(b"event: "):
        told = read_events(stream)
        return told[-1].get("usage") if told else None
    events = read_named(stream)
    return events[-2]["usage"] if events[-1]["type"] == "message_stop" else events[-1]["response"]["usage"]


def read_named(stream: bytes) -> list[dict[str, Any]]:
    events: list[dict[str, Any]] = []
    for block in stream.decode().removesuffix("\n\n").split("\n\n"):
        name, data = block.split("\n")
        events.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {events[-1]['type']}"
    return events


ID = re.compile(r"(?:resp|msg|rs|fc|call)_[0-9a-f]{24,32}")


def merge_named(stream: bytes) -> dict[str, Any]:
    """All events in their order; pieces that follow one another are one, and ids are numbers."""
    ids: list[str] = []

    def number(found: re.Match[str]) -> str:
        if found[0] not in ids:
            ids.append(found[0])
        return f"id {ids.index(found[0])}"

    events = read_named(ID.sub(number, stream.decode()).encode())
    assert is_over(stream)
    numbers = [event.pop("sequence_number") for event in events if "sequence_number" in event]
    assert numbers == list(range(len(numbers)))
    told = read_usage(stream) or {}
    usage = {"prompt_tokens": told["input_tokens"] + told.get("cache_read_input_tokens", 0),
             "completion_tokens": told["output_tokens"], "prompt_tokens_details": None,
             "details": told.get("output_tokens_details")}  # fmt: skip
    heads: set[int] = set()
    merged: list[dict[str, Any]] = []
    for event in events:
        whole = event.get("response", event)
        whole.pop("usage", None)
        whole.pop("completed_at", None)
        if "created_at" in whole:
            heads.add(whole.pop("created_at"))
        last = merged[-1] if merged else {}
        if "delta" in event and event["type"] == last.get("type"):
            _join(last, event)
        else:
            merged.append(event)
    return {"events": merged, "usage": usage, "heads": {(*ids, *sorted(heads))}}


def _join(last: dict[str, Any], event: dict[str, Any]) -> None:
    for key, value in event.items():
        match value:
            case str() if key in ("delta", "text", "thinking", "partial_json"):
                last[key] += value
            case dict():
                _join(last[key], value)
            case list():
                last[key] = last[key] + value
            case _:
                assert last[key] == value


def merge(stream: bytes) -> dict[str, Any]:
    """What a client puts together."""
    if stream.startswith(b"event: "):
        return merge_named(stream)
    merged: dict[str, Any] = {"choices": {}, "usage": None, "heads": set()}
    ids: list[str] = []
    events = read_events(stream)
    for event in events:
        if not event["choices"]:
            assert merged["usage"] is None
            merged["usage"] = event["usage"]
        for part in event["choices"]:
            choice = merged["choices"].setdefault(
                part["index"], {"text": "", "reasoning": "", "calls": [], "logprobs": {}, "ids": [], "roles": 0,
                                "finish": None, "prompt": []}
            )  # fmt: skip
            assert choice["finish"] is None, "nothing comes after the end"
            delta = part.get("delta", {})
            choice["roles"] += "role" in delta
            choice["text"] += delta.get("content") or part.get("text") or ""
            choice["reasoning"] += delta.get("reasoning_content") or ""
            for call in delta.get("tool_calls", []):
                if "id" in call:
                    ids.append(call["id"])
                    choice["calls"].append([call["function"]["name"], ""])
                assert len(choice["calls"]) == call["index"] + 1
                choice["calls"][-1][1] += call["function"]["arguments"]
            for key, values in (part["logprobs"] or {}).items():
                choice["logprobs"][key] = choice["logprobs"].get(key, []) + (values or [])
            choice["ids"] += part.get("token_ids", [])
            choice["prompt"] += part.get("prompt_token_ids", [])
            choice["finish"] = part["finish_reason"]
            choice["stopped"] = part.get("stop_reason")
    names = ("id", "created", "model", "system_fingerprint", "object")
    merged["heads"] = {(*[event[name] for name in names], *ids) for event in events}
    assert len(set(ids)) == len(ids)
    return merged


def same(first: bytes, second: bytes, *, heads: bool = True) -> None:
    one, other = merge(first), merge(second)
    if not heads:
        one["heads"] = other["heads"] = None
    else:
        assert len(other["heads"]) == 1
    for each in (one, other):
        if each["usage"] is not None:  # of the worker that was asked; another one may have had it in its cache
            each["usage"].pop("prompt_tokens_details")
    assert one == other


@pytest.mark.parametrize("every", [17, pytest.param(1, marks=pytest.mark.full)])
@pytest.mark.parametrize("kind", KINDS)
async def test_every_cut_of_every_kind(
    pair: tuple[httpx.AsyncClient, httpx.AsyncClient], kind: str, every: int
) -> None:
    """In the gate the first three cuts, and every seventeenth from one that differs from kind to kind."""
    first, second = pair
    request = KINDS[kind]
    undisturbed = await ask(second, request)
    head, units = await record(first, request)
    whole = b"".join(events for events, _ in units)
    same(undisturbed, whole, heads=False)
    for cut in range(1, len(units)):
        if is_over(units[cut - 1][0]):
            break
        if cut > 3 and (cut + len(kind)) % every:
            continue
        marks = [mark for _, mark in units[:cut]]
        response = await resume(second, request, head, marks)
        assert response.status_code == 200, response.text
        rest = b"".join(events for events, _ in cut_units(response.content))
        sent = b"".join(events for events, _ in units[:cut])
        same(whole, sent + rest)
        assert read_usage(rest) == read_usage(whole), "the cached tokens are those of the first"


@pytest.mark.parametrize(
    ("kind", "check"),
    [
        ("ends by itself", lambda choice: choice["finish"] == "stop"),
        ("schema", lambda choice: set(json.loads(choice["text"])) == {"a", "b"}),
        ("tools", lambda choice: choice["calls"] and "x" in json.loads(choice["calls"][0][1])),
        ("reasoning", lambda choice: choice["reasoning"] and choice["text"]),
        ("stop", lambda choice: choice["finish"] == "stop"),
        (
            "structural tags",
            lambda choice: re.fullmatch(
                r'(?:(?:(?!bc)[bc])*(?:ab[0-9]!|bc\{\s*"a"\s*:\s*[12]\s*\}</f>))+'
                r"(?:(?!bc)[bc])*(?:a|ab|ab[0-9]|bc.*)?",
                choice["text"],
                re.DOTALL,
            ),
        ),
        ("logprobs and stop", lambda choice: choice["finish"] == "stop" and len(choice["logprobs"]["content"]) > 3),
    ],
)
async def test_a_kind_does_what_makes_it_hard(
    pair: tuple[httpx.AsyncClient, httpx.AsyncClient], kind: str, check: Callable[[Any], Any]
) -> None:
    choice = merge(await ask(pair[0], KINDS[kind]))["choices"][0]
    assert check(choice), choice


ITEMS = {
    "response": ["message"],
    "response with reasoning": ["reasoning", "message"],
    "response with calls": ["reasoning", "function_call"],
    "response of a schema": ["message"],
    "response with logprobs and stop": ["message"],
    "message": ["text"],
    "message with thinking": ["thinking", "text"],
    "message with calls": ["tool_use", "tool_use"],
    "message and stop": ["text"],
}


@pytest.mark.parametrize("kind", ITEMS)
async def test_answers_of_other_apis_have_what_makes_them_hard(
    pair: tuple[httpx.AsyncClient, httpx.AsyncClient], kind: str
) -> None:
    events = read_named(await ask(pair[0], KINDS[kind]))
    begun = [event.get("item") or event.get("content_block") for event in events if event["type"] in BEGINS]
    assert [item["type"] for item in begun if item][: len(ITEMS[kind])] == ITEMS[kind]
    if "stop" in kind:
        assert events[-1].get("response", {}).get("status") == "completed" or events[-2]["delta"]["stop_sequence"]


BEGINS = ("response.output_item.added", "content_block_start")


@pytest.mark.parametrize("kind", ["response with logprobs and stop", "response with logprobs"])
async def test_logprobs_beyond_the_bound_are_repeated_nowhere(
    pair: tuple[httpx.AsyncClient, httpx.AsyncClient], kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The journal has those that the end repeats, and none once it repeats none. How many bytes they are depends on the
    digits that a CPU's arithmetic gives, so the bound is half of what this answer's come to."""
    request = KINDS[kind]
    told = [event["logprobs"] for event in read_named(await ask(pair[0], request)) if event["type"].endswith(".delta")]
    half = sum(len(orjson.dumps(each)) - len("[]") for each in told) // 2
    monkeypatch.setattr("tandem_worker.server.dialects.responses.encoder.MAX_REPEATED_BYTES", half)
    for _ in range(20):  # on a busy machine the steps of several tokens are told at once
        head, units = await record(pair[0], request)
        marks = [mark for _, mark in units]
        beyond = [number for number, mark in enumerate(marks) if mark.split()[4:5] == [b"-"]]
        if beyond and 1 < beyond[0] < len(marks) - 1:
            break
    whole = b"".join(events for events, _ in units)
    assert 1 < beyond[0] < len(marks) - 1
    assert read_named(whole)[-1]["response"]["output"][-1]["content"][0]["logprobs"] == []
    for cut in sorted({max(1, beyond[0] - 2), beyond[0] - 1, beyond[0], beyond[0] + 1, beyond[-1]}):
        rest = await resume(pair[1], request, head, marks[:cut])
        assert rest.status_code == 200, rest.text
        same(whole, b"".join(events for events, _ in [*units[:cut], *cut_units(rest.content)]))


@pytest.mark.parametrize("kind", ["response", "message"])
async def test_what_a_client_has_not_seen_is_never_gone_on_with(
    pair: tuple[httpx.AsyncClient, httpx.AsyncClient], kind: str
) -> None:
    """A worker of another release might write other events for the same tokens, or cut them otherwise."""
    head, units = await record(pair[0], KINDS[kind])
    while len(units) < 6:  # on a busy machine the steps of several tokens are told at once
        head, units = await record(pair[0], KINDS[kind])
    marks = [mark for _, mark in units[: len(units) // 2]]
    opening, middle = marks[0].split(b" "), marks[-1].split(b" ")
    assert (opening[1], middle[1]) == (b"b", b"e")
    other_opening = [b" ".join([*opening[:4], b"17\n"]), *marks[1:]]
    other_middle = [*marks[:-1], b" ".join([*middle[:4], b"17\n"])]
    joined = b": e 0 %b %b" % (b",".join(mark.split(b" ")[3] for mark in marks[-2:]), middle[4])
    older = [b" ".join(opening[:4]) + b"\n", *(b": t 0 %b\n" % mark.split(b" ")[3] for mark in marks[1:])]
    for journal in (other_opening, other_middle, [*marks[:-2], joined], older, [*marks, b": f 0 9 0\n"]):
        response = await resume(pair[1], KINDS[kind], head, journal)
        assert response.status_code == 409, journal[-1]
        assert response.json()["error"]["code"] == "cannot_resume"
    for other in {"greedy", "response", "message"} - {kind}:  # of the same prompt, for another API
        response = await resume(pair[1], KINDS[other], head, marks)
        assert response.status_code == 409
    assert (await resume(pair[1], KINDS[kind], head, marks)).status_code == 200


@pytest.mark.parametrize("kind", [kind for kind, (path, _) in KINDS.items() if path in (RESPONSES, BLOCKS)])
async def test_at_every_byte_a_client_has_what_the_journal_says(
    pair: tuple[httpx.AsyncClient, httpx.AsyncClient], kind: str
) -> None:
    """With the cuts between units above: all that can happen to a stream."""
    head, units = await record(pair[0], KINDS[kind])
    stream, passed, journal = JournaledStream(head.encode()), b"", b""
    for events, mark in units:
        for byte in (events + mark)[:-1]:
            assert not stream.feed(bytes([byte]))
            assert stream.journal == journal
        journal += mark
        assert stream.feed(mark[-1:]) == events
        assert stream.journal == journal
        passed += events
    assert stream.done
    assert is_over(passed)


async def test_withheld_logprobs_travel_along(pair: tuple[httpx.AsyncClient, httpx.AsyncClient]) -> None:
    _, units = await record(pair[0], KINDS["logprobs and stop"])
    assert any(mark.count(b" ") > 3 for _, mark in units), "no text was ever withheld"


@given(data=st.data())
@settings(max_examples=8, deadline=None)
def test_a_stream_may_move_again_and_again(data: st.DataObject) -> None:
    kind = data.draw(st.sampled_from(sorted(KINDS)))
    request = copy.deepcopy(KINDS[kind])
    request[1]["seed"] = data.draw(st.one_of(st.none(), st.integers(0, 1 << 40)))

    async def go() -> None:
        with serving() as first, serving() as second:
            head, units = await record(first, request)
            sent, marks = b"", list[bytes]()
            whole = b"".join(events for events, _ in units)
            for client in (second, first, second):
                cut = int(data.draw(st.floats(0, 1, exclude_max=True)) * len(units))
                sent += b"".join(events for events, _ in units[:cut])
                marks += [mark for _, mark in units[:cut]]
                response = await resume(client, request, head, marks)
                assert response.headers[HEADER_RESUME] == head
                units = cut_units(response.content)
            same(whole, sent + b"".join(events for events, _ in units))

    asyncio.run(go())


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"messages": [{"role": "user", "content": "Something else."}]}, "its prompt"),
        ({"max_tokens": 25}, "the room after it"),
        ({"stream": False, "stream_options": None}, "no stream"),
    ],
)
async def test_what_cannot_go_on_is_refused(
    pair: tuple[httpx.AsyncClient, httpx.AsyncClient], change: dict[str, Any], why: str
) -> None:
    """Whether the stream was cut early or when all had been said: on a busy machine few lines say all."""
    path, body = KINDS["greedy"]
    head, units = await record(pair[0], (path, body))
    for marks in ([mark for _, mark in units[:5]], [mark for _, mark in units]):
        response = await resume(pair[1], (path, body | change), head, marks)
        assert response.status_code == 409
        assert why in response.json()["error"]["message"]
        assert response.json()["error"]["code"] == "cannot_resume"


async def test_another_revision_does_not_take_it(pair: tuple[httpx.AsyncClient, httpx.AsyncClient]) -> None:
    head, units = await record(pair[0], KINDS["greedy"])
    with serving(revision="r2") as other:
        response = await resume(other, KINDS["greedy"], head, [mark for _, mark in units[:5]])
    assert response.status_code == 409
    assert "revision" in response.json()["error"]["message"]


async def test_tokens_that_do_not_belong_are_refused(pair: tuple[httpx.AsyncClient, httpx.AsyncClient]) -> None:
    head, _ = await record(pair[0], KINDS["schema"])
    response = await resume(pair[1], KINDS["schema"], head, [b": b 0 0\n", b": t 0 5,6,7\n"])
    assert response.status_code == 409
    assert "grammar" in response.json()["error"]["message"]
    head, _ = await record(pair[0], KINDS["greedy"])
    for token in (100_000, -5, 99_999_999_999):
        response = await resume(pair[1], KINDS["greedy"], head, [b": b 0 0\n", b": t 0 %d\n" % token])
        assert response.status_code == 409


HEAD_OF_OTHER_TYPES = b'{"id":"i","created":1,"fingerprint":"f","seed":"7","digest":"d"}\n'


@pytest.mark.parametrize("journal", [b"", b"{}\n", b"[]\n: t 0 1\n", b"x", b": t\n", b"\xff\n", HEAD_OF_OTHER_TYPES])
async def test_a_journal_that_is_none_is_refused(
    pair: tuple[httpx.AsyncClient, httpx.AsyncClient], journal: bytes
) -> None:
    path, body = KINDS["greedy"]
    headers = {HEADER_RESUME: str(len(journal) or "x")}
    response = await pair[0].post(path, content=journal + orjson.dumps(body), headers=headers)
    assert response.status_code == 400


@given(lines=st.lists(st.binary(max_size=30).filter(lambda line: b"\n" not in line), max_size=4))
@settings(max_examples=50, deadline=None)
def test_no_journal_breaks_the_reader(lines: list[bytes]) -> None:
    head = orjson.dumps({"id": "i", "created": 1, "fingerprint": "f", "seed": 1, "digest": "d"})
    with contextlib.suppress(RequestError):
        complete_steps(read_journal(b"\n".join([head, *(MARK + line for line in lines)])))


def test_a_long_journal_leaves_others_their_turn() -> None:
    head = orjson.dumps({"id": "i", "created": 1, "fingerprint": "f", "seed": 1, "digest": "d"})
    steps = read_journal(head + b"\n" + b": t 0 7\n" * 100_000)
    assert len(list(steps)) > 50


@pytest.mark.parametrize("kind", KINDS)
async def test_a_worker_that_guesses_answers_the_same(
    pair: tuple[httpx.AsyncClient, httpx.AsyncClient], kind: str
) -> None:
    first, second = pair
    same(await ask(second, KINDS[kind]), await ask(first, KINDS[kind]), heads=False)


async def test_usage_tells_how_much_was_predicted(pair: tuple[httpx.AsyncClient, httpx.AsyncClient]) -> None:
    path, body = chat(logit_bias=LETTERS, ignore_eos=True, max_tokens=40, temperature=0)
    answers = []
    for client in pair:
        told = (await client.post(path, json=body | {"stream": False, "stream_options": None})).json()
        assert told["usage"]["completion_tokens_details"]["rejected_prediction_tokens"] == 0
        answers.append(told["choices"][0]["message"]["content"])
        predicted = {"type": "content", "content": answers[0]}
        again = await client.post(path, json=body | {"stream": False, "stream_options": None, "prediction": predicted})
        usage = again.json()["usage"]
        assert again.json()["choices"][0]["message"]["content"] == answers[0]
        assert usage["completion_tokens"] == 40, "the prediction is no part of it"
        details = usage["completion_tokens_details"]
        assert details["accepted_prediction_tokens"] > 20
        assert details["accepted_prediction_tokens"] + details["rejected_prediction_tokens"] <= 40 * 3
    stats = pair[1].engine.stats()  # type: ignore[attr-defined]
    assert stats.accepted_draft_tokens_total["prediction"] > 0


async def test_a_client_of_its_own_sees_no_marks(pair: tuple[httpx.AsyncClient, httpx.AsyncClient]) -> None:
    stream = await ask(pair[0], KINDS["greedy"])
    assert all(line.startswith(b"data: ") for line in stream.split(b"\n") if line)


async def test_a_worker_that_stops_hands_its_streams_on(pair: tuple[httpx.AsyncClient, httpx.AsyncClient]) -> None:
    path, body = KINDS["greedy"]
    body = body | {"max_tokens": 1500}
    with serving() as client:
        hub: DeltaHub = client.hub  # type: ignore[attr-defined]
        engine: Any = client.engine  # type: ignore[attr-defined]

        async def stop() -> None:
            begun = engine.stats().generated_tokens_total
            while engine.stats().generated_tokens_total < begun + 20:  # noqa: ASYNC110
                await asyncio.sleep(0.001)
            hub.abort_all("It stops.")

        stopping = asyncio.create_task(stop())
        response = await client.post(path, json=body, headers={HEADER_RESUME: "0"})
        await stopping
        assert response.content.endswith(MOVED)
        units = cut_units(response.content)
        assert not any(mark == COMMIT or mark.startswith(USAGE) for _, mark in units)
        stopping = asyncio.create_task(stop())
        plain = await client.post(path, json=body)
        await stopping
        assert b'data: {"error":{"message":"It stops."' in plain.content
    rest = await resume(pair[1], (path, body), response.headers[HEADER_RESUME], [mark for _, mark in units[:-1]])
    whole = b"".join(events for events, _ in [*units, *cut_units(rest.content)])
    same(await ask(pair[0], (path, body)), whole, heads=False)
    *_, (_, last) = cut_units(rest.content)
    assert last.startswith(USAGE)
    assert last.endswith(b" 1500\n"), "with the tokens of the worker that stopped"
