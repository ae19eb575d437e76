"""The frames of the native link: what is written is read, however it is cut, and nothing else is."""

from __future__ import annotations

import contextlib
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tandem_api import link
from tandem_api.link import FrameReader, Hello, LinkError, VersionError

NAMES = st.from_regex(rb"[a-z0-9!#$%&'*+.^_`|~-]{1,20}", fullmatch=True)
VALUES = st.binary(max_size=40).filter(lambda value: not set(value) & {0, 10, 13})
FIELDS = st.lists(st.tuples(NAMES, VALUES), max_size=8)
STREAMS = st.integers(1, link.MAX_STREAM)
SIDES = (link.FROM_GATEWAY, link.FROM_WORKER)
GREETING = link.encode_hello(Hello())


@st.composite
def conversations(draw: st.DrawFn) -> tuple[dict[int, link.Rule], list[link.Frame]]:
    """A side's rules, and frames that it may send after its greeting."""
    rules = dict(draw(st.sampled_from(SIDES)))
    frames: list[link.Frame] = []
    for tag in draw(st.lists(st.sampled_from([tag for tag in rules if tag != link.HELLO]), max_size=12)):
        low, high, on_stream = rules[tag]
        payload = draw(st.binary(min_size=low, max_size=min(high, low + 50)))
        frames.append((tag, draw(STREAMS) if on_stream else 0, payload))
    return rules, frames


def write(frames: list[link.Frame]) -> bytes:
    return GREETING + b"".join(link.encode(*frame) for frame in frames)


def cut(data: bytes, places: list[int]) -> list[bytes]:
    borders = [0, *sorted(place % (len(data) + 1) for place in places), len(data)]
    return [data[start:end] for start, end in pairwise(borders)]


@given(conversations(), st.lists(st.integers(0, 2**20), max_size=20))
def test_frames_are_read_however_they_are_cut(
    conversation: tuple[dict[int, link.Rule], list[link.Frame]], places: list[int]
) -> None:
    rules, frames = conversation
    reader = FrameReader(rules)
    found = [frame for part in cut(write(frames), places) for frame in reader.feed(part)]
    assert found[0][0] == link.HELLO
    assert found[1:] == frames
    assert reader.error is None
    assert reader.held_bytes == 0


@given(conversations())
def test_frames_are_read_byte_by_byte(conversation: tuple[dict[int, link.Rule], list[link.Frame]]) -> None:
    rules, frames = conversation
    reader = FrameReader(rules)
    found = [frame for byte in write(frames) for frame in reader.feed(bytes([byte]))]
    assert found[1:] == frames


@given(
    conversations(),
    st.lists(st.tuples(st.integers(0, 2**20), st.integers(0, 255)), min_size=1, max_size=4),
    st.lists(st.integers(0, 2**20), max_size=10),
)
def test_damaged_bytes_end_in_a_named_error_or_in_other_frames(
    conversation: tuple[dict[int, link.Rule], list[link.Frame]], damage: list[tuple[int, int]], places: list[int]
) -> None:
    rules, frames = conversation
    data = bytearray(write(frames))
    for place, value in damage:
        data[place % len(data)] = value
    reader, whole = FrameReader(rules), FrameReader(rules)
    found = [frame for part in cut(bytes(data), places) for frame in reader.feed(part)]
    assert found == whole.feed(bytes(data))
    assert str(reader.error) == str(whole.error)
    for tag, stream, payload in found:
        low, high, on_stream = rules[tag]
        assert low <= len(payload) <= high
        assert (stream > 0) is on_stream
    if reader.error is not None:
        assert reader.error.code in ("protocol", "version")
        assert reader.feed(GREETING) == []


@given(st.binary(max_size=200), st.lists(st.integers(0, 2**20), max_size=5), st.sampled_from(SIDES))
def test_anything_at_all(data: bytes, places: list[int], rules: dict[int, link.Rule]) -> None:
    reader = FrameReader(rules)
    for part in cut(data, places):
        reader.feed(part)
        assert reader.held_bytes <= link.MAX_HELLO + link.HEADER_BYTES


@pytest.mark.parametrize("rules", SIDES)
def test_a_frame_that_is_not_complete_is_all_that_is_held(rules: dict[int, link.Rule]) -> None:
    reader = FrameReader(rules)
    reader.feed(GREETING)
    data = link.encode(link.DATA, 1, bytes(link.MAX_PAYLOAD)) * 3
    for start in range(0, len(data), 1000):
        reader.feed(data[start : start + 1000])
        assert reader.held_bytes <= link.MAX_PAYLOAD + link.HEADER_BYTES


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        (b"GET / HTTP/1.1\r\nhost: x\r\n\r\n", "speaks version 71"),
        (link.encode(link.DATA, 1, b"x"), "before any HELLO"),
        (GREETING + GREETING, "second HELLO"),
        (GREETING + link.encode_header(link.DATA, 1, link.MAX_PAYLOAD + 1), "DATA of 65537 bytes; it has 1 to 65536"),
        (GREETING + link.encode_header(link.DATA, 0, 1), "DATA on stream 0; it belongs to a stream"),
        (GREETING + link.encode_header(link.PING, 1, 8), "PING on stream 1; it belongs to stream 0"),
        (GREETING + link.encode_header(link.HEAD, 1, 8), "HEAD with flags 0x0 is not for this side"),
        (GREETING + link.encode_header(link.DATA | 2, 1, 8), "DATA with flags 0x2"),
        (GREETING + link.encode_header(link.VERSION << 24 | 99 << 16, 1, 8), "kind 99"),
        (GREETING + link.encode_header(2 << 24 | 4 << 16, 1, 8), "speaks version 2"),
    ],
)
def test_what_is_wrong_is_said(data: bytes, problem: str) -> None:
    reader = FrameReader(link.FROM_GATEWAY)
    reader.feed(data)
    assert problem in str(reader.error)
    assert isinstance(reader.error, VersionError) is ("version" in problem)


@given(st.integers(200, 999), FIELDS)
def test_heads_of_answers(status: int, fields: link.Fields) -> None:
    assert link.read_response_head(link.encode_response_head(status, fields)) == (status, fields)


@given(FIELDS)
def test_heads_of_requests(fields: link.Fields) -> None:
    lines = b"".join(name + b": " + value + b"\r\n" for name, value in fields)
    read = link.read_request_head(b"POST /v1/chat/completions?a=b HTTP/1.1\r\n" + lines + b"\r\n")
    assert read == (b"POST", b"/v1/chat/completions?a=b", fields)


@pytest.mark.parametrize(
    "head",
    [
        b"POST /x HTTP/1.1\r\nHost: upper\r\n\r\n",
        b"POST /x HTTP/1.1\r\nhost: x\r\n",
        b"POST /x HTTP/1.1\r\nhost: x\r\n\r\nPOST /y HTTP/1.1\r\n\r\n",
        b"POST /x HTTP/1.1\r\nhost: x\nb: c\r\n\r\n",
        b"POST /x HTTP/1.0\r\n\r\n",
        b"POST  HTTP/1.1\r\n\r\n",
        b"post /x HTTP/1.1\r\n\r\n",
        b"POST http://x/ HTTP/1.1\r\n\r\n",
    ],
)
def test_what_is_no_head_of_a_request(head: bytes) -> None:
    with pytest.raises(LinkError, match="not the head"):
        link.read_request_head(head)


@given(st.binary(max_size=100))
def test_any_head(data: bytes) -> None:
    for read in (link.read_request_head, link.read_response_head, link.read_hello):
        with contextlib.suppress(LinkError):
            read(data)
    assert link.read_reason(data).isprintable()


@pytest.mark.parametrize("status", [0, 99, 100, 101, 103, 199, 1000])
def test_what_is_no_answer(status: int) -> None:
    """A client would take what follows an interim answer for another one."""
    with pytest.raises(LinkError):
        link.encode_response_head(status, [])
    with pytest.raises(LinkError):
        link.read_response_head(b"%d\r\n" % status)


def test_headers_that_cannot_be_sent() -> None:
    with pytest.raises(LinkError):
        link.encode_response_head(200, [(b"a", b"b\r\nc: d")])
    with pytest.raises(LinkError, match="65536"):
        link.encode_response_head(200, [(b"a", bytes(link.MAX_PAYLOAD).replace(b"\0", b"x"))])


def test_a_key_is_not_shown_by_accident() -> None:
    assert "secret" not in repr(Hello(token="secret"))


def test_a_greeting_within_its_bounds() -> None:
    hello = Hello(token="k." + "0" * 64, name="n" * 253, max_streams=link.MAX_STREAM, telemetry_seconds=2.5)
    (frame,) = FrameReader(link.FROM_GATEWAY).feed(link.encode_hello(hello))
    assert link.read_hello(frame[2]) == hello
