"""Which commit of a draft head's `hf://` repository workers load. Pure.

It is resolved once, when workers are made, as the model's is (`commits`), and kept in `status.draft`: workers with
unlike heads exchange no blocks. It is not followed: another head is another revision of the spec.
"""

from __future__ import annotations

from tandem_api.crd.engine import Draft
from tandem_api.crd.resource import InferenceModel
from tandem_api.crd.status import ModelStatus

from tandem_operator.objects.manifests import Children
from tandem_operator.objects.problem import Problem
from tandem_operator.weights.commits import (
    SCHEME,
    CommitAnswer,
    CommitPlan,
    CommitQuestion,
    build_question,
    is_commit,
    read_told,
)
from tandem_operator.workloads import Blueprint

PATH = "spec.engine.speculative.draft"


def read_question(blueprint: Blueprint) -> CommitQuestion | None:
    """What to ask about the head of a model; None where there is nothing to ask."""
    head = _repository(blueprint.model)
    if head is None:
        return None
    secret = head.secret_ref or blueprint.model.spec.model.secret_ref
    return build_question(blueprint, head.uri, head.revision, secret, path=PATH)


def find_known(blueprint: Blueprint, live: Children) -> ModelStatus | None:
    """What the head was resolved to: by the status, or where that has been lost by what workers were told."""
    head = _repository(blueprint.model)
    if head is None:
        return None
    known = blueprint.model.status.draft
    if known is not None and (known.uri, known.revision, known.commit is None) == (head.uri, head.revision, False):
        return known
    if known is not None:
        return None
    for config in read_told(blueprint, live):
        told = config.speculative.draft
        if told is not None and told.uri == head.uri and is_commit(told.revision):
            return ModelStatus(uri=head.uri, revision=head.revision, commit=told.revision)
    return None


def plan_draft(
    model: InferenceModel,
    known: ModelStatus | None,
    answer: CommitAnswer | None,
    *,
    asks: bool,
    needed: bool,
    now: str,
) -> CommitPlan:
    """The commit to load. `answer` is the hub's latest one, None while there is none; `asks` says whether it may be
    asked at all, `needed` whether worker pods are about to be made."""
    head = _repository(model)
    if head is None:
        return CommitPlan()
    plain = ModelStatus(uri=head.uri, revision=head.revision)
    if is_commit(head.revision):
        return CommitPlan(commit=head.revision, status=plain.model_copy(update={"commit": head.revision}))
    if known is not None:
        return CommitPlan(commit=known.commit, status=known)
    if answer is not None and answer.commit is not None and needed:
        status = plain.model_copy(update={"commit": answer.commit, "resolved_at": now})
        return CommitPlan(commit=answer.commit, status=status)
    if asks and needed and not model.spec.suspend:
        problem = (answer.problem if answer is not None else None) or Problem(
            reason="ResolvingRevision",
            message=f"asking the hub which commit {head.revision} of {head.uri} is, the draft head",
        )
        return CommitPlan(status=model.status.draft, problem=problem)
    return CommitPlan(status=plain)


def _repository(model: InferenceModel) -> Draft | None:
    """The head, where it comes from a hub."""
    head = model.spec.engine.speculative.head
    return None if head is None or not head.uri.startswith(SCHEME) else head
