"""Rollouts on live objects: what StatefulSets are told, and which pods go."""

from __future__ import annotations

import copy
from datetime import UTC, datetime, timedelta
from typing import Any

from operator_objects import READY, UID, blueprint, children, container, pod
from tandem_operator.children.templates import RELEASED, WITHHELD
from tandem_operator.objects.manifests import ChildKey, Manifest, own_workloads
from tandem_operator.rollout.statefulsets import ABOVE_ALL, StatefulSetPlan, plan_drain_limits, plan_stateful_sets
from tandem_operator.workloads import Blueprint, build_children

NOW = datetime(2026, 1, 1, tzinfo=UTC)
DECODE, PREFILL, GATEWAY = (
    ChildKey("StatefulSet", "m-decode"),
    ChildKey("StatefulSet", "m-prefill"),
    ChildKey("Deployment", "m"),
)
OLD = {"controller-revision-hash": "old"}


def serving(plan: Blueprint) -> dict[ChildKey, Manifest]:
    """Everything is up and of the newest template."""
    live = copy.deepcopy(children(plan))
    for key, child in list(live.items()):
        if (count := child.get("spec", {}).get("replicas")) is None:
            continue
        child["metadata"] |= {"generation": 1, "uid": f"uid-{key.name}"}
        child["status"] = {
            "observedGeneration": 1,
            "updateRevision": "new",
            "replicas": count,
            "updatedReplicas": count,
        }
        labels = child["spec"]["template"]["metadata"]["labels"]
        for number in range(count if key.kind == "StatefulSet" else 0):
            name = f"{key.name}-{number}"
            live[ChildKey("Pod", name)] = pod(name, owner=f"uid-{key.name}", labels=labels, **READY)
    return live


def outdated(live: dict[ChildKey, Manifest], *names: str, **status: Any) -> None:
    for name in names:
        found = live[ChildKey("Pod", name)]
        found["metadata"]["labels"] = found["metadata"]["labels"] | OLD | {"tandem.dev/revision": "old"}
        found["status"] = status or found["status"]


def lowered(live: dict[ChildKey, Manifest], partition: int, key: ChildKey = DECODE) -> None:
    """The partition came down for the newest template."""
    live[key]["spec"]["updateStrategy"] = {"type": "RollingUpdate", "rollingUpdate": {"partition": partition}}
    live[key]["metadata"].setdefault("annotations", {})[RELEASED] = "new"


def rolled(plan: Blueprint, live: dict[ChildKey, Manifest], *, now: datetime = NOW) -> StatefulSetPlan:
    return plan_stateful_sets(plan, build_children(plan), own_workloads(live, owner_uid=UID), now=now)


def told(found: StatefulSetPlan, name: str = "m-decode") -> tuple[int, int | None]:
    """Replicas and partition."""
    (workload,) = [c for c in found.desired if c["kind"] == "StatefulSet" and c["metadata"]["name"] == name]
    strategy = workload["spec"]["updateStrategy"]
    return workload["spec"]["replicas"], strategy.get("rollingUpdate", {}).get("partition")


def names_of(found: StatefulSetPlan) -> list[str]:
    return [key.name for key in found.replace]


def test_what_is_up_to_date_stays_as_it_is() -> None:
    plan = blueprint(prefill={}, decode={"replicas": 3})
    found = rolled(plan, serving(plan))
    assert (told(found), told(found, "m-prefill"), found.replace) == ((3, 0), (1, 0), ())


def test_a_new_template_comes_with_a_partition_that_holds_everything() -> None:
    live = serving(blueprint(decode={"replicas": 3}))
    changed = blueprint(decode={"replicas": 5}, engine={"maxBatchTokens": 64})
    assert told(rolled(changed, live)) == (5, ABOVE_ALL), "what is added is made as the others were"
    overlay = {"spec": {"nodeSelector": {"gpu": "yes"}}}
    removed = serving(blueprint(decode={"replicas": 3, "podTemplate": overlay}))
    assert told(rolled(blueprint(decode={"replicas": 3}), removed)) == (3, ABOVE_ALL), (
        "a field that goes changes it too"
    )


def test_a_rollout_goes_on_though_the_api_server_writes_a_template_otherwise() -> None:
    """Else it would look like a new template at every look, and nothing would ever be replaced."""
    worker = {"name": "worker", "env": [{"name": "PROXY", "value": ""}], "startupProbe": {"initialDelaySeconds": 0}}
    overlay = {"spec": {"hostNetwork": False, "containers": [worker]}}
    limits = {"tmpSizeLimit": "2048Mi", "resources": {"limits": {"memory": "1024Mi"}}}
    plan = blueprint(decode={"replicas": 3, "podTemplate": overlay} | limits)
    live = serving(plan)
    outdated(live, "m-decode-0", "m-decode-1", "m-decode-2")
    lowered(live, 2)
    spec = live[DECODE]["spec"]["template"]["spec"]
    container = spec["containers"][0]
    del spec["hostNetwork"], container["startupProbe"]["initialDelaySeconds"]
    next(v for v in spec["volumes"] if v["name"] == "tmp")["emptyDir"]["sizeLimit"] = "2Gi"
    container["resources"]["limits"]["memory"] = "1Gi"
    del next(e for e in container["env"] if e["name"] == "PROXY")["value"]
    assert names_of(rolled(plan, live)) == ["m-decode-2"]
    container["env"].pop()
    assert names_of(rolled(plan, live)) == [], "what somebody changed by hand is put right first"


def test_one_by_one_from_the_last_and_only_once_the_controller_knows() -> None:
    plan = blueprint(decode={"replicas": 3}, rollout={"maxSurge": 0})
    live = serving(plan)
    outdated(live, "m-decode-0", "m-decode-1", "m-decode-2")
    lowered(live, 3)
    found = rolled(plan, live)
    assert (told(found), names_of(found)) == ((3, 2), []), "it would come back from the old template"
    lowered(live, 2)
    assert names_of(rolled(plan, live)) == ["m-decode-2"]
    live[DECODE]["metadata"]["generation"] = 2
    assert names_of(rolled(plan, live)) == []


def test_a_single_replica_is_replaced_beside_another_one() -> None:
    plan = blueprint(prefill={})
    live = serving(plan)
    outdated(live, "m-decode-0", "m-prefill-0")
    found = rolled(plan, live)
    # An earlier release, or somebody else, has left no partition: nothing was released by that.
    assert told(found) == (1, ABOVE_ALL)
    for key in (DECODE, PREFILL):
        lowered(live, 1, key)
    found = rolled(plan, live)
    assert (told(found), told(found, "m-prefill"), found.replace) == ((2, 1), (2, 1), ())


def test_a_surge_that_finds_no_room_can_be_given_up() -> None:
    """A quota is full: the second replica was asked for and never made."""
    waits = blueprint(decode={"replicas": 1})
    live = serving(waits)
    outdated(live, "m-decode-0")
    live[DECODE]["spec"]["replicas"] = 2
    lowered(live, 1)
    found = rolled(waits, live)
    assert (told(found), found.replace) == ((2, 1), ()), "what serves stays"
    found = rolled(blueprint(decode={"replicas": 1}, rollout={"maxSurge": 0}), live)
    assert told(found) == (1, 0)
    live[DECODE]["spec"]["replicas"] = 1
    lowered(live, 0)
    assert names_of(rolled(blueprint(decode={"replicas": 1}, rollout={"maxSurge": 0}), live)) == ["m-decode-0"]


def test_recreate_takes_everything_at_once() -> None:
    plan = blueprint(prefill={}, rollout={"type": "Recreate"})
    live = serving(plan)
    outdated(live, "m-decode-0", "m-prefill-0")
    for key in (DECODE, PREFILL):
        live[key]["spec"]["updateStrategy"] = {"type": "OnDelete"}
    assert names_of(rolled(plan, live)) == ["m-decode-0", "m-prefill-0"]


def test_unready_workers_below_ready_ones_are_mended_first() -> None:
    plan = blueprint(decode={"replicas": 3}, rollout={"maxSurge": 0})
    live = serving(plan)
    running = container(started=True, ready=False) | {
        "conditions": [{"type": "Ready", "status": "False", "lastTransitionTime": "2025-12-31T23:00:00Z"}]
    }
    outdated(live, "m-decode-0", "m-decode-1", **running)
    outdated(live, "m-decode-2")
    lowered(live, 3)
    assert told(rolled(plan, live)) == (3, None), "OnDelete: no controller takes the one that serves"
    live[DECODE]["spec"]["updateStrategy"] = {"type": "OnDelete"}
    assert names_of(rolled(plan, live)) == ["m-decode-0", "m-decode-1"]


def test_a_node_out_of_reach_is_given_time() -> None:
    """The control plane calls its pods unready; of their containers remains what the kubelet said last."""
    plan = blueprint(decode={"replicas": 2})
    live = serving(plan)
    ready = {"type": "Ready", "status": "False", "lastTransitionTime": NOW.isoformat()}
    outdated(live, "m-decode-0", "m-decode-1", **container(started=True, ready=True) | {"conditions": [ready]})
    live[DECODE]["spec"]["updateStrategy"] = {"type": "OnDelete"}
    assert names_of(rolled(plan, live, now=NOW + timedelta(seconds=60))) == ["m-decode-1"]
    assert names_of(rolled(plan, live, now=NOW + timedelta(minutes=6))) == ["m-decode-0", "m-decode-1"]


def test_workers_that_wait_for_their_gate_may_be_serving_and_those_left_out_are_not() -> None:
    """An operator that was away finds gates that nobody has opened, of workers that gateways have long admitted."""
    plan = blueprint(decode={"replicas": 2})
    live = serving(plan)
    waits = {"type": "Ready", "status": "False", "reason": "ReadinessGatesNotReady",
             "lastTransitionTime": "2025-01-01T00:00:00Z"}  # fmt: skip
    up = container(started=True, ready=True)
    outdated(live, "m-decode-0", "m-decode-1", **up | {"conditions": [waits]})
    live[DECODE]["spec"]["updateStrategy"] = {"type": "OnDelete"}
    assert names_of(rolled(plan, live)) == ["m-decode-1"]
    left_out = {"type": "tandem.dev/admitted", "status": "False"}
    outdated(live, "m-decode-0", "m-decode-1", **up | {"conditions": [waits, left_out]})
    assert names_of(rolled(plan, live)) == ["m-decode-0", "m-decode-1"]


def test_groups_go_whole() -> None:
    group = {"replicas": 2, "nodesPerReplica": 2, "parallelism": {"tensor": 2}}
    plan = blueprint(decode=group, rollout={"maxSurge": 0})
    live = serving(plan)
    outdated(live, *[f"m-decode-{number}" for number in range(4)])
    lowered(live, 4)
    found = rolled(plan, live)
    assert (told(found), found.replace) == ((4, 2), ())
    lowered(live, 2)
    assert names_of(rolled(plan, live)) == ["m-decode-2", "m-decode-3"]


def test_workers_that_serve_wait_for_the_gateways() -> None:
    plan = blueprint(decode={"replicas": 2}, rollout={"maxSurge": 0})
    live = serving(plan)
    outdated(live, "m-decode-0", "m-decode-1")
    lowered(live, 2)
    live[GATEWAY]["status"]["updatedReplicas"] = 0
    assert told(rolled(plan, live)) == (2, ABOVE_ALL)
    live[GATEWAY]["status"]["updatedReplicas"] = 1
    assert told(rolled(plan, live)) == (2, 1)


def test_they_wait_for_no_other_deployment() -> None:
    plan = blueprint(decode={"replicas": 2}, rollout={"maxSurge": 0})
    live = serving(plan)
    outdated(live, "m-decode-0", "m-decode-1")
    lowered(live, 2)
    store = copy.deepcopy(live[GATEWAY])
    store["metadata"]["name"] = "m-store"
    store["status"]["updatedReplicas"] = 0
    live[ChildKey("Deployment", "m-store")] = store
    assert told(rolled(plan, live)) == (2, 1)


def test_a_suspension_in_the_middle_of_a_rollout_takes_every_pod() -> None:
    live = serving(blueprint(decode={"replicas": 3}))
    outdated(live, "m-decode-0")
    live[DECODE]["metadata"]["generation"] = 2
    changed = blueprint(decode={"replicas": 3}, engine={"maxBatchTokens": 64}, suspend=True)
    assert told(rolled(changed, live))[0] == 0


def test_pods_of_anybody_elses_stateful_set_are_left_alone() -> None:
    """Of our name and with our labels, but not ours."""
    plan = blueprint()
    live = serving(plan)
    outdated(live, "m-decode-0", **container())
    lowered(live, 0)
    assert names_of(rolled(plan, live)) == ["m-decode-0"]
    live[DECODE]["metadata"]["ownerReferences"][0]["uid"] = "another"
    assert names_of(rolled(plan, live)) == []
    live = serving(plan)
    stray = pod("x-0", owner="uid-x", labels=live[ChildKey("Pod", "m-decode-0")]["metadata"]["labels"] | OLD)
    live[ChildKey("Pod", "x-0")] = stray
    live[ChildKey("StatefulSet", "x")] = live[DECODE] | {
        "metadata": live[DECODE]["metadata"] | {"name": "x", "uid": "uid-x", "ownerReferences": []}
    }
    assert names_of(rolled(plan, live)) == []


def test_pods_on_their_way_out_get_what_the_spec_says() -> None:
    live = serving(blueprint(drain={"timeout": "20s"}))
    leaving = live[ChildKey("Pod", "m-decode-0")]["metadata"]
    assert plan_drain_limits(blueprint(), live) == []
    leaving |= {"deletionTimestamp": "2026-01-01T00:00:00Z", "deletionGracePeriodSeconds": 600}
    assert plan_drain_limits(blueprint(drain={"timeout": "20s"}), live) == [(ChildKey("Pod", "m-decode-0"), 35)]
    leaving["deletionGracePeriodSeconds"] = 35
    assert plan_drain_limits(blueprint(drain={"timeout": "20s"}), live) == []
    leaving["deletionGracePeriodSeconds"] = 30  # of a podTemplate
    assert plan_drain_limits(blueprint(drain={"timeout": "90s"}), live) == []


def strategy(found: StatefulSetPlan) -> str:
    (workload,) = [c for c in found.desired if c["kind"] == "StatefulSet"]
    return workload["spec"]["updateStrategy"]["type"]


def test_what_is_held_when_all_replicas_go_comes_back_as_it_was() -> None:
    """A controller forgets the older template where there is no pod, but for a set that is on `OnDelete`."""
    awake, asleep = blueprint(decode={"replicas": 2}), blueprint(decode={"replicas": 0})
    live = serving(awake)
    live[DECODE]["status"]["currentRevision"] = "old"
    outdated(live, "m-decode-0", "m-decode-1")
    lowered(live, 2)
    gone = {key: child for key, child in live.items() if key.kind != "Pod"}
    desired, own = build_children(asleep), own_workloads(live, owner_uid=UID)
    assert strategy(plan_stateful_sets(asleep, desired, own, now=NOW)) == "RollingUpdate", "what is in motion goes on"
    found = plan_stateful_sets(asleep, desired, own, now=NOW, resting=True)
    (workload,) = [c for c in found.desired if c["kind"] == "StatefulSet"]
    live[DECODE]["spec"] = workload["spec"]
    live[DECODE]["metadata"]["annotations"] = workload["metadata"]["annotations"]
    assert (strategy(found), live[DECODE]["metadata"]["annotations"][WITHHELD]) == ("OnDelete", "new")
    gone[DECODE] = live[DECODE]
    assert strategy(rolled(asleep, gone)) == "OnDelete", "nothing but the record tells that it was stuck"
    assert told(rolled(awake, gone)) == (2, ABOVE_ALL)
    live[DECODE]["spec"] |= {"replicas": 2}
    lowered(live, ABOVE_ALL)
    starting = container(started=False, ready=False) | {
        "conditions": [{"type": "Ready", "status": "False", "lastTransitionTime": "2025-12-31T23:00:00Z"}]
    }
    outdated(live, "m-decode-0", "m-decode-1", **starting)
    assert told(rolled(awake, live)) == (2, ABOVE_ALL), "they are let up before one is replaced"
    live[DECODE]["status"]["updateRevision"] = "newer"
    assert told(rolled(awake, live))[1] == 0, "what was held was another template"
