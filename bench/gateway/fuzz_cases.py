"""What clients send and workers answer, made from random numbers, and how an answer is read strictly. Pure."""

from __future__ import annotations

import random
import re
from dataclasses import dataclass
from itertools import pairwise

FuzzStep = bytes | float | str
"""Send, wait, or end with "close" or "reset"."""
NAME = re.compile(rb"name-[0-9a-f]{12}")

STRANGER = b"name-" + b"f" * 12
"""In what workers add to complete answers: nobody may ever read it."""


def make_name(rng: random.Random) -> bytes:
    return b"name-%012x" % rng.getrandbits(48)


# --- damage ---------------------------------------------------------------------------------------------------------

_INSERTS = (
    b"\r\n", b"\n", b"\0", b"\r\n\r\n", b" ", b":", b"\xff" * 8, b"0\r\n\r\n", b"content-length: 5\r\n", b"x" * 70_000,
    b"transfer-encoding: chunked\r\n", b"HTTP/1.1 200 OK\r\n\r\n", b"GET / HTTP/1.1\r\nhost: x\r\n\r\n", b"data: ",
    b"connection: close\r\n", b"expect: 100-continue\r\n", b"\n\n", b"upgrade: h2c\r\nconnection: upgrade\r\n",
)  # fmt: skip


def damage(rng: random.Random, data: bytes) -> bytes:
    for _ in range(rng.choice((1, 1, 1, 2, 8))):
        at = rng.randrange(len(data) + 1)
        kind = rng.randrange(6)
        if kind == 0:
            data = data[:at] + bytes((rng.randrange(256),)) + data[at + 1 :]
        elif kind == 1:
            data = data[:at] + rng.choice(_INSERTS) + data[at:]
        elif kind == 2:
            data = data[:at] + data[at + rng.randrange(1, 40) :]
        elif kind == 3:
            data = data[:at]
        elif kind == 4:
            data = data[:at] + data[max(0, at - rng.randrange(1, 400)) :]
        else:
            line = data.find(b"\r\n", at)
            insert = rng.choice(_INSERTS)
            data = data[: line + 2] + insert + data[line + 2 :] if line >= 0 else data
    return data


def split(rng: random.Random, data: bytes) -> list[FuzzStep]:
    """The same bytes in pieces, now and then with pauses."""
    if rng.random() < 0.4 or len(data) < 2:
        return [data]
    count = min(len(data) - 1, rng.choice((1, 2, 5, 40)))
    cuts = [0, *sorted(rng.sample(range(1, len(data)), count)), len(data)]
    steps: list[FuzzStep] = []
    for start, end in pairwise(cuts):
        steps.append(data[start:end])
        if rng.random() < 0.3:
            steps.append(rng.choice((0.0, 0.0, 0.001, 0.01)))
    return steps


# --- clients --------------------------------------------------------------------------------------------------------


@dataclass
class ClientPlan:
    steps: list[FuzzStep]
    reads_late: bool
    patience: float
    pause: float
    """Silence after as many answers as requests, until it leaves."""


def plan_client(rng: random.Random, names: list[bytes]) -> ClientPlan:
    data = b"".join(_request(rng, name) for name in names)
    if rng.random() < 0.25:
        data = damage(rng, data)
    if rng.random() < 0.02:
        data += b"GET / HTTP/1.1\r\nhost: x\r\n\r\n" * rng.choice((10, 100, 5_000))
    steps = split(rng, data)
    if rng.random() < 0.25:
        steps[rng.randrange(len(steps)) :] = [rng.choice(("close", "reset"))]
    patience = 0.02 if rng.random() < 0.05 else rng.choice((0.5, 1.0))
    return ClientPlan(steps, rng.random() < 0.1, patience, rng.choice((0.01, 0.05)))


def _request(rng: random.Random, name: bytes) -> bytes:
    kind = rng.randrange(20)
    if kind == 0:
        target = rng.choice((b"/v1/models", b"/", b"http://a/v1/models", b"*", b"/v1/models/toy?x=y", b"//"))
        return b"GET %b HTTP/1.1\r\nhost: x\r\n%b\r\n" % (target, _fields(rng))
    stream = rng.random() < 0.5
    padding = b"x" * rng.choice((0, 0, 10, 3_000, 40_000, 200_000, 300_000))
    body = b'{"model":"toy","prompt":"%b %b","stream":%b}' % (name, padding, b"true" if stream else b"false")
    if kind == 1:
        body = b'{"model":"toy","messages":[%b{"role":"user","content":"%b"}]}' % (
            b'{"role":"a"},' * rng.choice((1, 300, 5_000)), name,
        )  # fmt: skip
    path = b"/v1/chat/completions" if b"messages" in body else b"/v1/completions"
    version = rng.choice((b"1.1",) * 20 + (b"1.0", b"1.0", b"0.9", b"2.0"))
    head = b"POST %b HTTP/%b\r\nhost: x\r\n%b" % (path, version, _fields(rng))
    if rng.random() < 0.75:
        return head + b"content-length: %d\r\n\r\n%b" % (len(body), body)
    size = rng.choice((1, 7, 100, 5_000, 1 << 20))
    if len(body) > 5_000:
        size = max(size, 100)
    pieces = [body[start : start + size] for start in range(0, len(body), size)]
    chunks = b"".join(b"%x%b\r\n%b\r\n" % (len(piece), rng.choice((b"", b";a=b")), piece) for piece in pieces)
    trailers = b"".join(b"x-%d: y\r\n" % index for index in range(rng.choice((0, 0, 1, 200))))
    return head + b"transfer-encoding: chunked\r\n\r\n" + chunks + b"0\r\n" + trailers + b"\r\n"


def _fields(rng: random.Random) -> bytes:
    known = (
        b"x-request-id: mine\r\n", b"connection: close\r\n", b"connection: keep-alive\r\n", b"expect: 100-continue\r\n",
        b"upgrade: h2c\r\nconnection: upgrade, http2-settings\r\n", b"content-type: application/json\r\n",
        b"x-tandem-prefill: 127.0.0.1:1\r\n", b"traceparent: 00-1-2-3\r\n", b"accept: */*\r\n",
        b"x-session-affinity: s\r\n",
    )  # fmt: skip
    refused = b"content-encoding: gzip\r\n" if rng.random() < 0.02 else b""
    return b"".join(rng.sample(known, rng.choice((0, 0, 1, 2, 4)))) + refused


# --- workers --------------------------------------------------------------------------------------------------------


def plan_answer(rng: random.Random, name: bytes, *, stream: bool) -> list[FuzzStep]:
    kind = rng.randrange(16)
    if kind == 0:
        return [rng.choice((0.0, 0.05, 1.0)), rng.choice(("close", "reset"))]
    data = _stream(rng, name) if stream and rng.random() < 0.9 else _whole(rng, name)
    if kind == 1:
        data = rng.choice((b"HTTP/1.1 100 Continue\r\n\r\n", b"HTTP/1.1 103 Hints\r\nlink: x\r\n\r\n")) + data
    elif kind == 2:
        foreign = _whole(rng, STRANGER)
        more = rng.choice((foreign, foreign, foreign[: rng.randrange(len(foreign))], data[:30], b"\r\n", b"\0" * 100))
        # The first byte too many comes with the last one: later it would cross the next request on the wire, as below.
        return [*split(rng, data[:-1]), data[-1:] + more[:1], *split(rng, more[1:])]
    elif kind == 3:
        return [*split(rng, data[: rng.randrange(len(data))]), rng.choice(("close", "reset"))]
    elif kind in (4, 5):
        return [*split(rng, damage(rng, data)), rng.choice((0.0, 0.05, 1.0)), rng.choice(("close", "reset"))]
    elif kind == 6:
        # Without a name: what crosses the next request on the wire cannot be told from its answer.
        return [*split(rng, data), rng.choice((0.0, 0.001, 0.01)), rng.choice((data[:9], b"\r\n", b"\0"))]
    elif kind == 7:
        data = b"HTTP/1.1 101 Switching\r\nupgrade: x\r\nconnection: upgrade\r\n\r\n" + data
    elif kind == 8:
        return [*split(rng, data[: rng.randrange(len(data))]), 1.0]
    return split(rng, data)


def _whole(rng: random.Random, name: bytes) -> bytes:
    status = rng.choice((200, 200, 200, 200, 400, 401, 429, 500, 503, 204))
    body = b'{"choices":[{"text":"%b"}],"usage":{"prompt_tokens":9,"completion_tokens":1}%b}' % (
        name, b" " * rng.choice((0, 10, 100_000)),
    )  # fmt: skip
    head = b"HTTP/1.1 %d X\r\ncontent-type: application/json\r\n%b" % (
        status, rng.choice((b"", b"", b"x-tandem-retry: 1\r\n", b"connection: close\r\n")),
    )  # fmt: skip
    if status == 204:
        return head + b"\r\n"
    kind = rng.randrange(3)
    if kind == 0:
        trailers = rng.choice((b"", b"x-a: b\r\n"))
        return head + b"transfer-encoding: chunked\r\n\r\n%x\r\n%b\r\n0\r\n%b\r\n" % (len(body), body, trailers)
    return head + b"content-length: %d\r\n\r\n%b" % (len(body), body)


def _stream(rng: random.Random, name: bytes) -> bytes:
    end = rng.choice((b"\n\n", b"\n\n", b"\r\n\r\n"))
    events = [b'data: {"choices":[{"text":"%b"}]}' % name + end for _ in range(rng.choice((0, 1, 3, 30)))]
    if rng.random() < 0.1:
        events.insert(0, b"\n\n")
    events.append(rng.choice((b"data: [DONE]", b'data: {"error":{"message":"x"}}', b": nothing")) + end)
    size = rng.choice((1, 1, 3, 100))
    groups = [b"".join(events[start : start + size]) for start in range(0, len(events), size)]
    return (
        b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
        + b"".join(b"%x\r\n%b\r\n" % (len(group), group) for group in groups)
        + b"0\r\n\r\n"
    )


# --- answers --------------------------------------------------------------------------------------------------------

_HEAD = re.compile(rb"HTTP/1\.1 (\d{3}) [^\r\n]*\r\n((?:[!-9;-~]+: [^\r\n]*\r\n)*)\r\n")


def read_responses(data: bytes) -> list[tuple[int, bytes]]:
    """Status and body of each response. The last may be cut short anywhere, for clients and workers leave.

    Raises:
        ValueError: it is not HTTP.
    """
    found: list[tuple[int, bytes]] = []
    at = 0
    while at < len(data):
        head = _HEAD.match(data, at)
        if head is None:
            if data.find(b"\r\n\r\n", at) >= 0 or not b"HTTP/1.1 ".startswith(data[at : at + 9]):
                raise ValueError(f"no header in {data[at : at + 200]!r}")
            return found
        status, fields, at = int(head[1]), head[2].lower(), head.end()
        length = re.search(rb"(?m)^content-length: (\d+)\r$", fields)
        if status == 100:
            continue
        if length is not None:
            found.append((status, data[at : at + int(length[1])]))
            at += int(length[1])
        elif re.search(rb"(?m)^transfer-encoding: chunked\r$", fields):
            body, at = _read_chunks(data, at)
            found.append((status, body))
        else:
            found.append((status, data[at:]))
            return found
    return found


def _read_chunks(data: bytes, at: int) -> tuple[bytes, int]:
    body: list[bytes] = []
    while True:
        end = data.find(b"\r\n", at)
        if end < 0:
            if not re.fullmatch(rb"[0-9a-f]{0,8}\r?", data[at:]):
                raise ValueError(f"no chunk in {data[at : at + 100]!r}")
            return b"".join(body), len(data)
        size = int(data[at:end], 16)
        body.append(data[end + 2 : end + 2 + size])
        at = end + 2 + size
        if not b"\r\n".startswith(data[at : at + 2]):
            raise ValueError(f"a chunk of {size} bytes ends with {data[at : at + 2]!r}")
        at += 2
        if not size or at > len(data):
            return b"".join(body), at
