"""Every status that can be written, as kstatus reads it: kubectl wait, Helm, Flux and Argo CD rest on these readings.

`kstatus` below is the library's documented rules for a type that it does not know, in their order:
https://github.com/kubernetes-sigs/cli-utils/blob/master/pkg/kstatus/README.md
"""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from operator_objects import READY, blueprint, container, settled
from tandem_api.crd.status import InferenceModelStatus, ScalingStatus
from tandem_api.schema import custom_resource_definition
from tandem_operator.objects.manifests import ChildKey, Manifest
from tandem_operator.objects.problem import Problem
from tandem_operator.reconcile.status import build_status, refused_status
from tandem_operator.workloads import Blueprint

NOW, LATER = "2026-01-01T00:00:00Z", "2026-01-01T02:00:00Z"
DECODE, GATEWAY = ChildKey("StatefulSet", "m-decode"), ChildKey("Deployment", "m")


def kstatus(thing: Manifest) -> str:
    """InProgress, Failed, Current or Terminating."""
    if thing["metadata"].get("deletionTimestamp"):
        return "Terminating"
    status = thing.get("status", {})
    observed = status.get("observedGeneration")
    if observed is not None and observed != thing["metadata"]["generation"]:
        return "InProgress"
    conditions = {condition["type"]: condition["status"] for condition in status.get("conditions", [])}
    if conditions.get("Reconciling") == "True":
        return "InProgress"
    if conditions.get("Stalled") == "True":
        return "Failed"
    if "Ready" in conditions:
        return "Current" if conditions["Ready"] == "True" else "InProgress"
    return "Current"


def written(status: InferenceModelStatus, **metadata: Any) -> Manifest:
    """The object as the API server has it."""
    return {
        "metadata": {"generation": 1} | metadata,
        "status": status.model_dump(by_alias=True, exclude_none=True),
    }


def look(plan: Blueprint, live: dict[ChildKey, Manifest], **more: Any) -> InferenceModelStatus:
    given = {"problems": [], "failures": {}, "waiting": [], "now": NOW} | more
    return build_status(plan, live, **given)


def after(plan: Blueprint, before: InferenceModelStatus) -> Blueprint:
    return Blueprint(model=plan.model.model_copy(update={"status": before}), release=plan.release)


def condition(status: InferenceModelStatus, kind: str) -> str | None:
    return next((f"{c.status} {c.reason}" for c in status.conditions if c.type == kind), None)


def test_a_fresh_object_is_in_progress() -> None:
    schema = custom_resource_definition()["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
    status = schema["properties"]["status"]["default"]
    assert kstatus({"metadata": {"generation": 1}, "status": status}) == "InProgress"
    assert kstatus({"metadata": {"generation": 1}}) == "Current", "why there is a default"


def test_all_is_well() -> None:
    plan = blueprint(prefill={}, decode={"replicas": 2})
    assert kstatus(written(look(plan, settled(plan)))) == "Current"


def test_a_canary_and_one_that_has_failed() -> None:
    plan = blueprint(decode={"replicas": 2})
    trying = Problem(reason="Canary", message="step 1")
    status = look(plan, settled(plan), trial=trying)
    assert (kstatus(written(status)), condition(status, "Ready")) == ("InProgress", "True AllReplicasReady")
    assert condition(look(after(plan, status), settled(plan), trial=trying, now=LATER), "Stalled") is None
    failed = look(plan, settled(plan), trial=Problem(reason="CanaryFailed", message="x", stalled=True))
    assert (kstatus(written(failed)), condition(failed, "Stalled")) == ("Failed", "True CanaryFailed")
    assert condition(failed, "Ready") == "True AllReplicasReady"
    suspended = blueprint(decode={"replicas": 2}, suspend=True)
    status = look(suspended, settled(suspended), trial=Problem(reason="CanaryFailed", message="x", stalled=True))
    assert condition(status, "Stalled") == "True Suspended"


def test_deleting() -> None:
    plan = blueprint()
    assert kstatus(written(look(plan, settled(plan)), deletionTimestamp=NOW)) == "Terminating"


SPECS: dict[str, tuple[dict[str, Any], str]] = {
    "suspended": ({"suspend": True}, "Suspended"),
    "no decode": ({"decode": {"replicas": 0}}, "ScaledToZero"),
    "no decode beside prefill": ({"prefill": {"replicas": 2}, "decode": {"replicas": 0}}, "ScaledToZero"),
    "no gateway": ({"gateway": {"replicas": 0}}, "ScaledToZero"),
    "no decode by what scales it": ({"decode": {"replicas": 0, "scaling": {"mode": "External"}}}, "ScaledToZero"),
    "suspended at zero": ({"suspend": True, "decode": {"replicas": 0}, "gateway": {"replicas": 0}}, "Suspended"),
    "no partner": ({"engine": {"kind": "VLLM", "device": "CUDA"}, "prefill": {"replicas": 0}}, "NoPrefill"),
}


@pytest.mark.parametrize("name", sorted(SPECS))
def test_what_serves_nothing_is_never_ready_and_waits_for_a_person(name: str) -> None:
    spec, reason = SPECS[name]
    plan = blueprint(**spec)
    status = look(plan, settled(plan))
    assert condition(status, "Ready") == f"False {reason}"
    assert condition(status, "Stalled") == f"True {reason}"
    assert condition(status, "Available") == "False NothingServed"
    assert kstatus(written(status)) == "Failed", "nobody waits for ever"


def test_pods_that_leave_are_in_progress() -> None:
    plan = blueprint(suspend=True)
    live = settled(plan)
    live[GATEWAY]["status"]["replicas"] = 1
    assert kstatus(written(look(plan, live))) == "InProgress"


def test_scaling_up_takes_ready_from_nobody() -> None:
    small = blueprint(decode={"replicas": 2})
    before = look(small, settled(small))
    grown = after(blueprint(decode={"replicas": 4}), before)
    live = settled(grown)
    for number in (2, 3):
        live[ChildKey("Pod", f"m-decode-{number}")]["status"] = container()
    status = look(grown, live)
    assert (condition(status, "Ready"), condition(status, "Reconciling")) == ("True Serving", "True Progressing")
    assert kstatus(written(status)) == "InProgress"
    del live[ChildKey("Pod", "m-decode-0")]
    assert condition(look(after(grown, status), live), "Ready") == "False Progressing", "what was promised is missed"
    whole = look(after(grown, status), settled(grown))
    assert whole.decode is not None
    assert (whole.decode.promised, kstatus(written(whole))) == (4, "Current")


def test_a_promise_to_a_role_that_grows_ends_with_the_progress_deadline() -> None:
    """Two of four for hours: a quota, or an image that is not there. That it grows is no excuse for ever."""
    small = blueprint(decode={"replicas": 2})
    grown = after(blueprint(decode={"replicas": 4}), look(small, settled(small)))
    live = settled(grown)
    for number in (2, 3):
        live[ChildKey("Pod", f"m-decode-{number}")]["status"] = container()
    status = look(grown, live)
    assert (condition(status, "Ready"), status.updated) == ("True Serving", "4/4")
    late = look(after(grown, status), live, now=LATER)
    assert (condition(late, "Ready"), condition(late, "Stalled")) == (
        "True Serving",
        "True ProgressDeadlineExceeded",
    ), "it is named first"
    over = look(after(grown, late), live, now=LATER)
    assert condition(over, "Ready") == "False ProgressDeadlineExceeded"
    assert over.decode is not None
    assert over.decode.promised == 4


def test_a_new_model_promises_all_from_the_start() -> None:
    plan = blueprint(decode={"replicas": 2})
    live = settled(plan)
    live[ChildKey("Pod", "m-decode-1")]["status"] = container()
    for _ in range(2):
        status = look(plan, live)
        assert condition(status, "Ready") == "False Progressing"
        plan = after(plan, status)


def test_nineteen_of_twenty_are_available() -> None:
    plan = blueprint(decode={"replicas": 20})
    live = settled(plan)
    live[ChildKey("Pod", "m-decode-3")]["status"] = container()
    status = look(plan, live)
    assert (condition(status, "Ready"), condition(status, "Available")) == ("False Progressing", "True Serving")


def test_a_rollout_within_its_budget_keeps_ready() -> None:
    plan = blueprint(decode={"replicas": 4})
    live = settled(plan)
    for number in (0, 1):
        live[ChildKey("Pod", f"m-decode-{number}")]["metadata"]["labels"]["controller-revision-hash"] = "old"
    live[ChildKey("Pod", "m-decode-2")]["status"] = container()
    status = look(plan, live)
    assert (condition(status, "Ready"), kstatus(written(status))) == ("True Serving", "InProgress")
    reconciling = next(c for c in status.conditions if c.type == "Reconciling")
    assert "decode 3/4 (2 of 4 updated)" in reconciling.message
    live[ChildKey("Pod", "m-decode-3")]["status"] = container()
    assert condition(look(plan, live), "Ready") == "False Progressing"


def test_a_surge_that_a_quota_refuses_is_told_while_all_is_served() -> None:
    plan = blueprint()
    live = settled(plan)
    live[DECODE]["spec"]["replicas"] = 2
    live[ChildKey("Pod", "m-decode-0")]["metadata"]["labels"]["controller-revision-hash"] = "old"
    status = look(plan, live, failures={DECODE: "exceeded quota"})
    assert (condition(status, "Ready"), condition(status, "Stalled")) == ("True Serving", "True PodsNotCreated")
    said = next(c.message for c in status.conditions if c.type == "Stalled")
    assert "raise the ResourceQuota" in said
    assert "spec.rollout.maxSurge: 0" in said
    del live[ChildKey("Pod", "m-decode-0")]
    lacking = look(plan, live, failures={DECODE: "exceeded quota"})
    assert "maxSurge" not in next(c.message for c in lacking.conditions if c.type == "Stalled"), (
        "it lacks more than that"
    )


def test_roles_of_different_builds_are_not_ready_whatever_their_pods_say() -> None:
    overlay = {"spec": {"containers": [{"name": "worker", "image": "patched:1"}]}}
    plan = blueprint(prefill={}, decode={"podTemplate": overlay})
    status = look(plan, settled(plan))
    assert condition(status, "Ready") == "False BuildsApart"
    assert kstatus(written(status)) == "Failed", "somebody has to give them one image"


def test_a_paused_rollout_waits_for_a_person_and_serves() -> None:
    plan = blueprint(decode={"replicas": 2}, rollout={"paused": True})
    live = settled(plan)
    assert kstatus(written(look(plan, live))) == "Current", "nothing is held"
    live[ChildKey("Pod", "m-decode-0")]["metadata"]["labels"]["controller-revision-hash"] = "old"
    status = look(plan, live)
    assert (condition(status, "Ready"), condition(status, "Stalled")) == ("True Serving", "True RolloutPaused")
    assert kstatus(written(status)) == "Failed"


def test_a_deadline_ends_the_waiting() -> None:
    plan = blueprint(rollout={"progressDeadline": "1h"})
    live = settled(plan)
    live[ChildKey("Pod", "m-decode-0")]["status"] = container()
    status = look(plan, live)
    assert kstatus(written(status)) == "InProgress"
    late = look(after(plan, status), live, now=LATER)
    assert condition(late, "Stalled") == "True ProgressDeadlineExceeded"
    assert kstatus(written(late)) == "Failed"
    assert condition(look(after(plan, late), live, now=LATER), "Stalled") == "True ProgressDeadlineExceeded"
    again = look(after(plan, late), live, now="2026-01-01T00:00:30Z")
    assert kstatus(written(again)) == "InProgress", "it was the clock: a pod that comes up is not waited for until then"
    live[ChildKey("Pod", "m-decode-0")]["metadata"]["creationTimestamp"] = "2026-01-01T02:01:00Z"
    assert kstatus(written(look(after(plan, late), live, now=LATER))) == "InProgress", "something has come since"


def test_a_refused_child_stalls_and_what_serves_is_available() -> None:
    plan = blueprint()
    problem = Problem(reason="Forbidden", message="no", stalled=True)
    status = look(plan, settled(plan), problems=[problem])
    assert (condition(status, "Ready"), condition(status, "Available")) == ("False Forbidden", "True Serving")
    assert kstatus(written(status)) == "Failed"
    passing = look(plan, settled(plan), problems=[Problem(reason="WebhookFailed", message="500")])
    assert (condition(passing, "Ready"), kstatus(written(passing))) == ("True Serving", "InProgress")


def test_an_object_that_cannot_be_read_keeps_the_generation_of_what_was_seen() -> None:
    plan = blueprint()
    problem = Problem(reason="InvalidSpec", message="no", stalled=True)
    status = refused_status(problem, look(plan, settled(plan)), generation=2, now=LATER)
    generations = {c.type: c.observed_generation for c in status.conditions}
    assert (generations["Stalled"], generations["DecodeReady"], generations["Available"]) == (2, 1, 1)
    assert kstatus(written(status, generation=2)) == "Failed"


SLO_ROLE = {"scaling": {"mode": "SLO", "max": 2}}
SLEEPS = {
    "prefill": SLO_ROLE, "decode": SLO_ROLE, "slo": {"ttft": {"seconds": 1}, "tpot": {"seconds": 0.05}},
    "autoscaling": {"scaleToZero": {}},
}  # fmt: skip


@given(
    gateways=st.integers(1, 2),
    gateways_ready=st.integers(0, 2),
    left=st.booleans(),
    awake=st.integers(0, 1),
    problem=st.none() | st.booleans(),
    trial=st.none() | st.booleans(),
    now=st.sampled_from([NOW, LATER]),
)
def test_rules_of_every_status_of_a_model_that_sleeps_and_wakes(
    gateways: int, gateways_ready: int, left: bool, awake: int, problem: bool | None, trial: bool | None, now: str
) -> None:
    """Nobody waits for a model that sleeps, and nobody has to act."""
    roles = {role: SLO_ROLE | {"replicas": awake} for role in ("prefill", "decode")}
    plan = blueprint(**(SLEEPS | roles), gateway={"replicas": gateways})
    asleep = ScalingStatus(asleep_since=NOW)
    zero = blueprint(**(SLEEPS | {role: SLO_ROLE | {"replicas": 0} for role in roles}), gateway={"replicas": gateways})
    before = look(zero, settled(zero), scaling=asleep)
    assert (condition(before, "Ready"), kstatus(written(before))) == ("True ScaledToZero", "Current")
    live = settled(plan)
    live[GATEWAY]["status"] |= {"readyReplicas": min(gateways, gateways_ready)}
    if left and not awake:
        live[ChildKey("Pod", "m-decode-0")] = settled(blueprint(**SLEEPS))[ChildKey("Pod", "m-decode-0")]
    for role in roles if awake else ():
        live[ChildKey("Pod", f"m-{role}-0")]["status"] = container()
    more = {
        "problems": [] if problem is None else [Problem(reason="Rejected", message="no", stalled=problem)],
        "trial": None if trial is None else Problem(reason="Canary", message="step", stalled=trial),
        "scaling": None if awake else asleep,
        "now": now,
    }
    plan = after(plan, before)
    status = look(plan, live, **more)
    conditions = {found.type: found for found in status.conditions}
    assert not {"Reconciling", "Stalled"} <= conditions.keys()
    if conditions["Ready"].status == "True":
        assert conditions["Available"].status == "True"
        assert conditions["Ready"].reason == ("Waking" if awake else "ScaledToZero")
    held, at_rest = gateways_ready >= gateways, problem is None and trial is None
    assert (conditions["Ready"].status == "True") == (
        held and not problem and (not awake or "Stalled" not in conditions)
    )
    if held and at_rest:
        assert kstatus(written(status)) == ("InProgress" if awake or left else "Current")
    assert "Stalled" not in conditions or problem or trial or now == LATER
    assert look(after(plan, status), live, **more) == status


@given(
    ready=st.integers(0, 2),
    updated=st.integers(0, 2),
    spec=st.fixed_dictionaries(
        {
            "suspend": st.booleans(),
            "rollout": st.fixed_dictionaries({"paused": st.booleans()}),
            "prefill": st.none() | st.just({}),
            "gateway": st.fixed_dictionaries({"replicas": st.integers(0, 2)}),
        }
    ),
    problem=st.none() | st.booleans(),
    waiting=st.booleans(),
    now=st.sampled_from([NOW, LATER]),
)
def test_rules_of_every_status(
    ready: int, updated: int, spec: dict[str, Any], problem: bool | None, waiting: bool, now: str
) -> None:
    plan = blueprint(decode={"replicas": 2}, **spec)
    live = settled(plan)
    for number in range(2):
        if (found := live.get(ChildKey("Pod", f"m-decode-{number}"))) is not None:
            found["status"] = READY if number < ready else container()
            if number >= updated:
                found["metadata"]["labels"]["controller-revision-hash"] = "old"
    problems = [] if problem is None else [Problem(reason="Rejected", message="no", stalled=problem)]
    plan = after(plan, look(plan, live))
    status = look(plan, live, problems=problems, waiting=["Service m"] if waiting else [], now=now)
    conditions = {condition.type: condition for condition in status.conditions}
    assert not {"Reconciling", "Stalled"} <= conditions.keys()
    assert all(c.message and c.reason and c.observed_generation == 1 for c in status.conditions)
    if conditions["Ready"].status == "True":
        assert conditions["Available"].status == "True"
        assert not plan.model.spec.suspend
    reading = kstatus(written(status))
    if reading == "Current":
        assert conditions["Ready"].status == "True"
    if reading == "InProgress":
        assert "Reconciling" in conditions, "it says what is waited for"
    if problem:
        assert reading == "Failed"
    assert (
        look(after(plan, status), live, problems=problems, waiting=["Service m"] if waiting else [], now=now) == status
    )
