"""Which commit of an `hf://` repository workers load: from the spec, from the status, and from what the hub says. Pure.

A branch or tag is resolved once, when workers are made; from then on the status has the commit. Workers that an earlier
release made resolved it for themselves: they are left alone until they are replaced anyway.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from pydantic import ValidationError
from tandem_api.crd.model import Model, SecretKey
from tandem_api.crd.resource import InferenceModel
from tandem_api.crd.status import ModelStatus
from tandem_api.launch import WorkerConfig
from tandem_api.names import GROUP

from tandem_operator.children.inherit import config_name, keep_what_runs
from tandem_operator.children.templates import is_new_template
from tandem_operator.objects.manifests import CONFIG_MAP, ChildKey, Children, Manifest, annotations_of, child_key, dig
from tandem_operator.objects.problem import Problem
from tandem_operator.observe.roles import workload_key
from tandem_operator.workloads import Blueprint, build_possible
from tandem_operator.workloads.blueprint import digest
from tandem_operator.workloads.configs import CONFIG_FILE

PUBLIC_HUB = "https://huggingface.co"
RESOLVE_ANNOTATION = f"{GROUP}/resolve-model"
"""On an InferenceModel: a new value asks for what the revision is now."""
MODEL_PATH = "spec.model"
_REQUEST_MAX = 253
_COMMIT = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")
SCHEME = "hf://"


@dataclass(frozen=True, slots=True, kw_only=True)
class CommitQuestion:
    """What to ask the hub. One with another `request` wants an answer of its own."""

    endpoint: str
    repository: str
    revision: str
    secret: SecretKey | None = None
    request: str | None = None
    path: str = MODEL_PATH
    """What of the object names the repository."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CommitAnswer:
    """A commit, or why there is none."""

    commit: str | None = None
    problem: Problem | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class CommitPlan:
    """What came of it."""

    commit: str | None = None
    """What workers load; None: each resolves the revision for itself."""
    status: ModelStatus | None = None
    finding: tuple[bool | None, str, str] | None = None
    """What the condition `ModelResolved` says: whether it holds, None for unknown, its reason and sentence."""
    problem: Problem | None = None
    """Why workers cannot be made."""
    draft: ModelStatus | None = None
    """What workers load of the draft head's repository, see `drafts`."""


def is_commit(revision: str) -> bool:
    """Whether it is the full name of a commit."""
    return _COMMIT.fullmatch(revision) is not None


def read_question(blueprint: Blueprint, request: str | None) -> CommitQuestion | None:
    """What to ask about a model; None where there is nothing to ask."""
    source = blueprint.model.spec.model
    return build_question(blueprint, source.uri, source.revision, source.secret_ref, request=request)


def build_question(
    blueprint: Blueprint,
    uri: str,
    revision: str,
    secret: SecretKey | None,
    *,
    request: str | None = None,
    path: str = MODEL_PATH,
) -> CommitQuestion | None:
    """What to ask the hub about a repository; None where it is no hub's, or the revision is a commit."""
    if not uri.startswith(SCHEME) or is_commit(revision):
        return None
    return CommitQuestion(
        endpoint=(blueprint.release.hub_endpoint or PUBLIC_HUB).rstrip("/"),
        repository=uri.removeprefix(SCHEME),
        revision=revision,
        secret=secret,
        request=request,
        path=path,
    )


def read_request(model: Manifest) -> str | None:
    """The wish to resolve the revision anew. A long one is kept by its digest."""
    request = annotations_of(model).get(RESOLVE_ANNOTATION)
    return request if request is None or len(request) <= _REQUEST_MAX else digest(request)


def is_resolved(model: InferenceModel) -> bool:
    """Whether the status has the commit of what the spec names."""
    known = _known(model)
    return known is not None and known.commit is not None


def can_wait(model: InferenceModel, request: str | None) -> bool:
    """Whether nothing hangs on the next answer but a report that the branch has moved."""
    known = _known(model)
    if known is None or known.commit is None or model.spec.model.follow_revision:
        return False
    return request is None or request == known.request


def makes_workers(blueprint: Blueprint, live: Children) -> bool:
    """Whether worker pods would be made anew even if they resolve the revision for themselves, as those of earlier
    releases do: then naming the commit restarts nobody who would otherwise run on."""
    children = {
        child_key(child): child for child in keep_what_runs(blueprint, build_possible(blueprint).children, live)
    }
    is_running = False
    for role in blueprint.worker_roles:
        key = workload_key(blueprint, role)
        present, desired = live.get(key), children.get(key)
        # One whose template cannot be made is neither made nor replaced.
        if desired is not None and (present is None or is_new_template(desired, present)):
            return True
        is_running |= bool(dig(present, "spec", "replicas"))
    return not is_running


def recover(blueprint: Blueprint, live: Children, *, request: str | None, now: str) -> InferenceModel:
    """The model, with the commit that its workers were told where its status has been lost. A wish to resolve it anew
    then counts as granted: nobody knows."""
    model = blueprint.model
    source = model.spec.model
    if model.status.model is not None or not source.uri.startswith(SCHEME):
        return model
    for config in read_told(blueprint, live):
        told = config.model
        if told.uri == source.uri and told.revision != source.revision and is_commit(told.revision):
            found = _resolved(source, told.revision, request=request, now=now).status
            return model.model_copy(update={"status": model.status.model_copy(update={"model": found})})
    return model


def read_told(blueprint: Blueprint, live: Children) -> Iterator[WorkerConfig]:
    """What the workers of each role were told, where it can be read."""
    for role in blueprint.worker_roles:
        config_map = live.get(ChildKey(CONFIG_MAP.name, str(config_name(live.get(workload_key(blueprint, role), {})))))
        try:
            yield WorkerConfig.model_validate_json(dig(config_map, "data", CONFIG_FILE) or "")
        except ValidationError:
            continue


def plan_commit(
    model: InferenceModel, answer: CommitAnswer | None, *, asks: bool, request: str | None, needed: bool, now: str
) -> CommitPlan:
    """The commit to load. `answer` is the latest one of the hub to this question, None while there is none; `asks` says
    whether it may be asked at all, `needed` whether worker pods are about to be made."""
    source, known = model.spec.model, _known(model)
    if not source.uri.startswith(SCHEME):
        return CommitPlan()
    plain = ModelStatus(uri=source.uri, revision=source.revision)
    latest = None if answer is None else answer.commit
    is_asked = request is not None and (known is None or request != known.request)
    wanted = source.follow_revision or is_asked
    if is_commit(source.revision):
        since = now if known is None or known.resolved_at is None else known.resolved_at
        status = plain.model_copy(update={"commit": source.revision, "resolved_at": since})
        return CommitPlan(
            commit=source.revision, status=status, finding=(True, "Resolved", f"{source.revision} is a commit")
        )
    if known is not None and known.commit is not None:
        return _keep_or_follow(known, answer, asks=asks, wanted=wanted, request=request, now=now)
    if not asks:
        text = f"each worker resolves {source.revision} for itself, because the operator was told to ask no hub"
        return CommitPlan(status=plain, finding=(None, "ResolutionOff", f"{text} (hub.resolve)"))
    if latest is not None and (needed or wanted):
        return _resolved(plain, latest, request=request, now=now)
    if needed and not model.spec.suspend:
        problem = (answer.problem if answer is not None else None) or Problem(
            reason="ResolvingRevision", message=f"asking the hub which commit {source.revision} of {source.uri} is"
        )
        found = None if answer is None else False
        return CommitPlan(status=model.status.model, finding=(found, problem.reason, problem.message), problem=problem)
    text = f"the workers were started by an earlier release and resolved {source.revision} for themselves"
    if model.spec.suspend:
        text = f"nobody needs to know which commit {source.revision} is while the model is suspended"
    if answer is not None and answer.problem is not None and wanted:
        return CommitPlan(status=plain, finding=(False, answer.problem.reason, f"{text}; {answer.problem.message}"))
    return CommitPlan(
        status=plain.model_copy(update={"latest_commit": latest}),
        finding=(None, "NotResolved", f"{text}; they load one commit from when they are next replaced"),
    )


def _known(model: InferenceModel) -> ModelStatus | None:
    """What the status says of the present source."""
    known, source = model.status.model, model.spec.model
    return known if known is not None and (known.uri, known.revision) == (source.uri, source.revision) else None


def _keep_or_follow(
    known: ModelStatus, answer: CommitAnswer | None, *, asks: bool, wanted: bool, request: str | None, now: str
) -> CommitPlan:
    latest = None if answer is None else answer.commit
    if wanted and asks and latest is not None:
        if latest != known.commit:
            return _resolved(known, latest, request=request, now=now)
        known = known.model_copy(update={"request": request})
    latest = latest or known.latest_commit
    moved = latest if latest != known.commit else None
    status = known.model_copy(update={"latest_commit": moved})
    finding: tuple[bool | None, str, str]
    finding = (True, "Resolved", f"{known.revision} was commit {known.commit} at {known.resolved_at}")
    if answer is not None and answer.problem is not None and wanted:
        finding = (False, answer.problem.reason, f"{answer.problem.message}; workers keep commit {known.commit}")
    elif wanted and not asks:
        text = f"the operator was told to ask no hub (hub.resolve), so workers keep commit {known.commit}"
        finding = (None, "ResolutionOff", text)
    elif moved is not None:
        text = f"{known.revision} is commit {moved} by now, and workers load {known.commit}: to replace them, set"
        finding = (True, "RevisionMoved", f"{text} spec.model.followRevision, or annotate {RESOLVE_ANNOTATION}")
    return CommitPlan(commit=known.commit, status=status, finding=finding)


def _resolved(source: ModelStatus | Model, commit: str, *, request: str | None, now: str) -> CommitPlan:
    status = ModelStatus(uri=source.uri, revision=source.revision, commit=commit, resolved_at=now, request=request)
    finding = (True, "Resolved", f"{source.revision} was commit {commit} at {now}")
    return CommitPlan(commit=commit, status=status, finding=finding)
