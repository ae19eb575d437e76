"""Revisions of a model: what its workers are made from, numbered and kept. Pure.

A revision is the part of the spec that decides what workers are, with the image that they run, so also that of the
release. Each distinct one is kept as a ControllerRevision of the model's own, and keeps its number when it comes back.
What has a default and was not set is left out, so that a release that adds a field makes no new revision.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any, cast

from pydantic import BaseModel, ValidationError
from tandem_api.changes import Change, change_of, declared_change
from tandem_api.crd.spec import InferenceModelSpec
from tandem_api.crd.status import RolloutStatus

from tandem_operator.objects.errors import UnreadableRevisionError
from tandem_operator.objects.manifests import CONTROLLER_REVISION, ChildKey, Children, Manifest, controller_of, dig
from tandem_operator.objects.parsing import known_spec
from tandem_operator.workloads.blueprint import Blueprint, digest
from tandem_operator.workloads.child import HISTORY, build_child

_FIELDS = tuple(
    name for name, field in InferenceModelSpec.model_fields.items() if declared_change(field) is Change.WORKERS
)
"""Parts of the spec that workers are made from."""
_ROLES = ("prefill", "decode")
_COUNTS = ("replicas", "scaling")
"""Fields of a role: how many there are, and who says so, is no part of what they are."""
_PREPARED = ("model", "cache", "prewarm")
"""A revision's own though workers know nothing of it: whether a Job is done before it rolls out."""

History = Mapping[int, Manifest]
"""Contents by number."""


def content_of(blueprint: Blueprint) -> Manifest:
    """What the workers of this model are made from, without what running ones follow."""
    spec = blueprint.model.spec
    told: Manifest = spec.model_dump(
        mode="json", by_alias=True, exclude_none=True, exclude_defaults=True, include=set(_FIELDS)
    )
    content = {key: _made_from(value, (key,)) for key, value in told.items()}
    if blueprint.commit is not None:
        content["model"]["revision"] = blueprint.commit
    if blueprint.draft_commit is not None:
        content["engine"]["speculative"]["draft"]["revision"] = blueprint.draft_commit
    return content | {"engine": content.get("engine", {}) | {"image": blueprint.worker_image}}


@lru_cache(maxsize=1024)
def _is_of_revision(path: tuple[str, ...]) -> bool:
    return path == _PREPARED or change_of(InferenceModelSpec, path) is Change.WORKERS


def _made_from(told: Manifest, path: tuple[str, ...]) -> Manifest:
    """What a part of the spec says that replaces workers when it changes."""
    return {
        key: _made_from(cast(Manifest, value), (*path, key)) if isinstance(value, dict) else value
        for key, value in told.items()
        if _is_of_revision((*path, key)) or key == "replicas"  # how many there are of a role that comes back
    }


def digest_of(content: Manifest) -> str:
    """Names a content; how many replicas there are is no part of it."""
    roles = {
        role: {key: value for key, value in content[role].items() if key not in _COUNTS}
        for role in _ROLES
        if role in content
    }
    # Of decode workers nothing said and everything by default is the same.
    roles = {role: told for role, told in roles.items() if told or role == "prefill"}
    return digest({key: value for key, value in content.items() if key not in _ROLES} | roles)[:16]


def revision_name(model: str, number: int) -> str:
    """Name of the ControllerRevision that keeps a revision."""
    return f"{model}-{number}"


def build_revision(blueprint: Blueprint, number: int, content: Manifest) -> Manifest:
    """The ControllerRevision that keeps a revision."""
    body = {"data": {"spec": content}, "revision": number}
    return build_child(blueprint, CONTROLLER_REVISION, revision_name(blueprint.name, number), body, component=HISTORY)


def kept_content(manifest: Manifest, *, owner_uid: str) -> tuple[int, Manifest] | None:
    """Number and content of a ControllerRevision of this model; None for any other one."""
    number, content = manifest.get("revision"), dig(manifest, "data", "spec")
    owner = controller_of(manifest) or {}
    if owner.get("uid") != owner_uid or not isinstance(number, int) or not isinstance(content, dict):
        return None
    return number, cast(Manifest, content)


def read_history(live: Children, *, owner_uid: str) -> dict[int, Manifest]:
    """The revisions of a model that are kept."""
    kept = (
        kept_content(found, owner_uid=owner_uid) for key, found in live.items() if key.kind == CONTROLLER_REVISION.name
    )
    return dict(sorted(item for item in kept if item is not None))


def number_of(content_digest: str, history: History, before: RolloutStatus | None, *, taken: int) -> int:
    """The number of a content: the one it had, or the next one. `taken` is the highest number of any object there.

    What runs keeps its number where it differs in fields alone that this release does not know: a later one made it,
    and finds it again.
    """
    if before is not None and before.digest == content_digest:
        return before.revision
    known = [number for number, content in history.items() if digest_of(known_spec(content)) == content_digest]
    if before is not None and before.revision in known:
        return before.revision
    same = [number for number in known if digest_of(history[number]) == content_digest] or known
    return same[-1] if same else max([taken, *history, *numbers_in_use(before)], default=0) + 1


def highest_number(live: Children) -> int:
    """The highest number of a ControllerRevision that is there, also of another model of this name; 0 without any."""
    numbers = [dig(found, "revision") for key, found in live.items() if key.kind == CONTROLLER_REVISION.name]
    return max((number for number in numbers if isinstance(number, int)), default=0)


def numbers_in_use(state: RolloutStatus | None) -> set[int]:
    """Revisions that the state of a rollout names."""
    if state is None:
        return set()
    named = (state.revision, state.stable_revision, state.complete_revision, state.canary and state.canary.revision)
    return {number for number in named if number is not None}


def kept_revisions(model: str, history: History, used: set[int], *, limit: int) -> frozenset[ChildKey]:
    """ControllerRevisions that stay: those in use, and the newest of the others."""
    spare = sorted((number for number in history if number not in used), reverse=True)[:limit]
    return frozenset(ChildKey(CONTROLLER_REVISION.name, revision_name(model, number)) for number in {*spare, *used})


def with_content(spec: InferenceModelSpec, content: Manifest, *, number: int) -> InferenceModelSpec:
    """`spec` with the workers of a revision. Replicas, their scaling and names stay those of `spec`; of a role that it
    does not have there are as many as there were. What this release does not know of it is left out.

    Raises:
        UnreadableRevisionError: it has values that this release cannot read.
    """
    try:
        kept = InferenceModelSpec.model_validate(known_spec(content))
    except ValidationError as error:
        text = f"revision {number} was kept by another release and cannot be read: {error.errors()[0]['msg']}"
        raise UnreadableRevisionError(text) from error
    carried = {field: _carried(getattr(kept, field), getattr(spec, field), (field,)) for field in _FIELDS}
    return spec.model_copy(update=carried)


def _carried(kept: Any, now: Any, path: tuple[str, ...]) -> Any:
    """A part of a revision, with what is no part of any as it is now."""
    if not isinstance(kept, BaseModel) or not isinstance(now, BaseModel):
        return kept
    changed: dict[str, Any] = {}
    for name, field in type(kept).model_fields.items():
        here, value = (*path, field.alias or name), getattr(now, name)
        changed[name] = _carried(getattr(kept, name), value, here) if _is_of_revision(here) else value
    return kept.model_copy(update=changed)


def same_shape(one: InferenceModelSpec, other: InferenceModelSpec) -> bool:
    """Whether workers of both can stand in the same StatefulSets, side by side."""
    if (one.prefill is None) != (other.prefill is None):
        return False
    pairs = [(one.decode, other.decode)]
    if one.prefill is not None and other.prefill is not None:
        pairs.append((one.prefill, other.prefill))
    return all(a.nodes_per_replica == b.nodes_per_replica for a, b in pairs)
