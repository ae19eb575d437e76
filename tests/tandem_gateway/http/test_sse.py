"""Whole events only, counted, whatever the reads look like."""

import json
import time
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tandem_gateway.http import sse
from tandem_gateway.http.journal import JournaledStream
from tandem_gateway.http.sse import EventStream, EventTooLarge, build_failure, find_usage
from tandem_gateway.paths import CHAT, MESSAGES, RESPONSES

EVENTS = [
    b'data: {"a":1}\n\n',
    b": comment\n\n",
    b"data: x\ndata: y\n\n",
    b"event: e\ndata: z\n\n",
    b"data: [DONE]\n\n",
]


@given(st.data(), st.booleans())
def test_any_fragmentation_gives_the_same_stream_cut_at_event_borders(data: st.DataObject, crlf: bool) -> None:
    events = [*data.draw(st.lists(st.sampled_from(EVENTS[:-1]), max_size=6)), EVENTS[-1]]
    whole = b"".join(events).replace(b"\n", b"\r\n") if crlf else b"".join(events)
    border = b"\r\n\r\n" if crlf else b"\n\n"
    cuts = sorted({0, len(whole), *data.draw(st.lists(st.integers(0, len(whole)), max_size=8))})
    stream = EventStream()
    passed = b""
    for start, end in pairwise(cuts):
        part = stream.feed(whole[start:end])
        assert not part or part.endswith(border)
        passed += part
    assert passed == whole
    assert stream.events == len(events)
    assert stream.done


@pytest.mark.parametrize("start", [b"\n\nd", b"\n\n: c", b"\r\n\r\nda", b"\n\n\ndat"])
def test_empty_lines_before_an_event_do_not_cut_it(start: bytes) -> None:
    stream = EventStream()
    passed = stream.feed(start)
    assert not passed.strip()
    assert passed + stream.feed(b"ata: 1\n\n") == start + b"ata: 1\n\n"


def test_an_event_cut_short_is_held_back() -> None:
    stream = EventStream()
    assert stream.feed(b'data: 1\n\ndata: {"ha') == b"data: 1\n\n"
    assert stream.feed(b'lf"') == b""
    assert not stream.done


def test_an_event_without_end_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sse, "MAX_EVENT_BYTES", 1000)
    stream = EventStream()
    stream.feed(b"x" * 900)
    with pytest.raises(EventTooLarge):
        stream.feed(b"x" * 200)


def test_what_an_event_costs_does_not_depend_on_how_many_reads_it_takes() -> None:
    """The last events of the Responses API repeat the answer and much of the request: up to 4 MB in small reads."""
    event = b"event: response.completed\ndata: " + b"x" * 3_000_000 + b"\n\n"
    stream = EventStream()
    began = time.thread_time()
    found = b"".join(stream.feed(event[start : start + 1024]) for start in range(0, len(event), 1024))
    assert time.thread_time() - began < 2, "it is a hundredth of that, and was 10 seconds"
    assert (found, stream.done) == (event, True)


def test_the_workers_own_error_event_is_recognised_and_text_about_errors_is_not() -> None:
    stream = EventStream()
    stream.feed(b'data: {"choices":[{"delta":{"content":"data: {\\"error\\""}}]}\n\n')
    assert not stream.failed
    stream.feed(build_failure(CHAT, {"error": {"message": "x"}}))
    assert stream.failed


def test_done_inside_a_text_does_not_end_the_stream() -> None:
    stream = EventStream()
    stream.feed(b'data: {"content":"[DONE]"}\n\n')
    assert not stream.done


@pytest.mark.parametrize(
    "tail",
    [
        b'data: {"choices":[],"usage":{"prompt_tokens":3}}\n\ndata: [DONE]\n\n',
        b'data: {"usage":{"prompt_tokens":3}}\r\n\r\ndata: [DONE]\r\n\r\n',
        b'data: {"usage":{"prompt_tokens":3}}\n\ndata: {"usage":null}\n\n',
        b'data: {broken "usage"\n\ndata:{"usage":{"prompt_tokens":3}}\n\ndata: {cut "usage"',
    ],
)
def test_usage_is_found_in_the_last_event_that_has_one(tail: bytes) -> None:
    assert find_usage(tail) == {"prompt_tokens": 3}


@pytest.mark.parametrize(
    "tail", [b"", b'data: "usage"\n\n', b'data: ["usage"]\n\n', b'data: {"usage":7}\n\n', b'"usage"']
)
def test_no_usage_is_none(tail: bytes) -> None:
    assert find_usage(tail) is None


def test_failures_are_written_as_the_clients_of_each_api_read_them() -> None:
    body = {"error": {"message": "a\nb"}}
    for path in (CHAT, RESPONSES):
        assert json.loads(build_failure(path, body).removeprefix(b"data: ")) == body
    # Clients of this API pass over events without a name.
    name, data, *rest = build_failure(MESSAGES, body).decode().split("\n")
    assert (name, json.loads(data.removeprefix("data: ")), rest) == (
        "event: error",
        {"type": "error", **body},
        ["", ""],
    )


@pytest.mark.parametrize("build", [EventStream, lambda: JournaledStream(b"{}")], ids=["plain", "journaled"])
def test_of_large_reads_kilobytes_are_kept_and_their_end_is_known(build) -> None:
    """A fast worker's reads are 256 KiB: two of them for each slow reader were half a megabyte."""
    events = b'data: {"choices":[{"delta":{"content":"' + b"x" * 200 + b'"}}]}\n\n'
    stream = build()
    for _ in range(2):
        stream.feed(events * 1000 + b": t 0 1\n" * (build is not EventStream))
    assert len(stream.tail) <= 16 * 1024
    assert not stream.done
    answer = b'event: response.completed\ndata: {"response":{"output":"%b","usage":{"input_tokens":7,' % (
        b"y" * 100_000
    )
    answer += b'"input_tokens_details":{"cached_tokens":5},"output_tokens":3}}}\n\n'
    stream.feed(answer + b": u 7 5 3\n" * (build is not EventStream))
    assert len(stream.tail) <= 16 * 1024
    assert stream.done
    assert not stream.failed
    usage = find_usage(stream.tail)
    assert usage is not None
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (7, 3)
    failed = build()
    failed.feed(
        b'event: response.failed\ndata: {"x":"%b"}\n\n' % (b"y" * 100_000) + b": \n" * (build is not EventStream)
    )
    assert failed.failed
