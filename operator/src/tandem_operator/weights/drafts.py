"""Which commit of a draft head's `hf://` repository workers load. Pure.

It is resolved once, when workers are made, as the model's is (`commits`), and kept in `status.draft`: workers with
unlike heads exchange no blocks. It is not followed: another head is another revision of the spec.
"""

from __future__ import annotations

from pydantic import ValidationError
from tandem_api.crd.engine import Draft
from tandem_api.crd.resource import InferenceModel
from tandem_api.crd.status import ModelStatus
from tandem_api.launch import WorkerConfig

from tandem_operator.children.inherit import config_name
from tandem_operator.objects.manifests import CONFIG_MAP, ChildKey, Children, dig
from tandem_operator.objects.problem import Problem
from tandem_operator.observe.roles import workload_key
from tandem_operator.weights.commits import PUBLIC_HUB, CommitAnswer, CommitPlan, CommitQuestion, is_commit
from tandem_operator.workloads import Blueprint
from tandem_operator.workloads.configs import CONFIG_FILE

PATH = "spec.engine.speculative.draft"
_SCHEME = "hf://"


def read_question(blueprint: Blueprint) -> CommitQuestion | None:
    """What to ask about the head of a model; None where there is nothing to ask."""
    spec = blueprint.model.spec
    head = _repository(blueprint.model)
    if head is None or is_commit(head.revision):
        return None
    return CommitQuestion(
        endpoint=(blueprint.release.hub_endpoint or PUBLIC_HUB).rstrip("/"),
        repository=head.uri.removeprefix(_SCHEME),
        revision=head.revision,
        secret=head.secret_ref or spec.model.secret_ref,
        path=PATH,
    )


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
    for role in blueprint.worker_roles:
        config_map = live.get(ChildKey(CONFIG_MAP.name, str(config_name(live.get(workload_key(blueprint, role), {})))))
        try:
            told = WorkerConfig.model_validate_json(dig(config_map, "data", CONFIG_FILE) or "").speculative.draft
        except ValidationError:
            continue
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
    return None if head is None or not head.uri.startswith(_SCHEME) else head
