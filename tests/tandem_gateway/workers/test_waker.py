"""Orders to workers that take no requests yet: given again until one is answered, and only while somebody waits."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
from tandem_api.names import Role
from tandem_gateway.scheduling import Worker
from tandem_gateway.workers import waker as module
from tandem_gateway.workers.waker import Sleeper, Waker

from tests.ports import free_port
from tests.tandem_gateway.conftest import until


class Worked:
    """A worker's inference port, and what it answers to orders; None: nothing, for now."""

    def __init__(self) -> None:
        self.answers: list[int | None] = []
        self.heads: list[str] = []
        self.left = 0
        """Orders that were withdrawn."""
        self.serving = asyncio.Event()
        self.port = 0

    async def start(self, port: int = 0) -> None:
        self.server = await asyncio.start_server(self._serve, "127.0.0.1", port or free_port())
        self.port = self.server.sockets[0].getsockname()[1]

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                self.heads.append(head.decode())
                status = self.answers.pop(0) if self.answers else None
                if status is None:
                    gone = asyncio.ensure_future(reader.read(1))
                    served = asyncio.ensure_future(self.serving.wait())
                    await asyncio.wait({gone, served}, return_when=asyncio.FIRST_COMPLETED)
                    if gone.done():
                        self.left += 1
                        return
                    gone.cancel()
                    status = 200
                writer.write(f"HTTP/1.1 {status} Said\r\ncontent-length: 0\r\n\r\n".encode())
        except asyncio.IncompleteReadError:
            return
        finally:
            writer.close()


class Scene:
    def __init__(self) -> None:
        self.waiting = False
        self.awake: list[Sleeper] = []
        self.waker = Waker(
            waits=lambda: self.waiting,
            token_line=lambda: b"x-tandem-token: t\r\n",
            connect_seconds=1.0,
            on_awake=self.awake.append,
        )
        self.worker = Worked()

    def sleeper(self, pod: str = "u/0", name: str = "m-decode-0") -> Sleeper:
        address = f"127.0.0.1:{self.worker.port}"
        return Sleeper(worker=Worker(name=name, address=address, role=Role.DECODE, revision="r"), pod=pod)

    def wait(self) -> None:
        self.waiting = True
        self.waker.poke()


@pytest.fixture
async def scene() -> AsyncIterator[Scene]:
    scene = Scene()
    await scene.worker.start()
    task = asyncio.create_task(scene.waker.run())
    yield scene
    task.cancel()
    scene.worker.server.close()


async def test_a_worker_is_asked_once_somebody_waits_and_is_told_of_when_it_serves(scene: Scene) -> None:
    scene.waker.take([scene.sleeper()])
    await asyncio.sleep(0.1)
    assert scene.worker.heads == [], "nobody waits"
    scene.wait()
    await until(lambda: scene.worker.heads)
    assert scene.worker.heads[0].startswith("POST /wake HTTP/1.1\r\n")
    assert "x-tandem-token: t\r\n" in scene.worker.heads[0]
    await asyncio.sleep(0.1)
    assert (len(scene.worker.heads), scene.awake) == (1, []), "one order at a time"
    scene.worker.serving.set()
    await until(lambda: scene.awake)
    await asyncio.sleep(0.1)
    assert scene.awake == [scene.sleeper()]
    assert len(scene.worker.heads) == 1, "it serves"


async def test_an_order_that_fails_is_given_again(scene: Scene) -> None:
    scene.worker.answers = [503, 500, 401, 200]
    scene.waker.take([scene.sleeper()])
    scene.wait()
    await until(lambda: scene.awake)
    assert len(scene.worker.heads) == 4


async def test_nobody_listens_yet(scene: Scene) -> None:
    scene.worker.server.close()
    await scene.worker.server.wait_closed()
    scene.waker.take([scene.sleeper()])
    scene.wait()
    await asyncio.sleep(0.2)
    await scene.worker.start(scene.worker.port)
    scene.worker.serving.set()
    await until(lambda: scene.awake)


async def test_one_that_does_not_answer_is_asked_again(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "ANSWER_SECONDS", 0.1)
    scene.worker.answers = [None, *[200] * 100]  # any of which may come too late, too
    scene.waker.take([scene.sleeper()])
    scene.wait()
    await until(lambda: scene.awake and scene.worker.left >= 1)


async def test_one_that_knows_no_orders_is_left_alone(scene: Scene) -> None:
    scene.worker.answers = [404, 200]
    scene.waker.take([scene.sleeper()])
    scene.wait()
    await until(lambda: scene.worker.heads)
    await asyncio.sleep(0.3)
    assert (len(scene.worker.heads), scene.awake) == (1, [])
    scene.waker.take([scene.sleeper(pod="u/1")])
    await until(lambda: scene.awake)
    assert scene.awake[0].pod == "u/1", "another process is asked anew"


async def test_one_that_is_gone_is_told_of_no_more(scene: Scene) -> None:
    scene.waker.take([scene.sleeper()])
    scene.wait()
    await until(lambda: scene.worker.heads)
    scene.waker.take([])
    await until(lambda: scene.worker.left)
    assert scene.awake == []


async def test_nothing_is_asked_once_nobody_waits(scene: Scene) -> None:
    scene.worker.answers = [503] * 1000
    scene.waker.take([scene.sleeper()])
    scene.wait()
    await until(lambda: scene.worker.heads)
    scene.waiting = False
    await asyncio.sleep(0.2)
    asked = len(scene.worker.heads)
    await asyncio.sleep(1.2)
    assert len(scene.worker.heads) == asked
    scene.worker.answers = []
    scene.worker.serving.set()
    scene.wait()
    await until(lambda: scene.awake)
