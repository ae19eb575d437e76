"""Which commit workers load: a table of every state, and what holds for any history of a branch and of wishes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from operator_objects import blueprint, cases, raw_model, released, settled
from tandem_api.crd.resource import InferenceModel
from tandem_api.crd.status import InferenceModelStatus, ModelStatus
from tandem_operator.objects.manifests import ChildKey
from tandem_operator.objects.problem import Problem
from tandem_operator.weights.commits import (
    CommitAnswer,
    CommitPlan,
    can_wait,
    is_resolved,
    makes_workers,
    plan_commit,
    read_question,
)
from tandem_operator.workloads.configs import worker_config

A, B, C = "a" * 40, "b" * 40, "c" * 40
DOWN = CommitAnswer(problem=Problem(reason="HubUnreachable", message="cannot ask the hub"))
NOW, LATER = "2026-01-01T00:00:00Z", "2026-01-02T00:00:00Z"


def known(commit: str | None = A, **fields: Any) -> ModelStatus:
    told = {"uri": "hf://org/repo", "revision": "main", "resolved_at": NOW if commit else None}
    return ModelStatus(commit=commit, **told | fields)


def plan(
    before: ModelStatus | None = None,
    answer: CommitAnswer | None = None,
    *,
    asks: bool = True,
    request: str | None = None,
    needed: bool = False,
    spec: dict[str, Any] | None = None,
    **source: Any,
) -> CommitPlan:
    raw = raw_model(**{"model": {"uri": "hf://org/repo"} | source, **(spec or {})})
    model = InferenceModel.model_validate(raw)
    model = model.model_copy(update={"status": InferenceModelStatus(model=before)})
    return plan_commit(model, answer, asks=asks, request=request, needed=needed, now=LATER)


def test_a_new_model_waits_for_its_commit_and_gets_it() -> None:
    waiting = plan(needed=True)
    assert (waiting.commit, waiting.status) == (None, None)
    assert waiting.problem is not None
    assert (waiting.problem.reason, waiting.problem.stalled) == ("ResolvingRevision", False)
    made = plan(None, CommitAnswer(commit=A), needed=True)
    assert (made.commit, made.problem) == (A, None)
    assert made.status == known(A, resolved_at=LATER)
    assert made.finding == (True, "Resolved", f"main was commit {A} at {LATER}")


def test_while_the_hub_is_away_nothing_is_made_and_the_reason_is_told() -> None:
    held = plan(None, DOWN, needed=True)
    assert held.problem == DOWN.problem
    assert held.finding == (False, "HubUnreachable", "cannot ask the hub")
    other = known(A, revision="v1")
    assert plan(other, DOWN, needed=True).status == other, "what runs is what the status goes on to say"


@pytest.mark.parametrize("answer", [None, DOWN, CommitAnswer(commit=B)])
def test_workers_of_an_earlier_release_are_left_as_they_are(answer: CommitAnswer | None) -> None:
    found = plan(None, answer)
    assert (found.commit, found.problem) == (None, None)
    assert found.status == known(None, latest_commit=B if answer is not None and answer.commit else None)
    assert found.finding is not None
    assert found.finding[:2] == (None, "NotResolved")
    assert plan(found.status, CommitAnswer(commit=B), needed=True).commit == B, "until they are replaced anyway"
    assert plan(found.status, CommitAnswer(commit=B), followRevision=True).commit == B, "or until somebody asks for it"
    assert plan(found.status, CommitAnswer(commit=B), request="now").commit == B


def test_a_branch_that_moves_is_told_and_followed_only_when_somebody_wants_it() -> None:
    moved = plan(known(A), CommitAnswer(commit=B))
    assert (moved.commit, moved.status) == (A, known(A, latest_commit=B))
    assert moved.finding is not None
    assert moved.finding[:2] == (True, "RevisionMoved")
    assert plan(moved.status, DOWN).status == moved.status, "what is known stays known"
    assert plan(moved.status, CommitAnswer(commit=A)).status == known(A), "it may move back"
    followed = plan(moved.status, CommitAnswer(commit=B), followRevision=True)
    assert (followed.commit, followed.status) == (B, known(B, resolved_at=LATER))
    asked = plan(moved.status, CommitAnswer(commit=B), request="now")
    assert (asked.commit, asked.status) == (B, known(B, resolved_at=LATER, request="now"))
    assert plan(asked.status, CommitAnswer(commit=C), request="now").commit == B, "one wish is granted once"
    assert plan(asked.status, CommitAnswer(commit=C), request="again").commit == C
    assert plan(asked.status, CommitAnswer(commit=C), request=None).commit == B


@pytest.mark.parametrize("wish", [{"request": "now"}, {"followRevision": True}])
def test_a_wish_that_cannot_be_granted_is_told_and_harms_nobody(wish: dict[str, Any]) -> None:
    for answer in (DOWN, None):
        found = plan(known(A), answer, **wish)
        assert (found.commit, found.problem, found.status) == (A, None, known(A))
    told = plan(known(A), DOWN, **wish).finding
    assert told == (False, "HubUnreachable", f"cannot ask the hub; workers keep commit {A}")
    off = plan(known(A), None, asks=False, **wish)
    assert off.commit == A
    assert off.finding is not None
    assert off.finding[:2] == (None, "ResolutionOff")


def test_switched_off_each_worker_resolves_for_itself_and_what_is_known_stays() -> None:
    off = plan(None, asks=False, needed=True)
    assert (off.commit, off.problem, off.status) == (None, None, known(None))
    assert off.finding is not None
    assert off.finding[1] == "ResolutionOff"
    assert plan(known(A), asks=False).commit == A


def test_a_commit_needs_no_question_and_other_sources_have_none() -> None:
    pinned = plan(None, None, asks=False, needed=True, revision=B)
    assert (pinned.commit, pinned.problem) == (B, None)
    assert pinned.status is not None
    assert (pinned.status.commit, pinned.status.resolved_at) == (B, LATER)
    again = plan(pinned.status, revision=B, spec={"suspend": True})
    assert again.status == pinned.status
    assert plan(uri="pvc://models/llama", needed=True) == CommitPlan()
    assert read_question(blueprint(model={"uri": "hf://org/repo", "revision": B}), None) is None
    assert read_question(blueprint(model={"uri": "file:///x"}), None) is None


def test_a_suspended_model_waits_for_nobody() -> None:
    assert plan(None, DOWN, needed=True, spec={"suspend": True}).problem is None
    assert plan(None, CommitAnswer(commit=A), needed=True, spec={"suspend": True}).commit == A


def test_another_source_is_another_question() -> None:
    for spec in ({"revision": "v2"}, {"uri": "hf://org/other"}):
        assert plan(known(A), None, needed=True, **spec).problem is not None
        assert plan(known(A), CommitAnswer(commit=B), needed=True, **spec).commit == B
    model = InferenceModel.model_validate(raw_model(model={"uri": "hf://org/repo", "revision": "v2"}))
    assert not is_resolved(model.model_copy(update={"status": InferenceModelStatus(model=known(A))}))


@pytest.mark.parametrize(
    ("status", "source", "wish", "expected"),
    [
        (None, {}, None, False),
        (known(None), {}, None, False),
        (known(A), {}, None, True),
        (known(A), {"followRevision": True}, None, False),
        (known(A), {"revision": "v2"}, None, False),
        (known(A), {}, "now", False),
        (known(A, request="now"), {}, "now", True),
    ],
)
def test_what_hangs_on_an_answer(
    status: ModelStatus | None, source: dict[str, Any], wish: str | None, expected: bool
) -> None:
    model = InferenceModel.model_validate(raw_model(model={"uri": "hf://org/repo"} | source))
    assert can_wait(model.model_copy(update={"status": InferenceModelStatus(model=status)}), wish) == expected


history = st.lists(
    st.tuples(
        st.sampled_from([None, DOWN, CommitAnswer(commit=A), CommitAnswer(commit=B), CommitAnswer(commit=C)]),
        st.sampled_from([None, "x", "y"]), st.booleans(), st.booleans(), st.booleans(),
    ),
    max_size=20,
)  # fmt: skip


@given(history=history)
def test_a_commit_changes_only_for_a_wish_and_never_without_an_answer(history: list[Any]) -> None:
    status: ModelStatus | None = None
    for answer, request, follows, needed, asks in history:
        before = None if status is None else status.commit
        asked = request is not None and (status is None or status.request != request)
        found = plan(status, answer, request=request, needed=needed, asks=asks, followRevision=follows)
        if found.commit != before:
            assert asks
            assert answer is not None
            assert found.commit == answer.commit is not None
            assert follows or asked or (before is None and needed)
        assert (found.problem is None) or (needed and before is None and found.commit is None)
        assert found.status is None or found.status.commit == found.commit
        status = found.status


# -- whether workers are made


@pytest.mark.parametrize("case", sorted(cases()))
def test_an_upgrade_that_names_commits_makes_no_workers(case: str) -> None:
    plan = blueprint(**cases()[case])
    for version in ("0.1.0", "0.1.0-rollouts"):
        assert makes_workers(plan, released(version, case)) == (case == "claim-suspended"), "nobody runs there"


@pytest.mark.parametrize(
    "changed", [{"engine": {"image": "w:2"}}, {"decode": {"replicas": 2, "resources": {"limits": {"cpu": 3}}}}]
)
def test_a_change_that_replaces_workers_names_the_commit_too(changed: dict[str, Any]) -> None:
    spec: dict[str, Any] = cases()["disaggregated"]
    assert makes_workers(blueprint(**spec | changed), released("0.1.0", "disaggregated"))
    assert not makes_workers(blueprint(**spec | {"rollout": {"maxSurge": 2}}), released("0.1.0", "disaggregated"))


def test_a_role_without_replicas_beside_one_that_runs_makes_none() -> None:
    spec: dict[str, Any] = {"prefill": {"replicas": 0}, "decode": {"replicas": 1}}
    assert not makes_workers(blueprint(**spec), settled(blueprint(**spec)))
    assert makes_workers(blueprint(**spec), {})
    gone: dict[str, Any] = {"decode": {"replicas": 0}}
    assert makes_workers(blueprint(**gone), settled(blueprint(**gone)))


def test_a_role_that_cannot_be_made_replaces_nobody_else() -> None:
    bad: dict[str, Any] = {"podTemplate": {"metadata": {"labels": {"tandem.dev/role": "x"}}}}
    live = settled(blueprint(prefill={}))
    del live[ChildKey("StatefulSet", "m-prefill")]
    assert not makes_workers(blueprint(prefill=bad), live)
    assert makes_workers(blueprint(prefill={}), live)


def test_the_commit_names_the_build_and_is_what_workers_are_told() -> None:
    plain = blueprint(prefill={})
    one, other = replace(plain, commit=A), replace(plain, commit=B)
    assert len({plain.revision, one.revision, other.revision}) == 3
    for role in plain.worker_roles:
        assert worker_config(one, role).model.revision == A
        assert one.revision_of(role) == one.revision
    pinned = blueprint(prefill={}, model={"uri": "hf://org/repo", "revision": A})
    assert replace(pinned, commit=A).revision == pinned.revision, "a full commit is what it was"
