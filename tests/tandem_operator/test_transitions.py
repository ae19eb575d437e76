from __future__ import annotations

from operator_objects import blueprint, children
from tandem_api.inferencemodel import Condition, InferenceModelStatus
from tandem_operator.transitions import apply_happenings, status_happenings
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


def test_workloads_that_are_made_or_scaled() -> None:
    one, three = blueprint(), blueprint(decode={"replicas": 3})
    created = apply_happenings(build_children(one), {})
    assert sorted(happening.reason for happening in created) == ["Created", "Created"]
    (scaled,) = apply_happenings(build_children(three), children(one))
    assert scaled.message == "scaled StatefulSet m-decode from 1 to 3 pods"
