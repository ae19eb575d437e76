"""Of all models only so many roll at a time, those that have waited longest first."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from tandem_api.crd.status import Condition, InferenceModelStatus, RolloutStatus
from tandem_operator.objects.manifests import ModelKey
from tandem_operator.rollout.queue import RolloutQueue, next_in_queue

A, B, C = (ModelKey("n", name) for name in "abc")


def status(
    phase: str, *, waiting: bool = False, since: str = "2026-01-01T00:00:00Z", stalled: bool = False
) -> InferenceModelStatus:
    told = {"phase": phase, "revision": 2, "digest": "x", "stableRevision": 1, "since": since, "waiting": waiting}
    return InferenceModelStatus(
        rollout=RolloutStatus.model_validate(told),
        conditions=[Condition(type="Stalled", status="True", reason="X", message="x")] if stalled else [],
    )


def test_without_a_limit_everybody_may() -> None:
    queue = RolloutQueue()
    assert all(queue.request_slot(key, since="2026") for key in (A, B, C))


def test_who_has_waited_longest_is_next() -> None:
    queue = RolloutQueue(limit=1)
    assert queue.request_slot(A, since="1")
    assert not queue.request_slot(B, since="3")
    assert not queue.request_slot(C, since="2")
    queue.release_slot(A)
    assert not queue.request_slot(B, since="3"), "another one has waited longer"
    assert queue.request_slot(C, since="2")
    assert queue.request_slot(C, since="2"), "a turn is kept"
    queue.release_slot(C)
    assert queue.request_slot(B, since="3")


def test_nobody_waits_for_a_model_that_does_not_come_for_its_turn() -> None:
    queue = RolloutQueue(limit=1)
    assert queue.request_slot(A, since="1")
    assert not queue.request_slot(B, since="2")
    assert not queue.request_slot(C, since="3")
    queue.stop_waiting(B)
    queue.release_slot(A)
    assert queue.request_slot(C, since="3")
    assert not queue.request_slot(B, since="2"), "it has asked again"
    queue.release_slot(C)
    assert queue.request_slot(B, since="2")


def test_a_stalled_model_is_not_counted_and_may_go_on() -> None:
    queue = RolloutQueue(limit=1)
    assert queue.request_slot(A, since="1")
    queue.set_stalled(A, stalled=True)
    assert queue.request_slot(B, since="2")
    queue.set_stalled(A, stalled=False)
    assert queue.request_slot(A, since="1")
    assert not queue.request_slot(C, since="3")


def test_an_operator_that_starts_knows_whose_turn_it_was() -> None:
    queue = RolloutQueue(limit=2)
    queue.remember(A, status("Canary"))
    queue.remember(B, status("Progressing", waiting=True, since="2026-01-01T00:00:01Z"))
    queue.remember(C, status("Progressing", stalled=True))
    assert not queue.request_slot(ModelKey("n", "d"), since="2026-01-01T00:00:02Z"), "it is B's"
    assert queue.request_slot(B, since="2026-01-01T00:00:01Z")
    assert queue.request_slot(A, since="x")
    queue = RolloutQueue(limit=1)
    queue.remember(A, status("Complete"))
    queue.remember(C, status("RolledBack"))
    assert queue.request_slot(B, since="x")


@given(st.dictionaries(st.sampled_from([A, B, C]), st.sampled_from(["1", "2"])), st.integers(0, 4), st.integers(1, 4))
def test_never_more_than_the_limit(waiting: dict[ModelKey, str], rolling: int, limit: int) -> None:
    chosen = next_in_queue(rolling, waiting, limit=limit)
    assert len(chosen) <= max(0, limit - rolling)
    left = [waiting[key] for key in waiting if key not in chosen]
    assert all(waiting[key] <= since for key in chosen for since in left)
