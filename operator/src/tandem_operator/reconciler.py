"""parse → observe → plan → apply → status, for one model, whatever the reason to look at it.

Level-triggered: nothing is remembered between two looks, so a restart, a lost event and a repeated one are the same.
Children come from the cache; the InferenceModel itself is read anew each time, so that a deleted one is never rebuilt.
"""

from __future__ import annotations

import datetime
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from tandem_api.inferencemodel import InferenceModel, InferenceModelStatus

from tandem_operator import metrics
from tandem_operator.causes import Problem, creation_failure
from tandem_operator.errors import ConflictError, ForbiddenError, ModelError, NotFoundError, RejectedError
from tandem_operator.keeper import KeyKeeper, KeyLook
from tandem_operator.kube.client import KubeClient, object_path
from tandem_operator.kube.store import ChildStore
from tandem_operator.manifests import (
    EVENT,
    INFERENCE_MODEL,
    KIND_BY_NAME,
    STATEFUL_SET,
    ChildKey,
    Manifest,
    ModelKey,
    child_key,
    controller_of,
    dig,
)
from tandem_operator.parsing import parse_model, parse_status
from tandem_operator.planner import Plan, Step, plan_children, plan_clearing, plan_outdated_pods, plan_step
from tandem_operator.recorder import EventRecorder
from tandem_operator.settings import Release
from tandem_operator.status import build_status, refused_status
from tandem_operator.transitions import Happening, apply_happenings, status_happenings
from tandem_operator.workloads import Blueprint, build_children
from tandem_operator.workloads.keys import rotation_request

_SOON, _LATER, _RARELY = 1.0, 5.0, 15.0
"""Seconds after which to look again at what no watch reports: a removal, a missing pod, a refusal."""

log = logging.getLogger(__name__)


@dataclass(slots=True)
class Outcome:
    """What came of executing a plan."""

    before: Mapping[ChildKey, Manifest]
    """Children as they were."""
    children: dict[ChildKey, Manifest]
    """Live children with the answers to what was applied: newer than the cache."""
    problems: list[Problem] = field(default_factory=list[Problem])
    waiting: list[str] = field(default_factory=list[str])
    applied: list[Manifest] = field(default_factory=list[Manifest])
    failures: dict[ChildKey, str] = field(default_factory=dict[ChildKey, str])

    @property
    def look_again(self) -> float | None:
        """Seconds until the next look, where events alone would not cause one."""
        if self.waiting:
            return _SOON
        if self.problems:
            return _RARELY
        return _LATER if self.failures else None


class Reconciler:
    def __init__(
        self, client: KubeClient, store: ChildStore, release: Release, keeper: KeyKeeper, recorder: EventRecorder
    ) -> None:
        self._client = client
        self._store = store
        self._release = release
        self._keeper = keeper
        self._recorder = recorder

    async def reconcile(self, key: ModelKey) -> float | None:
        """Bring one model to what it asks for. Returns seconds after which to look again, if events will not tell.

        Raises:
            APIError: something that time may heal; the caller tries again later.
        """
        path = INFERENCE_MODEL.path(key.namespace, key.name)
        raw = await self._client.find(path)
        if raw is None or dig(raw, "metadata", "deletionTimestamp") is not None:
            return None  # the garbage collector removes the children
        try:
            model = parse_model(raw)
            blueprint = Blueprint(model=model, release=self._release)
            desired = build_children(blueprint)
        except ModelError as error:
            problem = Problem(reason=error.reason, message=str(error), stalled=True)
            status = refused_status(problem, parse_status(raw), generation=raw["metadata"]["generation"], now=_now())
            await self._report(key, raw, status, [])
            return None
        keys = await self._keeper.ensure(blueprint, rotation_request(raw))
        outcome = await self._execute(key, model, desired, keys)
        status = build_status(
            blueprint,
            outcome.children,
            problems=outcome.problems,
            failures=outcome.failures,
            waiting=outcome.waiting,
            now=_now(),
        )
        happenings = apply_happenings(outcome.applied, outcome.before)
        await self._report(key, raw, status, happenings if keys.happening is None else [keys.happening, *happenings])
        moving = any(condition.type in ("Reconciling", "Stalled") for condition in status.conditions)
        again = [outcome.look_again or (_RARELY if moving else None), keys.look_after_seconds]
        return min((seconds for seconds in again if seconds is not None), default=None)

    async def _execute(
        self, key: ModelKey, model: InferenceModel, desired: Sequence[Manifest], keys: KeyLook
    ) -> Outcome:
        uid = model.metadata.uid
        live = self._store.children(key)
        # Pods made now would find no keys, or keys that are about to go: what runs is better left running.
        hold = not keys.usable and not model.spec.suspend
        plan = plan_children(desired, live, owner_uid=uid, hold_workloads=hold)
        outcome = Outcome(before=live, children=dict(live))
        if keys.problem is not None:
            outcome.problems.append(keys.problem)
        self._note(Plan(waiting=keys.waiting, taken=keys.taken), outcome)
        for manifest in plan.apply:
            await self._apply(manifest, outcome, uid=uid, known=child_key(manifest) in live)
        self._note(plan, outcome)
        for child in plan.delete:
            await self._delete(key, child, outcome, why="no longer wanted")
        for pod in () if hold else plan_outdated_pods(outcome.children):
            await self._delete(key, pod, outcome, why="made from an older template")
        outcome.failures = await self._creation_failures(outcome.children)
        return outcome

    async def _apply(self, manifest: Manifest, outcome: Outcome, *, uid: str, known: bool) -> None:
        """Apply one child. What the cache does not know is read first: it may be somebody else's."""
        key, path = child_key(manifest), object_path(KIND_BY_NAME[manifest["kind"]], manifest)
        live = outcome.before.get(key)
        if not known and (live := await self._client.find(path)) is not None:
            step = plan_step(manifest, live, owner_uid=uid)
            if step is Step.WAIT or step is Step.TAKEN:
                blocked = Plan(waiting=(key,)) if step is Step.WAIT else Plan(taken=(key,))
                self._note(blocked, outcome)
                return
            known = True
        try:
            if (patch := plan_clearing(manifest, live)) is not None:
                await self._client.merge(path, patch)
            # Without force where nothing is: an object that somebody makes in this moment is a conflict, not a prey.
            outcome.children[key] = await self._client.apply(path, manifest, force=known)
        except (RejectedError, ForbiddenError) as error:
            reason = "Forbidden" if isinstance(error, ForbiddenError) else "Rejected"
            text = f"the API server refuses {key}: {error.message}"
            outcome.problems.append(Problem(reason=reason, message=text, stalled=True))
            return
        metrics.WRITES.labels("apply", key.kind).inc()
        outcome.applied.append(manifest)

    def _note(self, plan: Plan, outcome: Outcome) -> None:
        outcome.waiting += [str(key) for key in plan.waiting]
        for key in plan.taken:
            text = f"{key} exists and belongs to somebody else: rename this model, or delete that object"
            outcome.problems.append(Problem(reason="ChildNameTaken", message=text, stalled=True))

    async def _delete(self, key: ModelKey, child: ChildKey, outcome: Outcome, *, why: str) -> None:
        removed = outcome.children.pop(child)
        path = KIND_BY_NAME[child.kind].path(key.namespace, child.name)
        try:
            await self._client.delete(path, uid=dig(removed, "metadata", "uid"))
        except ConflictError:
            return  # another object of that name by now: the next look decides about it
        metrics.WRITES.labels("delete", child.kind).inc()
        log.info("deleted", extra={"model": str(key), "child": str(child), "why": why})

    async def _creation_failures(self, children: dict[ChildKey, Manifest]) -> dict[ChildKey, str]:
        """Why StatefulSets could not create pods. Their status does not say; Events do."""
        owners = [str((controller_of(pod) or {}).get("uid")) for pod in children.values()]
        failures: dict[ChildKey, str] = {}
        for key, child in children.items():
            uid = str(dig(child, "metadata", "uid"))
            if key.kind != STATEFUL_SET.name or owners.count(uid) >= dig(child, "spec", "replicas"):
                continue
            selector = f"involvedObject.uid={uid}"
            found = await self._client.get(EVENT.path(child["metadata"]["namespace"]), fieldSelector=selector)
            if (failure := creation_failure(found["items"])) is not None:
                failures[key] = failure
        return failures

    async def _report(
        self, key: ModelKey, raw: Manifest, status: InferenceModelStatus, happenings: Sequence[Happening]
    ) -> None:
        """Write the status if it says something new, and the Events that belong to it."""
        before, uid = parse_status(raw), str(raw["metadata"]["uid"])
        if status != before:
            body: Manifest = {
                "apiVersion": INFERENCE_MODEL.api_version,
                "kind": INFERENCE_MODEL.name,
                "metadata": {"name": key.name, "namespace": key.namespace, "uid": uid},
                "status": status.model_dump(by_alias=True, exclude_none=True),
            }
            path = INFERENCE_MODEL.path(key.namespace, key.name, subresource="status")
            try:
                await self._client.apply(path, body, force=True)
            except NotFoundError:
                return
            metrics.WRITES.labels("status", INFERENCE_MODEL.name).inc()
        for happening in (*happenings, *status_happenings(before, status)):
            await self._recorder.record(key, uid, happening)


def _now() -> str:
    return datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
