"""Clients and workers that send anything, split anywhere, read late or not at all, leave at any moment.

    python -m bench.gateway.fuzz --seconds 60

One gateway, in this process; sockets are real. Every request has a name that its worker repeats, so that an answer that
reached the wrong client is known by it. A run ends with an error when
- anything raises that nobody catches, or a worker gets a request that is not HTTP as the gateway should speak it,
- a client reads bytes that are not HTTP, or another client's name,
- a request or connection does not end, or leaves anything counted: tokens, bytes, objects,
- one turn of the event loop computes for longer than STALL_SECONDS.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import json
import logging
import random
import re
import time
from collections import Counter
from typing import cast

import uvloop
from tandem_api.launch import GatewayConfig, GatewayQueue, GatewayTimeouts
from tandem_api.names import Role
from tandem_gateway.exchange import state
from tandem_gateway.http import connection
from tandem_gateway.process.server import Server
from tandem_gateway.process.settings import Settings
from tandem_gateway.scheduling import Worker

from bench.gateway.fuzz_cases import NAME, STRANGER, FuzzStep, make_name, plan_answer, plan_client, read_responses

STALL_SECONDS = 0.1
"""Of processor time, so that what the machine does elsewhere hardly counts."""
CLIENTS = 128
WORKERS = 6
ROUND_SECONDS = 5.0
"""Then everybody leaves, and nothing may be left."""
END_SECONDS = 20.0
_REQUEST = re.compile(rb"(?:POST|GET) /[\x21-\x7e]* HTTP/1\.1\r\n(?:[a-z-]+: [^\r\n]*\r\n)*\r\n")
_LENGTH = re.compile(rb"\r\ncontent-length: (\d+)\r\n")


class Found(Exception):
    """Something that must not be."""


class Run:
    """What all cases share."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.cases = 0
        self.statuses: Counter[int] = Counter()
        self.problems: list[str] = []
        self.names: set[bytes] = {STRANGER}
        """Given to requests that may still be answered."""
        self.longest = 0.0
        self.stall = STALL_SECONDS

    def report(self, problem: str) -> None:
        self.problems.append(problem)


class FuzzedWorker(asyncio.Protocol):
    """Reads requests strictly, and answers them in any way."""

    def __init__(self, run: Run, rng: random.Random) -> None:
        self._run = run
        self._rng = rng
        self._data = b""
        self._task: asyncio.Task[None] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        self._data += data
        if b"\r\n\r\n" not in self._data:
            return
        found = _REQUEST.match(self._data)
        length = _LENGTH.search(self._data[: found.end()]) if found else None
        if found is None or length is None:
            self._run.report(f"a worker got {self._data[:300]!r}")
            self._transport.abort()
            return
        if len(self._data) < found.end() + int(length[1]):
            return
        body = self._data[found.end() :]
        self._data = b""
        if self._task is not None:
            self._task.cancel()  # its answer was complete, or the gateway would not have sent another request
        if len(body) > int(length[1]):
            self._run.report(f"a worker got more than a request: {body[int(length[1]) :][:300]!r}")
        name = NAME.search(body)
        steps = plan_answer(self._rng, name[0] if name else b"", stream=b'"stream":true' in body)
        self._task = asyncio.get_running_loop().create_task(self._answer(steps))

    def connection_lost(self, exc: Exception | None) -> None:
        if self._task is not None:
            self._task.cancel()

    async def _answer(self, steps: list[FuzzStep]) -> None:
        for step in steps:
            if isinstance(step, bytes):
                self._transport.write(step)
            elif isinstance(step, float):
                await asyncio.sleep(step)
            elif step == "close":
                self._transport.close()
            else:
                self._transport.abort()


async def act_client(run: Run, port: int, rng: random.Random) -> None:
    """One connection's life."""
    names = [make_name(rng) for _ in range(rng.choice((1, 1, 2, 5)))]
    run.names.update(names)
    plan = plan_client(rng, names)
    run.cases += len(names)
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1024 if plan.reads_late else 65536)

    async def send() -> None:
        for step in plan.steps:
            if isinstance(step, bytes):
                writer.write(step)
                await writer.drain()
            elif isinstance(step, float):
                await asyncio.sleep(step)
            elif step == "close":
                writer.write_eof()
            else:
                writer.transport.abort()

    received, answered = b"", 0
    sending = asyncio.create_task(send())
    with contextlib.suppress(ConnectionError, TimeoutError):
        async with asyncio.timeout(plan.patience):
            if plan.reads_late:
                await asyncio.sleep(0.1)
            while data := await asyncio.wait_for(reader.read(65536), plan.pause if answered >= len(names) else None):
                received += data
                answered += data.count(b"HTTP/1.1 ")
    writer.transport.abort()
    sending.cancel()
    with contextlib.suppress(asyncio.CancelledError, ConnectionError, RuntimeError):
        await sending
    judge(run, names, received)
    run.names.difference_update(names)


async def act_clients(run: Run, port: int, rng: random.Random, until: float) -> None:
    while asyncio.get_running_loop().time() < until and not run.problems:
        await act_client(run, port, rng)


def judge(run: Run, names: list[bytes], received: bytes) -> None:
    try:
        for status, body in read_responses(received):
            run.statuses[status] += 1
            strangers = set(NAME.findall(body)) & (run.names - set(names))
            if strangers:
                run.report(f"{names} got {strangers}: {body[:300]!r}")
    except ValueError as error:
        run.report(f"a client read what is not HTTP: {error}: {received[:2000]!r}")


async def watch_turns(run: Run) -> None:
    """The longest computing between two turns of the event loop."""
    while True:
        before = time.thread_time()
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        run.longest = max(run.longest, time.thread_time() - before)
        await asyncio.sleep(0.001)


async def check_nothing_is_left(server: Server) -> None:
    gateway = server.gateway
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(END_SECONDS):
            while gateway.exchanges or server.reception.connections or gateway.budget.used:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
    counted = [(e.requests, e.prefill_tokens, e.decode_tokens) for e in gateway.scheduler.endpoints.values()]
    left = (len(gateway.exchanges), len(server.reception.connections), gateway.budget.used)
    if any(left) or any(any(item) for item in counted):
        raise Found(f"left after everybody has gone: exchanges, connections, bytes {left}, tokens {counted}")


async def fuzz(run: Run, seconds: float, cases: int) -> None:
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(lambda _, context: run.report(f"nobody caught {context}"))
    master = random.Random(run.seed)
    ports: list[int] = []
    for _ in range(WORKERS):
        rng = random.Random(master.random())
        listener = await loop.create_server(lambda rng=rng: FuzzedWorker(run, rng), "127.0.0.1", 0)
        ports.append(listener.sockets[0].getsockname()[1])
    server = Server(build_settings(ports))
    await server.start()
    watching = loop.create_task(watch_turns(run))
    started, objects = loop.time(), 0
    while loop.time() < started + seconds and run.cases < cases and not run.problems:
        until = min(loop.time() + ROUND_SECONDS, started + seconds)
        async with asyncio.timeout(ROUND_SECONDS + END_SECONDS), asyncio.TaskGroup() as clients:
            for _ in range(CLIENTS):
                clients.create_task(act_clients(run, server.http_port, random.Random(master.random()), until))
                await asyncio.sleep(0)  # what a client thinks of is not the gateway's computing
        await check_nothing_is_left(server)
        if run.longest > run.stall:
            run.report(f"one turn of the event loop computed for {run.longest:.3f} s")
        if not objects and loop.time() > started + seconds / 3:
            gc.collect()
            objects = len(gc.get_objects())
    gc.collect()
    grown = len(gc.get_objects()) - objects
    if objects and grown > 5_000:
        run.report(f"{grown} more objects than after a third of the run")
    watching.cancel()
    await server.stop()


def build_settings(ports: list[int]) -> Settings:
    timeouts = GatewayTimeouts(
        header_seconds=0.2, body_seconds=0.2, first_token_seconds=0.2, idle_seconds=0.2, answer_seconds=0.3
    )
    config = GatewayConfig(
        model_name="toy", served_name="toy", namespace="default", disaggregated=False, http_port=0, metrics_port=0,
        timeouts=timeouts, queue=GatewayQueue(ttl_seconds=0.2), max_body_bytes=256 * 1024, drain_timeout_seconds=1.0,
    )  # fmt: skip
    workers = [
        Worker(name=f"d{index}", address=f"127.0.0.1:{port}", role=Role.DECODE, revision="r")
        for index, port in enumerate(ports)
    ]
    return Settings(
        config=config, host="127.0.0.1", workers=tuple(workers), workers_file=None, lame_duck_seconds=0.0,
        log_level="error", access_log=False,
    )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--cases", type=int, default=10_000_000, help="end after as many requests")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1 << 32))
    parser.add_argument("--stall", type=float, default=STALL_SECONDS, help="seconds that one turn may compute")
    options = parser.parse_args()
    logging.basicConfig(level=logging.CRITICAL)
    # What takes seconds in a cluster: a case must end sooner.
    state.GRACE_SECONDS, connection.LINGER_SECONDS, connection.KEEP_ALIVE_SECONDS = 0.2, 0.2, 0.3
    run = Run(options.seed)
    run.stall = options.stall
    started = time.monotonic()
    try:
        uvloop.run(fuzz(run, options.seconds, options.cases))
    except (Found, TimeoutError) as error:
        run.report(f"{type(error).__name__} {error}")
    for problem in run.problems[:10]:
        print(problem)
    result = {
        "seed": run.seed, "cases": run.cases, "seconds": round(time.monotonic() - started, 1),
        "longest_turn_ms": round(run.longest * 1000, 1), "problems": len(run.problems),
        "answers": dict(sorted(run.statuses.items())),
    }  # fmt: skip
    print(json.dumps(result), flush=True)
    raise SystemExit(1 if run.problems else 0)


if __name__ == "__main__":
    main()
