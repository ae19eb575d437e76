"""Templates that others write too: which are the operator's own, what is released, and what differs."""

from __future__ import annotations

import copy
from datetime import UTC, datetime
from typing import Any

import pytest
from operator_objects import UID, blueprint, settled
from tandem_api.crd.status import RolloutStatus
from tandem_operator.children.inherit import keep_what_runs
from tandem_operator.children.plan import ChildStep, plan_step
from tandem_operator.children.templates import (
    ANSWER,
    FOREIGN_RESTART,
    RELEASED,
    REVISIONS,
    differences,
    is_new_template,
    is_rewritten,
    read_revisions,
    template_condition,
    with_answer,
)
from tandem_operator.objects.manifests import ChildKey, Manifest, own_workloads
from tandem_operator.rollout.statefulsets import ABOVE_ALL, StatefulSetPlan, plan_stateful_sets
from tandem_operator.workloads import Blueprint, build_children

NOW = datetime(2026, 1, 1, tzinfo=UTC)
DECODE = ChildKey("StatefulSet", "m-decode")
Live = dict[ChildKey, Manifest]


def rolled(plan: Blueprint, live: Live) -> StatefulSetPlan:
    return plan_stateful_sets(plan, build_children(plan), own_workloads(live, owner_uid=UID), now=NOW)


def decode_of(found: StatefulSetPlan) -> Manifest:
    return next(
        child for child in found.desired if child["metadata"]["name"] == DECODE.name and "template" in child["spec"]
    )


def at_rest(replicas: int = 8, **spec: Any) -> tuple[Blueprint, Live]:
    """Everything is of revision `new`, and the operator has said so."""
    plan = blueprint(decode={"replicas": replicas}, rollout={"maxUnavailable": 0, "maxSurge": 1}, **spec)
    live = settled(plan)
    live[DECODE] |= {
        "metadata": live[DECODE]["metadata"]
        | decode_of(rolled(plan, live))["metadata"]
        | {name: live[DECODE]["metadata"][name] for name in ("generation", "uid")}
    }
    live[DECODE]["spec"] = copy.deepcopy(decode_of(rolled(plan, live))["spec"])
    return plan, live


def write(live: Live, revision: str, **annotations: str) -> None:
    """Somebody else writes annotations into the template, and the controller has seen it."""
    live[DECODE]["spec"]["template"]["metadata"]["annotations"] |= annotations
    live[DECODE]["metadata"]["generation"] += 1
    live[DECODE]["status"] |= {"observedGeneration": live[DECODE]["metadata"]["generation"], "updateRevision": revision}


def partition_of(found: StatefulSetPlan) -> int | None:
    return decode_of(found)["spec"]["updateStrategy"].get("rollingUpdate", {}).get("partition")


def test_at_rest_the_partition_is_above_all_pods() -> None:
    plan, live = at_rest()
    found = rolled(plan, live)
    assert (partition_of(found), found.replace) == (ABOVE_ALL, ())
    assert plan_step(decode_of(found), live[DECODE], owner_uid=UID) is ChildStep.KEEP


def test_a_restart_by_hand_releases_one_after_another() -> None:
    plan, live = at_rest()
    write(live, "restarted", **{FOREIGN_RESTART: "now"})
    assert read_revisions(live[DECODE]).alike == {"restarted"}
    found = rolled(plan, live)
    assert found.replace == ()
    assert (decode_of(found)["spec"]["replicas"], partition_of(found)) == (9, 8), "the surge alone"
    assert decode_of(found)["metadata"]["annotations"][RELEASED] == "restarted"


@pytest.mark.parametrize("partition", [0, 3])
def test_a_partition_that_is_low_for_another_revision_releases_nobody(partition: int) -> None:
    """Of an earlier release, or of a rollout that somebody else wrote into."""
    plan, live = at_rest()
    live[DECODE]["spec"]["updateStrategy"] = {"type": "RollingUpdate", "rollingUpdate": {"partition": partition}}
    write(live, "other", **{FOREIGN_RESTART: "now"})
    found = rolled(plan, live)
    assert (partition_of(found), found.replace) == (ABOVE_ALL, ())


def test_a_pause_holds_a_restart_by_hand() -> None:
    _, live = at_rest()
    write(live, "restarted", **{FOREIGN_RESTART: "now"})
    paused = blueprint(decode={"replicas": 8}, rollout={"maxUnavailable": 0, "maxSurge": 1, "paused": True})
    found = rolled(paused, live)
    assert (decode_of(found)["spec"]["replicas"], partition_of(found), found.replace) == (8, ABOVE_ALL, ())


def test_what_is_added_to_a_template_is_the_same_template() -> None:
    plan, live = at_rest()
    write(live, "scanned", **{"example.com/scanned": "yes"})
    assert read_revisions(live[DECODE]).alike == {"new", "scanned"}
    grown = blueprint(decode={"replicas": 9}, rollout={"maxUnavailable": 0, "maxSurge": 1})
    found = rolled(grown, live)
    assert (decode_of(found)["spec"]["replicas"], partition_of(found), found.replace) == (9, ABOVE_ALL, ())
    assert decode_of(found)["metadata"]["annotations"][REVISIONS].split()[1:] == ["new", "scanned"]
    (told,) = template_condition([decode_of(rolled(plan, live))], live)
    assert "metadata.annotations[example.com/scanned] is added" in told.message


def test_another_template_of_the_model_begins_anew() -> None:
    _, live = at_rest()
    write(live, "scanned", **{"example.com/scanned": "yes"})
    changed = blueprint(
        decode={"replicas": 8}, rollout={"maxUnavailable": 0, "maxSurge": 1}, engine={"maxBatchTokens": 64}
    )
    applied = decode_of(rolled(changed, live))
    assert partition_of(rolled(changed, live)) == ABOVE_ALL
    live[DECODE] |= {"metadata": live[DECODE]["metadata"] | {"annotations": applied["metadata"]["annotations"]},
                     "spec": copy.deepcopy(applied["spec"])}  # fmt: skip
    write(live, "changed")
    assert read_revisions(live[DECODE]).alike == {"changed"}
    assert partition_of(rolled(changed, live)) == 8


def rewritten(plan: Blueprint, live: Live) -> tuple[Manifest, Manifest]:
    """What is told, and what the API server makes of it: another image, a variable and a sidecar."""
    told = decode_of(rolled(plan, live))
    answer = copy.deepcopy(live[DECODE])
    containers = answer["spec"]["template"]["spec"]["containers"]
    containers[0]["image"] = f"mirror/{containers[0]['image']}"
    containers[0]["env"].append({"name": "CLUSTER", "value": "c1"})
    containers.append({"name": "mesh", "image": "mesh:1"})
    return told, answer


def test_what_the_api_server_answers_is_the_template_from_then_on() -> None:
    plan, live = at_rest()
    told, answer = rewritten(plan, live)
    assert is_new_template(told, answer), "nobody knows yet whose that is"
    assert is_rewritten(told, answer)
    answer["metadata"]["annotations"] = with_answer(told, answer)["metadata"]["annotations"]
    assert not is_new_template(told, answer)
    assert not is_rewritten(told, answer)
    assert plan_step(told, answer, owner_uid=UID) is ChildStep.KEEP, "it is not written again and again"
    assert differences(told, answer) == [
        "spec.containers[worker].env[CLUSTER] is added",
        "spec.containers[worker].image is mirror/worker:1 instead of worker:1",
        "spec.containers[mesh] is added",
    ]
    answer["spec"]["template"]["spec"]["containers"][0]["image"] = "by-hand:1"
    assert is_new_template(told, answer), "what somebody changes afterwards is put right"


def test_defaults_of_the_api_server_are_no_differences() -> None:
    plan, live = at_rest()
    told, answer = decode_of(rolled(plan, live)), copy.deepcopy(live[DECODE])
    spec = answer["spec"]["template"]["spec"]
    spec |= {"dnsPolicy": "ClusterFirst", "restartPolicy": "Always", "schedulerName": "default-scheduler",
             "serviceAccount": spec["serviceAccountName"]}  # fmt: skip
    spec["containers"][0] |= {"terminationMessagePath": "/dev/termination-log"}
    for volume in spec["volumes"]:
        for kind in ("configMap", "secret"):
            if kind in volume:
                volume[kind].setdefault("defaultMode", 420)
    assert differences(told, answer) == []
    assert template_condition([told], {DECODE: answer}) == []


def test_a_policy_that_writes_another_text_each_time_does_not_grow_the_record() -> None:
    plan, live = at_rest()
    for number in range(40):
        write(live, f"r{number}", **{"example.com/scanned": str(number)})
        live[DECODE]["metadata"]["annotations"] = decode_of(rolled(plan, live))["metadata"]["annotations"]
    known = live[DECODE]["metadata"]["annotations"][REVISIONS].split()[1:]
    assert {"new", "r39"} <= set(known)
    assert len(known) <= 8


@pytest.mark.parametrize("phase", ["Complete", "Canary"])
def test_a_wish_to_restart_is_followed_but_during_a_canary(phase: str) -> None:
    plan, live = at_rest()
    metadata = plan.model.metadata.model_copy(update={"annotations": {"tandem.dev/restart": "1"}})
    rollout: Any = RolloutStatus.model_validate({"phase": phase, "revision": 1, "digest": "", "stableRevision": 1})
    status = plan.model.status.model_copy(update={"rollout": rollout})
    asked = Blueprint(
        model=plan.model.model_copy(update={"metadata": metadata, "status": status}), release=plan.release
    )
    found = {
        c["metadata"]["name"]: c
        for c in keep_what_runs(asked, build_children(asked), live)
        if "template" in c.get("spec", {})
    }
    assert is_new_template(found[DECODE.name], live[DECODE]) is (phase == "Complete")
    template = found[DECODE.name]["spec"]["template"]["metadata"]["annotations"]
    assert template.get("tandem.dev/restart") == ("1" if phase == "Complete" else None)


def test_a_wish_to_restart_that_is_taken_back_restarts_nobody() -> None:
    plan = blueprint()
    metadata = plan.model.metadata.model_copy(update={"annotations": {"tandem.dev/restart": "1"}})
    live = settled(Blueprint(model=plan.model.model_copy(update={"metadata": metadata}), release=plan.release))
    kept = {
        c["metadata"]["name"]: c
        for c in keep_what_runs(plan, build_children(plan), live)
        if "template" in c.get("spec", {})
    }
    assert not is_new_template(kept[DECODE.name], live[DECODE])


def test_the_records_have_the_names_that_live_objects_carry() -> None:
    names = ("tandem.dev/template-answer", "tandem.dev/template-revisions", "tandem.dev/released-revision")
    assert names == (ANSWER, REVISIONS, RELEASED)
