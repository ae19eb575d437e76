"""One look at a model over real HTTP, against a server that stores what it is sent: keys come first, and hold pods;
each failure is told and stops nothing else."""

from __future__ import annotations

import asyncio
import base64
import copy
import dataclasses
import json
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from time import time as clock
from typing import Any

import pytest
from aiohttp import web
from api_double import serving
from kubernetes.aio.client import ApiClient, Configuration
from operator_objects import READY, RELEASE, container, pod, raw_model
from prometheus_client import REGISTRY
from tandem_api.fleet import FleetReport
from tandem_operator.autoscale.scaler import Scaler
from tandem_operator.gateways.fleet import FleetView, FleetWatch
from tandem_operator.keys.keeper import KeyKeeper
from tandem_operator.keys.rotation import KeyPolicy
from tandem_operator.kube.client import KubeClient
from tandem_operator.kube.events import CreationEvents
from tandem_operator.kube.recorder import EventRecorder
from tandem_operator.kube.store import ChildStore, Kept
from tandem_operator.objects.errors import IncompleteError
from tandem_operator.objects.manifests import EVENT, KIND_BY_NAME, ModelKey
from tandem_operator.reconcile.reconciler import Reconciler
from tandem_operator.rollout.queue import RolloutQueue
from tandem_operator.rollout.revisions import digest_of
from tandem_operator.rollout.statefulsets import ABOVE_ALL
from tandem_operator.runtime import metrics
from tandem_operator.weights.hub import Hub, HubPolicy
from tandem_operator.workloads.release import Release

MODEL = "/apis/tandem.dev/v1alpha1/namespaces/n/inferencemodels/m"
SECRET = "/api/v1/namespaces/n/secrets/m-keys"
DECODE = "/apis/apps/v1/namespaces/n/statefulsets/m-decode"
KEY = ModelKey("n", "m")
SETTLE = 180.0


class ObjectServer:
    """Objects by path; an apply replaces."""

    def __init__(self) -> None:
        self.kept: dict[str, dict[str, Any]] = {}
        self.written: list[str] = []
        self.deleted: list[str] = []
        self.patched: dict[str, list[dict[str, Any]]] = {}
        """Merge patches by path."""
        self.requests: list[tuple[str, str]] = []
        self.refuse: dict[tuple[str, str], tuple[int, str]] = {}
        """By method and end of the path: a status and what it says."""
        self.before: Callable[[str, str], None] = lambda method, path: None
        """Told the method and the path of a request before it has an effect."""
        self.url = ""

    async def handle(self, request: web.Request) -> web.Response:
        path = request.path
        body = await request.json() if request.body_exists else {}
        if request.method == "POST":
            path = f"{path}/{body['metadata']['name']}"
        self.requests.append((request.method, path))
        self.before(request.method, path)
        for (method, end), (status, message) in self.refuse.items():
            if request.method == method and path.endswith(end):
                return web.json_response({"message": message}, status=status)
        if request.method == "GET":
            found = self.kept.get(path)
            return web.json_response(found or {"message": "not found"}, status=200 if found else 404)
        if request.method == "DELETE":
            self.deleted.append(path)
            return web.json_response({})
        if request.content_type == "application/merge-patch+json":
            self.patched.setdefault(path, []).append(body)
            for part, fields in body.items():
                self.kept[path][part] |= fields
            self.written.append(path)
            return web.json_response(self.kept[path])
        if request.method == "POST" and path in self.kept:
            return web.json_response({"message": f"{path} already exists"}, status=409)
        uid, kept = body["metadata"].get("uid"), self.kept.get(path, {"metadata": {}})
        if request.method == "PATCH" and "/status" not in path and uid not in (None, kept["metadata"].get("uid")):
            message = f'"m" is invalid: metadata.uid: Invalid value: "{uid}": field is immutable'
            return web.json_response({"message": message}, status=422)
        self.written.append(path)
        return web.json_response(self._keep(path, body))

    def _keep(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        if path.endswith("/status") and "/pods/" in path:
            conditions = self.kept[path.removesuffix("/status")]["status"].setdefault("conditions", [])
            for new in body["status"]["conditions"]:
                conditions[:] = [*(old for old in conditions if old["type"] != new["type"]), new]
        elif path.endswith("/status"):
            kept = self.kept[path.removesuffix("/status")]
            kept["status"] = body["status"]
            kept["metadata"]["resourceVersion"] = f"s{len(self.written)}"
            return kept
        else:
            body["metadata"] |= {"uid": f"uid of {path}", "resourceVersion": str(len(self.written)), "generation": 1}
            self.kept[path] = body
        return body

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
        self.kept[MODEL]["metadata"]["resourceVersion"] = f"g{self.kept[MODEL]['metadata']['generation']}"

    @property
    def version(self) -> str:
        return self.kept[MODEL]["metadata"]["resourceVersion"]

    def begin(self) -> None:
        self.written.clear()
        self.requests.clear()

    def add_pod(self, name: str, **fields: Any) -> str:
        """A pod of the StatefulSet that its name says. Returns its path."""
        owning = self.kept[f"{DECODE.rpartition('/')[0]}/{name.rpartition('-')[0]}"]
        owner, labels = owning["metadata"]["uid"], owning["spec"]["template"]["metadata"]["labels"]
        path = f"/api/v1/namespaces/n/pods/{name}"
        self.kept[path] = copy.deepcopy(pod(name, owner=owner, labels=labels | fields.pop("labels", {}), **fields))
        return path

    def settle(self) -> None:
        """Controllers have seen everything."""
        for path, found in self.kept.items():
            if "/statefulsets/" in path or "/deployments/" in path:
                replicas = found["spec"]["replicas"]
                found["status"] = {
                    "observedGeneration": found["metadata"]["generation"], "updateRevision": "new",
                    "currentRevision": "new", "replicas": replicas, "updatedReplicas": replicas,
                    "readyReplicas": replicas,
                }  # fmt: skip


@pytest.fixture
async def server() -> AsyncIterator[ObjectServer]:
    objects = ObjectServer()
    objects.kept[MODEL] = {"kind": "InferenceModel", **raw_model()}
    async with serving(objects.handle) as objects.url:
        yield objects


class Gateways(FleetWatch):
    """What gateways say: what a test has them say, else what they answer."""

    said: Sequence[FleetReport] = ()
    starting: Mapping[str, tuple[str, str]] = {}

    def view(self, key: ModelKey) -> FleetView:
        return dataclasses.replace(super().view(key), starting=self.starting) if self.starting else super().view(key)

    def heard(self, key: ModelKey) -> Sequence[tuple[FleetReport, float]]:
        return [(report, 0.0) for report in self.said] or super().heard(key)


class Operator:
    """Looks at model `m`, with a cache that knows what the server has."""

    def __init__(
        self,
        server: ObjectServer,
        client: KubeClient,
        hub: Hub | None = None,
        release: Release = RELEASE,
        status_seconds: float = 0.0,
        scaler: Scaler | None = None,
    ) -> None:
        self.now = 1_750_000_000.0
        self._server, self.client = server, client
        self.store = self._store = ChildStore()
        keeper = KeyKeeper(client, KeyPolicy(settle_seconds=SETTLE), clock=lambda: self.now)
        self.creations = CreationEvents()
        self.unserved: frozenset[str] = frozenset()
        recorder = EventRecorder(client, instance="test")
        self.rollouts = RolloutQueue()
        self.gone: list[ModelKey] = []
        """Models that were found to be deleted."""
        self.late: set[str] = set()
        """Paths of what the cache does not have yet."""
        self.fleet = self.gateways = Gateways(port=int(server.url.rpartition(":")[2]), seconds=(0.05, 0.05))
        self._reconciler = Reconciler(
            client,
            self._store,
            release,
            keeper,
            recorder,
            self.creations,
            hub,
            self.fleet,
            self.rollouts,
            scaler,
            unserved=lambda: self.unserved,
            on_gone=self.gone.append,
            status_seconds=status_seconds,
        )

    def learn(self) -> None:
        """The cache is as the server is, but for what it is late with."""
        for path, found in self._server.kept.items():
            if path not in self.late and (kind := KIND_BY_NAME.get(found["kind"])) is not None:
                self._store.put(kind, found)

    def forget(self, found: dict[str, Any]) -> None:
        """The cache has seen that this is gone."""
        self._store.remove(KIND_BY_NAME[found["kind"]], found)

    async def look(self, *, knows: bool = True) -> float | None:
        if knows:
            self.learn()
        self._server.begin()
        return await self._reconciler.reconcile(KEY)

    def has_written(self, version: str) -> bool:
        return self._reconciler.has_written(KEY, version)


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


GATEWAY = "/apis/apps/v1/namespaces/n/deployments/m"
WEBHOOK = (  # as API server 1.35 says it
    'Internal error occurred: failed calling webhook "images.corp.example": failed to call webhook: Post'
    ' "https://images.corp.svc:443/?timeout=2s": service "images" not found'
)


async def test_a_webhook_that_fails_for_one_child_stops_no_other(server: ObjectServer, operator: Operator) -> None:
    server.refuse["POST", "/services/m-decode"] = (500, WEBHOOK)
    with pytest.raises(IncompleteError, match="Service m-decode"):
        await operator.look()
    assert {DECODE, GATEWAY} <= set(server.written)
    found = server.conditions["Reconciling"]
    assert found["reason"] == "WebhookFailed"
    assert "Service m-decode" in found["message"]
    assert "ask who runs images.corp.example" in found["message"]
    del server.refuse["POST", "/services/m-decode"]
    await operator.look()
    assert server.conditions["Reconciling"]["reason"] == "Progressing"


async def test_a_pod_that_may_not_be_deleted_is_named(server: ObjectServer, operator: Operator) -> None:
    await operator.look()
    server.settle()
    path = server.add_pod("m-decode-0", labels={"controller-revision-hash": "old"}, **container())
    server.refuse["DELETE", "/pods/m-decode-0"] = (403, 'admission webhook "keep.example" denied the request: on call')
    await operator.look()
    stalled = server.conditions["Stalled"]
    assert (stalled["reason"], path in server.deleted) == ("Forbidden", False)
    assert "to delete Pod m-decode-0: admission webhook" in stalled["message"]
    assert stalled["message"].endswith("; ask who runs keep.example, or write what it wants")
    assert server.conditions["DecodeReady"]["message"].startswith("0/1 ready")


@pytest.mark.parametrize(
    ("status", "message", "reason", "advice"),
    [
        (403, "configmaps is forbidden: exceeded quota: small", "QuotaExceeded", "raise the ResourceQuota"),
        (403, 'User "x" cannot create resource "services"', "Forbidden", "the right to create it: upgrade its chart"),
        (422, "ValidatingAdmissionPolicy 'tidy' denied request", "Rejected", "ask who runs tidy"),
    ],
)
async def test_refusals_say_what_to_do(
    server: ObjectServer, operator: Operator, status: int, message: str, reason: str, advice: str
) -> None:
    server.refuse["POST", "/services/m"] = (status, message)
    await operator.look()
    stalled = server.conditions["Stalled"]
    assert stalled["reason"] == reason
    assert "Service m:" in stalled["message"]
    assert message in stalled["message"]
    assert advice in stalled["message"]


@pytest.mark.parametrize(
    "first", [("POST", "/secrets/m-keys"), ("POST", "/controllerrevisions/m-1"), ("POST", "/services/m")]
)
async def test_a_namespace_that_is_being_deleted_is_left_alone(
    server: ObjectServer, operator: Operator, first: tuple[str, str]
) -> None:
    """Its controller removes all, and the model maybe last: nothing is told that nobody reads."""
    words = 'things "m" is forbidden: unable to create new content in namespace n because it is being terminated'
    server.refuse[first] = (403, words)
    await operator.look()
    assert "status" not in server.kept[MODEL]
    assert not [path for path in server.written if "/events" in path]
    assert not server.deleted


async def test_an_api_server_that_does_not_give_keys_is_told_and_nothing_is_made(
    server: ObjectServer, operator: Operator
) -> None:
    server.refuse["GET", "/secrets/m-keys"] = (500, "etcd is away")
    with pytest.raises(IncompleteError):
        await operator.look()
    assert DECODE not in server.written
    assert "Secret m-keys: etcd is away" in server.conditions["Reconciling"]["message"]


BAD = {"podTemplate": {"metadata": {"labels": {"tandem.dev/role": "x"}}}}


async def test_a_bad_pod_template_freezes_neither_status_nor_the_other_role_nor_suspension(
    server: ObjectServer, operator: Operator
) -> None:
    await operator.look()
    server.settle()
    server.add_pod("m-decode-0", **READY)
    await operator.look()
    assert server.conditions["DecodeReady"]["status"] == "True"
    server.change(decode=BAD, gateway={"replicas": 2})
    await operator.look()
    assert (server.conditions["Stalled"]["reason"], DECODE in server.written) == ("InvalidPodTemplate", False)
    assert server.kept[GATEWAY]["spec"]["replicas"] == 2
    assert DECODE not in server.deleted
    server.kept["/api/v1/namespaces/n/pods/m-decode-0"]["status"] = container()
    await operator.look()
    assert server.conditions["DecodeReady"]["status"] == "False", "what is seen is told"
    assert server.kept[MODEL]["status"]["decode"]["ready"] == 0
    server.change(suspend=True)
    await operator.look()
    assert server.kept[DECODE]["spec"]["replicas"] == 0
    assert not server.deleted


async def test_a_stray_pod_stops_nothing(server: ObjectServer, operator: Operator) -> None:
    await operator.look()
    labels = {"tandem.dev/model": "m", "app.kubernetes.io/component": "decode", "tandem.dev/nodes-per-replica": "two"}
    server.kept["/api/v1/namespaces/n/pods/debug"] = pod("debug", owner="x", labels=labels)
    await operator.look()
    assert "Stalled" not in server.conditions


async def test_a_look_at_a_model_that_is_not_ready_asks_for_no_events(server: ObjectServer, operator: Operator) -> None:
    await operator.look()
    server.settle()
    assert "Stalled" not in server.conditions
    for reason, time in (("FailedCreate", "2026-01-01T00:00:00Z"), ("FailedCreate", "2026-01-01T00:01:00Z")):
        event = {
            "metadata": {"name": f"e{time}", "namespace": "n"}, "reason": reason, "lastTimestamp": time,
            "message": f"exceeded quota at {time}",
            "involvedObject": {"name": "m-decode", "uid": server.kept[DECODE]["metadata"]["uid"]},
        }  # fmt: skip
        assert operator.creations.put(EVENT, event) == Kept(KEY, is_news=True)
    await operator.look()
    assert "exceeded quota at 2026-01-01T00:01:00Z" in server.conditions["Stalled"]["message"]
    reads = [path for method, path in server.requests if method == "GET" and "/events/" not in path]
    assert sorted(reads) == [SECRET, MODEL], "the object and its keys, nothing else"


async def test_a_new_model_is_made_without_asking_what_there_is(server: ObjectServer, operator: Operator) -> None:
    await operator.look()
    reads = [path for method, path in server.requests if method == "GET"]
    assert sorted(reads) == [SECRET, MODEL]
    assert not [path for method, path in server.requests if method == "PATCH" and path != f"{MODEL}/status"]
    assert len(server.requests) <= 22


async def test_a_child_of_somebody_else_that_the_cache_does_not_know_is_left_alone(
    server: ObjectServer, operator: Operator
) -> None:
    path = "/api/v1/namespaces/n/services/m"
    foreign = {"kind": "Service", "metadata": {"name": "m", "namespace": "n", "uid": "x"}, "spec": {"ports": []}}
    server.kept[path] = copy.deepcopy(foreign)
    await operator.look()
    stalled = server.conditions["Stalled"]
    assert stalled["reason"] == "ChildNameTaken"
    assert stalled["message"].startswith("Service m exists and belongs to somebody else")
    assert server.kept[path] == foreign
    assert {DECODE, GATEWAY} <= set(server.written)
    del server.kept[path]
    await operator.look()
    assert path in server.written
    assert "Stalled" not in server.conditions


async def test_a_cache_that_is_late_makes_nothing_twice(server: ObjectServer, operator: Operator) -> None:
    """Everything is there already, made a moment ago: nothing is owned by another, nothing is changed."""
    await operator.look()
    before = {path: copy.deepcopy(found) for path, found in server.kept.items() if path != MODEL}
    late = Operator(server, operator.client)
    server.begin()
    await late.look(knows=False)
    assert {path: found for path, found in server.kept.items() if path in before} == before
    assert "Stalled" not in server.conditions


async def test_a_child_that_was_deleted_or_changed_by_hand_comes_back(server: ObjectServer, operator: Operator) -> None:
    await operator.look()
    service = "/api/v1/namespaces/n/services/m"
    made = copy.deepcopy(server.kept[service])
    server.kept[service]["spec"]["ports"][0]["port"] = 1
    await operator.look()
    assert server.kept[service]["spec"] == made["spec"]
    operator.forget(server.kept.pop(service))
    await operator.look()
    assert server.kept[service]["spec"] == made["spec"]


async def test_an_object_that_took_a_childs_name_is_not_written_for_a_cache_that_is_late(
    server: ObjectServer, operator: Operator
) -> None:
    await operator.look()
    service = "/api/v1/namespaces/n/services/m"
    server.kept[service]["spec"]["ports"][0]["port"] = 1
    operator.learn()
    foreign = {"kind": "Service", "metadata": {"name": "m", "namespace": "n", "uid": "x"}, "spec": {"ports": []}}
    server.kept[service] = copy.deepcopy(foreign)
    with pytest.raises(IncompleteError, match="Service m"):
        await operator.look(knows=False)
    assert server.kept[service] == foreign


async def test_what_was_created_is_claimed_before_it_is_changed(server: ObjectServer, operator: Operator) -> None:
    await operator.look()
    note = {"manager": "tandem-operator", "operation": "Update", "fieldsV1": {"f:spec": {"f:replicas": {}}}}
    server.kept[GATEWAY]["metadata"]["managedFields"] = [note]
    server.change(gateway={"replicas": 2})
    await operator.look()
    changes = [method for method, path in server.requests if path == GATEWAY]
    assert changes == ["GET", "PATCH", "PATCH"], "read, claimed, applied"
    assert server.patched[GATEWAY][0] == {
        "metadata": {
            "managedFields": [note | {"operation": "Apply"}],
            "resourceVersion": server.patched[GATEWAY][0]["metadata"]["resourceVersion"],
            "uid": f"uid of {GATEWAY}",
        }
    }
    assert server.kept[GATEWAY]["spec"]["replicas"] == 2


async def test_counts_are_told_together_and_what_matters_at_once(server: ObjectServer, operator: Operator) -> None:
    server.change(decode={"replicas": 3})
    patient = Operator(server, operator.client, status_seconds=30.0)
    await patient.look()
    server.settle()
    server.add_pod("m-decode-0", **container())
    assert (await patient.look() or 0) <= 30.0
    assert f"{MODEL}/status" not in server.written, "one pod more"
    assert server.kept[MODEL]["status"]["decode"]["replicas"] == 0
    server.kept["/api/v1/namespaces/n/pods/m-decode-0"]["status"] = dict(READY)
    server.kept["/api/v1/namespaces/n/pods/m-decode-0"]["status"] |= {"message": ""}
    add_gateway(server, state="Admitted")
    await patient.look()
    assert server.conditions["Available"]["status"] == "True", "at once"
    assert server.kept[MODEL]["status"]["decode"]["ready"] == 1


async def test_the_operators_own_status_is_no_reason_to_look(server: ObjectServer, operator: Operator) -> None:
    await operator.look()
    assert not operator.has_written(server.version), "there is a revision now: what follows from it is looked at"
    server.settle()
    server.add_pod("m-decode-0", **container())
    await operator.look()
    assert f"{MODEL}/status" in server.written
    assert operator.has_written(server.version)
    server.change(suspend=True)
    assert not operator.has_written(server.version)


@pytest.mark.parametrize("change", ["spec", "annotation"])
async def test_what_changed_between_a_look_and_its_status_is_a_reason_to_look(
    server: ObjectServer, operator: Operator, change: str
) -> None:
    """Its version has both, and of the one before it a watch that was away in between never tells."""
    await operator.look()
    server.settle()
    await operator.look()
    server.add_pod("m-decode-0", **container())

    def meanwhile(method: str, path: str) -> None:
        if (method, path) == ("PATCH", f"{MODEL}/status"):
            server.before = lambda method, path: None
            server.change(suspend=True) if change == "spec" else server.annotate(**{"rotate-keys": "now"})

    server.before = meanwhile
    await operator.look()
    assert f"{MODEL}/status" in server.written
    assert not operator.has_written(server.version)


async def test_a_restart_writes_nothing(server: ObjectServer, operator: Operator) -> None:
    await operator.look()
    server.settle()
    server.add_pod("m-decode-0", **READY)
    await operator.look()
    await operator.look()
    assert server.written == []


ROUTE = "/apis/gateway.networking.k8s.io/v1/namespaces/n/httproutes/m"
WITH_ROUTE = {"httpRoute": {"parentRefs": [{"name": "public"}]}}


async def test_a_route_that_cannot_be_made_is_told_and_everything_else_is_made(
    server: ObjectServer, operator: Operator
) -> None:
    operator.unserved = frozenset({"HTTPRoute"})
    server.change(gateway=WITH_ROUTE)
    await operator.look()
    stalled = server.conditions["Stalled"]
    assert stalled["reason"] == "GatewayAPIMissing"
    assert "spec.gateway.httpRoute" in stalled["message"]
    assert {DECODE, GATEWAY} <= set(server.written)
    assert not [path for _, path in server.requests if path == ROUTE], "it is not even asked for"
    operator.unserved = frozenset()
    await operator.look()
    assert ROUTE in server.written
    assert "Stalled" not in server.conditions


async def test_a_route_goes_with_its_field(server: ObjectServer, operator: Operator) -> None:
    server.change(gateway=WITH_ROUTE)
    await operator.look()
    assert ROUTE in server.written
    server.change(gateway={})
    await operator.look()
    assert server.deleted == [ROUTE]


CERTIFICATE = "/api/v1/namespaces/n/secrets/cert"


async def test_a_certificate_that_is_not_there_is_told(server: ObjectServer, operator: Operator) -> None:
    server.change(gateway={"tls": {"secretName": "cert"}})
    again = await operator.look()
    stalled = server.conditions["Stalled"]
    assert (stalled["reason"], server.conditions["Ready"]["reason"]) == ("TLSSecretNotFound",) * 2
    assert "kubectl create secret tls cert" in stalled["message"]
    assert again is not None, "no watch tells of it"
    assert GATEWAY in server.written, "its pods start as soon as the Secret is there"
    server.kept[CERTIFICATE] = {"kind": "PartialObjectMetadata", "metadata": {"name": "cert", "namespace": "n"}}
    await operator.look()
    assert "Stalled" not in server.conditions
    assert server.kept[MODEL]["status"]["url"] == "https://m.n.svc"


async def test_gateways_that_serve_outlive_the_secret_of_their_certificate(
    server: ObjectServer, operator: Operator
) -> None:
    server.kept[CERTIFICATE] = {"kind": "PartialObjectMetadata", "metadata": {"name": "cert", "namespace": "n"}}
    server.change(gateway={"tls": {"secretName": "cert"}})
    await operator.look()
    server.settle()
    await operator.look()
    before = server.conditions["Ready"]
    del server.kept[CERTIFICATE]
    await operator.look()
    assert server.conditions["Reconciling"]["reason"] == "TLSSecretNotFound"
    assert "Stalled" not in server.conditions
    assert server.conditions["Ready"]["status"] == before["status"]


async def test_conditions_are_figures_too(server: ObjectServer, operator: Operator) -> None:
    await operator.look()
    labels = {"namespace": "n", "model": "m"}
    name = "tandem_operator_model_condition"
    assert REGISTRY.get_sample_value(name, labels | {"type": "Ready"}) == 0
    server.change(suspend=True)
    await operator.look()
    server.settle()
    await operator.look()
    assert REGISTRY.get_sample_value(name, labels | {"type": "Stalled"}) == 1
    assert REGISTRY.get_sample_value(name, labels | {"type": "Suspended"}) == 1
    server.change(suspend=False, decode=BAD)
    await operator.look()
    assert REGISTRY.get_sample_value(name, labels | {"type": "Stalled"}) == 1
    assert REGISTRY.get_sample_value(name, labels | {"type": "Suspended"}) == 0, "nobody asked for that"
    metrics.forget_model(KEY)
    assert REGISTRY.get_sample_value(name, labels | {"type": "Stalled"}) is None


async def test_another_name_reaches_gateways_by_the_status_alone(server: ObjectServer, operator: Operator) -> None:
    await operator.look()
    server.settle()
    server.change(model={"uri": "hf://org/repo", "servedName": "new"})
    again = await operator.look()
    assert {DECODE, GATEWAY}.isdisjoint(server.written)
    routing = server.kept[MODEL]["status"]["routing"]
    assert routing["servedNames"] == ["new", "m"]
    assert (again or 999) <= 60, "the former name is taken away in time"
    assert "Renamed" in server.event_reasons
    server.change(model={"uri": 7})
    await operator.look()
    assert server.conditions["Stalled"]["reason"] == "InvalidSpec"
    assert server.kept[MODEL]["status"]["routing"] == routing, "what served last is served on"


A, B = "a" * 40, "b" * 40


class Weights:
    """An operator that asks a hub with one branch."""

    def __init__(self, server: ObjectServer, client: KubeClient, url: str) -> None:
        self.commit: str | None = A
        self._answered = asyncio.Event()
        self.hub = Hub(client, HubPolicy(), on_answer=lambda _: self._answered.set())
        release = dataclasses.replace(RELEASE, hub_endpoint=url)
        self.earlier = Operator(server, client, release=release)
        """One that asks nobody."""
        self.operator = Operator(server, client, self.hub, release)
        self._server = server

    async def look(self) -> list[str]:
        """Look when it is time to ask, and again once the hub has answered, as the work queue does. Returns what the
        second look wrote."""
        self.hub.forget(KEY)
        self._answered.clear()
        await self.operator.look()
        async with asyncio.timeout(60):
            await self._answered.wait()
        await self.operator.look()
        return [path for path in self._server.written if "/events/" not in path]

    @property
    def loaded(self) -> str:
        """The revision that decode pods are told."""
        return self.told["model"].get("revision", "main")

    @property
    def told(self) -> dict[str, Any]:
        """What decode pods are told."""
        volumes = self._server.kept[DECODE]["spec"]["template"]["spec"]["volumes"]
        (name,) = (volume["configMap"]["name"] for volume in volumes if volume["name"] == "config")
        return json.loads(self._server.kept[f"/api/v1/namespaces/n/configmaps/{name}"]["data"]["config.json"])


@pytest.fixture
async def weights(server: ObjectServer) -> AsyncIterator[Weights]:
    made: list[Weights] = []

    async def answer(_: web.Request) -> web.Response:
        return web.json_response({"sha": made[0].commit}) if made[0].commit else web.Response(status=503)

    configuration = Configuration()
    configuration.host = server.url
    client = KubeClient(ApiClient(configuration))
    async with serving(answer) as url:
        made.append(Weights(server, client, url))
        yield made[0]
        await made[0].hub.close()
    await client.close()


async def test_a_new_model_gets_pods_once_its_commit_is_known(server: ObjectServer, weights: Weights) -> None:
    weights.commit = None
    assert DECODE not in await weights.look()
    found = server.conditions["Reconciling"]
    assert found["reason"] == "HubUnreachable"
    assert "hub.resolve=false" in found["message"]
    weights.commit = A
    assert "rollout" not in server.kept[MODEL]["status"], "it has no revision before it has a commit"
    assert DECODE in await weights.look()
    assert weights.loaded == A
    assert server.kept[MODEL]["status"]["rollout"]["revision"] == 1
    assert server.kept[MODEL]["status"]["model"]["commit"] == A
    assert server.conditions["ModelResolved"]["status"] == "True"
    assert "ModelResolved" in server.event_reasons


async def test_a_branch_that_moves_is_told_and_rolled_when_somebody_says_so(
    server: ObjectServer, weights: Weights
) -> None:
    await weights.look()
    server.settle()
    weights.commit = B
    assert DECODE not in await weights.look()
    assert (weights.loaded, server.kept[MODEL]["status"]["model"]["latestCommit"]) == (A, B)
    assert server.conditions["ModelResolved"]["reason"] == "RevisionMoved"
    assert "RevisionMoved" in server.event_reasons
    server.annotate(**{"resolve-model": "now"})
    assert DECODE in await weights.look()
    assert weights.loaded == B
    server.settle()
    assert DECODE not in await weights.look(), "once"
    weights.commit = A
    server.change(model={"uri": "hf://org/repo", "followRevision": True})
    assert DECODE in await weights.look()
    assert weights.loaded == A


async def test_workers_that_an_earlier_operator_made_run_on_and_load_a_commit_when_they_are_replaced(
    server: ObjectServer, weights: Weights
) -> None:
    await weights.earlier.look()
    server.settle()
    before = server.kept[DECODE]
    assert DECODE not in await weights.look()
    assert server.kept[DECODE] == before
    assert server.conditions["ModelResolved"]["reason"] == "NotResolved"
    weights.commit = None
    server.change(engine={"image": "w:2"})
    assert DECODE not in await weights.look(), "what runs goes on"
    assert server.conditions["Reconciling"]["reason"] == "HubUnreachable"
    weights.commit = A
    assert DECODE in await weights.look()
    assert weights.loaded == A


async def test_a_lost_status_loses_no_commit(server: ObjectServer, weights: Weights) -> None:
    server.annotate(**{"resolve-model": "now"})
    await weights.look()
    server.settle()
    weights.commit = B
    server.kept[MODEL]["status"] = {"conditions": "unreadable"}
    assert DECODE not in await weights.look()
    assert weights.loaded == A
    assert server.kept[MODEL]["status"]["model"]["commit"] == A


async def test_a_model_that_names_a_commit_is_not_asked_about_any_more(server: ObjectServer, weights: Weights) -> None:
    await weights.look()
    assert weights.hub.look_after(KEY) is not None
    server.change(model={"uri": "hf://org/repo", "revision": B})
    await weights.operator.look()
    assert weights.loaded == B
    assert weights.hub.look_after(KEY) is None, "nothing would ever make it less than due"


async def test_a_draft_head_is_of_one_commit_that_no_branch_moves(server: ObjectServer, weights: Weights) -> None:
    await weights.look()
    server.settle()
    weights.commit = None
    guesses = {"draft": {"uri": "hf://org/head"}}
    server.change(engine={"speculative": guesses})
    assert DECODE not in await weights.look(), "what runs goes on until it is known"
    assert server.conditions["Reconciling"]["reason"] == "HubUnreachable"
    weights.commit = B
    for _ in range(2):  # one answer each for the model and its head
        await weights.look()
    assert weights.told["speculative"]["draft"]["revision"] == B
    assert weights.loaded == A
    assert server.kept[MODEL]["status"]["draft"] | {"resolvedAt": ""} == {
        "uri": "hf://org/head", "revision": "main", "commit": B, "resolvedAt": ""
    }  # fmt: skip
    server.settle()
    weights.commit = "c" * 40
    assert DECODE not in await weights.look()
    server.change(engine={"speculative": {"draft": guesses["draft"] | {"revision": A}}})
    await weights.operator.look()
    assert weights.told["speculative"]["draft"]["revision"] == A
    server.change(engine={"speculative": {"method": "Off", **guesses}})
    await weights.operator.look()
    assert "draft" not in server.kept[MODEL]["status"]


GATE = "tandem.dev/admitted"
UP = {"podIP": "10.0.0.1", "conditions": [{"type": "ContainersReady", "status": "True"}], **container(started=True)}


def add_gateway(server: ObjectServer, **worker: str) -> None:
    """A ready gateway pod at this server's address, and its report of one worker."""
    owner = {"kind": "ReplicaSet", "name": "m-5f", "uid": "rs", "controller": True}
    found = pod("m-5f-a", component="gateway", metadata={"ownerReferences": [owner]}, podIP="127.0.0.1", **READY)
    server.kept["/api/v1/namespaces/n/pods/m-5f-a"] = found
    told = {"name": "m-decode-0", "address": "10.0.0.1:8000", "role": "unified", "revision": "r", **worker}
    server.kept["/fleet"] = {"kind": "Fleet", "gateway": "m-5f-a", "startedAt": 1, "at": 2, "workers": [told]}


@asynccontextmanager
async def asking(operator: Operator) -> AsyncIterator[None]:
    """Gateways are asked meanwhile."""
    running = asyncio.create_task(operator.fleet.run())
    try:
        yield
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


async def until_reported(operator: Operator) -> None:
    async with asyncio.timeout(60):
        while not operator.fleet.view(KEY).standings:  # noqa: ASYNC110 -- the other end is a server
            await asyncio.sleep(0.01)


async def test_a_worker_is_ready_only_once_a_gateway_has_admitted_it(server: ObjectServer, operator: Operator) -> None:
    await operator.look()
    server.settle()
    path = server.add_pod("m-decode-0", **UP)
    server.kept[path]["spec"] = {"readinessGates": [{"conditionType": GATE}]}
    await operator.look()
    assert f"{path}/status" not in server.written, "no gateway has said anything"
    assert server.conditions["WorkersAdmitted"]["reason"] == "NoGatewayReady"
    add_gateway(server, state="Admitted")
    async with asking(operator):
        await operator.look()
        assert server.conditions["WorkersAdmitted"]["reason"] == "NotAskedYet"
        await until_reported(operator)
    await operator.look()
    gates = [c for c in server.kept[path]["status"]["conditions"] if c["type"] == GATE]
    assert [(gate["status"], gate["reason"]) for gate in gates] == [("True", "Admitted")]
    assert server.conditions["WorkersAdmitted"]["status"] == "True"
    await operator.look()
    assert server.written == [], "said once"


@pytest.mark.parametrize(
    ("kv", "often"),
    [
        ({}, False),
        ({"store": {"memory": "1Gi"}}, True),
        ({"disk": {"size": "8Gi"}}, True),
        ({"peers": "Auto"}, True),
    ],
    ids=["nothing", "store", "disk", "peers"],
)
async def test_gateways_of_a_model_with_tiers_are_asked_often(
    server: ObjectServer, operator: Operator, kv: dict[str, Any], often: bool
) -> None:
    """They are to be told of within seconds, and nothing else is under way."""
    server.change(kv=kv)
    await operator.look()
    server.settle()
    server.add_pod("m-decode-0", **READY)
    await operator.look()
    assert "Reconciling" not in server.conditions
    assert operator.fleet._models[KEY].fast is often


async def test_gateways_of_a_model_that_is_gone_are_not_asked(server: ObjectServer, operator: Operator) -> None:
    await operator.look()
    add_gateway(server)
    await operator.look()
    assert operator.fleet.view(KEY).silent
    del server.kept[MODEL]
    await operator.look()
    assert operator.fleet.view(KEY) == FleetView()


async def test_a_gate_that_may_not_be_set_is_told(server: ObjectServer, operator: Operator) -> None:
    server.change(gateway={"replicas": 0})
    await operator.look()
    server.settle()
    path = server.add_pod("m-decode-0", **UP)
    server.kept[path]["spec"] = {"readinessGates": [{"conditionType": GATE}]}
    server.refuse["PATCH", "/pods/m-decode-0/status"] = (403, 'User "x" cannot patch resource "pods/status"')
    await operator.look()
    stalled = server.conditions["Stalled"]
    assert stalled["reason"] == "Forbidden"
    assert "to admit Pod m-decode-0" in stalled["message"]
    assert "the right to patch it: upgrade its chart" in stalled["message"]
    server.refuse.clear()
    await operator.look()
    assert f"{path}/status" in server.written, "without a gateway nothing waits for one"


async def test_gateways_that_cannot_be_asked_are_named_where_workers_wait_for_them(
    server: ObjectServer, operator: Operator
) -> None:
    await operator.look()
    server.settle()
    path = server.add_pod("m-decode-0", **UP)
    server.kept[path]["spec"] = {"readinessGates": [{"conditionType": GATE}]}
    add_gateway(server)
    server.refuse["GET", "/fleet"] = (500, "no")
    async with asking(operator):
        await operator.look()
        async with asyncio.timeout(60):
            while "it answers 500" not in operator.fleet.view(KEY).silent.values():  # noqa: ASYNC110
                await asyncio.sleep(0.01)
    await operator.look()
    assert f"{path}/status" not in server.written, "it is not guessed"
    words = "1 of 1 gateways do not report: m-5f-a: it answers 500"
    assert words in server.conditions["WorkersAdmitted"]["message"]
    assert (server.conditions["Ready"]["reason"], server.conditions["Reconciling"]["reason"]) == ("NoReports",) * 2


STEPS = {"steps": [{"weight": 20, "duration": "1m"}]}
REVISION = "/apis/apps/v1/namespaces/n/controllerrevisions/m-"
FIRST, SECOND = f"{REVISION}1", f"{REVISION}2"


@pytest.mark.parametrize("labels", [True, False], ids=["own", "foreign"])
async def test_a_number_that_is_taken_is_given_to_nothing_else(
    server: ObjectServer, operator: Operator, labels: bool
) -> None:
    """The cache does not know it yet, and whatever was to remember it has failed; or it is somebody else's."""
    await serve(server, operator)
    taken = copy.deepcopy(server.kept[FIRST]) | {"revision": 2, "data": {"spec": {"engine": {"image": "w:other"}}}}
    taken["metadata"]["name"] = "m-2"
    if not labels:
        del taken["metadata"]["labels"], taken["metadata"]["ownerReferences"]
    server.change(engine={"image": "w:2"})
    operator.late.add(SECOND)
    server.kept[SECOND] = taken
    await operator.look()
    state = server.kept[MODEL]["status"]["rollout"]
    assert state["revision"] == 3
    assert server.kept[f"{REVISION}3"]["data"]["spec"]["engine"]["image"] == "w:2"
    assert server.kept[SECOND] is taken
    await operator.look()
    assert server.kept[MODEL]["status"]["rollout"]["revision"] == 3


async def serve(server: ObjectServer, operator: Operator, **spec: Any) -> None:
    """Revision 1 serves."""
    server.kept[MODEL]["spec"] |= {"engine": {"image": "w:1"}} | spec
    await operator.look()
    server.settle()
    server.add_pod("m-decode-0", **READY)
    await operator.look()
    assert server.kept[MODEL]["status"]["rollout"]["completeRevision"] == 1


async def begin_trial(server: ObjectServer, operator: Operator) -> None:
    """The new template is seen, then a pod of it is up beside the old one."""
    for _ in range(2):
        server.settle()
        server.kept[DECODE]["status"] |= {"updateRevision": "newer"}
        server.add_pod("m-decode-1", labels={"controller-revision-hash": "newer"}, **READY)
        await operator.look()


async def test_a_revision_is_kept_before_anything_is_made_of_it(server: ObjectServer, operator: Operator) -> None:
    await operator.look()
    made = [path for path in server.written if path in (FIRST, DECODE)]
    assert made == [FIRST, DECODE]
    kept = server.kept[FIRST]
    assert (kept["revision"], kept["data"]["spec"]["engine"]["image"]) == (1, "worker:1")
    assert kept["metadata"]["ownerReferences"][0]["kind"] == "InferenceModel"


async def test_a_canary_is_told_to_gateways_and_survives_the_operator(server: ObjectServer, operator: Operator) -> None:
    await serve(server, operator, rollout={"canary": STEPS})
    server.change(engine={"image": "w:2"})
    assert await operator.look() == 5.0
    assert {SECOND, DECODE} <= set(server.written)
    statuses = [index for index, path in enumerate(server.written) if path == f"{MODEL}/status"]
    assert statuses[0] < server.written.index(DECODE), "what is tried is remembered before it is made"
    await begin_trial(server, operator)
    status = server.kept[MODEL]["status"]
    assert status["rollout"]["canary"]["weight"] == 20
    assert status["routing"]["canary"] == {"percent": 20.0, "workers": ["m-decode-1"]}
    assert server.conditions["Reconciling"]["reason"] == "Canary"
    assert server.conditions["Ready"]["status"] == "True"


async def test_a_canary_that_fails_by_the_gateways_figures_goes_back(server: ObjectServer, operator: Operator) -> None:
    await serve(server, operator, rollout={"canary": STEPS | {"maxErrorRate": 5, "minRequests": 10}})
    old = server.kept[DECODE]["spec"]["template"]
    server.change(engine={"image": "w:2"})
    await operator.look()
    await begin_trial(server, operator)
    now = clock()
    worker = {"name": "m-decode-1", "address": "10.0.0.1", "role": "decode", "revision": "r", "state": "Admitted"}
    for requests, failures in ((0, 0), (40, 30)):
        told = worker | {"requests": requests, "failures": failures}
        report = {"gateway": "m-x", "startedAt": now - 100, "at": now, "workers": [told]}
        operator.gateways.said = [FleetReport.model_validate(report)]
        await operator.look()
    stalled = server.conditions["Stalled"]
    assert (stalled["reason"], server.conditions["Ready"]["status"]) == ("CanaryFailed", "True")
    assert "ErrorRateExceeded: 30 of 40 requests failed" in stalled["message"]
    assert server.kept[MODEL]["status"]["routing"]["canary"]["percent"] == 0.0
    assert server.kept[DECODE]["spec"]["template"] == old
    assert "CanaryFailed" in server.event_reasons


async def test_without_figures_a_limit_holds_the_step(server: ObjectServer, operator: Operator) -> None:
    steps = {"steps": [{"weight": 20, "duration": "0s"}]}
    await serve(server, operator, rollout={"canary": steps | {"maxErrorRate": 5}})
    server.change(engine={"image": "w:2"})
    await operator.look()
    await begin_trial(server, operator)
    for _ in range(3):
        await operator.look()
    assert "no gateway has reported figures for 45 s" in server.conditions["Reconciling"]["message"]
    server.change(rollout={"canary": steps})
    for _ in range(3):
        await operator.look()
    assert server.kept[MODEL]["status"]["rollout"]["phase"] == "Progressing"


async def test_only_so_many_revisions_are_kept(server: ObjectServer, operator: Operator) -> None:
    await serve(server, operator, rollout={"revisionHistoryLimit": 1})
    for number in (2, 3, 4):
        server.change(engine={"image": f"w:{number}"})
        await operator.look()
        server.settle()
        await operator.look()
    assert set(server.deleted) == {FIRST, SECOND}
    assert server.kept[MODEL]["status"]["rollout"]["revision"] == 4


async def test_a_revision_that_is_not_kept_is_named(server: ObjectServer, operator: Operator) -> None:
    await serve(server, operator)
    server.change(rollout={"revision": 9})
    await operator.look()
    assert (server.conditions["Stalled"]["reason"], server.conditions["Ready"]["status"]) == (
        "RevisionNotFound",
        "True",
    )
    assert ("GET", f"{REVISION}9") in server.requests, "the cache may be late"
    assert DECODE not in server.written


async def test_workers_are_admitted_by_the_revision_that_they_have(server: ObjectServer, operator: Operator) -> None:
    """The spec has no prefill workers any more, the revision that was gone back to has."""
    server.kept[MODEL]["spec"] |= {"prefill": {"replicas": 1}, "gateway": {"replicas": 0}}
    await operator.look()
    server.settle()
    del server.kept[MODEL]["spec"]["prefill"]
    server.change(rollout={"revision": 1})
    path = server.add_pod("m-prefill-0", **UP)
    server.kept[path]["spec"] = {"readinessGates": [{"conditionType": GATE}]}
    await operator.look()
    assert f"{path}/status" in server.written


async def wait_for_turn(server: ObjectServer, operator: Operator) -> None:
    """The model has something to roll, and another one has the turn."""
    await serve(server, operator)
    operator.rollouts.limit = 1
    assert operator.rollouts.request_slot(ModelKey("n", "other"), since="2026")
    server.change(engine={"image": "w:2"})
    await operator.look()
    server.settle()
    server.kept[DECODE]["status"] |= {"updateRevision": "newer"}
    await operator.look()
    assert server.conditions["Reconciling"]["reason"] == "WaitingForTurn"


async def test_one_model_waits_for_another(server: ObjectServer, operator: Operator) -> None:
    await wait_for_turn(server, operator)
    assert server.kept[DECODE]["spec"]["updateStrategy"]["rollingUpdate"]["partition"] == ABOVE_ALL
    server.settle()
    server.kept[DECODE]["status"] |= {"updateRevision": "newer"}
    operator.rollouts.release_slot(ModelKey("n", "other"))
    await operator.look()
    assert server.conditions["Reconciling"]["reason"] != "WaitingForTurn"
    assert server.kept[DECODE]["spec"]["replicas"] == 2


async def test_a_spec_that_cannot_be_read_keeps_nobody_waiting(server: ObjectServer, operator: Operator) -> None:
    await wait_for_turn(server, operator)
    server.change(engine={"image": "w:2", "device": "TPU"})
    await operator.look()
    operator.rollouts.release_slot(ModelKey("n", "other"))
    assert operator.rollouts.request_slot(ModelKey("n", "third"), since="2999")


async def test_suspension_holds_though_the_rest_cannot_be_read(server: ObjectServer, operator: Operator) -> None:
    await serve(server, operator)
    server.change(engine={"image": "w:2", "device": "TPU"})
    await operator.look()
    assert server.conditions["Stalled"]["reason"] == "InvalidSpec"
    assert server.kept[DECODE]["spec"]["replicas"] == 1
    server.change(suspend=True)
    await operator.look()
    assert (server.kept[DECODE]["spec"]["replicas"], server.kept[GATEWAY]["spec"]["replicas"]) == (0, 0)
    assert "its pods are scaled to zero" in server.conditions["Stalled"]["message"]
    assert server.conditions["Available"]["status"] == "False"
    await operator.look()
    assert server.written == []


def pods_and_templates(server: ObjectServer) -> dict[str, Any]:
    kept = server.kept.items()
    return {
        path: copy.deepcopy(found.get("spec")) for path, found in kept if path in (DECODE, GATEWAY) or "/pods/" in path
    }


async def test_fields_that_only_a_later_release_knows_are_told_and_the_rest_is_followed(
    server: ObjectServer, operator: Operator
) -> None:
    await serve(server, operator)
    before = pods_and_templates(server)
    server.change(engine={"image": "w:1", "lookahead": 4}, future={})
    await operator.look()
    told = server.conditions["SpecUnderstood"]
    assert (told["status"], told["reason"]) == ("False", "UnknownFields")
    assert "which does not know spec.engine.lookahead, spec.future: no effect until" in told["message"]
    assert server.conditions["Ready"]["status"] == "True"
    assert not {"Stalled", "Reconciling"} & server.conditions.keys()
    assert server.kept[MODEL]["status"]["observedGeneration"] == 2
    assert server.event_reasons.count("UnknownFields") == 1
    assert pods_and_templates(server) == before
    assert not server.deleted
    await operator.look()
    assert server.written == [], "said once"
    server.change(gateway={"replicas": 2})
    await operator.look()
    assert server.kept[GATEWAY]["spec"]["replicas"] == 2, "what is known is followed"
    server.change(engine={"image": "w:1"}, gateway={"replicas": 1})
    del server.kept[MODEL]["spec"]["future"]
    await operator.look()
    assert "SpecUnderstood" not in server.conditions
    assert "SpecUnderstood" in server.event_reasons
    assert pods_and_templates(server) == before
    assert FIRST in server.kept
    assert SECOND not in server.kept, "a field that is not known makes no revision"


async def test_a_revision_of_a_later_release_is_taken_over_without_a_canary(
    server: ObjectServer, operator: Operator
) -> None:
    """The operator alone went back: it keeps the number and what the later one kept, which finds all as it was."""
    await serve(server, operator, rollout={"canary": STEPS})
    kept = server.kept[FIRST]["data"]["spec"]
    kept["engine"]["lookahead"] = 8
    later = digest_of(kept)
    server.kept[MODEL]["status"]["rollout"]["digest"] = later
    server.change(engine={"image": "w:1", "lookahead": 8})
    before = pods_and_templates(server)
    for _ in range(2):
        await operator.look()
        rollout = server.kept[MODEL]["status"]["rollout"]
        assert (rollout["phase"], rollout["revision"], rollout["digest"]) == ("Complete", 1, later)
    assert (SECOND in server.kept, server.kept[FIRST]["data"]["spec"], pods_and_templates(server)) == (
        False, kept, before,
    )  # fmt: skip
    server.change(engine={"image": "w:2", "lookahead": 8})
    await operator.look()
    assert server.kept[MODEL]["status"]["rollout"]["phase"] == "Canary", "it can go back to a revision that it reads"


async def test_a_value_that_only_a_later_release_knows_holds_all_and_what_serves_serves_on(
    server: ObjectServer, operator: Operator
) -> None:
    await serve(server, operator)
    before = pods_and_templates(server)
    server.change(engine={"image": "w:2", "device": "TPU"}, gateway={"replicas": 1})
    await operator.look()
    stalled = server.conditions["Stalled"]
    assert stalled["reason"] == "InvalidSpec"
    assert stalled["message"].startswith("spec.engine.device: Input should be 'Auto', 'CUDA' or 'CPU'")
    assert stalled["message"].endswith("its pods stay as they are")
    assert server.conditions["Ready"]["status"] == "True", "as clients see it"
    assert pods_and_templates(server) == before
    path = server.add_pod("m-decode-0", **UP)
    server.kept[path]["spec"] = {"readinessGates": [{"conditionType": GATE}]}
    add_gateway(server, state="Admitted")
    async with asking(operator):
        await operator.look()
        assert server.conditions["Ready"]["status"] == "False", "a worker was lost"
        await until_reported(operator)
    await operator.look()
    gates = [c for c in server.kept[path]["status"]["conditions"] if c["type"] == GATE]
    assert [gate["status"] for gate in gates] == ["True"], "the one that was made in its place is admitted"
    server.kept[path]["status"] = READY
    await operator.look()
    assert server.conditions["Ready"]["status"] == "True"
    assert [path for path in server.written if path != f"{MODEL}/status" and "/events/" not in path] == []
    assert not server.deleted
    server.change(engine={"image": "w:2"})
    await operator.look()
    assert "Stalled" not in server.conditions
    assert DECODE in server.written


async def test_a_model_that_vanished_unseen_leaves_no_figures(server: ObjectServer, operator: Operator) -> None:
    """A watch that was away does not tell of a deletion; the look at a child that goes with it does."""
    await operator.look()
    labels = {"namespace": "n", "model": "m", "type": "Ready"}
    assert REGISTRY.get_sample_value("tandem_operator_model_condition", labels) == 0
    assert operator.gone == []
    del server.kept[MODEL]
    await operator.look()
    assert operator.gone == [KEY]
    assert REGISTRY.get_sample_value("tandem_operator_model_condition", labels) is None


PREWARMED = {"uri": "hf://org/repo", "cache": {"persistentVolumeClaim": "models", "prewarm": True}}


def jobs_of(server: ObjectServer) -> list[str]:
    return [path for path in server.kept if "/jobs/" in path]


async def test_a_new_model_and_a_new_revision_wait_for_the_job_that_fills_the_claim(
    server: ObjectServer, operator: Operator
) -> None:
    server.change(model=PREWARMED)
    await operator.look()
    (job,) = jobs_of(server)
    assert DECODE not in server.kept
    assert server.conditions["Reconciling"]["reason"] == "Prewarming"
    await operator.look()
    assert job not in server.written, "a Job is made once"
    server.kept[job]["status"] = {"conditions": [{"type": "Complete", "status": "True"}]}
    await operator.look()
    assert server.conditions["CachePrewarmed"]["status"] == "True"
    template = copy.deepcopy(server.kept[DECODE]["spec"]["template"])
    server.settle()
    server.change(model=PREWARMED | {"revision": "v2"}, decode={"replicas": 3})
    await operator.look()
    assert server.kept[DECODE]["spec"]["template"] == template, "what serves goes on as it is"
    assert server.kept[DECODE]["spec"]["replicas"] == 3, "it is scaled all the same"
    assert server.deleted == [job]
    operator.forget(server.kept.pop(job))
    (second,) = jobs_of(server)
    server.kept[second]["status"] = {"conditions": [{"type": "Complete", "status": "True"}]}
    await operator.look()
    assert server.kept[DECODE]["spec"]["template"] != template
    server.change(model=PREWARMED | {"revision": "v2", "cache": {"persistentVolumeClaim": "models"}})
    await operator.look()
    assert server.deleted[1:] == [second, "/apis/networking.k8s.io/v1/namespaces/n/networkpolicies/m-prewarm"]
    assert "CachePrewarmed" not in server.conditions


async def test_a_job_that_failed_stalls_the_model_and_is_made_anew_once_it_is_deleted(
    server: ObjectServer, operator: Operator
) -> None:
    server.change(model=PREWARMED)
    await operator.look()
    (job,) = jobs_of(server)
    server.kept[job]["status"] = {"conditions": [{"type": "Failed", "status": "True", "message": "too often"}]}
    await operator.look()
    assert server.conditions["Stalled"]["reason"] == "PrewarmFailed"
    assert DECODE not in server.kept
    operator.forget(server.kept.pop(job))
    await operator.look()
    assert jobs_of(server) == [job]
    assert "Stalled" not in server.conditions
