"""The whole operator over random histories: everything is late, writes fail, operators end in the middle of a look, and
people change their minds. In the end everybody has what was asked for last, and the status says so.

`TANDEM_WHOLE_HISTORIES` plays as many, `TANDEM_FIRST_HISTORY` others: each takes about half a second.
"""

from __future__ import annotations

import datetime as real
import functools
import os
import random
from collections.abc import Callable, Mapping
from typing import Any

import pytest
from operator_objects import RELEASE, UID, container, copied, pod
from tandem_api.fleet import FleetReport, WorkerReport
from tandem_api.names import Role
from tandem_operator.gateways.fleet import FleetWatch
from tandem_operator.keys.keeper import KeyKeeper
from tandem_operator.keys.rotation import KeyPolicy
from tandem_operator.kube.recorder import EventRecorder
from tandem_operator.kube.store import ChildStore
from tandem_operator.objects.errors import APIError, ConflictError, IncompleteError, NotFoundError
from tandem_operator.objects.manifests import KIND_BY_NAME, Manifest, ModelKey, dig_list, labels_of
from tandem_operator.reconcile.reconciler import Reconciler
from tandem_operator.rollout.queue import RolloutQueue
from tandem_operator.rollout.revisions import digest_of
from tandem_operator.weights.commits import CommitAnswer, CommitQuestion
from tandem_operator.weights.hub import HubPolicy
from tandem_operator.workloads.blueprint import digest

HISTORIES = int(os.environ.get("TANDEM_WHOLE_HISTORIES", "3"))
FIRST = int(os.environ.get("TANDEM_FIRST_HISTORY", "0"))
KEY = ModelKey("n", "m")
MODEL = "/apis/tandem.dev/v1alpha1/namespaces/n/inferencemodels/m"
START = real.datetime(2026, 1, 1, tzinfo=real.UTC)


class World:
    """An API server with controllers, a kubelet, gateways and a hub, by a clock of its own. It stands for `KubeClient`,
    `Hub` and the watches of the operator."""

    def __init__(self, rng: random.Random, spec: Manifest) -> None:
        self.rng = rng
        self.seconds = 0.0
        self.kept: dict[str, Manifest] = {}
        self.late: list[tuple[Manifest, bool]] = []
        """Objects that the operator's watches have not brought yet, in order, and whether they are gone."""
        self.versions: list[str] = []
        """Of the model, of which its watch has not told yet."""
        self.meanwhile: list[Callable[[], None]] = []
        """What people do while the operator looks."""
        self.serial = 0
        self.templates: dict[tuple[str, str], Manifest] = {}
        self.fails = 0.0
        """How often a write fails."""
        self.dies = 0.0
        """How often the operator ends after a write."""
        self.gaps = False
        """The watch of the model is away in between."""
        self.tip = "a" * 40
        self.policy = HubPolicy(resolve=True)
        self.answers: dict[tuple[ModelKey, str], tuple[CommitQuestion, CommitAnswer | None]] = {}
        self.bad: set[str] = set()
        """Images whose workers never start."""
        self.due = 0.0
        self.kept[MODEL] = {
            "apiVersion": "tandem.dev/v1alpha1", "kind": "InferenceModel", "spec": spec, "status": {},
            "metadata": {"name": "m", "namespace": "n", "uid": UID, "generation": 1, "annotations": {}},
        }  # fmt: skip
        self.begin()

    @property
    def now(self) -> real.datetime:
        return START + real.timedelta(seconds=self.seconds)

    def unix(self) -> float:
        return self.now.timestamp()

    @property
    def stamp(self) -> str:
        return self.now.strftime("%Y-%m-%dT%H:%M:%SZ")

    # the operator

    def begin(self) -> None:
        """A fresh process, that has listed everything."""
        client: Any = self
        self.store = ChildStore()
        self.late.clear()
        self.versions.clear()
        for found in self.kept.values():
            if found["kind"] in KIND_BY_NAME:
                self.store.put(KIND_BY_NAME[found["kind"]], found)
        self.fleet = FleetWatch(self._wake, clock=lambda: self.seconds)
        self.fleet._ask = self._report  # type: ignore[method-assign]
        self.polled = 0.0
        self.answers.clear()
        self.operator = Reconciler(
            client, self.store, RELEASE, KeyKeeper(client, KeyPolicy(), clock=self.unix),
            EventRecorder(client, instance="test"), None, client, self.fleet, RolloutQueue(),
            clock=lambda: self.now,
        )  # fmt: skip
        self.due = self.seconds

    def _wake(self, key: ModelKey) -> None:
        self.due = min(self.due, self.seconds)

    async def look(self) -> None:
        self.due = float("inf")
        try:
            again = await self.operator.reconcile(KEY)
            if again is not None:
                self.due = min(self.due, self.seconds + again)
        except (APIError, IncompleteError, TimeoutError):
            self.due = self.seconds + 3
        except Died:
            self.begin()

    async def _report(self, session: Any, name: str, gateway: Any) -> None:
        gateway.asked = True
        if self.fails and self.rng.random() < 0.3:
            gateway.error = "late"
            return
        workers = [
            WorkerReport(
                name=p["metadata"]["name"], address=f"{p['status']['podIP']}:8000",
                role=Role(labels_of(p)["tandem.dev/role"]), revision="r", state="Admitted",
                requests=int(self.seconds), ttft_counts=[0, int(self.seconds)],
            )
            for p in self.pods()
            if condition(p, "ContainersReady") and "deletionTimestamp" not in p["metadata"]
        ]  # fmt: skip
        at = self.now.timestamp()
        gateway.report = FleetReport(gateway=name, started_at=START.timestamp(), at=at, workers=workers)
        gateway.heard_at, gateway.error, gateway.unable = self.seconds, "", False

    # the hub

    def ask(self, key: ModelKey, question: CommitQuestion, *, can_wait: bool = False) -> CommitAnswer | None:
        known = self.answers.get((key, question.path))
        if known is None or known[0] != question:
            self.answers[key, question.path] = known = (question, None)
        return known[1]

    def forget(self, key: ModelKey, path: str | None = None) -> None:
        for each in [each for each in self.answers if each[0] == key and path in (None, each[1])]:
            del self.answers[each]

    def look_after(self, key: ModelKey) -> float | None:
        return None

    def answer(self) -> None:
        for each, (question, before) in list(self.answers.items()):
            told = CommitAnswer(commit=self.tip)
            if told != before:
                self.answers[each] = question, told
                self._wake(each[0])

    # the API server

    def _may_fail(self, path: str) -> None:
        if self.meanwhile and self.rng.random() < 0.2:
            self.meanwhile.pop(0)()
        if self.rng.random() < self.fails and "/events/" not in path:
            raise self.rng.choice([APIError(500, "busy"), TimeoutError("late"), ConflictError(409, "try again")])

    def _put(self, path: str, found: Manifest) -> Manifest:
        self.serial += 1
        found["metadata"]["resourceVersion"] = str(self.serial)
        self.kept[path] = found
        self.late.append((copied(found), False))
        return copied(found)

    def _gone(self, path: str) -> None:
        self.late.append((self.kept.pop(path), True))

    async def find(self, path: str) -> Manifest | None:
        self._may_fail(path)
        return copied(self.kept.get(path))

    async def get(self, path: str) -> Manifest:
        if (found := await self.find(path)) is None:
            raise NotFoundError(404, "not found")
        return found

    async def create(self, path: str, body: Manifest) -> Manifest:
        self._may_fail(path)
        path = f"{path}/{body['metadata']['name']}"
        if path in self.kept:
            raise ConflictError(409, "already exists")
        made = self._put(path, self._new(path, body))
        self._may_die()
        return made

    def _new(self, path: str, body: Manifest) -> Manifest:
        self.serial += 1
        found = copied(body)
        found["metadata"] |= {"uid": f"uid-{self.serial}", "generation": 1, "creationTimestamp": self.stamp}
        return found

    def _may_die(self) -> None:
        if self.rng.random() < self.dies:
            raise Died

    async def replace(self, path: str, body: Manifest) -> Manifest:
        self._may_fail(path)
        return self._put(path, copied(body))

    async def apply(self, path: str, body: Manifest, *, force: bool) -> Manifest:
        self._may_fail(path)
        if path.endswith("/status"):
            path = path.removesuffix("/status")
            found = copied(self.kept.get(path))
            if found is None or found["metadata"]["uid"] != body["metadata"]["uid"]:
                raise ConflictError(409, "another uid")
            if path == MODEL:
                self.serial += 1
                found["status"] = copied(body["status"])
                found["metadata"]["resourceVersion"] = str(self.serial)
                self.kept[path] = found
                self.versions.append(str(self.serial))
            else:
                for new in body["status"]["conditions"]:
                    set_condition(found, new["type"], new["status"], self.stamp, new["reason"])
                self._put(path, found)
            self._may_die()
            return found
        before = self.kept.get(path)
        found = self._new(path, body)
        if before is not None:
            changed = before["spec"] != body.get("spec") if "spec" in before else True
            found["metadata"] |= {
                "uid": before["metadata"]["uid"], "generation": before["metadata"]["generation"] + changed,
                "creationTimestamp": before["metadata"]["creationTimestamp"],
            }  # fmt: skip
            found["status"] = copied(before.get("status", {}))
        made = self._put(path, found)
        self._may_die()
        return made

    async def merge(self, path: str, patch: Manifest) -> Manifest:
        self._may_fail(path)
        found = copied(self.kept[path])
        for key, value in patch["spec"].items():
            if key == "updateStrategy":
                found["spec"][key] = {"type": value["type"]}
            else:
                found["spec"][key] = value
        found["metadata"]["generation"] += 1
        return self._put(path, found)

    async def delete(self, path: str, *, uid: str | None = None, grace_seconds: int | None = None) -> None:
        self._may_fail(path)
        found = self.kept.get(path)
        if found is None:
            return
        if uid is not None and found["metadata"]["uid"] != uid:
            raise ConflictError(409, "another uid")
        self.end(path)
        self._may_die()

    def end(self, path: str) -> None:
        found = copied(self.kept[path])
        if found["kind"] != "Pod":
            self._gone(path)
        elif "deletionTimestamp" not in found["metadata"]:
            found["metadata"] |= {"deletionTimestamp": self.stamp, "deletionGracePeriodSeconds": 30}
            self._put(path, found)

    # controllers and the kubelet

    def pods(self) -> list[Manifest]:
        return [found for found in self.kept.values() if found["kind"] == "Pod"]

    def of(self, kind: str) -> list[tuple[str, Manifest]]:
        return [(path, found) for path, found in self.kept.items() if found["kind"] == kind]

    def control(self) -> None:
        for path, found in self.of("StatefulSet"):
            self._control(path, copied(found))
        for path, found in self.of("Deployment"):
            self._deploy(path, copied(found))

    def _control(self, path: str, found: Manifest) -> None:
        spec, name = found["spec"], found["metadata"]["name"]
        newest = digest(spec["template"])[:8]
        self.templates[name, newest] = copied(spec["template"])
        status = found.get("status") or {}
        current = status.get("currentRevision") or newest
        before = copied(status)
        rolls = spec["updateStrategy"]["type"] == "RollingUpdate"
        partition = spec["updateStrategy"]["rollingUpdate"]["partition"] if rolls else 0
        mine = {
            int(p["metadata"]["name"].rsplit("-", 1)[1]): (q, p)
            for q, p in self.of("Pod")
            if p["metadata"]["ownerReferences"][0]["uid"] == found["metadata"]["uid"]
        }
        for number, (where, _) in mine.items():
            if number >= spec["replicas"]:
                self.end(where)
        for number in range(spec["replicas"]):
            if number not in mine:
                self._make(found, number, newest if number >= partition else current)
        if rolls:
            for number in sorted((n for n in mine if partition <= n < spec["replicas"]), reverse=True):
                where, p = mine[number]
                if labels_of(p)["controller-revision-hash"] != newest:
                    self.end(where)
                    break
                if not condition(p, "Ready"):
                    break
        now = [p for _, p in mine.values()]
        whole = len(now) == spec["replicas"] and all(
            labels_of(p)["controller-revision-hash"] == newest and condition(p, "Ready") for p in now
        )
        if rolls and whole:
            current = newest
        status = {
            "observedGeneration": found["metadata"]["generation"], "updateRevision": newest,
            "currentRevision": current, "replicas": len(now),
        }  # fmt: skip
        if status != before:
            self._put(path, self.kept[path] | {"status": status})

    def _make(self, found: Manifest, number: int, revision: str) -> None:
        name = f"{found['metadata']['name']}-{number}"
        template = self.templates[found["metadata"]["name"], revision]
        labels = template["metadata"]["labels"] | {"controller-revision-hash": revision}
        self.serial += 1
        made = pod(
            name, owner=found["metadata"]["uid"], labels=labels,
            annotations=copied(template["metadata"].get("annotations", {})),
            metadata={"uid": f"uid-{self.serial}", "creationTimestamp": self.stamp},
            **container(started=False, ready=False), podIP=f"10.0.0.{self.serial}",
        )  # fmt: skip
        made["spec"] = {"readinessGates": copied(template["spec"].get("readinessGates", []))}
        made["image"] = [c["image"] for c in template["spec"]["containers"] if c["name"] == "worker"]
        self._put(f"/api/v1/namespaces/n/pods/{name}", made)

    def _deploy(self, path: str, found: Manifest) -> None:
        count = found["spec"]["replicas"]
        status = {"observedGeneration": found["metadata"]["generation"], "replicas": count}
        status |= {"updatedReplicas": count, "readyReplicas": count}
        if found.get("status") != status:
            self._put(path, self.kept[path] | {"status": status})
        where = "/api/v1/namespaces/n/pods/m-5d-x"
        if count and where not in self.kept:
            made = pod("m-5d-x", component="gateway", podIP="10.0.1.1", **container(started=True))
            made["metadata"]["ownerReferences"] = [
                {"kind": "ReplicaSet", "name": "m-5d", "uid": "rs", "controller": True}
            ]
            set_condition(made, "Ready", "True", self.stamp)
            self._put(where, made)
        elif not count and where in self.kept:
            self._gone(where)

    def kubelet(self, chance: float) -> None:
        for path, found in self.of("Pod"):
            if self.rng.random() > chance:
                continue
            p = copied(found)
            if "deletionTimestamp" in p["metadata"]:
                self._gone(path)
                continue
            if "image" not in p:
                continue
            if set(p["image"]) & self.bad:
                p["status"]["containerStatuses"][0] |= {
                    "state": {"waiting": {"reason": "ImagePullBackOff", "message": "no such image"}}
                }
            elif not condition(p, "ContainersReady"):
                p["status"]["containerStatuses"][0] |= {"started": True, "ready": True}
                set_condition(p, "ContainersReady", "True", self.stamp)
            gates = [g["conditionType"] for g in p["spec"]["readinessGates"]]
            up = condition(p, "ContainersReady")
            ready = up and all(condition(p, gate) for gate in gates)
            reason = "" if ready else "ReadinessGatesNotReady" if up else "ContainersNotReady"
            set_condition(p, "Ready", "True" if ready else "False", self.stamp, reason)
            if p != found:
                self._put(path, p)

    # time

    def see(self, count: int) -> None:
        """The operator's watches bring the next events."""
        seen, self.late = self.late[:count], self.late[count:]
        for found, is_gone in seen:
            kind = KIND_BY_NAME.get(found["kind"])
            if kind is None:
                continue
            if is_gone:
                self.store.remove(kind, found)
                self._wake(KEY)
            elif (kept := self.store.put(kind, found)) is not None and kept.is_news:
                self._wake(KEY)
        told, self.versions = self.versions[:count], self.versions[count:]
        if self.gaps:
            told = told[-1:]  # a watch that was away tells of the last version alone
        if any(not self.operator.has_written(KEY, version) for version in told):
            self._wake(KEY)

    async def poll(self) -> None:
        if self.seconds >= self.polled + 2:
            self.polled = self.seconds
            if KEY in self.fleet._models:
                await self.fleet._poll(None, KEY)  # type: ignore[arg-type]

    async def step(self, *, calm: bool = False) -> None:
        self.seconds += 1 if calm else self.rng.choice([0.2, 1, 3])
        for act in self.rng.sample(range(6), 6):
            if not calm and self.rng.random() < 0.4:
                continue
            if act == 0:
                self.control()
            elif act == 1:
                self.kubelet(1.0 if calm else 0.4)
            elif act == 2:
                self.see(len(self.late) + len(self.versions) if calm else self.rng.randint(0, 4))
            elif act == 3:
                await self.poll()
            elif act == 4:
                self.answer()
            elif self.due <= self.seconds:
                await self.look()

    # what people see

    @property
    def status(self) -> Manifest:
        return self.kept[MODEL]["status"]

    @property
    def conditions(self) -> dict[str, str]:
        return {c["type"]: f"{c['status']} {c['reason']} {c['message']}" for c in self.status.get("conditions", [])}

    def is_settled(self) -> bool:
        told = self.conditions
        return told.get("Ready", "").startswith("True") and not {"Reconciling", "Stalled"} & told.keys()

    def change(self, **spec: Any) -> None:
        self.kept[MODEL]["spec"] |= spec
        self.kept[MODEL]["metadata"]["generation"] += 1
        self.edited()

    def annotate(self, **annotations: str) -> None:
        self.kept[MODEL]["metadata"]["annotations"] |= {f"tandem.dev/{k}": v for k, v in annotations.items()}
        self.edited()

    def edited(self) -> None:
        """There is another version of the model."""
        self.serial += 1
        self.kept[MODEL]["metadata"]["resourceVersion"] = str(self.serial)
        self.versions.append(str(self.serial))


class Died(Exception):
    """The operator's process ends here."""


def condition(p: Manifest, kind: str) -> bool:
    return any(c["type"] == kind and c["status"] == "True" for c in dig_list(p, "status", "conditions"))


def set_condition(p: Manifest, kind: str, status: str, now: str, reason: str = "") -> None:
    conditions = p["status"].setdefault("conditions", [])
    before = next((c for c in conditions if c["type"] == kind), None)
    since = before["lastTransitionTime"] if before is not None and before["status"] == status else now
    new = {"type": kind, "status": status, "reason": reason, "lastTransitionTime": since}
    conditions[:] = [*(c for c in conditions if c["type"] != kind), new]


async def settle(made: World, *, where: str, within: int = 900) -> None:
    """From now on nothing fails. What the conditions say that only a person can do, is done."""
    made.fails = made.dies = 0.0
    for act in made.meanwhile:
        act()
    made.meanwhile.clear()
    calm = 0
    for _ in range(within):
        await made.step(calm=True)
        calm = calm + 1 if made.is_settled() else 0
        if calm > 20:
            return
        if "remove spec.rollout.canary" in made.conditions.get("Stalled", ""):
            made.change(rollout={})
    raise AssertionError(f"{where}: {made.conditions} {made.status.get('rollout')}")


HF: Mapping[str, Any] = {"model": {"uri": "hf://org/repo"}}


@pytest.mark.timeout(max(600, 20 * HISTORIES))
async def test_a_moved_branch_is_followed() -> None:
    for seed in range(FIRST, FIRST + HISTORIES):
        rng = random.Random(seed)
        made = World(rng, copied(dict(HF)))
        await settle(made, where=f"seed {seed} first")
        made.tip = "b" * 40
        made.fails, made.dies = rng.choice([(0.0, 0.0), (0.1, 0.0), (0.1, 0.05)])
        made.gaps = rng.random() < 0.5
        for _ in range(rng.randint(0, 10)):
            await made.step()
        made.annotate(**{"resolve-model": "1"})
        for _ in range(rng.randint(0, 60)):
            await made.step()
        await settle(made, where=f"seed {seed}")
        assert made.status["model"]["commit"] == "b" * 40


ROLES: list[Manifest] = [
    {"decode": {"replicas": 1}},
    {"decode": {"replicas": 2}},
    {"prefill": {"replicas": 1}, "decode": {"replicas": 2}},
    {"prefill": {"replicas": 2}, "decode": {"replicas": 1}},
]
BAD = "bad:1"
STEPS = {"steps": [{"weight": 50, "duration": "5s"}, {"weight": 90, "duration": "5s"}]}


def disturb(made: World, rng: random.Random) -> str:
    """Somebody changes something, or something happens. Returns what."""
    spec: Manifest = made.kept[MODEL]["spec"]

    def roll(field: str, value: Any) -> None:
        rollout = {key: told for key, told in spec.get("rollout", {}).items() if key != field}
        made.change(rollout=rollout if value is None else rollout | {field: value})

    def move() -> None:
        made.tip = rng.choice("abcdef") * 40
        made.annotate(**{"resolve-model": str(rng.random())})

    def lose(kind: str) -> None:
        if found := made.of(kind):
            made.end(rng.choice(found)[0])

    def rewrite() -> None:
        made.kept[MODEL]["status"] = edit(rng, made.status)
        made.edited()

    def jump() -> None:
        made.seconds += rng.choice([600, 4000])

    acts: dict[str, Callable[[], None]] = {
        "image": lambda: made.change(engine={"image": f"w:{rng.randint(1, 4)}"}),
        "another image": lambda: made.change(engine={"image": f"w:{rng.randint(1, 4)}"}),
        "bad image": lambda: made.change(engine={"image": BAD}),
        "scale": lambda: made.change(decode={"replicas": rng.randint(0, 3)}),
        "suspend": lambda: made.change(suspend=not spec.get("suspend", False)),
        "undo": lambda: roll("revision", rng.choice([None, 1, 2, 3, 99])),
        "canary": lambda: roll("canary", rng.choice([None, STEPS])),
        "pause": lambda: roll("paused", rng.random() < 0.5),
        "retry": lambda: made.annotate(**{"retry-canary": str(rng.random())}),
        "branch": move,
        "evict": lambda: lose("Pod"),
        "revision lost": lambda: lose("ControllerRevision"),
        "status": rewrite,
        "clock": jump,
        "restart": made.begin,
    }
    what = rng.choice(list(acts))
    if what not in ("clock", "restart") and rng.random() < 0.3:
        made.meanwhile.append(acts[what])
        return f"{what} during a look"
    acts[what]()
    return what


def edit(rng: random.Random, status: Manifest) -> Manifest:
    """A status as somebody with an editor may leave it."""
    status = copied(status)
    found = rng.choice(["rollout", "routing", "model", "conditions", "decode", "all"])
    if found == "all":
        return {}
    part = status.get(found)
    if isinstance(part, dict) and part and rng.random() < 0.7:
        name = rng.choice(list(part))
        if rng.random() < 0.5:
            del part[name]
        else:
            part[name] = rng.choice([None, 7, "x", [], {}, True, part[name]])
    else:
        status.pop(found, None)
    return status


def ask_for(made: World, roles: Manifest, said: list[str]) -> None:
    """The last wish."""
    made.change(suspend=False, engine={"image": "w:9"}, **copied(roles))
    rollout = made.kept[MODEL]["spec"]["rollout"]
    made.change(rollout={k: v for k, v in rollout.items() if k == "canary"})
    said.append("canary" if rollout.get("canary") else "plain")


@pytest.mark.timeout(max(600, 20 * HISTORIES))
async def test_whatever_happens_the_last_wish_is_followed() -> None:
    for seed in range(FIRST, FIRST + HISTORIES):
        rng = random.Random(seed)
        roles = rng.choice(ROLES)
        made = World(rng, copied(dict(HF)) | copied(roles) | {"rollout": {"canary": STEPS}})
        made.bad = {BAD}
        await settle(made, where=f"seed {seed} first")
        said: list[str] = []
        made.fails, made.dies = rng.choice([(0.0, 0.0), (0.1, 0.0), (0.1, 0.05)])
        made.gaps = rng.random() < 0.5
        for _ in range(rng.randint(1, 8)):
            said.append(disturb(made, rng))
            for _ in range(rng.choice([0, 3, 30, 80])):
                await made.step()

        made.meanwhile.append(functools.partial(ask_for, made, roles, said))
        for _ in range(rng.choice([0, 10])):
            await made.step()
        await settle(made, where=f"seed {seed}: {said}")
        images = {image for p in made.pods() for image in p.get("image", [])}
        assert images == {"w:9"}, f"seed {seed}: {said} {made.status}"
        state = made.status["rollout"]
        assert state["phase"] == "Complete", f"seed {seed}: {said} {state}"
        assert made.status["routing"].get("canary") is None
        kept = {found["revision"]: found["data"]["spec"] for _, found in made.of("ControllerRevision")}
        assert digest_of(kept[state["revision"]]) == state["digest"], f"seed {seed}: {said} {state}"
