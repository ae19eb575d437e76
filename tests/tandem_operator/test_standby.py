"""Workers that stay while a model sleeps: they come back without weights, serve nobody, and wake with their model."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from api_double import serving
from kubernetes.aio.client import ApiClient, Configuration
from operator_objects import blueprint, container, pod, raw_model
from tandem_api.launch import WorkerConfig
from tandem_operator.kube.client import KubeClient
from tandem_operator.objects.manifests import Manifest, dig
from tandem_operator.objects.pods import is_on_standby
from tandem_operator.observe.replica import ObservedReplica, ReplicaState
from tandem_operator.rollout.replacement import RolePlan, RoleView, plan_replacement
from tandem_operator.workloads import build_children
from test_desired import PREFILL, OwningServer, look, scaling
from test_kstatus import kstatus
from test_reconciler import DECODE, GATEWAY, MODEL
from test_scaler import SLO, D
from test_sleeping import IDLE_AFTER, Sleeper

PODS = "/api/v1/namespaces/n/pods"
SPEC: dict[str, Any] = {
    "prefill": scaling("SLO"), "decode": scaling("SLO", min=2), "slo": SLO,
    "autoscaling": {"scaleToZero": {"idleAfter": "1m", "standby": {}}, "behavior": {"scaleDownStabilization": "2m"}},
}  # fmt: skip
ASLEEP = ["True ScaledToZero", "True ScaledToZero", "", ""]


class Standbys(OwningServer):
    """Pods that are made while their launch configuration says so go on standby."""

    def __init__(self) -> None:
        super().__init__()
        self.made = 0
        self.current = "new"
        """The revision that StatefulSets were at before the newest, until all pods are of that."""

    def settle(self) -> None:
        for path in self.deleted:
            if path.startswith(PODS):
                self.kept.pop(path, None)
        self.deleted = [path for path in self.deleted if not path.startswith(PODS)]
        super(OwningServer, self).settle()
        revisions = {
            p["metadata"]["labels"]["controller-revision-hash"] for n, p in self.kept.items() if n.startswith(PODS)
        }
        for path in (DECODE, PREFILL):
            if path in self.kept and "old" in revisions:
                self.kept[path]["status"]["currentRevision"] = self.current
        for path in (DECODE, PREFILL):
            if path not in self.kept:
                continue
            name, count = path.rpartition("/")[2], self.kept[path]["spec"]["replicas"]
            for number in range(10):
                at = f"{PODS}/{name}-{number}"
                if number < count and at not in self.kept:
                    self.make(f"{name}-{number}", ready=not self.config(path).standby)
                elif number >= count:
                    self.kept.pop(at, None)

    def make(self, name: str, *, ready: bool) -> None:
        self.made += 1
        at = datetime.now(UTC) + timedelta(seconds=2 if not ready else -3600)
        metadata = {"creationTimestamp": f"{at:%FT%TZ}"}
        path = self.add_pod(name, metadata=metadata, **container(started=True, ready=ready))
        self.kept[path]["metadata"]["uid"] = f"uid-{self.made}"
        self.say(path, ready=ready)

    def say(self, path: str, *, ready: bool) -> None:
        state = "True" if ready else "False"
        self.kept[path]["status"]["conditions"] = [
            {"type": kind, "status": state} for kind in ("Ready", "ContainersReady")
        ]
        self.kept[path]["status"]["containerStatuses"][0]["ready"] = ready

    def config(self, path: str) -> WorkerConfig:
        volumes = self.kept[path]["spec"]["template"]["spec"]["volumes"]
        name = next(volume["configMap"]["name"] for volume in volumes if volume["name"] == "config")
        data = self.kept[f"/api/v1/namespaces/n/configmaps/{name}"]["data"]
        return WorkerConfig.model_validate_json(data["config.json"])

    @property
    def uids(self) -> dict[str, str]:
        return {path.rpartition("/")[2]: p["metadata"]["uid"] for path, p in self.kept.items() if path.startswith(PODS)}


class Resting(Sleeper):
    server: Standbys

    async def rest(self) -> None:
        await self.run(IDLE_AFTER + 30, 0.0)
        await look(self.server, self.operator)
        assert not self.awake

    def change(self, **spec: Any) -> None:
        self.server.change(**(SPEC | spec))


@pytest.fixture
async def resting() -> AsyncIterator[Resting]:
    server = Standbys()
    server.kept[MODEL] = {"kind": "InferenceModel", **raw_model(**SPEC)}
    async with serving(server.handle) as server.url:
        configuration = Configuration()
        configuration.host = server.url
        client = KubeClient(ApiClient(configuration))
        resting = Resting(server, client)
        await look(server, resting.operator, times=4)
        assert resting.replicas == (1, 2)
        yield resting
        await client.close()


async def test_workers_that_served_come_back_on_standby(resting: Resting) -> None:
    server, before = resting.server, dict(resting.server.uids)
    await resting.rest()
    assert resting.replicas == (1, 1)
    assert server.config(DECODE).standby
    assert server.config(PREFILL).standby
    assert set(server.uids) == {"m-prefill-0", "m-decode-0"}
    assert not set(server.uids.values()) & set(before.values())
    status = server.kept[MODEL]["status"]
    assert {key: status["decode"][key] for key in ("replicas", "ready", "updated", "standby", "summary")} == {
        "replicas": 1, "ready": 0, "updated": 1, "standby": 1, "summary": "0/0",
    }  # fmt: skip
    assert status["scaling"]["decode"]["desired"] == 0
    assert resting.conditions("Ready", "Available", "Stalled", "Reconciling") == ASLEEP
    assert server.conditions["Ready"]["message"].endswith("on standby: prefill 1/1, decode 1/1")
    assert kstatus(server.kept[MODEL]) == "Current"
    assert server.kept[GATEWAY]["spec"]["replicas"] == 1
    at_rest = dict(server.uids)
    for _ in range(3):
        await resting.run(60, 0.0)
        await look(server, resting.operator, times=1)
    assert server.written == [], "nothing is said again"
    assert server.uids == at_rest


async def test_they_wake_with_their_model(resting: Resting) -> None:
    server = resting.server
    await resting.rest()
    on_standby = dict(server.uids)
    await resting.request()
    assert resting.replicas == (1, 2)
    assert not server.config(DECODE).standby
    assert not server.config(PREFILL).standby
    assert resting.conditions("Ready", "Available") == ["True Waking", "True Waking"]
    await look(server, resting.operator)
    assert {name: server.uids[name] for name in on_standby} == on_standby, "they are the ones that wake"
    for name in on_standby:
        server.say(f"{PODS}/{name}", ready=True)
    resting.load.waiting = 0
    await resting.run(30, 0.2)
    assert resting.conditions("Ready", "Available") == ["True AllReplicasReady", "True Serving"]
    assert "standby" not in server.kept[MODEL]["status"]["decode"]


async def test_one_that_a_gateway_woke_wakes_its_model(resting: Resting) -> None:
    """The operator was away, and nothing is under way any more when it comes back."""
    server = resting.server
    await resting.rest()
    at_rest = dict(server.uids)
    server.say(f"{PODS}/m-decode-0", ready=True)
    resting.start()
    await look(server, resting.operator)
    await resting.run(10, 0.0)
    await look(server, resting.operator)
    assert resting.awake
    assert resting.replicas == (1, 2)
    assert {name: server.uids[name] for name in at_rest} == at_rest
    assert resting.events("WokeUp")[-1].endswith("A worker that was on standby serves, so the model wakes up.")


async def test_an_operator_that_begins_anew_leaves_them_on_standby(resting: Resting) -> None:
    await resting.rest()
    at_rest = dict(resting.server.uids)
    resting.start()
    await look(resting.server, resting.operator)
    await resting.run(60, 0.0)
    assert resting.server.uids == at_rest
    await resting.request()
    assert resting.replicas == (1, 2)


@pytest.mark.parametrize("paused", [False, True])
async def test_a_new_template_replaces_them(resting: Resting, paused: bool) -> None:
    """Unless rollouts are paused: those that wake are as they were."""
    server = resting.server
    await resting.rest()
    at_rest = dict(server.uids)
    resting.change(engine={"image": "w:2"}, rollout={"paused": paused})
    for path in (PREFILL, DECODE):
        server.kept[f"{PODS}/{path.rpartition('/')[2]}-0"]["metadata"]["labels"]["controller-revision-hash"] = "old"
    server.current = "old"
    await look(server, resting.operator, times=6)
    assert resting.replicas == (1, 1)
    assert set(server.uids.values()).isdisjoint(at_rest.values()) is not paused
    assert server.kept[MODEL]["status"]["decode"]["standby"] == 1
    assert resting.conditions("Ready", "Available", "Stalled") == ASLEEP[:3]
    assert resting.conditions("Reconciling") == (["True ScaledToZero"] if paused else [""])
    if not paused:
        assert kstatus(server.kept[MODEL]) == "Current"


async def test_a_suspension_takes_them_away_and_gives_them_back(resting: Resting) -> None:
    await resting.rest()
    resting.change(suspend=True)
    await look(resting.server, resting.operator)
    assert resting.replicas == (0, 0)
    assert resting.server.uids == {}
    resting.change(suspend=False)
    await look(resting.server, resting.operator)
    assert resting.replicas == (1, 1)
    assert not resting.awake
    assert resting.server.config(DECODE).standby


async def test_turning_it_off_and_on(resting: Resting) -> None:
    server = resting.server
    await resting.rest()
    resting.change(autoscaling={"scaleToZero": {"idleAfter": "1m"}})
    await look(server, resting.operator)
    assert resting.replicas == (0, 0)
    assert not resting.awake
    resting.change()
    await look(server, resting.operator)
    assert resting.replicas == (1, 1)
    assert server.kept[MODEL]["status"]["decode"]["standby"] == 1
    resting.change(autoscaling={})
    await look(server, resting.operator)
    assert resting.replicas == (1, 2)
    assert resting.awake
    assert not server.config(DECODE).standby


async def test_what_ails_one_is_told(resting: Resting) -> None:
    server = resting.server
    await resting.rest()
    status = server.kept[f"{PODS}/m-decode-0"]["status"]
    waits = {"waiting": {"reason": "ImagePullBackOff", "message": "no such image"}}
    status["containerStatuses"] = [{"name": "worker", "image": "w", "started": False, "ready": False, "state": waits}]
    await look(server, resting.operator)
    assert resting.conditions("Ready", "Stalled") == ["True ScaledToZero", "True ImagePullFailed"]
    assert server.kept[MODEL]["status"]["decode"]["standby"] == 0
    await resting.request()
    assert resting.awake, "requests wake it all the same"


def replica(index: int, *, outdated: bool = False, leaving: bool = False) -> ObservedReplica:
    return ObservedReplica(index=index, build="b", state=ReplicaState.DOWN, is_outdated=outdated, is_leaving=leaving)


@pytest.mark.parametrize(
    ("standby", "replicas", "even", "plan"),
    [
        (0, [], True, RolePlan(total=0, partition=0)),
        (0, [replica(0, outdated=True)], False, RolePlan(total=0, partition=0)),
        (2, [], True, RolePlan(total=2, partition=2)),
        (2, [replica(0), replica(1)], False, RolePlan(total=2, partition=0)),
        (2, [replica(0), replica(1, outdated=True)], False, RolePlan(total=2, partition=0, replace=(1,))),
        (1, [replica(0, outdated=True, leaving=True)], False, RolePlan(total=1, partition=0)),
        (1, [replica(0), replica(1, outdated=True)], False, RolePlan(total=1, partition=0)),
    ],
)
def test_plans_of_those_who_serve_nobody(
    standby: int, replicas: list[ObservedReplica], even: bool, plan: RolePlan
) -> None:
    view = RoleView(
        wanted=0, total=5, partition=0, replicas=replicas, surge=1, unavailable=0, is_even=even, standby=standby
    )
    assert plan_replacement({D: view}) == {D: plan}
    held = RolePlan(total=standby, partition=standby or None)
    assert plan_replacement({D: replace(view, is_withheld=True)}) == {D: plan if even else held}


def manifests(**spec: Any) -> dict[tuple[str, str], Manifest]:
    return {(m["kind"], m["metadata"]["name"]): m for m in build_children(blueprint(**spec))}


def probe(found: dict[tuple[str, str], Manifest]) -> str:
    (worker,) = found["StatefulSet", "m-decode"]["spec"]["template"]["spec"]["containers"]
    return worker["startupProbe"]["httpGet"]["path"]


def test_pods_have_started_once_they_are_on_standby_and_gateways_reach_them() -> None:
    """Of models that want that; all others are as they were."""
    with_standby, sleeps = manifests(**SPEC), manifests(**(SPEC | {"autoscaling": {"scaleToZero": {}}}))
    plain = manifests(**(SPEC | {"autoscaling": {}}))
    assert (probe(with_standby), probe(sleeps), probe(plain)) == ("/startz", "/readyz", "/readyz")
    assert with_standby["StatefulSet", "m-decode"]["spec"]["replicas"] == 1
    for found, opened in ((with_standby, True), (sleeps, True), (plain, False)):
        rules = found["NetworkPolicy", "m-prefill"]["spec"]["ingress"]
        ports = [
            port["port"]
            for rule in rules
            if dig(rule["from"][0], "podSelector", "matchLabels", "app.kubernetes.io/component") == "gateway"
            for port in rule["ports"]
        ]
        assert (8000 in ports) is opened
    text = next(m for (kind, name), m in with_standby.items() if kind == "ConfigMap" and name.startswith("m-decode-"))
    assert "standby" not in json.loads(text["data"]["config.json"]), "it is awake"


async def test_what_a_worker_that_starts_is_doing_is_told(resting: Resting) -> None:
    """By the gateways, of the pods that are there."""
    server = resting.server
    await resting.rest()
    await resting.request()
    for name, address in (("m-decode-0", "10.0.0.7"), ("m-prefill-0", "10.0.0.8")):
        server.kept[f"{PODS}/{name}"]["status"]["podIP"] = address
    said = [("m-decode-0", "10.0.0.7", "loading weights"), ("m-prefill-0", "10.9.9.9", "another pod of that name")]
    resting.operator.fleet.starting = {name: (address, words) for name, address, words in said}
    await look(server, resting.operator, times=1)
    message = server.conditions["Reconciling"]["message"]
    assert message.endswith("; m-decode-0 is still loading weights"), message


@pytest.mark.parametrize(
    ("fields", "since", "rests"),
    [
        ({"started": True, "ready": False}, "2026-01-01T00:00:01Z", True),
        ({"started": True, "ready": False}, "2026-01-01T00:01:00Z", False),
        ({"started": False, "ready": False}, "2026-01-01T00:00:01Z", False),
        ({"started": True, "ready": True}, "2026-01-01T00:01:00Z", False),
    ],
)
def test_one_that_was_ready_is_on_standby_no_more(fields: Manifest, since: str, rests: bool) -> None:
    """But unready, which is told."""
    state = "True" if fields["ready"] else "False"
    conditions = [{"type": t, "status": state, "lastTransitionTime": since} for t in ("Ready", "ContainersReady")]
    running = {"state": {"running": {"startedAt": "2026-01-01T00:00:02Z"}}}
    made = pod("m-decode-0", conditions=conditions, **container(**fields, **running))
    assert is_on_standby(made) is rests
