"""One address takes what there is: others have their share, and the gateway its memory."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections import Counter

from hypothesis import given
from hypothesis import strategies as st
from tandem_gateway.http import connection as connection_module
from tandem_gateway.http.budget import FREE_BYTES, UNCOUNTED_BYTES, Budget, Share
from tandem_gateway.http.fairness import Sources

HOG, OTHER = "127.0.0.1", "127.0.0.2"
MODELS = b"GET /v1/models HTTP/1.1\r\nhost: x\r\n\r\n"
MIB = 1 << 20


async def connect_from(address: str, port: int):
    return await asyncio.open_connection("127.0.0.1", port, local_addr=(address, 0))


async def read_status(reader: asyncio.StreamReader) -> int:
    head = await reader.readuntil(b"\r\n\r\n")
    await reader.readexactly(int(head.split(b"content-length: ")[1].split(b"\r\n")[0]))
    return int(head.split()[1])


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 5), st.booleans())))
def test_who_has_most_is_known_whatever_came_before(steps) -> None:
    sources: Sources[tuple[str, int]] = Sources()
    has: dict[str, list[int]] = {}
    for source, number, adds in steps:
        things = has.setdefault(source, [])
        if adds and number not in things:
            things.append(number)
            sources.add(source, (source, number))
        elif not adds:
            sources.remove(source, (source, number))
            things[:] = [other for other in things if other != number]
    counts = Counter({source: len(things) for source, things in has.items() if things})
    for source in "abc":
        assert sources.used(source) == counts[source]
        if not counts:
            continue
        most = sources.find_most()
        assert counts[most] == max(counts.values())
        assert [number for _, number in sources.newest(most)] == has[most][::-1]
        excess = sources.find_excess(source)
        assert (excess is not None) == any(
            other != source and count - 1 >= counts[source] for other, count in counts.items()
        ) or counts[source] == counts[most]


class Connection:
    def __init__(self, budget: Budget, source: str) -> None:
        self.source = source
        self.gone = False
        self.share = Share(budget, self)

    def give_up(self) -> None:
        self.gone = True


@given(st.lists(st.tuples(st.integers(0, 11), st.integers(0, 3 * MIB)), max_size=60))
def test_nobody_has_less_than_a_share_for_another(steps) -> None:
    budget = Budget(8 * MIB)
    connections = [Connection(budget, f"s{index % 3}") for index in range(12)]
    for index, size in steps:
        connection = connections[index]
        held = {source: budget.sources.used(source) for source in ("s0", "s1", "s2")}
        gone = {other for other in connections if other.gone}
        fits = connection.share.hold(size)
        for other in connections:
            if other.gone and other not in gone:
                assert other.source != connection.source
                assert held[other.source] >= budget.sources.used(connection.source) or held[other.source] >= 2 * MIB
                other.gone = False
        if not fits:
            connection.share.hold(0)
        assert budget.used <= budget.limit
        assert budget.used == sum(other.share.charged for other in connections)


def test_one_source_has_three_quarters_and_large_ones_leave_the_rest_to_small_ones() -> None:
    budget = Budget(8 * MIB)
    assert all(Connection(budget, "a").share.hold(2 * MIB) for _ in range(3))
    late = Connection(budget, "a")
    assert not late.share.hold(MIB)
    late.share.hold(0)
    assert Connection(budget, "a").share.hold(FREE_BYTES)
    assert Connection(budget, "b").share.hold(MIB // 2)
    assert Connection(budget, "c").share.hold(UNCOUNTED_BYTES)
    assert budget.used == 6 * MIB + FREE_BYTES + MIB // 2


async def test_one_address_takes_no_connection_from_others(start_gateway, start_worker, chat, fault, until) -> None:
    worker = await start_worker(behaviours=[fault.hang, fault.hang])
    running = await start_gateway(worker, max_connections=8)
    held = [await connect_from(HOG, running.port) for _ in range(8)]
    held[6][1].write(chat())
    held[7][1].write(chat())
    await until(lambda: worker.answering == 2 and len(running.server.reception.connections) == 8)
    others = [await connect_from(OTHER, running.port) for _ in range(4)]
    for reader, writer in others:
        writer.write(MODELS)
        assert await read_status(reader) == 200
    for reader, _ in held[2:6]:
        assert not await reader.read(), "the newest that nobody asks over"
    assert worker.answering == 2
    late_reader, late = await connect_from(OTHER, running.port)
    late.write(MODELS)
    assert await read_status(late_reader) == 503, "they are even"
    held[0][1].write(MODELS)
    assert await read_status(held[0][0]) == 200
    for _, writer in (*held, *others, (late_reader, late)):
        writer.transport.abort()


async def test_who_has_to_leave_counts_until_it_has_gone(
    start_gateway, start_worker, chat, fault, until, monkeypatch
) -> None:
    """A client that is asked to leave over a request under way need not close its side: it is closed for it."""
    monkeypatch.setattr(connection_module, "LINGER_SECONDS", 0.3)
    worker = await start_worker(behaviours=[fault.hang] * 20)
    running = await start_gateway(worker, max_connections=4)
    reception, seen, held = running.server.reception, set(), []

    def busy() -> int:
        return sum(connection.exchange is not None for connection in reception.connections)

    for _ in range(3):
        more = [await connect_from(HOG, running.port) for _ in range(4 - busy())]
        for _, writer in more:
            writer.write(chat())
        held += more
        await until(lambda: busy() == 4)
        seen |= reception.connections
        others = [await connect_from(OTHER, running.port) for _ in range(2)]
        await until(lambda: sum(connection.source == OTHER for connection in reception.connections) == 2)
        assert {connection for connection in seen if not connection.closed} <= reception.connections, "all are counted"
        for _, writer in others:
            writer.transport.abort()
        await until(lambda: len(reception.connections) == busy() == 2)
    for _, writer in held:
        writer.transport.abort()
    await until(lambda: not reception.connections and not worker.answering)


async def test_one_address_takes_no_bytes_from_others(start_gateway, start_worker, chat, until) -> None:
    running = await start_gateway(await start_worker(), max_held_bytes=8 * MIB)
    head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 1000000\r\n\r\n"
    held = [await connect_from(HOG, running.port) for _ in range(24)]
    for _, writer in held:
        writer.write(head + b"x" * 500_000)
    await until(lambda: running.gateway.budget.used >= 5_500_000)
    large = chat(user="x" * 3_000_000, headers="connection: close\r\n")
    async with asyncio.timeout(60):
        for _ in range(3):
            reader, writer = await connect_from(OTHER, running.port)
            writer.write(large)
            assert (await reader.read()).startswith(b"HTTP/1.1 200")
            writer.close()
    for _, writer in held:
        writer.transport.abort()
    await until(lambda: running.gateway.budget.used == 0)


async def test_bodies_of_64_kilobytes_count(start_gateway, until) -> None:
    running = await start_gateway()
    head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 64000\r\n\r\n"
    writers = [(await running.connect())[1] for _ in range(20)]
    for writer in writers:
        writer.write(head + b"x" * 63_000)
    await until(lambda: running.gateway.budget.used == 20 * 63_000)


async def test_slow_readers_of_a_fast_worker_cost_little_and_are_counted(launch, connect) -> None:
    """Of what is unsent, and of reads that are kept for what an answer says in its end."""

    async def flood(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        event = b'data: {"choices":[{"delta":{"content":"' + b"x" * 200 + b'"}}]}\n\n'
        part = event * 400
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n")
        with contextlib.suppress(ConnectionError, asyncio.CancelledError):
            while True:
                writer.write(b"%x\r\n%b\r\n" % (len(part), part))
                await writer.drain()

    server = await asyncio.start_server(flood, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    process = await launch("--worker", f"url=127.0.0.1:{port}", "--no-access-log")
    body = json.dumps({"model": "toy", "messages": [{"role": "user", "content": "x"}], "stream": True}).encode()
    ask = b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(body) + body
    _, first = await connect(process.http_port)
    first.transport.abort()
    before, count = process.rss_mib, 60
    for _ in range(count):
        _, writer = await connect(process.http_port)
        writer.transport.pause_reading()
        writer.write(ask)
    await asyncio.sleep(2)
    assert (process.rss_mib - before) / count < 0.4, "MiB each"
    server.close()
