"""Which commit of a draft head workers load: once, when they are made, and what runs is never made anew for it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from operator_objects import blueprint, raw_model, settled
from tandem_api.crd.resource import InferenceModel
from tandem_api.crd.status import InferenceModelStatus, ModelStatus
from tandem_api.names import Role
from tandem_operator.objects.problem import Problem
from tandem_operator.rollout.revisions import content_of
from tandem_operator.weights.commits import CommitAnswer, CommitPlan, makes_workers
from tandem_operator.weights.drafts import PATH, find_known, plan_draft, read_question
from tandem_operator.workloads.blueprint import Blueprint
from tandem_operator.workloads.configs import worker_config

A, B = "a" * 40, "b" * 40
NOW = "2026-01-01T00:00:00Z"
HEAD = {"uri": "hf://org/head"}
DOWN = CommitAnswer(problem=Problem(reason="HubUnreachable", message="cannot ask the hub"))


def spec_of(head: dict[str, Any] | None, method: str = "Auto") -> dict[str, Any]:
    return {"engine": {"speculative": {"method": method} | ({} if head is None else {"draft": head})}}


def model_of(head: dict[str, Any] | None = HEAD, before: ModelStatus | None = None, **more: Any) -> InferenceModel:
    model = InferenceModel.model_validate(raw_model(**spec_of(head), **more))
    return model.model_copy(update={"status": InferenceModelStatus(draft=before)})


def known(commit: str | None = A, revision: str = "main") -> ModelStatus:
    return ModelStatus(uri="hf://org/head", revision=revision, commit=commit, resolved_at=NOW if commit else None)


def plan(model: InferenceModel, answer: CommitAnswer | None = None, *, asks: bool = True, needed: bool = True,
         told: ModelStatus | None = None) -> CommitPlan:  # fmt: skip
    return plan_draft(model, told, answer, asks=asks, needed=needed, now=NOW)


def test_pods_wait_for_the_commit_of_their_head() -> None:
    waiting = plan(model_of())
    assert waiting.problem is not None
    assert (waiting.problem.reason, waiting.commit, waiting.status) == ("ResolvingRevision", None, None)
    assert plan(model_of(), DOWN).problem == DOWN.problem
    made = plan(model_of(), CommitAnswer(commit=A))
    assert (made.commit, made.status, made.problem) == (A, known(), None)


@pytest.mark.parametrize(("head", "method"), [(None, "Auto"), (HEAD, "Off"), ({"uri": "pvc://claim/head"}, "Auto")])
def test_where_there_is_no_repository_nothing_is_asked_and_nothing_waits(
    head: dict[str, Any] | None, method: str
) -> None:
    made = blueprint(**spec_of(head, method))
    assert read_question(made) is None
    assert plan(made.model) == CommitPlan()


def test_a_commit_is_taken_as_it_is() -> None:
    named = {**HEAD, "revision": B}
    assert read_question(blueprint(**spec_of(named))) is None
    found = plan(model_of(named), asks=False)
    assert (found.commit, found.problem) == (B, None)
    assert found.status is not None
    assert found.status.commit == B


def test_what_runs_goes_on_and_what_is_known_stays() -> None:
    assert plan(model_of(), DOWN, needed=False) == CommitPlan(status=known(None)), "pods that nobody makes anew"
    assert plan(model_of(), CommitAnswer(commit=B), needed=False).commit is None
    assert plan(model_of(), None, asks=False) == CommitPlan(status=known(None)), "each worker asks for itself"
    assert plan(model_of(suspend=True)).problem is None, "nobody waits for a model that is suspended"
    assert plan(model_of(), CommitAnswer(commit=B), told=known()) == CommitPlan(commit=A, status=known())


def test_another_revision_is_another_question() -> None:
    made = blueprint(**spec_of({**HEAD, "revision": "v2"}))
    status = InferenceModelStatus(draft=known())
    made = replace(made, model=made.model.model_copy(update={"status": status}))
    assert find_known(made, {}) is None
    question = read_question(made)
    assert question is not None
    assert (question.repository, question.revision, question.path) == ("org/head", "v2", PATH)


def test_the_head_is_asked_for_with_its_own_token_or_the_model_s() -> None:
    def secret(head: dict[str, Any], **model: Any) -> str | None:
        question = read_question(blueprint(model={"uri": "hf://org/repo"} | model, **spec_of(HEAD | head)))
        assert question is not None
        return None if question.secret is None else question.secret.name

    own, models = {"secretRef": {"name": "own"}}, {"secretRef": {"name": "models"}}
    assert (secret({}), secret({}, **models), secret(own, **models)) == (None, "models", "own")


def with_commit(commit: str | None) -> Blueprint:
    return replace(blueprint(**spec_of(HEAD)), draft_commit=commit)


def test_workers_blocks_and_kept_revisions_go_by_the_commit() -> None:
    told = worker_config(with_commit(A), Role.UNIFIED).speculative.draft
    assert told is not None
    assert told.revision == A
    assert len({with_commit(commit).revision for commit in (None, A, B)}) == 3
    assert content_of(with_commit(A))["engine"]["speculative"]["draft"] == {**HEAD, "revision": A}
    named = blueprint(**spec_of({**HEAD, "revision": A}))
    assert named.revision == with_commit(A).revision, "who writes down what it was resolved to restarts nobody"
    assert not makes_workers(replace(named, draft_commit=A), settled(with_commit(A)))


def test_a_lost_status_loses_no_commit() -> None:
    found = find_known(with_commit(None), settled(with_commit(A)))
    assert found is not None
    assert found.commit == A
    assert find_known(with_commit(None), settled(with_commit(None))) is None
    assert find_known(blueprint(**spec_of({"uri": "hf://org/other"})), settled(with_commit(A))) is None
