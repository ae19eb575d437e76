"""Answers of other engines, cut anywhere: the same events, the same usage, whatever the reads were."""

from __future__ import annotations

import json
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tandem_gateway.http.sse import EventStream
from tandem_gateway.upstream.engines.answer import Answer, count_cached
from tandem_gateway.upstream.engines.body import STEERS, build_request, count_prompts
from tandem_gateway.upstream.engines.sglang import build_meeting
from tandem_gateway.upstream.engines.vllm import build_prefill

CHAT = "/v1/chat/completions"
TEXTS = st.lists(st.text(max_size=12), max_size=6)
USAGE = {
    "prompt_tokens": 40,
    "completion_tokens": 3,
    "total_tokens": 43,
    "prompt_tokens_details": {"cached_tokens": 39},
}


def write_stream(texts: list[str], *, blank: bool, ending: str) -> bytes:
    frame: dict[str, Any] = {"id": "x", "model": "inside", "choices": []}
    frames = [frame | {"choices": [{"index": 0, "delta": {"content": text}}]} for text in texts]
    frames = [each | ({"usage": None} if blank else {}) for each in frames] + [frame | {"usage": USAGE}]
    events = [json.dumps(each, separators=(",", ":")) for each in frames] + ["[DONE]"]
    return "".join(f"data: {each}{ending}{ending}" for each in events).encode()


def read_stream(data: bytes) -> list[Any]:
    events = [event for event in data.replace(b"\r\n", b"\n").split(b"\n\n") if event]
    assert all(event.startswith(b"data: ") for event in events)
    return [event[6:] if event[6:] == b"[DONE]" else orjson.loads(event[6:]) for event in events]


def pass_through(parts: list[bytes], *, shows: bool, cached: int | None) -> tuple[bytes, Answer]:
    answer = Answer(reads_usage=True, shows_usage=shows, worker_model="inside", client_model="outside")
    answer.cached = cached
    stream = EventStream()
    return b"".join(answer.events(stream.feed(part)) for part in parts), answer


def check(data: bytes, parts: list[bytes], texts: list[str], *, shows: bool, cached: int | None) -> None:
    out, answer = pass_through(parts, shows=shows, cached=cached)
    events = read_stream(out)
    assert events[-1] == b"[DONE]"
    said = [event["choices"][0]["delta"]["content"] for event in events[:-1] if event["choices"]]
    assert said == texts
    assert {event["model"] for event in events[:-1]} <= {"outside"}
    usages = [event["usage"] for event in events[:-1] if event.get("usage") is not None]
    assert answer.usage is not None
    assert count_cached(answer.usage) == (39 if cached is None else cached)
    assert usages == ([answer.usage] if shows else [])


@given(TEXTS, st.booleans(), st.booleans(), st.sampled_from([None, 0, 7]), st.sampled_from(["\n", "\r\n"]), st.data())
def test_any_cut_gives_the_same_answer(texts, blank, shows, cached, ending, data) -> None:
    whole = write_stream(texts, blank=blank, ending=ending)
    cuts = sorted(data.draw(st.sets(st.integers(1, len(whole) - 1), max_size=12)))
    parts = [whole[a:b] for a, b in zip([0, *cuts], [*cuts, len(whole)], strict=True)]
    check(whole, parts, texts, shows=shows, cached=cached)


@pytest.mark.parametrize("shows", [False, True])
@pytest.mark.parametrize("ending", ["\n", "\r\n"])
def test_every_single_cut_and_every_byte_by_itself(shows, ending) -> None:
    texts = ['say "usage":{"a":1}', "ünïcode", 'data: {"error"', '"model":"inside"']
    whole = write_stream(texts, blank=True, ending=ending)
    for position in range(1, len(whole)):
        check(whole, [whole[:position], whole[position:]], texts, shows=shows, cached=5)
    check(whole, [whole[n : n + 1] for n in range(len(whole))], texts, shows=shows, cached=5)


def test_usage_in_every_chunk_is_hidden_from_who_did_not_ask() -> None:
    data = b'data: {"choices":[{"index":0}],"usage":{"prompt_tokens":3}}\n\ndata: [DONE]\n\n'
    out, answer = pass_through([data], shows=False, cached=None)
    assert read_stream(out) == [{"choices": [{"index": 0}], "usage": None}, b"[DONE]"]
    assert answer.usage == {"prompt_tokens": 3}


def test_nothing_follows_a_failure() -> None:
    data = b'data: {"choices":[]}\n\ndata: {"error":{"message":"no"}}\n\ndata: [DONE]\n\n'
    for parts in ([data], [data[:40], data[40:]], [data[n : n + 1] for n in range(len(data))]):
        out, _ = pass_through(parts, shows=True, cached=None)
        assert read_stream(out) == [{"choices": []}, {"error": {"message": "no"}}]


def test_an_answer_in_one_piece() -> None:
    answer = Answer(reads_usage=True, shows_usage=False, worker_model="inside", client_model="outside")
    body = orjson.dumps({"model": "inside", "choices": [], "usage": USAGE, "kv_transfer_params": {"remote_host": "h"}})
    assert orjson.loads(answer.body(body)) == {"model": "outside", "choices": [], "usage": USAGE}
    answer.cached = 4
    assert orjson.loads(answer.body(body))["usage"]["prompt_tokens_details"] == {"cached_tokens": 4}
    assert answer.body(b"no JSON") == b"no JSON"
    same = Answer(reads_usage=True, shows_usage=False, worker_model="x", client_model="x")
    assert same.body(b'{ "a": 1 }') == b'{ "a": 1 }'


@pytest.mark.parametrize(
    ("given_options", "sent"),
    [
        ({}, {"include_usage": True}),
        ({"stream_options": None}, {"include_usage": True}),
        ({"stream_options": {"include_usage": False, "x": 1}}, {"include_usage": True, "x": 1}),
        ({"stream_options": {"continuous_usage_stats": True}}, {"include_usage": True}),
        (
            {"stream_options": {"include_usage": True, "continuous_usage_stats": True}},
            {"include_usage": True, "continuous_usage_stats": True},
        ),
        ({"stream_options": 7}, 7),
    ],
)
def test_usage_is_asked_for(given_options, sent) -> None:
    body = orjson.loads(build_request({"stream": True, **given_options}, CHAT, "m"))
    assert body["stream_options"] == sent
    assert "stream_options" not in orjson.loads(build_request({"stream": False}, CHAT, "m"))
    assert "stream_options" not in orjson.loads(build_request({"stream": True}, "/v1/messages", "m"))


def test_a_prefill_makes_one_token() -> None:
    fields = {"model": "x", "stream": True, "stream_options": {"include_usage": True}, "max_completion_tokens": 90,
              "min_tokens": 9, "kv_transfer_params": {"remote_host": "evil"}, "seed": 4}  # fmt: skip
    body = orjson.loads(build_prefill(fields, CHAT, "m"))
    place = body.pop("kv_transfer_params")
    assert (place["do_remote_decode"], place["do_remote_prefill"], place["remote_host"]) == (True, False, None)
    assert body == {"model": "m", "stream": False, "max_tokens": 1, "max_completion_tokens": 1, "seed": 4}


def test_rooms() -> None:
    one = build_meeting(None, "[fd00::1]:8998")
    assert (one["bootstrap_host"], one["bootstrap_port"]) == ("[fd00::1]", 8998)
    many = [build_meeting(None, "h:1")["bootstrap_room"] for _ in range(100)]
    assert len(set(many)) == 100
    assert all(0 <= room < 1 << 63 for room in many)
    three = build_meeting(3, "h:1")
    assert (three["bootstrap_host"], three["bootstrap_port"]) == (["h"] * 3, [1] * 3)
    assert len(set(three["bootstrap_room"])) == 3
    assert [count_prompts({"prompt": prompt}) for prompt in ("x", [1], ["x"], [[1], [2]], [])] == [
        None,
        None,
        1,
        2,
        None,
    ]


@given(st.dictionaries(st.text(max_size=5), st.none() | st.integers() | st.text(max_size=3), max_size=4))
def test_what_the_client_said_goes_on_unchanged(fields) -> None:
    assume_small = {name: value for name, value in fields.items() if not isinstance(value, int) or abs(value) < 1 << 53}
    sent = orjson.loads(build_request(assume_small, CHAT, "m"))
    theirs = {name: value for name, value in assume_small.items() if name != "model" and name not in STEERS}
    assert {name: sent[name] for name in theirs} == theirs
