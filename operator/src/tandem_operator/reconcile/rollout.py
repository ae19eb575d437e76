"""Which revision and images the workers of a model get in one look: kept, and told, before anything is made of it."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from datetime import datetime

from tandem_api.crd.resource import InferenceModel
from tandem_api.crd.status import CanaryFigures, InferenceModelStatus, RolloutStatus

from tandem_operator.gateways.fleet import FleetWatch
from tandem_operator.kube.client import KubeClient
from tandem_operator.objects.manifests import CONTROLLER_REVISION, ModelKey, format_time
from tandem_operator.objects.parsing import parse_status
from tandem_operator.reconcile.executor import Executor
from tandem_operator.reconcile.look import Look
from tandem_operator.reconcile.status_writer import StatusWriter
from tandem_operator.rollout.figures import Tally, take_differences
from tandem_operator.rollout.images import ImagePlan, plan_images
from tandem_operator.rollout.plan import (
    RolloutPlan,
    RolloutView,
    missing_revisions,
    plan_rollout,
    retry_request,
    view_rollout,
)
from tandem_operator.rollout.queue import RolloutQueue, is_stalled
from tandem_operator.rollout.revisions import History, highest_number, kept_content, read_history, revision_name
from tandem_operator.runtime.turns import LoopTurns
from tandem_operator.workloads.blueprint import Blueprint
from tandem_operator.workloads.release import Release


class RolloutReconciler:
    """Remembers the slots of all models, and what gateways had counted of each canary."""

    def __init__(
        self,
        client: KubeClient,
        release: Release,
        fleet: FleetWatch,
        queue: RolloutQueue,
        executor: Executor,
        statuses: StatusWriter,
        loop_turns: LoopTurns,
        clock: Callable[[], datetime],
    ) -> None:
        self._client = client
        self._release = release
        self._fleet = fleet
        self._queue = queue
        self._executor = executor
        self._statuses = statuses
        self._loop_turns = loop_turns
        self._clock = clock
        self._tallies: dict[ModelKey, Tally] = {}
        """What gateways had counted of models with a canary when they were last asked."""

    def choose_images(self, look: Look, model: InferenceModel) -> ImagePlan:
        """Images of a model that names none. Those of a later release come when the model has a slot."""
        owned = look.own_before
        history = read_history(owned, owner_uid=look.uid)
        images = plan_images(model, self._release, owned, history, may_follow=False)
        if not images.waiting or not self._queue.request_slot(look.key, since=format_time(self._clock())):
            return images
        return plan_images(model, self._release, owned, history, may_follow=True)

    async def plan(self, look: Look, blueprint: Blueprint, images: ImagePlan, *, known: bool) -> RolloutPlan:
        """Find out which revision the workers should have. `known`: so is the commit that they load."""
        # 1. What there is: revisions that were kept, also those that the cache has not seen yet.
        now, ours, retry = self._clock(), look.own_before, retry_request(look.raw)
        history = await self._read_history(look, blueprint)
        await self._loop_turns.next()
        # 2. What is wanted, under a number that nobody else has taken; kept before workers are made of it.
        taken = highest_number(look.before)
        view = view_rollout(blueprint, history, ours, retry=retry, taken=taken, now=now, known=known)
        while view.record is not None and not await self._executor.keep_revision(look, view.record):
            if view.record["revision"] <= taken:
                break
            taken = view.record["revision"]
            view = view_rollout(blueprint, history, ours, retry=retry, taken=taken, now=now, known=known)
        await self._loop_turns.next()
        # 3. What follows, by the slots of all models and by what gateways have counted since the last look.
        added, fresh = self._count(look.key, view.before, now=time.monotonic())
        may_roll = self._may_roll(look.key, view, images)
        plan = plan_rollout(view, ours, may_roll=may_roll, added=added, fresh=fresh, now=now)
        await self._loop_turns.next()
        # 4. An operator that stops in this moment must not take the pods of one revision for those of the other.
        phases = {view.before and view.before.phase, plan.state and plan.state.phase}
        if view.before is not None and "Canary" in phases and len(phases) > 1:
            await self._statuses.write(look, parse_status(look.raw).model_copy(update={"rollout": plan.state}))
        return plan

    def note_status(self, key: ModelKey, status: InferenceModelStatus) -> None:
        """A model that is stalled keeps its slot, and others may roll."""
        self._queue.set_stalled(key, stalled=is_stalled(status))

    def note_refused(self, key: ModelKey) -> None:
        """Nothing can be read of this model: it moves nothing, and nobody waits for it."""
        self._queue.set_stalled(key, stalled=True)
        self._queue.stop_waiting(key)

    def forget(self, key: ModelKey) -> None:
        """The model is gone, or somebody else's."""
        self._queue.release_slot(key)
        self._tallies.pop(key, None)

    async def _read_history(self, look: Look, blueprint: Blueprint) -> History:
        history = read_history(look.before, owner_uid=look.uid)
        for number in missing_revisions(blueprint, history):
            name = revision_name(blueprint.name, number)
            async with look.collecting(f"ControllerRevision {name}", doing="read"):
                found = await self._client.find(CONTROLLER_REVISION.path(look.key.namespace, name))
                if found is not None and (kept := kept_content(found, owner_uid=look.uid)) is not None:
                    history[kept[0]] = kept[1]
        return history

    def _may_roll(self, key: ModelKey, view: RolloutView, images: ImagePlan) -> bool:
        if not view.wants_slot:
            if not images.waiting:
                self._queue.release_slot(key)
            return True
        before = view.before
        since = before.since if before is not None and before.waiting else format_time(self._clock())
        return self._queue.request_slot(key, since=since)

    def _count(
        self, key: ModelKey, state: RolloutStatus | None, *, now: float
    ) -> tuple[Mapping[str, CanaryFigures], bool]:
        """What gateways have counted of each worker since the last look, and whether they have told lately."""
        if state is None or state.phase != "Canary":
            self._tallies.pop(key, None)
            return {}, False
        reports = self._fleet.heard(key)
        self._tallies[key], added = take_differences(self._tallies.get(key) or Tally(since=now), reports, now=now)
        return added, bool(reports)
