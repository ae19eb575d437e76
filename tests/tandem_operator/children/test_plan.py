from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from operator_objects import UID, blueprint, children, pod
from tandem_operator.children.plan import ChildStep, plan_children, plan_clearing, plan_step
from tandem_operator.children.templates import WITHHELD
from tandem_operator.objects.manifests import ChildKey, Manifest, child_key
from tandem_operator.workloads import build_children
from tandem_operator.workloads.release import NetworkSettings, Release

specs = st.fixed_dictionaries(
    {"prefill": st.none() | st.just({}), "decode": st.fixed_dictionaries({"replicas": st.integers(0, 3)})}
)


def owned(**changes: Any) -> Manifest:
    (service,) = [c for c in build_children(blueprint()) if child_key(c) == ChildKey("Service", "m")]
    return service | {"metadata": service["metadata"] | changes}


def step(live: Manifest | None) -> ChildStep:
    return plan_step(owned(), live, owner_uid=UID)


@given(spec=specs)
def test_what_is_there_is_left_alone(spec: dict[str, Any]) -> None:
    plan = blueprint(**spec)
    done = plan_children(build_children(plan), children(plan), owner_uid=UID)
    assert (done.apply, done.delete, done.waiting, done.taken) == ((), (), (), ())


@given(old=specs, new=specs)
def test_one_plan_reaches_the_goal(old: dict[str, Any], new: dict[str, Any]) -> None:
    live, goal = children(blueprint(**old)), children(blueprint(**new))
    plan = plan_children(goal.values(), live, owner_uid=UID)
    after = {key: child for key, child in live.items() if key not in plan.delete}
    after |= {child_key(child): child for child in plan.apply}
    kept = {key for key in after if key not in goal}
    assert {key: child for key, child in after.items() if key in goal} == goal
    assert {key.kind for key in kept} <= {"ConfigMap"}  # until the rollout is done


def test_missing_children_are_made() -> None:
    assert step(None) is ChildStep.APPLY


def test_drift_is_corrected() -> None:
    live = owned() | {"spec": owned()["spec"] | {"selector": {"app": "other"}}}
    assert step(live) is ChildStep.APPLY


def test_objects_of_others_are_not_touched() -> None:
    assert step(owned(ownerReferences=[], labels={})) is ChildStep.TAKEN
    other = {"kind": "Deployment", "name": "other", "uid": "x", "controller": True}
    assert step(owned(ownerReferences=[other])) is ChildStep.TAKEN


def test_orphans_of_ours_are_adopted() -> None:
    assert step(owned(ownerReferences=[])) is ChildStep.APPLY


def test_children_of_an_earlier_object_of_this_name_are_waited_for() -> None:
    earlier = {"kind": "InferenceModel", "name": "m", "uid": "earlier", "controller": True}
    assert step(owned(ownerReferences=[earlier])) is ChildStep.WAIT
    assert step(owned(deletionTimestamp="2026-01-01T00:00:00Z")) is ChildStep.WAIT


def test_only_owned_children_are_pruned() -> None:
    live = children(blueprint(prefill={}))
    foreign = ChildKey("Service", "foreign")
    live[foreign] = owned(name="foreign", ownerReferences=[])
    plan = plan_children(build_children(blueprint()), live, owner_uid=UID)
    assert ChildKey("StatefulSet", "m-prefill") in plan.delete
    assert foreign not in plan.delete


def test_a_configuration_stays_while_a_pod_may_start_from_it() -> None:
    live, new = children(blueprint()), children(blueprint(engine={"maxBatchTokens": 64}))
    (old,) = [key for key in live if key.kind == "ConfigMap" and "decode" in key.name]
    workload = ChildKey("StatefulSet", "m-decode")

    def pruned() -> bool:
        return old in plan_children(new.values(), live, owner_uid=UID).delete

    assert not pruned(), "the template is yet to change"
    live[workload] = new[workload]
    live[workload]["metadata"]["generation"] = 2
    counts = {"replicas": 1, "updatedReplicas": 1}
    live[workload]["status"] = counts | {"observedGeneration": 1}
    assert not pruned(), "a pod that dies now is made from the old template again"
    live[workload]["status"] = counts | {"observedGeneration": 2, "updatedReplicas": 0}
    assert not pruned(), "a pod of the old template is there, though the cache may not know it yet"
    # With updates on delete the controller leaves `currentRevision` behind for good.
    live[workload]["status"] = counts | {"observedGeneration": 2, "currentRevision": "old", "updateRevision": "new"}
    running = pod("m-decode-0", annotations={"tandem.dev/config-hash": old.name.rsplit("-", 1)[1]})
    live[ChildKey("Pod", "m-decode-0")] = running
    assert not pruned(), "its container may restart"
    del live[ChildKey("Pod", "m-decode-0")]
    assert pruned()
    records = live[workload]["metadata"]["annotations"]
    live[workload]["metadata"]["annotations"] = records | {WITHHELD: "new"}
    live[workload]["status"] = {"observedGeneration": 2, "replicas": 0}
    assert not pruned(), "asleep in a rollout that is held: pods come back from the old template"


def test_what_the_api_server_filled_in_goes_before_a_strategy_that_does_not_admit_it() -> None:
    (desired,) = [c for c in build_children(blueprint()) if c["kind"] == "StatefulSet"]
    by_hand = desired | {"spec": desired["spec"] | {"updateStrategy": {"type": "OnDelete"}}}
    patch = plan_clearing(by_hand, desired)
    assert patch == {"spec": {"updateStrategy": {"type": "OnDelete", "rollingUpdate": None}}}
    assert plan_clearing(desired, desired) is None
    assert plan_clearing(by_hand, None) is None
    assert plan_clearing(by_hand, by_hand) is None
    assert plan_clearing(desired, by_hand) is None


def test_policies_go_with_the_switch_and_the_role() -> None:
    off = Release(worker_image="worker:1", gateway_image="gateway:1", network=NetworkSettings(enabled=False))
    gone = plan_children(build_children(blueprint(release=off)), children(blueprint(prefill={})), owner_uid=UID).delete
    assert {ChildKey("NetworkPolicy", name) for name in ("m", "m-decode", "m-prefill")} <= set(gone)
    gone = plan_children(build_children(blueprint()), children(blueprint(prefill={})), owner_uid=UID).delete
    assert [key.name for key in gone if key.kind == "NetworkPolicy"] == ["m-prefill"]


def test_while_keys_are_missing_no_workload_is_touched() -> None:
    goal = build_children(blueprint(engine={"maxBatchTokens": 64}))
    held = plan_children(goal, children(blueprint()), owner_uid=UID, hold_workloads=True)
    assert [child["kind"] for child in held.apply] == ["ConfigMap"]
    assert held.delete == (), "what runs may start anew from its configuration"
    made = plan_children(goal, {}, owner_uid=UID, hold_workloads=True)
    assert not {"Deployment", "StatefulSet"} & {child["kind"] for child in made.apply}
