"""The whole operator against an API server double over real HTTP: it leads, watches, makes a model, and stops."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from api_double import api_client, serving
from operator_objects import RELEASE, raw_model
from tandem_operator.kube.client import Connections, KubeClient
from tandem_operator.kube.leader import LeaseSettings
from tandem_operator.process.app import Operator
from tandem_operator.process.settings import OperatorSettings
from tandem_operator.weights.hub import HubPolicy

NAMESPACES = tuple(f"n{number}" for number in range(10))
MODEL = "/apis/tandem.dev/v1alpha1/namespaces/n3/inferencemodels/m"
LEASE = "/apis/coordination.k8s.io/v1/namespaces/ns/leases/tandem-operator"
RESOURCE = {
    "name": "inferencemodels", "singularName": "inferencemodel", "namespaced": True, "kind": "InferenceModel",
    "verbs": ["get", "list", "watch", "patch"],
}  # fmt: skip


class APIServer:
    """Objects by path. Watches stay open and say nothing, as in a cluster in which nothing happens."""

    def __init__(self) -> None:
        self.kept: dict[str, dict[str, Any]] = {}
        self.requests: Counter[str] = Counter()
        self.watching: set[str] = set()
        self.stop = asyncio.Event()
        self.url = ""
        self.answers_before: list[web.Response] = []
        """To lists of models, in place of what is there."""

    async def handle(self, request: web.Request) -> web.StreamResponse:
        path, method = request.path, request.method
        if request.query.get("watch") == "true":
            return await self._watch(request)
        self.requests[method] += 1
        if method == "GET":
            if path.endswith("/inferencemodels") and self.answers_before:
                return self.answers_before.pop(0)
            return self._get(path)
        body = await request.json()
        if method == "POST":
            path = f"{path}/{body['metadata']['name']}"
        if path.endswith("/status"):
            self.kept[path.removesuffix("/status")]["status"] = body["status"]
            return web.json_response(body)
        version = str(sum(self.requests.values()))
        body["metadata"] |= {"uid": f"uid of {path}", "resourceVersion": version, "generation": 1}
        self.kept[path] = body
        return web.json_response(body)

    def _get(self, path: str) -> web.Response:
        if path == "/api":
            return web.json_response({"versions": ["v1"]})
        if path == "/apis":
            version = {"groupVersion": "tandem.dev/v1alpha1", "version": "v1alpha1"}
            group = {"name": "tandem.dev", "versions": [version], "preferredVersion": version}
            return web.json_response({"groups": [group]})
        if path == "/apis/tandem.dev/v1alpha1":
            return web.json_response({"resources": [RESOURCE], "groupVersion": "tandem.dev/v1alpha1"})
        if path == "/api/v1":
            namespaces = {"name": "namespaces", "singularName": "namespace", "namespaced": False, "kind": "Namespace"}
            return web.json_response({"resources": [namespaces | {"verbs": ["list"]}], "groupVersion": "v1"})
        if path in self.kept:
            return web.json_response(self.kept[path])
        if path.count("/") > 1 and path.rsplit("/", 1)[1].endswith("s") and "m-" not in path:
            items = [found for key, found in self.kept.items() if key.rsplit("/", 1)[0] == path]
            return web.json_response({"items": items, "metadata": {"resourceVersion": "1"}, "kind": "List"})
        return web.json_response({"message": "not found", "code": 404, "kind": "Status"}, status=404)

    async def _watch(self, request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        self.watching.add(request.path)
        await self.stop.wait()
        return response


@pytest.fixture
async def server() -> AsyncIterator[APIServer]:
    made = APIServer()
    made.kept[MODEL] = {"apiVersion": "tandem.dev/v1alpha1", "kind": "InferenceModel", **raw_model()}
    made.kept[MODEL]["metadata"] |= {"namespace": "n3", "resourceVersion": "1"}
    async with serving(made.handle) as made.url:
        yield made
        made.stop.set()


async def until(holds: Any) -> None:
    async with asyncio.timeout(60):
        while not holds():  # noqa: ASYNC110 -- the other end is a server
            await asyncio.sleep(0.02)


async def end(running: asyncio.Task[int]) -> None:
    assert not running.done()
    os.kill(os.getpid(), signal.SIGTERM)
    assert await asyncio.wait_for(running, 60) == 0


@pytest.fixture
async def running(
    server: APIServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[asyncio.Task[int]]:
    """The operator of ten namespaces. It begins when the test first waits."""
    cluster = {"name": "c", "cluster": {"server": server.url}}
    context = {"name": "c", "context": {"cluster": "c", "user": "u"}}
    config = {"clusters": [cluster], "contexts": [context], "users": [{"name": "u", "user": {"token": "t"}}]}
    path = tmp_path / "kubeconfig"
    path.write_text(json.dumps({"apiVersion": "v1", "kind": "Config", "current-context": "c", **config}))
    # The library reads KUBECONFIG once, when it is imported.
    monkeypatch.setattr("kubernetes.config.kube_config.KUBE_CONFIG_DEFAULT_LOCATION", str(path))
    lease = LeaseSettings(namespace="ns", identity="me", renew_seconds=0.2)
    settings = OperatorSettings(
        release=RELEASE,
        lease=lease,
        namespaces=NAMESPACES,
        hub=HubPolicy(resolve=False),
        max_concurrent_rollouts=1,
    )
    # As `connect` makes them, with pools so small that watches in them would starve all else.
    connections = Connections(
        requests=KubeClient(api_client(server.url, 4), watches=api_client(server.url, 0)),
        lease=KubeClient(api_client(server.url, 1)),
    )
    task = asyncio.create_task(Operator(settings, connections).run())
    yield task
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    await connections.close()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
async def test_ten_namespaces_are_watched_and_the_lease_is_held_meanwhile(
    server: APIServer, running: asyncio.Task[int]
) -> None:
    server.kept["/apis/gateway.networking.k8s.io/v1"] = {"resources": [{"name": "httproutes"}]}
    server.kept[MODEL]["spec"]["gateway"] = {"httpRoute": {"parentRefs": [{"name": "public"}]}}
    await until(lambda: "conditions" in server.kept[MODEL].get("status", {}))
    assert "/apis/apps/v1/namespaces/n3/statefulsets/m-decode" in server.kept
    assert "/apis/gateway.networking.k8s.io/v1/namespaces/n3/httproutes/m" in server.kept
    assert server.kept[LEASE]["spec"]["holderIdentity"] == "me"
    await until(lambda: sum(path.endswith("/events") for path in server.watching) == len(NAMESPACES))
    assert sum(path.endswith("/pods") for path in server.watching) == len(NAMESPACES)
    assert sum(path.endswith("/httproutes") for path in server.watching) == len(NAMESPACES)
    renewed = server.kept[LEASE]["spec"]["renewTime"]
    await until(lambda: server.kept[LEASE]["spec"]["renewTime"] > renewed)
    await end(running)
    assert server.kept[LEASE]["spec"]["holderIdentity"] == "", "given up at once"


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
async def test_nothing_is_made_before_whose_turn_it_is_to_roll_has_been_read(
    server: APIServer, running: asyncio.Task[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tandem_operator.process.app._API_POLL_SECONDS", 0.05)
    server.answers_before = [
        web.json_response({"message": "etcdserver: leader changed", "code": 500, "kind": "Status"}, status=500),
        web.Response(text='{"items": [{"metadata": {"na', content_type="application/json"),
        web.Response(status=503, text="no endpoints"),
    ]
    await until(lambda: not server.answers_before)
    assert not any("statefulsets" in path for path in server.kept), "the lists before were no lists"
    await until(lambda: "conditions" in server.kept[MODEL].get("status", {}))
    assert "/apis/apps/v1/namespaces/n3/statefulsets/m-decode" in server.kept
    await until(lambda: sum(path.endswith("/inferencemodels") for path in server.watching) == len(NAMESPACES))
    await end(running)
