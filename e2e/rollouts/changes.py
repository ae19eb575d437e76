"""The changes themselves: each begins with a model that serves, and ends with one."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from kubernetes import client
from tandem_api.names import LABEL_ROLE

from e2e.install import NAMESPACE
from e2e.rollouts.cases import REPOSITORY, ChangeKind, FleetShape, widths
from e2e.suite.fleet import Fleet, Object, is_ready, until

MIRROR = "/api/v1/namespaces/tandem-mirror/services/mirror:80/proxy"
RESOLVE = "tandem.dev/resolve-model"
NO_IMAGE = "registry.invalid/no-such-image:1"
LIMIT = 900.0
"""Seconds that a rollout may take. On two cores that also serve, a worker is up after half a minute to two."""
HOLD = 20.0
"""Seconds of a pause."""
CANARY = {"steps": [{"weight": 25, "duration": "10s"}, {"weight": 60, "duration": "10s"}]}
SMALL, USUAL = 1024, 2048
"""Tokens of a batch."""


@dataclass
class Site:
    """A model that serves, and what can be changed about it."""

    fleet: Fleet
    model: str
    shape: FleetShape
    images: tuple[str, str]
    """Two names of one image: for the operator two builds, for the clients the same answers."""
    notes: list[str] = field(default_factory=list[str])

    def spec(self) -> Object:
        return self.fleet.get("inferencemodels", self.model)["spec"]

    def status(self) -> Object:
        return self.fleet.get("inferencemodels", self.model).get("status", {})

    def workers(self, role: str = "") -> dict[str, Object]:
        """By uid."""
        roles = (role,) if role else ("prefill", "decode")
        return {pod["metadata"]["uid"]: pod for one in roles for pod in self.fleet.pods(self.model, one)}

    def settle(self, replaced: Mapping[str, Object] | None = None) -> None:
        """Until the present generation is served by all its workers, none of them among `replaced`, and nothing is at
        work."""

        def probe() -> bool:
            live = self.fleet.get("inferencemodels", self.model)
            status = live.get("status", {})
            conditions = {c["type"]: c for c in status.get("conditions", [])}
            assert status.get("observedGeneration") == live["metadata"]["generation"], status
            assert conditions["Ready"]["status"] == "True", conditions["Ready"]
            assert not {"Reconciling", "Stalled"} & conditions.keys(), conditions
            assert status["rollout"]["phase"] == "Complete", status["rollout"]
            workers = self.workers()
            for role, count in self.shape.pods.items():
                states = [is_ready(pod) for pod in workers.values() if pod["metadata"]["labels"][LABEL_ROLE] == role]
                assert states == [True] * count, (role, states)
            kept = [workers[uid]["metadata"]["name"] for uid in workers.keys() & (replaced or {}).keys()]
            assert not kept, f"not replaced: {sorted(kept)}"
            return True

        until(f"the end of the rollout of {self.model}", probe, within=LIMIT, every=0.5)

    def wait_midway(self, before: dict[str, Object]) -> None:
        """Until a new worker is ready, and one of the former ones is still there."""

        def probe() -> bool:
            now = self.workers()
            assert any(is_ready(pod) for uid, pod in now.items() if uid not in before)
            return True

        until(f"the first new worker of {self.model}", probe, within=LIMIT / 2)
        assert self.workers().keys() & before.keys(), "the rollout was over before its middle was seen"

    def change_image(self) -> None:
        now = self.spec()["engine"]["image"]
        self.fleet.patch(self.model, {"engine": {"image": next(name for name in self.images if name != now)}})


def change_image(site: Site) -> None:
    before = site.workers()
    site.change_image()
    site.settle(before)


def change_commit(site: Site) -> None:
    before = site.workers()
    commit = site.fleet.kubernetes.request("POST", f"{MIRROR}/move/{REPOSITORY}")["sha"]
    site.fleet.annotate(site.model, {RESOLVE: commit})
    until("the commit is taken", lambda: site.status().get("model", {}).get("commit") == commit, within=90)
    site.settle(before)


def change_parallelism(site: Site) -> None:
    role, usual, longer = widths(site.shape)
    before = site.workers(role)
    now = site.spec()[role].get("parallelism", {}).get("pipeline", 1)
    site.fleet.patch(site.model, {role: {"parallelism": {"pipeline": longer if now == usual else usual}}})
    site.settle(before)


def change_setting(site: Site) -> None:
    before = site.workers()
    now = site.spec()["engine"].get("maxBatchTokens", USUAL)
    site.fleet.patch(site.model, {"engine": {"maxBatchTokens": SMALL if now != SMALL else USUAL}})
    site.settle(before)


def roll_back_midway(site: Site) -> None:
    before, image = site.workers(), site.spec()["engine"]["image"]
    site.change_image()
    site.wait_midway(before)
    site.fleet.patch(site.model, {"engine": {"image": image}})
    site.settle()
    images = {pod["spec"]["containers"][0]["image"] for pod in site.workers().values()}
    assert images == {image}, f"workers of {sorted(images)} are there, and {image} was asked for"


def kill_operator_midway(site: Site) -> None:
    before = site.workers()
    site.change_image()
    site.wait_midway(before)
    path = f"/api/v1/namespaces/{NAMESPACE}/pods"
    for pod in site.fleet.kubernetes.request("GET", path)["items"]:
        try:
            site.fleet.kubernetes.request("DELETE", f"{path}/{pod['metadata']['name']}?gracePeriodSeconds=0")
        except client.ApiException as error:
            if error.status != 404:  # one that was ending by itself
                raise
    site.settle(before)


def pause_midway(site: Site) -> None:
    before = site.workers()
    site.change_image()
    site.wait_midway(before)
    generation = site.fleet.patch(site.model, {"rollout": {"paused": True}})["metadata"]["generation"]
    until("the pause is seen", lambda: site.status()["observedGeneration"] == generation, within=60)
    time.sleep(5)  # what the StatefulSets' controller was told before the pause happens
    serving = site.workers()
    held = {uid for uid in before.keys() & serving if not serving[uid]["metadata"].get("deletionTimestamp")}
    assert held, "the rollout was over before it was paused"
    time.sleep(HOLD)
    lost = held - site.workers().keys()
    assert not lost, f"{len(lost)} workers were replaced in a pause"
    site.fleet.patch(site.model, {"rollout": {"paused": None}})
    site.settle(before)


def fail_canary(site: Site) -> None:
    before, image = site.workers(), site.spec()["engine"]["image"]
    canary = {"canary": CANARY, "progressDeadline": "4m"}
    site.fleet.patch(site.model, {"engine": {"image": NO_IMAGE}, "rollout": canary})

    def failed() -> Object | None:
        stalled = site.fleet.condition(site.model, "Stalled")
        return stalled if stalled and stalled["reason"] == "CanaryFailed" else None

    site.notes.append(until("the canary to go back", failed, within=LIMIT / 2)["message"])
    for role, count in site.shape.pods.items():
        site.fleet.wait_role(site.model, role, count, within=LIMIT / 2)
    site.fleet.patch(site.model, {"engine": {"image": image}, "rollout": {"canary": None, "progressDeadline": None}})
    site.settle()
    if site.shape.promise == 1:
        assert site.workers().keys() == before.keys(), (
            "what served was touched, though the canary had a place beside it"
        )


CHANGES: dict[ChangeKind, Callable[[Site], None]] = {
    ChangeKind.IMAGE: change_image,
    ChangeKind.COMMIT: change_commit,
    ChangeKind.PARALLELISM: change_parallelism,
    ChangeKind.SETTING: change_setting,
    ChangeKind.ROLLBACK: roll_back_midway,
    ChangeKind.KILLED: kill_operator_midway,
    ChangeKind.PAUSED: pause_midway,
    ChangeKind.CANARY: fail_canary,
}
