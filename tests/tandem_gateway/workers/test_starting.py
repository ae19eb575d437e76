"""What workers that are not ready say of themselves reaches the gateway's report, and nothing that they make up."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
from tandem_api.fleet import LONGEST_TEXT, StartingReport
from tandem_api.names import Role
from tandem_gateway.scheduling import Worker
from tandem_gateway.workers import starting as module
from tandem_gateway.workers.starting import StartWatch
from tandem_gateway.workers.waker import Sleeper

from tests.tandem_gateway.conftest import until

LOADING = b"HTTP/1.1 503 Service Unavailable\r\ncontent-length: 16\r\n\r\nloading weights\n"


class Probed:
    """A worker's metrics port."""

    def __init__(self) -> None:
        self.answer = LOADING
        self.asked = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                assert head.startswith(b"GET /readyz ")
                self.asked += 1
                writer.write(self.answer)
        except asyncio.IncompleteReadError:
            pass
        finally:
            writer.close()


class Scene:
    def __init__(self, port: int, probed: Probed) -> None:
        self.port, self.probed = port, probed
        self.watch = StartWatch(connect_seconds=1.0)

    def sleeper(self, number: int = 0) -> Sleeper:
        worker = Worker(
            name=f"m-decode-{number:02}", address="10.0.0.1:8000", role=Role.DECODE, revision="r",
            status_address=f"127.0.0.1:{self.port}",
        )  # fmt: skip
        return Sleeper(worker=worker, pod=f"u{number}/0")


@pytest.fixture
async def scene(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Scene]:
    monkeypatch.setattr(module, "PERIOD_SECONDS", 0.05)
    probed = Probed()
    server = await asyncio.start_server(probed.serve, "127.0.0.1", 0)
    scene = Scene(server.sockets[0].getsockname()[1], probed)
    task = asyncio.create_task(scene.watch.run())
    yield scene
    task.cancel()
    server.close()


async def test_what_a_worker_waits_for_is_told_until_it_is_ready(scene: Scene) -> None:
    await asyncio.sleep(0.1)
    assert scene.probed.asked == 0, "nobody is there to be asked"
    scene.watch.take([scene.sleeper()])
    await until(scene.watch.reports)
    assert scene.watch.reports() == [
        StartingReport(name="m-decode-00", address="10.0.0.1:8000", waits_for="loading weights")
    ]
    scene.probed.answer = b"HTTP/1.1 200 OK\r\ncontent-length: 3\r\n\r\nok\n"
    await until(lambda: not scene.watch.reports())
    scene.watch.take([])
    await asyncio.sleep(0.1)
    asked = scene.probed.asked
    await asyncio.sleep(0.15)
    assert scene.probed.asked == asked


@pytest.mark.parametrize(
    "answer",
    [
        b"nonsense\r\n\r\n",
        b"HTTP/1.1 404 Not Found\r\ncontent-length: 4\r\n\r\nwhat",
        b"HTTP/1.1 503 No\r\ncontent-length: 3\r\n\r\n\x1b[m",
        b"HTTP/1.1 503 No\r\ncontent-length: 9999\r\n\r\n" + b"x" * 9999,
    ],
)
async def test_what_is_no_sentence_is_not_told(scene: Scene, answer: bytes) -> None:
    scene.probed.answer = answer
    scene.watch.take([scene.sleeper()])
    await until(lambda: scene.probed.asked >= 3)
    assert scene.watch.reports() == []


async def test_some_of_many_are_asked(scene: Scene) -> None:
    scene.watch.take([scene.sleeper(number) for number in reversed(range(module.MOST + 8))])
    await until(lambda: len(scene.watch.reports()) == module.MOST)
    assert {one.name for one in scene.watch.reports()} == {f"m-decode-{n:02}" for n in range(module.MOST)}
    assert all(len(one.waits_for) <= LONGEST_TEXT for one in scene.watch.reports())
