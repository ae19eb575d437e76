"""Of all models only so many roll at a time, those that have waited longest first."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from tandem_api.inferencemodel import Condition, InferenceModelStatus, RolloutStatus
from tandem_operator.objects.manifests import ModelKey
from tandem_operator.rollout.queue import Turns, next_turns

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
    turns = Turns()
    assert all(turns.ask(key, since="2026") for key in (A, B, C))


def test_who_has_waited_longest_is_next() -> None:
    turns = Turns(limit=1)
    assert turns.ask(A, since="1")
    assert not turns.ask(B, since="3")
    assert not turns.ask(C, since="2")
    turns.give_back(A)
    assert not turns.ask(B, since="3"), "another one has waited longer"
    assert turns.ask(C, since="2")
    assert turns.ask(C, since="2"), "a turn is kept"
    turns.give_back(C)
    assert turns.ask(B, since="3")


def test_nobody_waits_for_a_model_that_does_not_come_for_its_turn() -> None:
    turns = Turns(limit=1)
    assert turns.ask(A, since="1")
    assert not turns.ask(B, since="2")
    assert not turns.ask(C, since="3")
    turns.stop_waiting(B)
    turns.give_back(A)
    assert turns.ask(C, since="3")
    assert not turns.ask(B, since="2"), "it has asked again"
    turns.give_back(C)
    assert turns.ask(B, since="2")


def test_a_stalled_model_is_not_counted_and_may_go_on() -> None:
    turns = Turns(limit=1)
    assert turns.ask(A, since="1")
    turns.count(A, stalled=True)
    assert turns.ask(B, since="2")
    turns.count(A, stalled=False)
    assert turns.ask(A, since="1")
    assert not turns.ask(C, since="3")


def test_an_operator_that_starts_knows_whose_turn_it_was() -> None:
    turns = Turns(limit=2)
    turns.remember(A, status("Canary"))
    turns.remember(B, status("Progressing", waiting=True, since="2026-01-01T00:00:01Z"))
    turns.remember(C, status("Progressing", stalled=True))
    assert not turns.ask(ModelKey("n", "d"), since="2026-01-01T00:00:02Z"), "it is B's"
    assert turns.ask(B, since="2026-01-01T00:00:01Z")
    assert turns.ask(A, since="x")
    turns = Turns(limit=1)
    turns.remember(A, status("Complete"))
    turns.remember(C, status("RolledBack"))
    assert turns.ask(B, since="x")


@given(st.dictionaries(st.sampled_from([A, B, C]), st.sampled_from(["1", "2"])), st.integers(0, 4), st.integers(1, 4))
def test_never_more_than_the_limit(waiting: dict[ModelKey, str], rolling: int, limit: int) -> None:
    chosen = next_turns(rolling, waiting, limit=limit)
    assert len(chosen) <= max(0, limit - rolling)
    left = [waiting[key] for key in waiting if key not in chosen]
    assert all(waiting[key] <= since for key in chosen for since in left)
