"""The gateway follows `status.routing` of its model, and goes by what it knows while it cannot."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
from discovery_server import FakeApiServer
from tandem_api.launch import GatewayRouting, GatewayTimeouts
from tandem_gateway.workers.discovery.kube import ApiServer
from tandem_gateway.workers.discovery.routing import RoutingWatcher


def make_model(*names: str, version: str = "1", **fields: Any) -> dict[str, Any]:
    routing = GatewayRouting(served_names=list(names), **fields).model_dump(by_alias=True)
    return {"metadata": {"name": "toy", "resourceVersion": version}, "status": {"routing": routing}}


class Watch:
    """A watcher under test and what it applied."""

    def __init__(self, api: FakeApiServer, token: Path) -> None:
        self.applied: list[GatewayRouting] = []
        server = ApiServer(host="127.0.0.1", port=api.port, ca=None, token=token)
        self.watcher = RoutingWatcher(
            server, namespace="ns", model="toy", apply=self.applied.append, silence_seconds=300.0, backoff_first=0.02
        )
        self.task = asyncio.create_task(self.watcher.run())

    @property
    def names(self) -> list[list[str]]:
        return [routing.served_names for routing in self.applied]

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(30):
            while not condition():
                assert not self.task.done(), self.task
                await asyncio.sleep(0.01)


@pytest.fixture
async def api() -> AsyncIterator[FakeApiServer]:
    server = FakeApiServer("/apis/tandem.dev/v1alpha1/namespaces/ns/inferencemodels", fieldSelector="metadata.name=toy")
    server.items = [make_model("toy")]
    await server.start()
    yield server
    server.stop()
    await asyncio.sleep(0.02)


@pytest.fixture
async def start(api: FakeApiServer, tmp_path: Path) -> AsyncIterator[Callable[[], Watch]]:
    (tmp_path / "token").write_text("t")
    started: list[Watch] = []

    def begin() -> Watch:
        started.append(Watch(api, tmp_path / "token"))
        return started[-1]

    yield begin
    for watch in started:
        watch.task.cancel()
        await asyncio.gather(watch.task, return_exceptions=True)


async def test_what_the_status_says_is_applied_and_followed(api: FakeApiServer, start: Callable[[], Watch]) -> None:
    watch = start()
    await watch.until(lambda: watch.names == [["toy"]])
    changed = make_model("new", "toy", version="2", timeouts=GatewayTimeouts(idle_seconds=7), drain_timeout_seconds=9)
    for version in ("2", "3"):  # a status is written for many reasons
        changed["metadata"]["resourceVersion"] = version
        api.events.put_nowait({"type": "MODIFIED", "object": changed})
    api.events.put_nowait({"type": "MODIFIED", "object": make_model("new", version="4")})
    await watch.until(lambda: watch.names == [["toy"], ["new", "toy"], ["new"]])
    assert (watch.applied[1].timeouts.idle_seconds, watch.applied[1].drain_timeout_seconds) == (7, 9)


@pytest.mark.parametrize("status", [None, {}, {"routing": None}, {"routing": {"servedNames": []}}, {"routing": "x"}])
async def test_what_says_nothing_changes_nothing(api: FakeApiServer, start: Callable[[], Watch], status: Any) -> None:
    watch = start()
    await watch.until(lambda: len(watch.applied) == 1)
    broken = {"metadata": {"name": "toy", "resourceVersion": "2"}} | ({} if status is None else {"status": status})
    api.events.put_nowait({"type": "MODIFIED", "object": broken})
    api.events.put_nowait({"type": "DELETED", "object": make_model("gone", version="3")})
    api.events.put_nowait({"type": "ADDED", "object": make_model("again", version="4")})
    await watch.until(lambda: watch.names == [["toy"], ["again"]])


async def test_a_model_without_routing_keeps_the_launch_configuration(
    api: FakeApiServer, start: Callable[[], Watch]
) -> None:
    api.items = [{"metadata": {"name": "toy"}}]
    watch = start()
    await watch.until(lambda: watch.watcher.asked)
    assert watch.applied == []


@pytest.mark.parametrize("status", [403, 404, 500])
async def test_a_refusal_keeps_nobody_waiting_and_is_tried_again(
    api: FakeApiServer, start: Callable[[], Watch], status: int
) -> None:
    api.refuse = [status]
    watch = start()
    assert not watch.watcher.asked
    await watch.until(lambda: watch.watcher.asked)
    await watch.until(lambda: watch.names == [["toy"]])
