"""Who sets the number of a role's replicas: looks at a model against a server that knows whose `spec.replicas` is.

The server follows the rules of server-side apply for that one field: one that its only manager applies no longer falls
back to its default, another value is a conflict unless it is forced, and an update takes a field over.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest
from aiohttp import web
from api_double import serving
from hypothesis import given
from hypothesis import strategies as st
from kubernetes.aio.client import ApiClient, Configuration
from operator_objects import READY, blueprint, raw_model, stateful_set
from tandem_api.crd.resource import InferenceModel
from tandem_api.crd.status import ScalingStatus
from tandem_api.names import Role
from tandem_operator.autoscale.desired import Recommendation, settle_replicas
from tandem_operator.kube.client import KubeClient
from tandem_operator.objects.manifests import ChildKey, Manifest
from tandem_operator.reconcile.status import is_same_memory
from tandem_operator.rollout.revisions import content_of, digest_of
from test_reconciler import DECODE, GATEWAY, KEY, MODEL, ObjectServer, Operator

NOW = "2026-01-01T00:00:00Z"
SLO = {"ttft": {"seconds": 1}, "tpot": {"seconds": 0.05}}
PREFILL = "/apis/apps/v1/namespaces/n/statefulsets/m-prefill"


def scaling(mode: str, **more: Any) -> dict[str, Any]:
    return {"scaling": {"mode": mode} | ({"max": 8} if mode == "SLO" else {}) | more}


class OwningServer(ObjectServer):
    """Knows the managers of `spec.replicas` of StatefulSets."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: list[int] = []
        """Every number that the decode StatefulSet ever had, one after another."""

    async def handle(self, request: web.Request) -> web.Response:
        path = request.path
        if "/statefulsets" not in path or request.method not in ("POST", "PATCH"):
            return await super().handle(request)
        body, manager = await request.json(), request.query["fieldManager"]
        if request.method == "POST":
            answer = await super().handle(request)
            if answer.status == 200:
                made = self.kept[f"{path}/{body['metadata']['name']}"]
                self._own(made, manager, "Update", "", has="replicas" in body["spec"])
        elif request.content_type == "application/merge-patch+json":
            answer = await super().handle(request)
            if "replicas" in body.get("spec", {}):
                self._take(self.kept[path], manager, "Update", "")
        else:
            answer = await self._apply(request, path, body, manager)
        self._note()
        return answer

    async def _apply(self, request: web.Request, path: str, body: Manifest, manager: str) -> web.Response:
        live = self.kept[path]
        have, want = live["spec"]["replicas"], body["spec"].get("replicas")
        others = [e for e in self._owners(live) if (e["manager"], e["operation"]) != (manager, "Apply")]
        mine = [e for e in self._owners(live) if e not in others]
        if want is not None and want != have:
            if others and request.query["force"] != "true":
                return web.json_response({"message": f"conflict with {others[0]['manager']}"}, status=409)
            for entry in others:
                self._own(live, entry["manager"], entry["operation"], entry.get("subresource", ""), has=False)
        elif want is None and mine and not others:
            want = 1
        self._own(live, manager, "Apply", "", has="replicas" in body["spec"])
        managed = live["metadata"]["managedFields"]
        spec = body["spec"] | {"replicas": have if want is None else want}
        changed = spec["replicas"] != have or manager == "tandem-operator"
        if manager == "tandem-operator":
            status = live.get("status")
            answer = await super().handle(request)
            self.kept[path]["spec"] = spec
            if status is not None:
                self.kept[path]["status"] = status
        else:
            live["spec"] = live["spec"] | spec
            answer = web.json_response(live)
        self.kept[path]["metadata"]["managedFields"] = managed
        self.kept[path]["metadata"]["generation"] = live["metadata"].get("generation", 1) + changed
        return answer

    def scale(self, path: str, replicas: int) -> None:
        """As an autoscaler does, by the subresource."""
        live = self.kept[path]
        live["spec"]["replicas"] = replicas
        live["metadata"]["generation"] += 1
        self._take(live, "kube-controller-manager", "Update", "scale")
        self._note()

    def managers(self, path: str = DECODE) -> set[str]:
        return {entry["manager"] for entry in self._owners(self.kept[path])}

    def _take(self, live: Manifest, manager: str, operation: str, subresource: str) -> None:
        for entry in self._owners(live):
            self._own(live, entry["manager"], entry["operation"], entry.get("subresource", ""), has=False)
        self._own(live, manager, operation, subresource, has=True)

    @staticmethod
    def _owners(live: Manifest) -> list[Manifest]:
        managed = live["metadata"].get("managedFields", [])
        return [entry for entry in managed if "f:replicas" in entry["fieldsV1"].get("f:spec", {})]

    @staticmethod
    def _own(live: Manifest, manager: str, operation: str, subresource: str, *, has: bool) -> None:
        managed = live["metadata"].setdefault("managedFields", [])
        identity = {"manager": manager, "operation": operation} | ({"subresource": subresource} if subresource else {})
        managed[:] = [e for e in managed if {k: e[k] for k in e if k != "fieldsV1"} != identity]
        managed.append(identity | {"fieldsV1": {"f:spec": {"f:replicas": {}} if has else {}}})

    def _note(self) -> None:
        if DECODE in self.kept:
            count = self.kept[DECODE]["spec"]["replicas"]
            if self.counts[-1:] != [count]:
                self.counts.append(count)

    def settle(self) -> None:
        """Controllers have made and removed pods."""
        super().settle()
        for path in (DECODE, PREFILL):
            if path not in self.kept:
                continue
            name, count = path.rpartition("/")[2], self.kept[path]["spec"]["replicas"]
            for number in range(10):
                at = f"/api/v1/namespaces/n/pods/{name}-{number}"
                if number < count and at not in self.kept:
                    self.add_pod(f"{name}-{number}", **READY)
                elif number >= count:
                    self.kept.pop(at, None)


@pytest.fixture
async def server() -> AsyncIterator[OwningServer]:
    objects = OwningServer()
    objects.kept[MODEL] = {"kind": "InferenceModel", **raw_model(decode={"replicas": 3})}
    async with serving(objects.handle) as objects.url:
        yield objects


@pytest.fixture
async def operator(server: OwningServer) -> AsyncIterator[Operator]:
    configuration = Configuration()
    configuration.host = server.url
    client = KubeClient(ApiClient(configuration))
    yield Operator(server, client)
    await client.close()


async def look(server: OwningServer, operator: Operator, times: int = 3) -> None:
    for _ in range(times):
        server.settle()
        for gone in [
            key for key in operator_pods(operator) if f"/api/v1/namespaces/n/pods/{key.name}" not in server.kept
        ]:
            operator.forget({"kind": "Pod", "metadata": {"name": gone.name, "namespace": "n", "labels": LABELS}})
        await operator.look()


LABELS = {"tandem.dev/model": "m"}


def operator_pods(operator: Operator) -> list[ChildKey]:
    """Their names alone: unpacking every child, several thousand times, is a tenth of these tests."""
    return [key for key in operator.store._models.get(KEY, {}) if key.kind == "Pod"]


def told(server: OwningServer) -> dict[str, Any]:
    return server.kept[MODEL]["status"]["scaling"]["decode"]


async def test_a_number_that_is_handed_over_never_changes_by_that(server: OwningServer, operator: Operator) -> None:
    await look(server, operator)
    server.change(decode={"replicas": 3} | scaling("External"))
    await look(server, operator)
    assert server.counts == [3]
    assert server.managers() == {"tandem-operator-handover"}
    server.scale(DECODE, 5)
    await look(server, operator)
    assert server.managers() == {"kube-controller-manager"}
    assert told(server) == {"mode": "External", "desired": 5}
    server.change(engine={"image": "w:2"})
    await look(server, operator)
    assert (server.kept[DECODE]["spec"]["replicas"], server.conditions["Ready"]["status"]) == (5, "True")
    server.scale(DECODE, 1)
    await look(server, operator)
    assert server.counts == [3, 5, 1]
    assert server.conditions["Ready"]["status"] == "True", "one is what is wanted"
    await operator.look()
    assert server.written == []


async def test_a_new_model_begins_with_its_replicas(server: OwningServer, operator: Operator) -> None:
    server.change(decode={"replicas": 4} | scaling("External"))
    await look(server, operator)
    assert server.counts == [4]
    server.scale(DECODE, 0)
    await look(server, operator)
    assert server.counts == [4, 0]
    assert server.conditions["Stalled"]["reason"] == "ScaledToZero"
    assert "what scales the StatefulSet of decode" in server.conditions["Stalled"]["message"]


async def test_modes_follow_one_another_without_moving_anything(server: OwningServer, operator: Operator) -> None:
    def mode(name: str) -> None:
        server.change(prefill={}, slo=SLO, decode={"replicas": 3} | scaling(name))

    for name in ("Static", "SLO", "External"):
        mode(name)
        await look(server, operator)
    server.scale(DECODE, 6)
    await look(server, operator)
    for name in ("SLO", "External", "SLO"):
        mode(name)
        await look(server, operator)
    assert server.counts == [3, 6]
    mode("Static")
    await look(server, operator)
    assert server.counts == [3, 6, 3]
    assert "scaling" not in server.kept[MODEL]["status"]


@pytest.mark.parametrize("mode", ["External", "SLO"])
async def test_suspension_gives_back_what_there_was(server: OwningServer, operator: Operator, mode: str) -> None:
    server.change(prefill={}, slo=SLO, decode={"replicas": 3} | scaling(mode))
    await look(server, operator)
    if mode == "External":
        server.scale(DECODE, 5)
    server.change(suspend=True)
    await look(server, operator)
    assert server.kept[DECODE]["spec"]["replicas"] == 0
    count = 5 if mode == "External" else 3
    assert told(server)["desired"] == count
    again = Operator(server, operator.client)
    await look(server, again)
    server.change(suspend=False)
    await look(server, again)
    assert server.kept[DECODE]["spec"]["replicas"] == count
    if mode == "External":
        assert "pending" not in told(server)
        server.scale(DECODE, 2)
        await look(server, again)
        assert server.kept[DECODE]["spec"]["replicas"] == 2, "what scales it is followed again"


async def test_suspension_of_a_spec_that_cannot_be_read_is_remembered(server: OwningServer, operator: Operator) -> None:
    server.change(decode={"replicas": 3} | scaling("External"))
    await look(server, operator)
    server.scale(DECODE, 5)
    await look(server, operator)
    server.change(suspend=True, engine={"unheardOf": True})
    await look(server, operator)
    assert server.kept[DECODE]["spec"]["replicas"] == 0
    server.change(suspend=False, engine={})
    await look(server, operator)
    assert server.kept[DECODE]["spec"]["replicas"] == 5


async def test_a_stateful_set_that_was_deleted_comes_back_as_large_as_it_was(
    server: OwningServer, operator: Operator
) -> None:
    server.change(decode={"replicas": 3} | scaling("External"))
    await look(server, operator)
    server.scale(DECODE, 5)
    await look(server, operator)
    operator.forget(server.kept.pop(DECODE))
    await look(server, operator)
    assert server.kept[DECODE]["spec"]["replicas"] == 5


async def test_a_rollout_has_no_surge_where_something_else_scales(server: OwningServer, operator: Operator) -> None:
    server.change(decode={"replicas": 1} | scaling("External"))
    await look(server, operator)
    server.change(engine={"image": "w:2"})
    await operator.look()
    server.kept[DECODE]["status"] |= {"observedGeneration": server.kept[DECODE]["metadata"]["generation"]}
    server.kept[DECODE]["status"] |= {"updateRevision": "newer"}
    await operator.look()
    assert server.kept[DECODE]["spec"]["replicas"] == 1
    assert server.kept[DECODE]["spec"]["updateStrategy"]["rollingUpdate"]["partition"] == 0, "it goes on without one"


async def test_what_something_else_scales_is_not_the_gateway(server: OwningServer, operator: Operator) -> None:
    server.change(decode=scaling("External"), gateway={"replicas": 2})
    await look(server, operator)
    assert server.kept[GATEWAY]["spec"]["replicas"] == 2


def live(replicas: int) -> dict[ChildKey, Manifest]:
    return {ChildKey("StatefulSet", "m-decode"): stateful_set(replicas=replicas)}


def model(status: dict[str, Any] | None = None, **decode: Any) -> InferenceModel:
    raw = raw_model(prefill={}, decode=decode, slo=SLO)
    return InferenceModel.model_validate(raw | {"status": {"scaling": status} if status else {}})


@given(
    st.sampled_from(["Static", "SLO", "External"]), st.integers(0, 10), st.integers(0, 10) | st.none(),
    st.integers(1, 4), st.integers(0, 6), st.dictionaries(st.just(Role.DECODE), st.builds(
        lambda observed, replicas: Recommendation(observed=observed, replicas=replicas),
        st.integers(0, 10), st.integers(-3, 20),
    )),
    st.none() | st.builds(
        lambda mode, desired: {"decode": {"mode": mode, "desired": desired}},
        st.sampled_from(["SLO", "External"]), st.integers(0, 10),
    ),
)  # fmt: skip
def test_what_is_decided_stays_within_bounds_and_is_decided_once(
    mode: str,
    replicas: int,
    present: int | None,
    least: int,
    more: int,
    recommendations: dict[Role, Recommendation],
    status: dict[str, Any] | None,
) -> None:
    asked = model(status, replicas=replicas, scaling={"mode": mode, "min": least, "max": least + more})
    children = {} if present is None else live(present)
    found = settle_replicas(asked, children, recommendations, now=NOW)
    count = found.model.spec.decode.replicas
    assert found == settle_replicas(asked, children, recommendations, now=NOW)
    if mode == "Static":
        assert (found.model, found.scaling) == (asked, None)
    if mode == "SLO":
        assert least <= count <= least + more
        after = asked.model_copy(update={"status": asked.status.model_copy(update={"scaling": found.scaling})})
        stale = {
            role: Recommendation(observed=recommendation.observed + 20, replicas=recommendation.replicas)
            for role, recommendation in recommendations.items()
        }
        for again in ({}, stale):
            settled = settle_replicas(after, children, again, now=NOW)
            assert (settled.model.spec.decode.replicas, settled.moved) == (count, False)
    if mode == "External" and found.left:
        assert count == present


def test_a_switch_does_not_take_a_surge_for_what_is_wanted() -> None:
    decode = {"replicas": 2, "scaling": {"mode": "SLO", "max": 8}}
    raw = raw_model(prefill={}, decode=decode, slo=SLO, rollout={"maxSurge": 1})
    state = {"phase": "Progressing", "revision": 2, "digest": "", "stableRevision": 2}
    rolling = InferenceModel.model_validate(raw | {"status": {"rollout": state, "decode": {"promised": 2}}})
    for count, wanted in ((3, 2), (2, 2)):
        assert settle_replicas(rolling, live(count), {}, now=NOW).model.spec.decode.replicas == wanted


def test_a_dry_run_moves_nothing() -> None:
    raw = raw_model(prefill={}, decode={"scaling": {"mode": "SLO", "min": 2, "max": 8}}, slo=SLO)
    raw["spec"]["autoscaling"] = {"dryRun": True}
    asked = InferenceModel.model_validate(raw)
    recommendations = {Role.DECODE: Recommendation(observed=1, replicas=5)}
    for _ in range(2):
        found = settle_replicas(asked, live(1), recommendations, now=NOW)
        assert found.model.spec.decode.replicas == 1
        asked = asked.model_copy(update={"status": asked.status.model_copy(update={"scaling": found.scaling})})


def test_who_scales_is_no_part_of_a_revision() -> None:
    plain = blueprint(prefill={}, decode={})
    scaled = blueprint(prefill=scaling("SLO"), decode=scaling("External"), slo=SLO, autoscaling={"gpuBudget": 9})
    assert digest_of(content_of(plain)) == digest_of(content_of(scaled))
    assert "scaling" not in str(content_of(scaled))


def test_words_about_scaling_cause_no_look() -> None:
    status = model({"decode": {"mode": "SLO", "desired": 2}}).status
    said = ScalingStatus.model_validate({"decode": {"mode": "SLO", "desired": 2, "limit": "x"}, "message": "y"})
    assert is_same_memory(status, status.model_copy(update={"scaling": said}))
    other = ScalingStatus.model_validate({"decode": {"mode": "SLO", "desired": 3}})
    assert not is_same_memory(status, status.model_copy(update={"scaling": other}))
