"""Many large bodies at once: how long one turn of the event loop takes, which is what every stream waits."""

from __future__ import annotations

import asyncio
import socket
import threading
import time

import orjson
import pytest
from tandem_gateway.errors import BadRequest
from tandem_gateway.http.request import Request
from tandem_gateway.paths import COMPLETIONS
from tandem_gateway.requests.json_body import MAX_VALUES
from tandem_gateway.requests.prompt import read_inquiry
from tandem_gateway.scheduling import Estimator

LONGEST, TIMES = 0.1, 4
"""Seconds of computing; or on a slow processor so many times what one takes, and for one what its parser takes."""
NUMBERS = b'{"model":"toy","prompt":[' + b"1,2," * 2_097_000 + b"3]}"
TOKENS = b'{"model":"toy","prompt":[' + b"14711,9," * 450_000 + b"3]}"
TEXT = b'{"model":"toy","prompt":"' + "Größe, und so weiter. ".encode() * 340_000 + b'"}'


def build(body: bytes) -> bytes:
    return (
        b"POST /v1/completions HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: %d\r\n\r\n" % len(body)
        + body
    )


class Clients:
    """Threads that have sent all but the last byte of their requests, and then send it, all at once."""

    def __init__(self, port: int, request: bytes, count: int) -> None:
        self._sockets = [socket.create_connection(("127.0.0.1", port)) for _ in range(count)]
        self._request = request
        self.statuses: list[bytes] = []
        self.ready = threading.Barrier(count + 1)
        self._threads = [threading.Thread(target=self._ask, args=(each,), daemon=True) for each in self._sockets]
        for thread in self._threads:
            thread.start()

    def _ask(self, each: socket.socket) -> None:
        each.sendall(self._request[:-1])
        self.ready.wait()
        each.sendall(self._request[-1:])
        self.statuses.append(each.recv(12))
        each.close()

    @property
    def done(self) -> bool:
        return not any(thread.is_alive() for thread in self._threads)


@pytest.mark.parametrize(
    ("body", "count", "status"),
    [(NUMBERS, 8, b"413"), (TOKENS, 8, b"200"), (TEXT, 16, b"200")],
    ids=["numbers", "tokens", "text"],
)
async def test_no_stream_waits_for_more_than_one_of_many(
    start_gateway, start_worker, until, body, count, status
) -> None:
    running = await start_gateway(await start_worker())
    began = time.thread_time()
    orjson.loads(TOKENS)
    parsing = time.thread_time() - began
    alone = await find_longest_turn(running, until, body, 1, status)
    assert alone < max(LONGEST, TIMES * parsing)
    assert await find_longest_turn(running, until, body, count, status) < max(LONGEST, TIMES * alone)


async def find_longest_turn(running, until, body: bytes, count: int, status: bytes) -> float:
    """Seconds of computing, while `count` clients at once are answered."""
    clients = Clients(running.port, build(body), count)
    await until(
        lambda: sum(c._reader.body_bytes > len(body) - 65536 for c in running.server.reception.connections) == count
    )
    await asyncio.to_thread(clients.ready.wait)
    time.sleep(0.05)  # noqa: ASYNC251  the loop stands while all of them arrive
    longest = 0.0
    while not clients.done:
        before = time.thread_time()
        await asyncio.sleep(0)
        longest = max(longest, time.thread_time() - before)
    assert {answer.split()[1] for answer in clients.statuses} == {status}
    return longest


def test_numbers_are_counted_outside_of_strings_alone() -> None:
    def read(body: bytes) -> None:
        request = Request(b"POST", COMPLETIONS, {}, http10=False, content_length=len(body), body=body)
        read_inquiry(request, served_names=["toy"], estimator=Estimator())

    many = b"," * (MAX_VALUES + 1)
    read(b'{"prompt": "' + many + b'"}')
    read(b'{"prompt": "\\"' + many + b'\\\\"}')
    with pytest.raises(BadRequest, match=f"at most {MAX_VALUES} values"):
        read(b'{"prompt": [' + b"1," * MAX_VALUES + b"1]}")
    read(b'{"prompt": [' + b"1," * (MAX_VALUES - 10) + b"1]}")
