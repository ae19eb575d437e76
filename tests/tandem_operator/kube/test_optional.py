"""A kind whose CRD comes and goes, over real HTTP."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
from aiohttp import web
from api_double import api_client, serving
from operator_objects import blueprint, children
from tandem_operator.kube.client import KubeClient
from tandem_operator.kube.optional import OptionalWatch
from tandem_operator.kube.store import ChildStore
from tandem_operator.objects.manifests import HTTP_ROUTE, ChildKey, ModelKey

M = ModelKey("n", "m")
ROUTE = children(blueprint(gateway={"httpRoute": {"parentRefs": [{"name": "public"}]}}))[ChildKey("HTTPRoute", "m")]
GROUP = "/apis/gateway.networking.k8s.io/v1"


class Server:
    """Has the kind or not; its watches stay open."""

    def __init__(self) -> None:
        self.resources: list[str] | None = None
        self.fails = False
        self.forbids = False
        self.asked: asyncio.Queue[None] = asyncio.Queue()
        self.stay = asyncio.Event()
        self.url = ""

    async def handle(self, request: web.Request) -> web.StreamResponse:
        if request.path == GROUP:
            self.asked.put_nowait(None)
            if self.fails:
                return web.json_response({"message": "away"}, status=503)
            if self.resources is None:
                return web.json_response({"message": "not found"}, status=404)
            return web.json_response({"resources": [{"name": name} for name in self.resources]})
        if self.forbids:
            return web.json_response({"message": "no"}, status=403)
        if request.query.get("watch") == "true":
            response = web.StreamResponse()
            await response.prepare(request)
            await self.stay.wait()
            return response
        return web.json_response({"items": [ROUTE], "metadata": {"resourceVersion": "1"}})

    async def asked_again(self) -> None:
        """When the second question comes, the answer to the first one has been acted upon."""
        while not self.asked.empty():
            self.asked.get_nowait()
        await self.asked.get()
        await self.asked.get()


@pytest.fixture
async def server() -> AsyncIterator[Server]:
    made = Server()
    async with serving(made.handle) as made.url:
        yield made
        made.stay.set()


@pytest.fixture
async def watch(server: Server) -> AsyncIterator[tuple[OptionalWatch, ChildStore, list[str]]]:
    client, store = KubeClient(api_client(server.url, 4)), ChildStore()
    seen: list[str] = []
    made = OptionalWatch(
        client,
        store,
        HTTP_ROUTE,
        (None,),
        on_change=lambda key: seen.append(str(key)),
        on_served=lambda: seen.append("all"),
        poll_seconds=0.05,
    )
    task = asyncio.create_task(made.run())
    yield made, store, seen
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    await client.close()


async def test_the_kind_comes_and_goes(server: Server, watch: tuple[OptionalWatch, ChildStore, list[str]]) -> None:
    made, store, seen = watch
    await made.looked.wait()
    assert (made.is_served, seen) == (False, [])
    server.resources = ["gateways"]
    await server.asked_again()
    assert not made.is_served, "the group alone is not enough"
    server.resources = ["gateways", "httproutes"]
    await server.asked_again()
    assert (made.is_served, seen) == (True, ["n/m", "all"])
    assert ChildKey("HTTPRoute", "m") in store.children(M)
    server.fails = True
    await server.asked_again()
    assert made.is_served, "an error says nothing"
    server.fails, server.resources = False, None
    await server.asked_again()
    assert (made.is_served, store.children(M)) == (False, {})
    assert seen[-1] == "all"


async def test_who_may_not_read_it_waits_for_nothing(
    server: Server, watch: tuple[OptionalWatch, ChildStore, list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tandem_operator.kube.optional._SYNC_SECONDS", 0.1)
    made, _, _ = watch
    server.forbids, server.resources = True, ["httproutes"]
    await server.asked_again()
    assert made.is_served
    assert made.looked.is_set()
