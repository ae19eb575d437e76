from __future__ import annotations

import itertools

from operator_objects import blueprint, children
from tandem_api.crd.status import Condition, InferenceModelStatus, ModelStatus, RolloutStatus
from tandem_api.launch import GatewayRouting
from tandem_operator.reconcile.transitions import apply_happenings, rollout_happenings, status_happenings
from tandem_operator.workloads import build_children


def with_conditions(*conditions: tuple[str, str, str]) -> InferenceModelStatus:
    return InferenceModelStatus(
        conditions=[Condition(type=t, status=s, reason=r, message=r) for t, s, r in conditions]  # pyright: ignore[reportArgumentType]
    )


def reasons(before: InferenceModelStatus, after: InferenceModelStatus) -> list[str]:
    return [happening.reason for happening in status_happenings(before, after)]


def test_each_change_is_told_once() -> None:
    new, loading = InferenceModelStatus(), with_conditions(("Ready", "False", "Progressing"))
    stalled = with_conditions(("Ready", "False", "ModelNotFound"), ("Stalled", "True", "ModelNotFound"))
    ready = with_conditions(("Ready", "True", "AllReplicasReady"), ("ModelReady", "True", "Loaded"))
    suspended = with_conditions(("Ready", "False", "Suspended"))
    assert reasons(new, loading) == []
    assert reasons(loading, stalled) == ["ModelNotFound"]
    assert reasons(stalled, stalled) == []
    assert reasons(stalled, ready) == ["Recovered", "ModelLoaded", "Ready"]
    assert reasons(ready, ready) == []
    assert reasons(ready, suspended) == ["Suspended"]


def test_fields_that_are_not_known_are_told_once_and_when_they_are() -> None:
    ready = ("Ready", "True", "AllReplicasReady")
    known, unknown = with_conditions(ready), with_conditions(ready, ("SpecUnderstood", "False", "UnknownFields"))
    held = with_conditions(ready, ("Stalled", "True", "InvalidSpec"))
    assert reasons(known, unknown) == ["UnknownFields"]
    assert reasons(unknown, unknown) == []
    assert reasons(unknown, known) == ["SpecUnderstood"]
    assert reasons(unknown, held) == ["InvalidSpec"], "which names the fields too"


def test_workloads_that_are_made_or_scaled() -> None:
    one, three = blueprint(), blueprint(decode={"replicas": 3})
    (created,) = apply_happenings(build_children(one), {})
    assert created.message == "created StatefulSet m-decode with 1 pods, Deployment m with 1 pods"
    (scaled,) = apply_happenings(build_children(three), children(one))
    assert scaled.message == "scaled StatefulSet m-decode from 1 to 3 pods"


def test_a_change_of_name_is_told_with_its_end() -> None:
    old = InferenceModelStatus(routing=GatewayRouting(served_names=["old"]))
    both = GatewayRouting(served_names=["new", "old"], former_until="2026-01-01T00:01:00Z")
    new = InferenceModelStatus(routing=both)
    (told,) = status_happenings(old, new)
    assert (told.reason, told.message) == (
        "Renamed", "served as new from now on; until 2026-01-01T00:01:00Z also as old",
    )  # fmt: skip
    ended = InferenceModelStatus(routing=GatewayRouting(served_names=["new"]))
    assert reasons(new, new) == reasons(new, ended) == reasons(InferenceModelStatus(), new) == []


def test_a_commit_and_a_move_of_its_branch_are_told_once() -> None:
    def status(commit: str | None, latest: str | None = None) -> InferenceModelStatus:
        model = ModelStatus(uri="hf://o/r", revision="main", commit=commit, latest_commit=latest)
        return InferenceModelStatus(model=model)

    assert reasons(InferenceModelStatus(), status("a")) == ["ModelResolved"]
    assert reasons(status(None), status(None, "b")) == [], "nobody knows what runs there"
    assert reasons(status("a"), status("a", "b")) == ["RevisionMoved"]
    assert reasons(status("a", "b"), status("a", "b")) == []
    assert reasons(status("a", "b"), status("a", "c")) == ["RevisionMoved"]
    assert reasons(status("a", "c"), status("c")) == ["ModelResolved"]


def rollout(phase: str, *, step: int | None = None, **more: int) -> RolloutStatus:
    told: dict[str, object] = {"phase": phase, "revision": 2, "digest": "x", "stableRevision": 1, "completeRevision": 1}
    trial = None if step is None else {"revision": 2, "step": step, "since": "2026-01-01T00:00:00Z"}
    return RolloutStatus.model_validate(told | {"canary": trial, "since": "2026-01-01T00:00:00Z"} | more)


def test_steps_of_a_canary_are_told() -> None:
    rollout_plan = [
        rollout("Complete"),
        rollout("Canary", step=1),
        rollout("Canary", step=1),
        rollout("Canary", step=2),
        rollout("Progressing", stableRevision=2),
        rollout("Complete", stableRevision=2, completeRevision=2),
    ]
    told = [[h.message for h in rollout_happenings(*pair)] for pair in itertools.pairwise(rollout_plan)]
    assert told == [
        ["revision 2 is at step 1"],
        [],
        ["revision 2 is at step 2"],
        ["revision 2 is promoted"],
        ["all workers have revision 2"],
    ]
    given_up = rollout_happenings(rollout_plan[1], rollout("Progressing", revision=1))
    assert [h.message for h in given_up] == ["revision 2 is given up"]
