"""Leader election over real HTTP, against a server that keeps one Lease as the API server does."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from typing import Any

import pytest
from aiohttp import web
from api_double import serving
from kubernetes.aio.client import ApiClient, Configuration
from tandem_operator.kube.client import KubeClient
from tandem_operator.kube.leader import LeaderElection, LeaseSettings

FAST = LeaseSettings(namespace="n", name="l", identity="a", duration_seconds=3, renew_seconds=0.1, give_up_seconds=1.5)


class LeaseServer:
    """One Lease with optimistic locking. `broken` makes every answer a 500."""

    def __init__(self) -> None:
        self.lease: dict[str, Any] | None = None
        self.broken = False
        self.num_reads = self.num_writes = 0
        self.url = ""

    async def handle(self, request: web.Request) -> web.Response:
        if self.broken:
            return web.json_response({"message": "out of order"}, status=500)
        if request.method == "GET":
            self.num_reads += 1
            found = self.lease is not None
            return web.json_response(self.lease if found else {"message": "not found"}, status=200 if found else 404)
        body = await request.json()
        present = None if self.lease is None else self.lease["metadata"]["resourceVersion"]
        if body["metadata"].get("resourceVersion") != present:
            return web.json_response({"message": "conflict"}, status=409)
        body["metadata"]["resourceVersion"] = str(int(present or 0) + 1)
        self.lease = body
        self.num_writes += 1
        return web.json_response(body)

    @property
    def holder(self) -> str:
        assert self.lease is not None
        return self.lease["spec"]["holderIdentity"]


@pytest.fixture
async def server() -> AsyncIterator[LeaseServer]:
    leases = LeaseServer()
    async with serving(leases.handle) as leases.url:
        yield leases


@pytest.fixture
async def client(server: LeaseServer) -> AsyncIterator[KubeClient]:
    configuration = Configuration()
    configuration.host = server.url
    made = KubeClient(ApiClient(configuration))
    yield made
    await made.close()


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def election(client: KubeClient, identity: str, clock: Callable[[], float] = time.monotonic) -> LeaderElection:
    return LeaderElection(client, replace(FAST, identity=identity), clock)


async def test_a_free_lease_is_taken_and_a_held_one_is_not(server: LeaseServer, client: KubeClient) -> None:
    """On a clock of its own, which stands still while the machine does something else: a leader that is stopped for
    longer than `give_up_seconds` rightly stops leading, and a follower then rightly takes over."""
    clock = Clock()
    leader, follower = election(client, "a", clock), election(client, "b", clock)
    await leader.acquire()
    held, waiting = asyncio.create_task(leader.hold()), asyncio.create_task(follower.acquire())
    while clock.now < 3 * FAST.duration_seconds:
        renewed, looked = server.num_writes, server.num_reads
        clock.now += FAST.give_up_seconds / 2
        async with asyncio.timeout(30):
            while server.num_writes < renewed + 2 or server.num_reads < looked + 2:  # noqa: ASYNC110 - those under way, and one more
                await asyncio.sleep(0.01)
        assert not held.done()
        assert not waiting.done()
    assert server.holder == "a"
    for task in (held, waiting):
        task.cancel()


async def test_a_released_lease_is_taken_at_once(server: LeaseServer, client: KubeClient) -> None:
    """On a clock that stands still no lease runs out."""
    leader, follower = election(client, "a"), election(client, "b", Clock())
    await leader.acquire()
    await leader.release()
    await asyncio.wait_for(follower.acquire(), timeout=30)
    assert server.holder == "b"
    assert server.lease is not None
    assert server.lease["spec"]["leaseTransitions"] == 1


async def test_a_lease_that_is_not_renewed_runs_out(server: LeaseServer, client: KubeClient) -> None:
    await election(client, "a").acquire()
    await asyncio.wait_for(election(client, "b").acquire(), timeout=30)
    assert server.holder == "b"


async def test_a_leader_that_cannot_renew_stops_before_others_may_start(
    server: LeaseServer, client: KubeClient
) -> None:
    clock = Clock()
    leader = election(client, "a", clock)
    await leader.acquire()
    server.broken = True
    holding = asyncio.create_task(leader.hold())
    await asyncio.sleep(0)
    clock.now = FAST.give_up_seconds
    assert clock.now < FAST.duration_seconds
    await asyncio.wait_for(holding, timeout=30)


async def test_a_leader_whose_lease_was_taken_stops(server: LeaseServer, client: KubeClient) -> None:
    leader = election(client, "a", Clock())
    await leader.acquire()
    assert server.lease is not None
    server.lease["spec"]["holderIdentity"] = "b"
    server.lease["metadata"]["resourceVersion"] = "77"
    await asyncio.wait_for(leader.hold(), timeout=30)
    await leader.release()
    assert server.holder == "b"
