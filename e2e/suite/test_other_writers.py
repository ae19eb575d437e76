"""The operator among others that write: restarts by hand, admission policies, scaling in the middle of a rollout.

On a real API server with the real StatefulSet controller, without nodes (`e2e.realapi`).
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import pytest

from e2e.realapi import ControlPlane, Nodes
from e2e.suite.bare import (
    DECODE,
    LOAD_SECONDS,
    MERGE,
    Space,
    images,
    made_space,
    make,
    policy,
    restarted_at,
    rolled,
    serve,
    stays,
)
from e2e.suite.fleet import Object, until

_METADATA = "/spec/template/metadata/annotations/example.com~1scanned"
_CONTAINER = "/spec/template/spec/containers"
POLICIES = {
    "annotation": (
        "!('example.com/scanned' in object.spec.template.metadata.annotations)",
        f"""[JSONPatch{{op: "add", path: "{_METADATA}", value: "yes"}}]""",
        "metadata.annotations[example.com/scanned] is added",
    ),
    "nodeSelector": (
        "!has(object.spec.template.spec.nodeSelector)",
        """[JSONPatch{op: "add", path: "/spec/template/spec/nodeSelector", value: {"pool": "gpu"}}]""",
        "spec.nodeSelector is added",
    ),
    "image": (
        "!object.spec.template.spec.containers[0].image.startsWith('mirror/')",
        f"""[JSONPatch{{op: "replace", path: "{_CONTAINER}/0/image",
            value: "mirror/" + object.spec.template.spec.containers[0].image}}]""",
        "spec.containers[worker].image is mirror/worker:1 instead of worker:1",
    ),
    "env": (
        "!object.spec.template.spec.containers[0].env.exists(e, e.name == 'CLUSTER')",
        f"""[JSONPatch{{op: "add", path: "{_CONTAINER}/0/env/-",
            value: Object.spec.template.spec.containers.env{{name: "CLUSTER", value: "c1"}}}}]""",
        "spec.containers[worker].env[CLUSTER] is added",
    ),
    "volume": (
        "!object.spec.template.spec.volumes.exists(v, v.name == 'ca')",
        """[JSONPatch{op: "add", path: "/spec/template/spec/volumes/-",
            value: Object.spec.template.spec.volumes{name: "ca",
                emptyDir: Object.spec.template.spec.volumes.emptyDir{}}}]""",
        "spec.volumes[ca] is added",
    ),
    "sidecar": (
        "!object.spec.template.spec.containers.exists(c, c.name == 'mesh')",
        f"""[JSONPatch{{op: "add", path: "{_CONTAINER}/-",
            value: Object.spec.template.spec.containers{{name: "mesh", image: "mesh:1"}}}}]""",
        "spec.containers[mesh] is added",
    ),
}
"""When it applies, what it does, and how the condition says it."""


def expression(name: str) -> str:
    when, then, _ = POLICIES[name]
    return f"{when} ? {then} : []"


def test_a_restart_by_kubectl_keeps_the_promise_and_a_pause_holds_it(space: Space, nodes: Nodes) -> None:
    before = serve(space, 8, paused=True)
    space.write_template(restarted_at("one"))
    stays(space, before)
    space.patch("m", {"rollout": {"paused": False}})
    lowest = nodes.lowest(space.namespace, DECODE, rolled(space, before, 8))
    assert lowest >= 8


def test_a_restart_by_annotation_keeps_the_promise(space: Space, nodes: Nodes) -> None:
    before = serve(space, 4)

    def restart() -> None:
        space.mark("tandem.dev/restart", "1")
        rolled(space, before, 4)()

    assert nodes.lowest(space.namespace, DECODE, restart) >= 4
    again = space.workers
    space.mark("tandem.dev/restart", None)
    stays(space, again)


SHAPES: dict[str, dict[str, Any]] = {
    "1+1": {"prefill": {"replicas": 1}, "decode": {"replicas": 1}},
    "2+4": {"prefill": {"replicas": 2}, "decode": {"replicas": 4}},
    "groups": {"decode": {"replicas": 2, "nodesPerReplica": 2, "parallelism": {"tensor": 2}}},
}


@pytest.mark.parametrize("shape", SHAPES)
def test_restarts_of_any_shape_keep_the_promise(space: Space, nodes: Nodes, shape: str) -> None:
    """By `kubectl rollout restart` of each StatefulSet, and by the model's annotation."""
    spec = SHAPES[shape]
    pods = {f"m-{role}": own["replicas"] * own.get("nodesPerReplica", 1) for role, own in spec.items()}
    make(space, {"engine": {"image": "worker:1"}, "rollout": {"maxUnavailable": 0}} | spec)

    def uids() -> set[str]:
        return {p["metadata"]["uid"] for workload in pods for p in nodes.of(space.namespace, workload)}

    def all_ready() -> bool:
        ready = {workload: len(nodes.ready(space.namespace, workload)) for workload in pods}
        assert ready == pods, ready
        assert space.model["status"]["rollout"]["phase"] == "Complete"
        return sum(pods.values()) == len(uids())

    until("all to be ready", all_ready, within=120)
    for restart in (
        lambda: [space.write_template(restarted_at("one"), workload) for workload in pods],
        lambda: space.mark("tandem.dev/restart", "1"),
    ):
        before = uids()

        def wait(before: set[str] = before, restart: Callable[[], object] = restart) -> None:
            restart()
            until("all to be new", lambda: not before & uids() and all_ready(), within=300)

        assert nodes.lowest_of(space.namespace, pods, wait) == pods


@pytest.mark.full
def test_forty_workers_roll_in_few_load_times(space: Space, nodes: Nodes) -> None:
    """One at a time they took 38."""
    make(space, {"engine": {"image": "worker:1"}, "prefill": {"replicas": 8}, "decode": {"replicas": 32}})
    until("all to be ready", lambda: len(space.ready) == 32 and space.model["status"]["updated"] == "40/40", within=300)
    until("it to be settled", lambda: space.model["status"]["rollout"]["phase"] == "Complete", within=120)
    before, nodes.load_seconds = set(space.workers.values()), 10.0
    began = time.monotonic()
    try:
        space.mark("tandem.dev/restart", "1")
        until("all to be new", lambda: not before & set(space.workers.values()), within=300)
        until("it to be settled", lambda: space.model["status"]["rollout"]["phase"] == "Complete", within=300)
    finally:
        nodes.load_seconds = LOAD_SECONDS
    assert time.monotonic() - began <= 8 * 10.0


def test_what_somebody_adds_to_a_template_is_named_and_replaces_nobody(space: Space) -> None:
    before = serve(space, 3)
    space.write_template({"metadata": {"annotations": {"example.com/note": "x"}}})
    found = until("the condition", lambda: space.told("TemplateMutated"), within=120)
    assert "metadata.annotations[example.com/note] is added" in found["message"]
    stays(space, before)
    space.wait_settled(3)


@pytest.fixture
def deep_json() -> Iterator[None]:
    """This process reads and writes what is nested as deeply as an API server takes."""
    before = sys.getrecursionlimit()
    sys.setrecursionlimit(25_000)
    yield
    sys.setrecursionlimit(before)


@pytest.mark.usefixtures("deep_json")
def test_an_object_that_is_nested_beyond_reason_ends_no_operator(space: Space, plane: ControlPlane) -> None:
    """The free parts of a spec take 10,000 levels, and every model of the cluster has the same operator."""
    before = serve(space, 2)
    nested: Object = {}
    for _ in range(5_000):
        nested = {"a": nested}
    path = space.path("inferencemodels", "m")
    body: Object = {"spec": {"decode": {"podTemplate": {"spec": nested}}}}
    plane.kubernetes.request("PATCH", path, body, MERGE)
    found = until("the condition", lambda: space.told("Stalled"), within=120)
    assert found["reason"] == "InvalidSpec"
    assert "nested more than 100 levels deep" in found["message"]
    plane.stop_operators()
    plane.start_operator()
    stays(space, before)
    body = {"spec": {"decode": {"podTemplate": None, "replicas": 3}}}
    plane.kubernetes.request("PATCH", path, body, MERGE)
    space.wait_settled(3)
    assert before.items() <= space.workers.items()


@pytest.mark.timeout(1800)
def test_a_policy_that_rewrites_templates_takes_nobody_away(plane: ControlPlane, nodes: Nodes) -> None:
    """Each comes when the workers are there; then they are scaled, rolled, and scaled down. All at the same time."""
    with ExitStack() as stack, ThreadPoolExecutor(len(POLICIES)) as beside:
        spaces = {name: stack.enter_context(made_space(plane, nodes)) for name in POLICIES}
        for done in [beside.submit(under_policy, space, name) for name, space in spaces.items()]:
            done.result()


def is_rewritten(space: Space) -> bool:
    """Whether a write of the workers' StatefulSet, which is only tried, comes out with another template."""
    path = space.path("statefulsets", DECODE) + "?dryRun=All"
    body = {"metadata": {"annotations": {"example.com/tried": "yes"}}}
    tried = space.kubernetes.request("PATCH", path, body, MERGE)
    return tried["spec"]["template"] != space.workload["spec"]["template"]


def under_policy(space: Space, name: str) -> None:
    before = serve(space, 2)
    end = policy(space.cluster, space.namespace, expression(name))
    try:
        until("admission to have learnt of it", lambda: is_rewritten(space), within=120)
        space.patch("m", {"decode": {"replicas": 3}})
        space.wait_settled(3)
        stays(space, before, seconds=1.5)
        found = until("the condition", lambda: space.told("TemplateMutated"), within=120)
        assert POLICIES[name][2] in found["message"], name
        three = space.workers
        space.patch("m", {"engine": {"maxBatchTokens": 64}})
        assert space.nodes.lowest(space.namespace, DECODE, rolled(space, three, 3)) >= 3, name
        space.patch("m", {"decode": {"replicas": 1}})
        space.wait_settled(1)
    finally:
        end()


def test_what_is_added_to_a_rollout_that_is_paused_or_stuck_is_of_the_template_before(space: Space) -> None:
    serve(space, 2, paused=True, maxSurge=1)
    space.patch("m", {"engine": {"image": "worker:2"}})
    until("the new template", lambda: "worker:2" in str(space.workload["spec"]["template"]), within=120)
    space.patch("m", {"decode": {"replicas": 4}})
    until("four workers", lambda: len(space.ready) == 4, within=120)
    assert images(space) == {"worker:1"}
    space.patch("m", {"engine": {"image": "bad:1"}, "rollout": {"paused": False}})
    until("one that never starts", lambda: "bad:1" in images(space, ready=False), within=120)
    space.patch("m", {"decode": {"replicas": 7}})
    until("seven that serve beside it", lambda: (len(space.ready), len(space.workers)) == (7, 8), within=120)
    assert images(space) == {"worker:1"}


@pytest.mark.parametrize("held", ["paused", "stuck"])
def test_a_rollout_that_is_held_comes_back_from_zero_as_it_was(space: Space, held: str) -> None:
    """The controller of StatefulSets takes the newest template for the one of all pods where there is none."""
    serve(space, 2, paused=held == "paused", maxSurge=1)
    image = "worker:2" if held == "paused" else "bad:1"
    space.patch("m", {"engine": {"image": image}, "rollout": {"progressDeadline": "3s"}})
    until("the new template", lambda: image in str(space.workload["spec"]["template"]), within=120)
    until("it to be held", lambda: space.told("Stalled"), within=120)
    space.patch("m", {"decode": {"replicas": 0}})
    until("all workers to be gone", lambda: not space.workers, within=120)
    time.sleep(1.0)
    space.patch("m", {"decode": {"replicas": 3}})
    until("three that serve", lambda: len(space.ready) == 3, within=120)
    assert images(space) == {"worker:1"}
    space.patch("m", {"engine": {"image": "worker:3"}, "rollout": {"paused": False, "progressDeadline": "10m"}})
    until("the next template", lambda: images(space, ready=False) == {"worker:3"} and space.settled(3), within=120)


def test_workers_wait_for_the_job_that_fills_their_claim(space: Space) -> None:
    """With the real controller of Jobs: a pod that fails is followed by another, one that succeeds lets workers go."""

    def jobs() -> dict[str, Object]:
        return {j["metadata"]["name"]: j for j in space.find("jobs")}

    def end(phase: str, code: int, number: int) -> None:
        """What a kubelet says of the newest pod."""

        def its_pod() -> Object:
            prefix = "".join(jobs()) or "no job"
            found = [p for p in space.nodes.of(space.namespace, prefix) if p["status"].get("phase") == "Running"]
            assert len(found) == 1, found
            return found[0]

        pod = until(f"pod {number} of the job", its_pod, within=120)
        told = {"exitCode": code, "message": '{"reason": "DiskFull", "message": "The disk is full."}'}
        ended = {"name": "worker", "state": {"running": None, "terminated": told}, "ready": False, "started": False}
        path = f"{space.path('pods', pod['metadata']['name'])}/status"
        conditions = [{"type": kind, "status": "False"} for kind in ("Ready", "ContainersReady")]
        body = {"status": {"phase": phase, "containerStatuses": [ended], "conditions": conditions}}
        space.kubernetes.request("PATCH", path, body, "application/strategic-merge-patch+json")

    model = {"uri": "hf://org/repo", "cache": {"persistentVolumeClaim": "models", "prewarm": True}}
    make(space, {"model": model, "decode": {"replicas": 1}, "engine": {"image": "worker:1"}})
    end("Failed", 1, 1)

    def is_told() -> bool:
        assert "The disk is full." in (space.told("CachePrewarmed") or {})["message"]
        return True

    until("the failure to be told", is_told, within=120)
    assert not space.workers
    end("Succeeded", 0, 2)
    space.wait_settled(1)
    before, (first,) = space.workers, jobs()
    space.patch("m", {"engine": {"image": "worker:2"}, "decode": {"replicas": 2}})
    until("another job", lambda: len(jobs()) == 1 and first not in jobs(), within=120)
    until("two workers", lambda: len(space.ready) == 2, within=120)
    assert images(space) == {"worker:1"}, "what serves is scaled, and not replaced"
    end("Succeeded", 0, 1)
    rolled(space, before, 2)()
    space.patch("m", {"model": {"cache": {"prewarm": None}}})
    until("no job", lambda: not jobs(), within=120)
    space.wait_settled(2)


@pytest.mark.timeout(1800)
def test_an_upgrade_replaces_nobody_and_is_followed_one_model_at_a_time(plane: ControlPlane, nodes: Nodes) -> None:
    """Models that name no image, and a release that brings others."""
    with ExitStack() as stack, ThreadPoolExecutor(MODELS) as beside:
        spaces = [stack.enter_context(made_space(plane, nodes)) for _ in range(MODELS)]
        made = list(beside.map(lambda space: serve(space, 1, image=None), spaces))
        plane.stop_operators()
        plane.start_operator("--worker-image=worker:2")
        for space in spaces:
            found = until("the condition", lambda space=space: space.told("ImagesCurrent"), within=120)
            assert (found["reason"], "worker:2" in found["message"]) == ("NewerRelease", True)
        for space, before in zip(spaces, made, strict=True):
            stays(space, before, seconds=0.5)
        plane.stop_operators()
        plane.start_operator("--worker-image=worker:2", "--follow-images=true")
        together = 0

        def all_follow() -> bool:
            nonlocal together
            together = max(together, count_moving(nodes, spaces))
            return all(images(space) == {"worker:2"} and space.settled(1) for space in spaces)

        until("all models to follow", all_follow, within=300, every=0.1)
        assert together == 1
    plane.stop_operators()
    plane.start_operator()


MODELS = 8


def count_moving(nodes: Nodes, spaces: list[Space]) -> int:
    """Models of which two workers are there because one is replaced, at one moment."""
    found: dict[str, set[str]] = {space.namespace: set() for space in spaces}
    for (namespace, name), pod in list(nodes.pods.items()):
        if namespace in found and name.startswith(f"{DECODE}-"):
            found[namespace].add(pod["spec"]["containers"][0]["image"])
    return sum(len(images) > 1 for images in found.values())
