"""Carries out what was decided about a model's children; here only an answer of the API server decides anything.

All that can be done is done: what fails is collected in the look, and nothing else waits for it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass

from tandem_operator.children.plan import ChildPlan, ChildStep, plan_clearing, plan_step
from tandem_operator.children.templates import is_rewritten, with_answer
from tandem_operator.gateways.admission import Admission
from tandem_operator.kube.client import KubeClient, object_path
from tandem_operator.kube.events import CreationEvents
from tandem_operator.kube.ownership import HANDOVER_MANAGER, claim, holds_replicas, updates
from tandem_operator.objects.errors import ConflictError, NotFoundError
from tandem_operator.objects.manifests import (
    CONTROLLER_REVISION,
    KIND_BY_NAME,
    POD,
    STATEFUL_SET,
    WORKLOADS,
    ChildKey,
    Manifest,
    child_key,
    controller_of,
    dig,
)
from tandem_operator.reconcile.contention import Contention, last_writer
from tandem_operator.reconcile.look import Look
from tandem_operator.rollout.revisions import kept_content
from tandem_operator.runtime import metrics
from tandem_operator.weights.prewarm import PrewarmPlan
from tandem_operator.workloads.blueprint import digest

_DELETED = "deleted"
"""What is written of objects that are not wanted, as `Contention` has it."""

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Actions:
    """All there is to do, in this order."""

    children: ChildPlan
    scale: Sequence[tuple[ChildKey, int]] = ()
    """Counts of workloads whose template cannot be made: they are scaled and suspended nevertheless."""
    replace: Sequence[ChildKey] = ()
    """Pods that were made from an older template, whose time has come."""
    drain_limits: Sequence[tuple[ChildKey, int]] = ()
    """Pods on their way out that are to have so many seconds and no more."""
    prewarm: PrewarmPlan


class Executor:
    """Writes children. What two operators, or a person, write in turns is written ever more rarely."""

    def __init__(self, client: KubeClient, creations: CreationEvents, contention: Contention) -> None:
        self._client = client
        self._creations = creations
        self._contention = contention

    async def execute(self, look: Look, actions: Actions) -> None:
        """Write and delete in the order that pods need."""
        # 1. What pods refer to, then workloads: pods start when all that they refer to is there.
        workloads = [manifest for manifest in actions.children.apply if manifest["kind"] in WORKLOADS]
        for stage in ([manifest for manifest in actions.children.apply if manifest not in workloads], workloads):
            for part in await asyncio.gather(*(self._make_apart(look, manifest) for manifest in stage)):
                look.add(part)
        look.note_blocked(actions.children)
        # 2. What nobody wants any more, once what takes its place has been written.
        for child in actions.children.delete:
            await self._delete_unwanted(look, child)
        # 3. Counts and pods: those that go now come back from a template that is there.
        for child, pods in actions.scale:
            await self.scale(look, child, pods)
        for pod in actions.replace:
            await self._delete(look, pod, why="made from an older template")
        for pod, seconds in actions.drain_limits:
            await self._limit_drain(look, pod, seconds)
        # 4. The cache of weights: its Job's pod needs the volume and the account from above.
        for child in actions.prewarm.delete:
            await self._delete(look, child, why="no longer wanted")
        for manifest in actions.prewarm.make:
            look.add(await self._make_apart(look, manifest))

    async def scale(self, look: Look, child: ChildKey, pods: int) -> None:
        """Change the count alone."""
        async with look.collecting(str(child), doing="scale"):
            path = KIND_BY_NAME[child.kind].path(look.key.namespace, child.name)
            look.children[child] = await self._client.merge(path, {"spec": {"replicas": pods}})
            metrics.WRITES.labels("scale", child.kind).inc()

    async def admit(self, look: Look, admission: Admission, *, now: str) -> None:
        """Set one worker's readiness gate."""
        async with look.collecting(str(admission.pod), doing="admit"):
            path = POD.path(look.key.namespace, admission.pod.name, subresource="status")
            try:
                await self._client.apply(path, admission.manifest(look.key, now), force=True)
            except (NotFoundError, ConflictError):
                return  # another pod of that name by now, or none
            metrics.WRITES.labels("admit", POD.name).inc()

    async def keep_revision(self, look: Look, record: Manifest) -> bool:
        """Make a ControllerRevision. False where one of that name has another content: the cache does not know it yet,
        or it is somebody else's."""
        async with look.collecting(str(child_key(record)), doing="create"):
            path = CONTROLLER_REVISION.path(look.key.namespace)
            try:
                made = await self._client.create(path, record)
            except ConflictError:
                found = await self._client.find(object_path(CONTROLLER_REVISION, record))
                uid = dig(controller_of(record), "uid")
                return found is None or kept_content(found, owner_uid=uid) == kept_content(record, owner_uid=uid)
            look.children[child_key(made)] = made
            metrics.WRITES.labels("create", CONTROLLER_REVISION.name).inc()
        return True

    def creation_failures(self, look: Look) -> dict[ChildKey, str]:
        """Why controllers could not create pods."""
        return {
            child: failure
            for child, manifest in look.children.items()
            if child.kind == STATEFUL_SET.name
            and (failure := self._creations.failure(str(dig(manifest, "metadata", "uid")))) is not None
        }

    async def _make_apart(self, look: Look, manifest: Manifest) -> Look:
        """What came of one child: several are made at a time, and told in their order."""
        part, child, content = look.part(), child_key(manifest), digest(manifest)[:16]
        if (wait := self._contention.wait(look.key, child, content)) > 0:
            part.later.append(wait)
            return part
        async with part.collecting(str(child)):
            writer = ""
            if self._contention.is_contested(look.key, child):
                writer = last_writer(await self._client.find(object_path(KIND_BY_NAME[child.kind], manifest)))
            await self._make(part, manifest)
            if part.applied:
                self._contention.note(look.key, child, content, writer=writer)
        return part

    async def _make(self, look: Look, manifest: Manifest) -> None:
        """Create or change one child. What the cache does not know is created, which leaves alone what is there: that
        is read then, for it may be somebody else's."""
        key, kind = child_key(manifest), KIND_BY_NAME[manifest["kind"]]
        live = look.before.get(key)
        if live is None:
            try:
                made = await self._client.create(kind.path(look.key.namespace), manifest)
            except ConflictError:
                if (live := await self._client.find(object_path(kind, manifest))) is None:
                    raise
            else:
                look.children[key] = made
                metrics.WRITES.labels("create", key.kind).inc()
                look.applied.append(manifest)
                return
            step = plan_step(manifest, live, owner_uid=look.uid)
            if step is ChildStep.WAIT or step is ChildStep.TAKEN:
                look.note_blocked(ChildPlan(waiting=(key,)) if step is ChildStep.WAIT else ChildPlan(taken=(key,)))
                return
            look.children[key] = live
            if step is ChildStep.KEEP:
                return  # the cache is late
        await self._apply(look, manifest, live)

    async def _apply(self, look: Look, manifest: Manifest, live: Manifest) -> None:
        """Change a child that is there and the model's own. The uid keeps the change from an object that has the name
        by now."""
        key, path = child_key(manifest), object_path(KIND_BY_NAME[manifest["kind"]], manifest)
        identity = {"uid": found} if (found := dig(live, "metadata", "uid")) is not None else {}
        if updates(live):
            await self._claim(path, identity)
        if (patch := plan_clearing(manifest, live)) is not None:
            await self._client.merge(path, patch)
        if key.kind in WORKLOADS and "replicas" not in manifest["spec"]:
            await self._hand_over(path, manifest)
        body = manifest | {"metadata": manifest["metadata"] | identity}
        answer = await self._client.apply(path, body, force=True)
        metrics.WRITES.labels("apply", key.kind).inc()
        if key.kind in WORKLOADS and is_rewritten(manifest, answer):
            answer = await self._client.apply(path, with_answer(body, answer), force=True)
            metrics.WRITES.labels("apply", key.kind).inc()
        look.children[key] = answer
        look.applied.append(manifest)

    async def _claim(self, path: str, identity: Manifest) -> None:
        """Have what was created count as applied. Bound to the version that was read."""
        live = await self._client.get(path)
        metadata = {"managedFields": claim(live["metadata"].get("managedFields") or [])}
        metadata |= {"resourceVersion": live["metadata"]["resourceVersion"]} | identity
        await self._client.merge(path, {"metadata": metadata})

    async def _hand_over(self, path: str, manifest: Manifest) -> None:
        """Have somebody else hold the number of replicas before the operator lets go of it."""
        live = await self._client.get(path)
        replicas = dig(live, "spec", "replicas")
        if holds_replicas(live) or replicas is None:
            return
        metadata = {field: live["metadata"][field] for field in ("name", "namespace", "uid")}
        body = {"apiVersion": manifest["apiVersion"], "kind": manifest["kind"], "metadata": metadata}
        await self._client.apply(path, body | {"spec": {"replicas": replicas}}, force=False, manager=HANDOVER_MANAGER)

    async def _delete_unwanted(self, look: Look, child: ChildKey) -> None:
        if (wait := self._contention.wait(look.key, child, _DELETED)) > 0:
            look.later.append(wait)
            return
        writer = last_writer(look.before.get(child))
        await self._delete(look, child, why="no longer wanted")
        self._contention.note(look.key, child, _DELETED, writer=writer)

    async def _delete(self, look: Look, child: ChildKey, *, why: str) -> None:
        path = KIND_BY_NAME[child.kind].path(look.key.namespace, child.name)
        async with look.collecting(str(child), doing="delete"):
            try:
                await self._client.delete(path, uid=dig(look.children[child], "metadata", "uid"))
            except ConflictError:
                return  # another object of that name by now: the next look decides about it
            del look.children[child]
            metrics.WRITES.labels("delete", child.kind).inc()
            log.info("deleted", extra={"model": str(look.key), "child": str(child), "why": why})

    async def _limit_drain(self, look: Look, pod: ChildKey, seconds: int) -> None:
        async with look.collecting(str(pod), doing="end"):
            path = KIND_BY_NAME[pod.kind].path(look.key.namespace, pod.name)
            await self._client.delete(path, uid=dig(look.before[pod], "metadata", "uid"), grace_seconds=seconds)
