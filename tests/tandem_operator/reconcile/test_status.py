from __future__ import annotations

from dataclasses import replace
from typing import Any

from operator_objects import blueprint, container, pod, settled
from tandem_api.crd.status import Condition, InferenceModelStatus
from tandem_api.telemetry import WeightsTelemetry
from tandem_operator.objects.manifests import ChildKey, Manifest
from tandem_operator.objects.problem import Problem
from tandem_operator.reconcile.status import build_status, refused_status
from tandem_operator.workloads import Blueprint

NOW, LATER = "2026-01-01T00:00:00Z", "2026-01-01T00:01:00Z"


def unready(live: dict[ChildKey, Manifest], name: str) -> None:
    live[ChildKey("Pod", name)]["status"] = container()


def status(plan: Blueprint, live: dict[ChildKey, Manifest], **more: Any) -> InferenceModelStatus:
    given = {"problems": [], "failures": {}, "waiting": [], "now": NOW} | more
    return build_status(plan, live, **given)


def by_type(found: InferenceModelStatus) -> dict[str, Condition]:
    return {condition.type: condition for condition in found.conditions}


def test_everything_up() -> None:
    plan = blueprint(prefill={"replicas": 1}, decode={"replicas": 2})
    found = status(plan, settled(plan))
    conditions = by_type(found)
    assert (conditions["Ready"].status, conditions["Ready"].reason) == ("True", "AllReplicasReady")
    assert conditions["Ready"].message == "prefill 1/1, decode 2/2, gateway 1/1"
    assert conditions["Available"].status == "True"
    assert not {"Reconciling", "Stalled"} & conditions.keys()
    assert conditions["ModelReady"].reason == "Loaded"
    assert found.decode is not None
    assert (found.decode.summary, found.url) == ("2/2", "http://m.n.svc")


def test_messages_have_a_bound_whatever_others_say() -> None:
    """What a webhook says of a pod that it refuses has none, and an object that is too large is never written."""
    plan = blueprint()
    live = settled(plan)
    del live[ChildKey("Pod", "m-decode-0")]
    words = "policy says no: " + "x" * 100_000
    found = status(plan, live, failures={ChildKey("StatefulSet", "m-decode"): words})
    stalled = by_type(found)["Stalled"]
    assert stalled.message.startswith("StatefulSet m-decode: policy says no")
    assert max(len(c.message) for c in found.conditions) <= 4000
    refused = Problem(reason="InvalidSpec", message=words, stalled=True)
    assert max(len(c.message) for c in refused_status(refused, found, generation=2, now=NOW).conditions) <= 4000


def test_why_the_spec_is_not_followed_is_told_before_what_ails_pods() -> None:
    """Somebody has corrected the image, and needs to know why the pods of the former one stay."""
    plan = blueprint(decode={"replicas": 2})
    live = settled(plan)
    pulling = {"waiting": {"reason": "ImagePullBackOff", "message": "no such image"}}
    live[ChildKey("Pod", "m-decode-1")]["status"] = container(state=pulling)
    lost = Problem(reason="RevisionNotFound", message="remove spec.rollout.canary", stalled=True)
    conditions = by_type(status(plan, live, trial=lost))
    assert (conditions["Stalled"].reason, conditions["DecodeReady"].reason) == ("RevisionNotFound", "ImagePullFailed")
    taken = Problem(reason="ChildNameTaken", message="rename", stalled=True)
    assert by_type(status(plan, live, trial=lost, problems=[taken]))["Stalled"].reason == "ChildNameTaken"


GROUPS = {"replicas": 2, "nodesPerReplica": 2, "parallelism": {"pipeline": 2}}


def test_groups_are_counted_not_pods() -> None:
    plan = blueprint(decode=GROUPS)
    found = status(plan, settled(plan)).decode
    assert found is not None
    assert (found.replicas, found.ready, found.updated, found.summary) == (2, 2, 2, "2/2")


def test_one_pod_makes_its_group_unready_and_is_named() -> None:
    plan = blueprint(decode=GROUPS)
    live = settled(plan)
    ended = {"terminated": {"exitCode": 137, "reason": "OOMKilled"}}
    live[ChildKey("Pod", "m-decode-3")]["status"] = container(lastState=ended)
    found = status(plan, live)
    assert found.decode is not None
    assert (found.decode.replicas, found.decode.ready, found.decode.summary) == (2, 1, "1/2")
    conditions = by_type(found)
    assert conditions["DecodeReady"].reason == "OutOfMemory"
    assert "Pod m-decode-3 (node 1 of replica 1)" in conditions["DecodeReady"].message


def test_half_a_group_of_the_newest_template_is_not_updated() -> None:
    plan = blueprint(decode=GROUPS)
    live = settled(plan)
    live[ChildKey("Pod", "m-decode-1")]["metadata"]["labels"]["controller-revision-hash"] = "old"
    found = status(plan, live)
    assert found.decode is not None
    assert (found.decode.ready, found.decode.updated) == (2, 1)
    assert by_type(found)["Reconciling"].status == "True"


def test_pods_that_quota_keeps_from_being_made_say_what_to_do() -> None:
    plan, key = blueprint(), ChildKey("StatefulSet", "m-decode")
    live = settled(plan)
    del live[ChildKey("Pod", "m-decode-0")]
    said = (
        'create Pod m-decode-0 in StatefulSet m-decode failed error: pods "m-decode-0" is forbidden: exceeded quota:'
        " small, requested: pods=1, used: pods=4, limited: pods=4"
    )
    stalled = by_type(status(plan, live, failures={key: said}))["Stalled"]
    assert stalled.reason == "PodsNotCreated"
    assert stalled.message == f"{key}: {said}; raise the ResourceQuota, or lower what the model asks for"


def test_a_pod_stuck_on_a_lost_node_is_told() -> None:
    plan = blueprint()
    live = settled(plan)
    live[ChildKey("Pod", "m-decode-0")]["metadata"]["deletionTimestamp"] = "2025-12-31T23:00:00Z"
    conditions = by_type(status(plan, live))
    assert conditions["Stalled"].reason == conditions["Ready"].reason == "StuckTerminating"


def test_a_missing_pod_of_a_group_is_missed() -> None:
    plan = blueprint(decode=GROUPS)
    live = settled(plan)
    key = ChildKey("StatefulSet", "m-decode")
    del live[ChildKey("Pod", "m-decode-3")]
    assert by_type(status(plan, live, failures={key: "exceeded quota"}))["Stalled"].reason == "PodsNotCreated"


def test_a_single_ready_pod_of_a_group_has_not_loaded_the_model() -> None:
    plan = blueprint(decode=GROUPS | {"replicas": 1})
    live = settled(plan)
    assert by_type(status(plan, live))["ModelReady"].reason == "Loaded"
    unready(live, "m-decode-1")
    assert by_type(status(plan, live))["ModelReady"].reason == "Loading"


def test_without_prefill_there_is_no_prefill_condition() -> None:
    found = status(blueprint(), settled(blueprint()))
    assert "PrefillReady" not in by_type(found)
    assert found.prefill is None


def test_a_template_that_its_controller_has_not_seen_is_in_progress() -> None:
    plan = blueprint()
    live = settled(plan)
    live[ChildKey("StatefulSet", "m-decode")]["metadata"]["generation"] = 2
    conditions = by_type(status(plan, live))
    assert (conditions["Ready"].reason, conditions["Reconciling"].reason) == ("Serving", "Progressing")


def test_a_workers_own_words_end_in_stalled_and_model_ready() -> None:
    plan = blueprint()
    live = settled(plan)
    said = '{"reason": "ModelNotFound", "message": "no such model"}'
    ended = {"terminated": {"exitCode": 1, "message": said}}
    live[ChildKey("Pod", "m-decode-0")]["status"] = container(lastState=ended)
    conditions = by_type(status(plan, live))
    assert {conditions[kind].reason for kind in ("Ready", "Stalled", "ModelReady", "DecodeReady")} == {"ModelNotFound"}
    assert "Reconciling" not in conditions


def test_pods_that_cannot_be_created() -> None:
    plan = blueprint()
    live = settled(plan)
    key = ChildKey("StatefulSet", "m-decode")
    del live[ChildKey("Pod", "m-decode-0")]
    conditions = by_type(status(plan, live, failures={key: "exceeded quota"}))
    assert conditions["Stalled"].reason == "PodsNotCreated"
    assert "exceeded quota" in conditions["DecodeReady"].message


def test_suspended() -> None:
    plan = blueprint(suspend=True)
    conditions = by_type(status(plan, settled(plan)))
    assert (conditions["Ready"].status, conditions["Ready"].reason) == ("False", "Suspended")
    assert "Reconciling" not in conditions
    leaving = settled(plan)
    leaving[ChildKey("Deployment", "m")]["status"]["replicas"] = 1
    assert by_type(status(plan, leaving))["Reconciling"].reason == "Suspended"


def test_waiting_for_an_earlier_object() -> None:
    conditions = by_type(status(blueprint(), settled(blueprint()), waiting=["Service m"]))
    assert conditions["Reconciling"].reason == "WaitingForRemoval"


def test_the_transition_time_moves_with_the_status_alone() -> None:
    plan = blueprint()
    first = status(plan, settled(plan))
    plan = Blueprint(model=plan.model.model_copy(update={"status": first}), release=plan.release)
    assert status(plan, settled(plan), now=LATER) == first
    live = settled(plan)
    live[ChildKey("Deployment", "m")]["status"]["readyReplicas"] = 0
    conditions = by_type(status(plan, live, now=LATER))
    assert conditions["Ready"].last_transition_time == LATER
    assert conditions["DecodeReady"].last_transition_time == NOW


def test_a_refused_spec_keeps_what_runs_in_view() -> None:
    before = status(blueprint(), settled(blueprint()))
    problem = Problem(reason="InvalidPodTemplate", message="spec.decode…", stalled=True)
    after = refused_status(problem, before, generation=2, now=LATER)
    conditions = by_type(after)
    assert (conditions["Stalled"].reason, conditions["Ready"].status) == ("InvalidPodTemplate", "False")
    assert conditions["DecodeReady"].status == "True"
    assert (after.observed_generation, after.decode) == (2, before.decode)
    assert refused_status(problem, after, generation=2, now="2027-01-01T00:00:00Z") == after


def test_one_stray_pod_with_our_labels_disturbs_nobody() -> None:
    plan = blueprint()
    live = settled(plan)
    before = status(plan, live)
    labels = live[ChildKey("Pod", "m-decode-0")]["metadata"]["labels"]
    for name, more in (("debug", {"tandem.dev/nodes-per-replica": "x"}), ("m-decode-7", {}), ("m-x-5", {})):
        live[ChildKey("Pod", name)] = pod(name, owner="somebody", labels=labels | more, **container())
    assert status(plan, live) == before


def test_each_role_says_in_which_form_its_workers_keep_the_model_and_a_silence_takes_that_from_nobody() -> None:
    plan = blueprint(prefill={"replicas": 1}, decode={"replicas": 2})
    live = settled(plan)
    assert status(plan, live).decode.weights is None  # pyright: ignore[reportOptionalMemberAccess]
    names = [key.name for key in live if key.kind == "Pod"]
    forms = {
        name: WeightsTelemetry(form="plain" if "prefill" in name else "lossless", why="as engine.weights says")
        for name in names
    }
    told = status(plan, live, forms=forms)
    assert told.prefill is not None
    assert told.decode is not None
    assert told.gateway is not None
    assert (told.prefill.weights, told.decode.weights, told.gateway.weights) == (
        "plain: as engine.weights says", "lossless: as engine.weights says", None,
    )  # fmt: skip
    later = replace(plan, model=plan.model.model_copy(update={"status": told}))
    assert status(later, live).decode == told.decode
    assert status(later, live, forms={name: WeightsTelemetry(form="plain") for name in names}).decode != told.decode


def test_a_form_goes_with_the_workers_that_told_it() -> None:
    plan = blueprint(decode={"replicas": 2})
    live = settled(plan)
    names = [key.name for key in live if key.kind == "Pod"]
    told = status(plan, live, forms={name: WeightsTelemetry(form="lossless") for name in names})
    later = replace(plan, model=plan.model.model_copy(update={"status": told}))

    def form(plan: Any, **known: Any) -> str | None:
        found = status(plan, live, **known).decode
        assert found is not None
        return found.weights

    assert form(later, forms={}) == "lossless", "their gateways are silent"
    assert form(later, forms={names[0]: None, names[1]: WeightsTelemetry(form="plain")}) == "plain"
    assert form(later, forms=dict.fromkeys(names)) is None, "these are of a release that tells nothing of it"
    foreign = blueprint(decode={"replicas": 2}, engine={"kind": "VLLM"})
    assert form(replace(foreign, model=foreign.model.model_copy(update={"status": told}))) is None
