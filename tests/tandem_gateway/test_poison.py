"""A request that ends its worker, among others', in front of workers that are processes and really die."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from contextlib import suppress

import pytest
from tandem_api.names import Role
from tandem_gateway.exchange.recovery import MAX_RESETS
from tandem_gateway.scheduling import Endpoint, Reservation, Worker
from tandem_gateway.scheduling.isolation import DYING_SECONDS, PROVEN_SECONDS, Isolation

from tests.tandem_gateway.worker_process import POISON

CLIENTS = 12
POISONS = 3


def completion(prompt: str) -> bytes:
    body = json.dumps({"model": "toy", "prompt": prompt}).encode()
    return b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(body) + body


class Client:
    """One connection, one request at a time."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer

    async def ask(self, prompt: str) -> tuple[int, object]:
        self._writer.write(completion(prompt))
        head = await self._reader.readuntil(b"\r\n\r\n")
        body = await self._reader.readexactly(int(head.split(b"content-length: ")[1].split(b"\r\n")[0]))
        status = int(head.split()[1])
        return status, json.loads(body)["choices"][0]["text"] if status == 200 else json.loads(body)["error"]


class Workers:
    """Processes, each started again at its port after it died where `restarts`, as a container is."""

    def __init__(self, launch: Callable, *, restarts: bool) -> None:
        self._launch = launch
        self._restarts = restarts
        self.deaths = 0
        self.ports: list[int] = []
        self._watches: list[asyncio.Task[None]] = []

    async def start(self, count: int) -> None:
        for process, port in await asyncio.gather(*(self._launch() for _ in range(count))):
            self.ports.append(port)
            self._watches.append(asyncio.create_task(self._watch(process, port)))

    async def _watch(self, process: asyncio.subprocess.Process, port: int) -> None:
        while True:
            await process.wait()
            self.deaths += 1
            if not self._restarts:
                return
            process, _ = await self._launch(port)

    async def stop(self) -> None:
        for watch in self._watches:
            watch.cancel()
            with suppress(asyncio.CancelledError):
                await watch


@pytest.mark.parametrize(("count", "restarts"), [(4, True), (8, False)])
async def test_a_request_that_ends_its_worker_ends_no_more_than_two(
    launch, launch_worker, connect, count: int, restarts: bool
) -> None:
    workers = Workers(launch_worker, restarts=restarts)
    await workers.start(count)
    names = [f"--worker=url=127.0.0.1:{port},name=d{index}" for index, port in enumerate(workers.ports)]
    process = await launch(*names, "--no-access-log")
    wrong: list[object] = []
    asked, over = 0, False

    async def innocent(number: int) -> None:
        nonlocal asked
        client = Client(*await connect(process.http_port))
        while not over:
            prompt = f"prompt {number}.{asked}"
            asked += 1
            if (answer := await client.ask(prompt)) != (200, prompt):
                wrong.append((prompt, answer))

    async with asyncio.timeout(60):
        others = [asyncio.create_task(innocent(number)) for number in range(CLIENTS)]
        poison = Client(*await connect(process.http_port))
        for number in range(POISONS):
            before, warm = workers.deaths, asked
            while asked < warm + 10 * CLIENTS:  # noqa: ASYNC110  connections of all workers have served by then
                await asyncio.sleep(0.01)
            status, _ = await poison.ask(f"{POISON} {number}")
            assert status == 502
            await asyncio.sleep(0.6)  # for a third one to die, and for who was aboard to be answered
            assert workers.deaths - before <= MAX_RESETS
        over = True
        await asyncio.gather(*others)
    await workers.stop()
    assert not wrong


def test_a_worker_has_one_suspect_until_it_has_shown_something_or_outlived_it() -> None:
    endpoint = Endpoint(Worker(name="d0", address="127.0.0.1:1", role=Role.DECODE, revision="r"))
    first, second = (Reservation(endpoint, endpoint, prefill_tokens=1, decode_tokens=1, now=10.0) for _ in range(2))
    isolation = Isolation()
    isolation.add("d0", first, 10.0)
    isolation.add("d1", second, 10.4)
    assert isolation.find_occupied(10.4) == isolation.find_closed(10.4) == {"d0", "d1"}
    second.release()
    assert isolation.find_closed(10.45) == {"d0"}
    assert isolation.find_closed(10.0 + PROVEN_SECONDS) == frozenset()
    assert isolation.find_occupied(13.0) == {"d0"}  # another worker is better, as long as there is one
    first.release()
    assert isolation.find_occupied(13.0) == frozenset()


def test_a_worker_that_has_just_died_gets_no_suspect() -> None:
    isolation = Isolation()
    isolation.report_death("d0", 10.0)
    assert isolation.find_occupied(10.1) == isolation.find_closed(10.1) == {"d0"}
    assert isolation.find_occupied(10.0 + DYING_SECONDS) == frozenset()
