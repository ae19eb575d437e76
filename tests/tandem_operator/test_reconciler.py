"""One look at a model over real HTTP, against a server that stores what it is sent: keys come first, and hold pods."""

from __future__ import annotations

import base64
from collections.abc import AsyncIterator
from typing import Any

import pytest
from aiohttp import web
from kubernetes.aio.client import ApiClient, Configuration
from operator_objects import RELEASE, raw_model
from tandem_operator.keeper import KeyKeeper
from tandem_operator.kube.client import KubeClient
from tandem_operator.kube.store import ChildStore
from tandem_operator.manifests import KIND_BY_NAME, ModelKey
from tandem_operator.reconciler import Reconciler
from tandem_operator.recorder import EventRecorder
from tandem_operator.rotation import KeyPolicy

MODEL = "/apis/tandem.dev/v1alpha1/namespaces/n/inferencemodels/m"
SECRET = "/api/v1/namespaces/n/secrets/m-keys"
DECODE = "/apis/apps/v1/namespaces/n/statefulsets/m-decode"
KEY = ModelKey("n", "m")
SETTLE = 180.0


class ObjectServer:
    """Objects by path; an apply replaces. Refuses nothing."""

    def __init__(self) -> None:
        self.kept: dict[str, dict[str, Any]] = {}
        self.written: list[str] = []
        self.deleted: list[str] = []
        self.url = ""

    async def handle(self, request: web.Request) -> web.Response:
        path = request.path
        if request.method == "GET":
            found = {"items": []} if path.endswith("/events") else self.kept.get(path)
            return web.json_response(found or {"message": "not found"}, status=200 if found else 404)
        if request.method == "DELETE":
            self.deleted.append(path)
            return web.json_response({})
        body = await request.json()
        if request.method == "POST":
            path = f"{path}/{body['metadata']['name']}"
        self.written.append(path)
        if path.endswith("/status"):
            self.kept[path.removesuffix("/status")]["status"] = body["status"]
        else:
            body["metadata"] |= {"uid": f"uid of {path}", "resourceVersion": str(len(self.written)), "generation": 1}
            self.kept[path] = body
        return web.json_response(body)

    @property
    def conditions(self) -> dict[str, dict[str, Any]]:
        return {condition["type"]: condition for condition in self.kept[MODEL]["status"]["conditions"]}

    @property
    def event_reasons(self) -> list[str]:
        return [found["reason"] for path, found in self.kept.items() if "/events/" in path]

    def annotate(self, **annotations: str) -> None:
        self.kept[MODEL]["metadata"]["annotations"] = {f"tandem.dev/{k}": v for k, v in annotations.items()}

    def change(self, **spec: Any) -> None:
        self.kept[MODEL]["spec"] |= spec
        self.kept[MODEL]["metadata"]["generation"] += 1

    def begin(self) -> None:
        self.written.clear()


@pytest.fixture
async def server() -> AsyncIterator[ObjectServer]:
    objects = ObjectServer()
    objects.kept[MODEL] = {"kind": "InferenceModel", **raw_model()}
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", objects.handle)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    objects.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    yield objects
    await runner.cleanup()


class Operator:
    """Looks at model `m`, with a cache that knows what the server has."""

    def __init__(self, server: ObjectServer, client: KubeClient) -> None:
        self.now = 1_750_000_000.0
        self._server = server
        self._store = ChildStore()
        keeper = KeyKeeper(client, KeyPolicy(settle_seconds=SETTLE), clock=lambda: self.now)
        self._reconciler = Reconciler(client, self._store, RELEASE, keeper, EventRecorder(client, instance="test"))

    async def look(self) -> float | None:
        for found in self._server.kept.values():
            if (kind := KIND_BY_NAME.get(found["kind"])) is not None:
                self._store.put(kind, found)
        self._server.begin()
        return await self._reconciler.reconcile(KEY)


@pytest.fixture
async def operator(server: ObjectServer) -> AsyncIterator[Operator]:
    configuration = Configuration()
    configuration.host = server.url
    client = KubeClient(ApiClient(configuration))
    yield Operator(server, client)
    await client.close()


async def test_keys_are_there_before_the_pods_that_need_them(server: ObjectServer, operator: Operator) -> None:
    await operator.look()
    assert server.written[0] == SECRET
    assert DECODE in server.written
    assert "KeysMade" in server.event_reasons
    assert "Stalled" not in server.conditions


async def test_a_rotation_touches_the_secret_alone(server: ObjectServer, operator: Operator) -> None:
    await operator.look()
    server.annotate(**{"rotate-keys": "now"})
    for _ in range(3):
        operator.now += SETTLE
        await operator.look()
        assert [path for path in server.written if "/events/" not in path] == [SECRET]
    operator.now += SETTLE - 100
    server.annotate(**{"rotate-keys": "again"})
    assert (await operator.look() or 0) <= 100, "the next step is not forgotten"
    assert not server.deleted


async def test_without_usable_keys_pods_stay_as_they_are(server: ObjectServer, operator: Operator) -> None:
    await operator.look()
    server.kept[SECRET]["data"]["peers.json"] = base64.b64encode(b"{}").decode()
    server.change(engine={"maxBatchTokens": 64})
    await operator.look()
    stalled = server.conditions["Stalled"]
    assert (stalled["reason"], server.conditions["Ready"]["status"]) == ("KeysUnreadable", "False")
    assert "peers.json" in stalled["message"]
    assert DECODE not in server.written
    assert SECRET not in server.written
    assert not server.deleted
    server.change(suspend=True)
    await operator.look()
    assert DECODE in server.written, "pods that go need no keys"
    server.change(suspend=False)
    del server.kept[SECRET]
    await operator.look()
    assert server.written[0] == SECRET
    assert DECODE in server.written
    assert "Stalled" not in server.conditions


async def test_a_secret_of_somebody_else_is_named(server: ObjectServer, operator: Operator) -> None:
    foreign = {"kind": "Secret", "apiVersion": "v1", "metadata": {"name": "m-keys", "namespace": "n"}}
    server.kept[SECRET] = dict(foreign)
    await operator.look()
    assert server.conditions["Stalled"]["reason"] == "ChildNameTaken"
    assert "Secret m-keys" in server.conditions["Stalled"]["message"]
    assert server.kept[SECRET] == foreign
    assert DECODE not in server.written
