"""Watchers over real HTTP, against a server that ends streams as it likes."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Any

import pytest
from aiohttp import web
from api_double import api_client, serving
from operator_objects import pod
from tandem_operator.kube.client import KubeClient
from tandem_operator.kube.events import CREATIONS, CreationEvents
from tandem_operator.kube.store import ChildStore
from tandem_operator.kube.watch import KindWatcher
from tandem_operator.objects.manifests import EVENT, POD, ModelKey

M = ModelKey("n", "m")
BACKOFF = (0.05, 0.1, 0.2)


class WatchServer:
    """One list, and watches that say `says` and end; or that stay open."""

    def __init__(self) -> None:
        self.items: list[dict[str, Any]] = []
        self.says: list[list[dict[str, Any]]] = []
        self.stay = asyncio.Event()
        self.lists = self.watches = self.open = 0
        self.breaks = 0
        """So many lists have a second page, which fails."""
        self.queries: list[dict[str, str]] = []
        self.url = ""

    async def handle(self, request: web.Request) -> web.StreamResponse:
        self.queries.append(dict(request.query))
        if request.query.get("watch") != "true":
            if request.query.get("continue"):
                return web.json_response({"message": "busy"}, status=500)
            self.lists += 1
            if self.lists <= self.breaks:
                metadata = {"resourceVersion": str(self.lists), "continue": "more"}
                return web.json_response({"items": self.items, "metadata": metadata})
            return web.json_response({"items": self.items, "metadata": {"resourceVersion": str(self.lists)}})
        self.watches += 1
        response = web.StreamResponse()
        await response.prepare(request)
        for event in self.says.pop(0) if self.says else []:
            await response.write(json.dumps(event).encode() + b"\n")
        self.open += 1
        await self.stay.wait()
        self.open -= 1
        return response


@pytest.fixture
async def server() -> AsyncIterator[WatchServer]:
    made = WatchServer()
    async with serving(made.handle) as made.url:
        yield made
        made.stay.set()


@pytest.fixture
async def client(server: WatchServer) -> AsyncIterator[KubeClient]:
    made = KubeClient(api_client(server.url, 4), watches=api_client(server.url, 0))
    yield made
    await made.close()


async def run(watcher: KindWatcher, *, seconds: float) -> None:
    with suppress(TimeoutError):
        await asyncio.wait_for(watcher.run(), seconds)


def watched(name: str) -> dict[str, Any]:
    found = pod(name)
    found["metadata"]["resourceVersion"] = "1"
    return found


async def until(holds: Any) -> None:
    async with asyncio.timeout(60):
        while not holds():  # noqa: ASYNC110 -- the other end is a server
            await asyncio.sleep(0.01)


async def test_watches_that_end_at_once_are_asked_for_less_and_less(server: WatchServer, client: KubeClient) -> None:
    server.stay.set()
    watcher = KindWatcher(client, ChildStore(), POD, "n", on_change=lambda _: None, backoff_seconds=BACKOFF)
    await run(watcher, seconds=1.0)
    assert server.lists == 1, "a watch that ended well goes on from where it was"
    assert 2 <= server.watches <= 10


async def test_versions_that_are_gone_are_listed_anew_with_pauses(server: WatchServer, client: KubeClient) -> None:
    server.stay.set()
    server.says = [[{"type": "ERROR", "object": {"code": 410, "message": "too old"}}] for _ in range(1000)]
    watcher = KindWatcher(client, ChildStore(), POD, "n", on_change=lambda _: None, backoff_seconds=BACKOFF)
    await run(watcher, seconds=1.0)
    assert 2 <= server.lists <= 10
    assert server.watches == server.lists


async def test_what_changes_reaches_the_store_and_a_new_list_removes_what_vanished(
    server: WatchServer, client: KubeClient
) -> None:
    store, changed = ChildStore(), list[ModelKey]()
    server.items = [watched("m-decode-0")]
    gone = {"type": "ERROR", "object": {"code": 410, "message": "too old"}}
    server.says = [[{"type": "ADDED", "object": watched("m-decode-1")}, gone]]
    watcher = KindWatcher(client, store, POD, "n", on_change=changed.append, backoff_seconds=(0.05,))
    task = asyncio.create_task(watcher.run())
    await until(lambda: server.watches == 2)
    await until(lambda: [key.name for key in store.children(M)] == ["m-decode-0"])
    assert changed.count(M) >= 3
    task.cancel()


async def test_what_a_list_brought_before_it_broke_off_is_looked_at(server: WatchServer, client: KubeClient) -> None:
    """The next list brings it again, when it is no news any more."""
    store, changed = ChildStore(), list[ModelKey]()
    server.items, server.breaks = [watched("m-decode-0")], 1
    watcher = KindWatcher(client, store, POD, "n", on_change=changed.append, backoff_seconds=(0.05,))
    task = asyncio.create_task(watcher.run())
    await until(watcher.synced.is_set)
    task.cancel()
    assert (server.lists, changed) == (2, [M])


async def test_a_watch_that_says_nothing_is_asked_again_from_its_last_event(
    server: WatchServer, client: KubeClient
) -> None:
    """Its connection is dead, and nothing will ever tell. What it had brought is not brought again."""
    last = watched("m-decode-1")
    last["metadata"]["resourceVersion"] = "7"
    server.says = [[{"type": "ADDED", "object": last}]]
    watcher = KindWatcher(
        client, ChildStore(), POD, "n", on_change=lambda _: None, backoff_seconds=(0.05,), silence_seconds=2.0
    )
    task = asyncio.create_task(watcher.run())
    await until(lambda: server.watches >= 2)
    task.cancel()
    assert server.lists == 1
    assert [query["resourceVersion"] for query in server.queries if "watch" in query][:2] == ["1", "7"]


async def test_a_change_that_nobody_reads_is_no_reason_to_look(server: WatchServer, client: KubeClient) -> None:
    store, changed = ChildStore(), list[ModelKey]()
    server.items = [watched("m-decode-0")]
    touched, ready = watched("m-decode-0"), watched("m-decode-0")
    touched["metadata"]["resourceVersion"], ready["status"] = "2", {"phase": "Running"}
    gone = {"type": "ERROR", "object": {"code": 410, "message": "too old"}}
    server.says = [[{"type": "MODIFIED", "object": touched}, gone], [{"type": "MODIFIED", "object": ready}]]
    watcher = KindWatcher(client, store, POD, "n", on_change=changed.append, backoff_seconds=(0.05,))
    task = asyncio.create_task(watcher.run())
    await until(lambda: len(changed) == 2)
    assert server.lists == 2
    assert [child["status"] for child in store.children(M).values()] == [{"phase": "Running"}]
    task.cancel()


async def test_a_hundred_watches_leave_room_for_everything_else(server: WatchServer, client: KubeClient) -> None:
    """Ten namespaces and ten kinds, with four connections for requests."""
    store = ChildStore()
    watchers = [KindWatcher(client, store, POD, f"n{number}", on_change=lambda _: None) for number in range(100)]
    tasks = [asyncio.create_task(watcher.run()) for watcher in watchers]
    await until(lambda: server.open == 100)
    async with asyncio.timeout(60):
        await client.get("/api/v1/namespaces/n/pods")
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def creation(name: str, reason: str, *, of: str = "m-decode", uid: str = "u") -> dict[str, Any]:
    return {
        "metadata": {"name": name, "namespace": "n", "resourceVersion": "1"}, "reason": reason,
        "message": "exceeded quota", "lastTimestamp": "2026-01-01T00:00:00Z",
        "involvedObject": {"name": of, "uid": uid},
    }  # fmt: skip


async def test_events_about_creating_pods_are_watched_by_their_object(server: WatchServer, client: KubeClient) -> None:
    events, changed = CreationEvents(), list[ModelKey]()
    server.items = [creation("a", "FailedCreate"), creation("b", "FailedCreate", of="web"), creation("c", "Killing")]
    watcher = KindWatcher(
        client, events, EVENT, "n", on_change=changed.append, selector=CREATIONS, backoff_seconds=(0.05,)
    )
    task = asyncio.create_task(watcher.run())
    await until(lambda: events.failure("u") is not None)
    assert changed == [M]
    assert {query["fieldSelector"] for query in server.queries} == {"involvedObject.kind=StatefulSet"}
    task.cancel()


def test_events_run_out_and_what_is_kept_ends_with_them() -> None:
    events = CreationEvents()
    failed = creation("a", "FailedCreate")
    events.put(EVENT, failed)
    assert events.failure("u") == "exceeded quota"
    events.put(EVENT, creation("b", "SuccessfulCreate") | {"lastTimestamp": "2026-01-01T00:00:01Z"})
    assert events.failure("u") is None
    assert events.remove(EVENT, failed) == M
    assert events.retain(EVENT, "elsewhere", []) == set()
    assert events.retain(EVENT, None, []) == {M}
    assert events.failure("u") is None
