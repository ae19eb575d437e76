"""parse → observe → plan → apply → status, for one model, whatever the reason to look at it.

Level-triggered: nothing is remembered between two looks, so a restart, a lost event and a repeated one are the same.
Children come from the cache; the InferenceModel itself is read anew each time, so that a deleted one is never rebuilt.
"""

from __future__ import annotations

import asyncio
import dataclasses
import datetime
import logging
import time
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import aiohttp
from tandem_api.inferencemodel import (
    CanaryFigures,
    Condition,
    InferenceModel,
    InferenceModelStatus,
    RolloutStatus,
    ScalingStatus,
)
from tandem_api.names import LABEL_MODEL, Role, keys_name

from tandem_operator import metrics
from tandem_operator.admission import (
    NO_REPORTS,
    admission_condition,
    gateway_addresses,
    is_admission_open,
    plan_admissions,
)
from tandem_operator.causes import Problem, missing_certificate
from tandem_operator.claims import LOOK_SECONDS, Claims
from tandem_operator.commits import (
    CommitPlan,
    can_wait,
    is_resolved,
    makes_workers,
    plan_commit,
    read_question,
    read_request,
    recover,
)
from tandem_operator.course import Course, Look, decide, look_at, missing_revisions, retry_request, with_traffic
from tandem_operator.errors import (
    APIError,
    ConflictError,
    IncompleteError,
    ModelError,
    NamespaceEndingError,
    NotFoundError,
)
from tandem_operator.fights import Fights, last_writer, soonest
from tandem_operator.figures import Tally, take_differences
from tandem_operator.fleet import FleetWatch
from tandem_operator.hub import Hub
from tandem_operator.images import ImagePlan, plan_images, with_images
from tandem_operator.keeper import KeyKeeper, KeyLook
from tandem_operator.kube.client import KubeClient, object_path
from tandem_operator.kube.events import CreationEvents
from tandem_operator.kube.ownership import HANDOVER_MANAGER, claim, holds_replicas, updates
from tandem_operator.kube.store import ChildStore
from tandem_operator.manifests import (
    CONTROLLER_REVISION,
    INFERENCE_MODEL,
    KIND_BY_NAME,
    POD,
    SECRET,
    STATEFUL_SET,
    WORKLOADS,
    ChildKey,
    Manifest,
    ModelKey,
    child_key,
    controller_of,
    dig,
)
from tandem_operator.observation import workload_key
from tandem_operator.pace import Pace
from tandem_operator.parsing import parse_status, read_model, read_past
from tandem_operator.planner import Children, Plan, Step, own_workloads, plan_children, plan_clearing, plan_step
from tandem_operator.prewarm import PrewarmPlan, plan_prewarm
from tandem_operator.recorder import EventRecorder
from tandem_operator.refusals import refusal, unserved_problem
from tandem_operator.replicas import Replicas, settle_replicas
from tandem_operator.revisions import highest_number, kept_content, read_history, revision_name
from tandem_operator.rolling import Rolling, plan_hurry, plan_rolling
from tandem_operator.routing import seconds_left
from tandem_operator.scaler import Outlook, Scaler
from tandem_operator.scaling.words import tell_attainment, tell_scaling
from tandem_operator.scene import is_resting, is_rolling, set_scene
from tandem_operator.settings import Release
from tandem_operator.status import (
    build_status,
    held_status,
    is_same_but_counts,
    is_same_memory,
    known_conditions,
    refused_status,
    true_conditions,
    understood_condition,
)
from tandem_operator.templates import is_rewritten, template_condition, with_answer
from tandem_operator.tiers import tiers_condition
from tandem_operator.transitions import Happening, apply_happenings, status_happenings
from tandem_operator.turns import Turns, is_stalled
from tandem_operator.workloads import Blueprint, Built
from tandem_operator.workloads.blueprint import digest
from tandem_operator.workloads.keys import rotation_request

_SOON, _OFTEN, _RARELY = 1.0, 5.0, 15.0
"""Seconds after which to look again at what no watch reports: a removal, a refusal, a deadline."""

_STATUS_SECONDS = 1.0
_STATUS = ChildKey(INFERENCE_MODEL.name, "status")
_DELETED = "deleted"
"""What is written of objects that are not wanted, and of the model itself, as `Fights` has it."""

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Written:
    """A status that was written."""

    at: float
    """By the monotonic clock."""
    version: str | None
    """The resourceVersion that came of it; None where the next look may decide otherwise for it."""
    content: str
    """Digest of the status as the API server keeps it."""


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
    failed: list[str] = field(default_factory=list[str])
    """Requests that time may heal."""
    ending: bool = False
    """The namespace is being deleted."""
    later: list[float] = field(default_factory=list[float])
    """Seconds after which to write what somebody else writes too."""

    def add(self, part: Outcome) -> None:
        """Take over what came of a part of the plan."""
        self.children |= part.children
        self.problems += part.problems
        self.waiting += part.waiting
        self.applied += part.applied
        self.failed += part.failed
        self.later += part.later
        self.ending |= part.ending

    @property
    def look_again(self) -> float | None:
        """Seconds until the next look, where events alone would not cause one."""
        if self.waiting:
            return _SOON
        return _RARELY if self.problems else None


class Reconciler:
    def __init__(
        self,
        client: KubeClient,
        store: ChildStore,
        release: Release,
        keeper: KeyKeeper,
        recorder: EventRecorder,
        creations: CreationEvents | None = None,
        hub: Hub | None = None,
        fleet: FleetWatch | None = None,
        turns: Turns | None = None,
        scaler: Scaler | None = None,
        claims: Claims | None = None,
        *,
        unserved: Callable[[], frozenset[str]] = frozenset,
        on_gone: Callable[[ModelKey], None] = lambda key: None,
        status_seconds: float = _STATUS_SECONDS,
        pace: Pace | None = None,
    ) -> None:
        """Without `hub`, or where its policy says so, workers resolve branches for themselves. `on_gone` is told of a
        model that is not there any more, which a watch that was away does not tell. `unserved` names the kinds that the
        API server does not have just now. `status_seconds` is how long a status stays that has nothing to say but other
        counts."""
        self._client = client
        self._store = store
        self._release = release
        self._keeper = keeper
        self._recorder = recorder
        self._creations = creations or CreationEvents()
        self._unserved = unserved
        self._on_gone = on_gone
        self._status_seconds = status_seconds
        self._pace = pace or Pace()
        self._statuses: dict[ModelKey, _Written] = {}
        self._hub = hub
        self._fleet = fleet or FleetWatch()
        self._turns = turns or Turns()
        self._scaler = scaler or Scaler(self._fleet)
        self._claims = claims or Claims(client)
        self._fights = Fights()
        self._foreign: dict[ModelKey, str] = {}
        """Of models whose status somebody else has written since it was written here: who."""
        self._tallies: dict[ModelKey, Tally] = {}
        """Of models with a canary: what gateways had counted when they were last asked."""

    async def reconcile(self, key: ModelKey) -> float | None:
        """Bring one model to what it asks for. Returns seconds after which to look again, if events will not tell.

        Raises:
            APIError: the model cannot be read, or its status cannot be written; the caller tries again later.
            IncompleteError: some requests failed; the rest is done, the status says which.
        """
        path = INFERENCE_MODEL.path(key.namespace, key.name)
        raw = await self._client.find(path)
        if raw is None or dig(raw, "metadata", "deletionTimestamp") is not None:
            self.forget(key)
            if raw is None:
                self._on_gone(key)
            return None  # the garbage collector removes the children
        if await self._stands_off(key, raw):
            return LOOK_SECONDS
        outcome = Outcome(before=await self._store.read(key), children={})
        outcome.children |= outcome.before
        try:
            reading = read_model(raw)
        except ModelError as error:
            return await self._refuse(key, raw, error, outcome)
        model = reading.model
        outlook = self._scaler.outlook(key, model.metadata.generation)
        owned = own_workloads(outcome.before, owner_uid=model.metadata.uid)
        replicas = settle_replicas(
            model,
            owned,
            outlook.wishes if outlook is not None else {},
            now=_now(),
            rest=outlook.asleep if outlook is not None else None,
        )
        model = replicas.model
        if replicas.moved:
            # An operator that stops in this moment must not decide anew.
            await self._write_status(key, raw, parse_status(raw).model_copy(update={"scaling": replicas.scaling}))
        images = self._choose_images(key, model, owned)
        blueprint = with_images(self._draw(replicas), images)
        weights = self._name_weights(key, blueprint, raw, outcome)
        blueprint = dataclasses.replace(blueprint, commit=weights.commit)
        keys = await self._ensure_keys(blueprint, raw, outcome)
        if outcome.ending:
            return _RARELY  # the namespace's controller removes everything, this model too
        await self._check_certificate(blueprint, outcome)
        prewarm = self._plan_prewarm(blueprint, weights, outcome)
        course = await self._steer(
            key, blueprint, raw, outcome, known=weights.problem is None and not prewarm.hold, images=images
        )
        await self._execute(key, course, outcome, prewarm, hold=not keys.usable or weights.problem is not None)
        if outcome.ending:
            return _RARELY
        await self._pace.turn()  # a look at a thousand pods is long
        ours = own_workloads(outcome.children, owner_uid=model.metadata.uid)
        blueprint = course.target.blueprint
        admitted = await self._admit(key, blueprint, ours, outcome)
        await self._pace.turn()
        scaling, scaled = self._tell_scaling(blueprint, replicas.scaling, outlook)
        status = build_status(
            blueprint,
            ours,
            problems=outcome.problems,
            failures=outcome.failures,
            waiting=outcome.waiting,
            now=_now(),
            rollout=course.state,
            scaling=scaling,
            trial=course.problem,
            weights=weights,
            images=images.status,
            starting=self._fleet.view(key).starting,
            more=[
                *([] if admitted is None else [admitted]),
                *scaled,
                *template_condition(course.target.desired, ours),
                *images.condition,
                *prewarm.condition,
                *understood_condition(reading.unknown),
                *self._fights.condition(key),
                *tiers_condition(blueprint, self._fleet.view(key).tiers),
            ],
        )
        await self._pace.turn()
        status = with_traffic(status, course, ours, now=datetime.datetime.now(datetime.UTC))
        self._turns.count(key, stalled=is_stalled(status))
        happenings = apply_happenings(outcome.applied, outcome.before)
        happenings = happenings if keys.happening is None else [keys.happening, *happenings]
        moving = any(condition.type in ("Reconciling", "Stalled") for condition in status.conditions)
        hurry = moving or (admitted is not None and admitted.status == "False")
        self._follow(key, blueprint, ours, course.state, scaling=scaling, hurry=hurry)
        tell_after = await self._report(key, raw, status, happenings)
        if outcome.failed:
            raise IncompleteError("; ".join(outcome.failed))
        again = [
            tell_after,
            soonest(outcome.later),
            outcome.look_again or (_RARELY if moving or images.waiting else None),
            keys.look_after_seconds,
            None if self._hub is None else self._hub.look_after(key),
            seconds_left(status.routing, now=datetime.datetime.now(datetime.UTC)),
            _OFTEN if course.state is not None and course.state.phase == "Canary" else None,
        ]
        return min((seconds for seconds in again if seconds is not None), default=None)

    def _follow(
        self,
        key: ModelKey,
        blueprint: Blueprint,
        ours: Children,
        state: RolloutStatus | None,
        *,
        scaling: ScalingStatus | None,
        hurry: bool,
    ) -> None:
        """Tell those who decide and measure how this model was seen."""
        asleep = scaling is not None and scaling.asleep_since is not None and not blueprint.model.spec.suspend
        self._scaler.follow(key, set_scene(blueprint, ours, state, asleep=asleep))
        hurry = hurry or (not asleep and (self._scaler.follows(key) or is_admission_open(blueprint, ours)))
        self._fleet.follow(key, gateway_addresses(blueprint, ours), hurry=hurry, asleep=asleep)

    def _tell_scaling(
        self, blueprint: Blueprint, scaling: ScalingStatus | None, outlook: Outlook | None
    ) -> tuple[ScalingStatus | None, list[Condition]]:
        """What there is to say about replicas and targets."""
        spec, before = blueprint.model.spec, blueprint.model.status
        found: list[Condition] = []
        if scaling is not None:
            scaling, found = tell_scaling(
                scaling,
                None if outlook is None else outlook.decision,
                before=before.scaling,
                suspended=spec.suspend,
                dry_run=spec.autoscaling.dry_run,
                conditions=before.conditions,
                now=datetime.datetime.now(datetime.UTC),
            )
            if outlook is not None:
                scaling = scaling.model_copy(update={"start": outlook.starts.tell(scaling.start)})
        if spec.slo is None or spec.suspend:
            return scaling, found
        again = scaling is not None and (before.scaling is None or scaling.decided_at != before.scaling.decided_at)
        attained = None if outlook is None else outlook.attainment
        return scaling, [*found, *tell_attainment(attained, before.conditions, again=again)]

    def _choose_images(self, key: ModelKey, model: InferenceModel, owned: Children) -> ImagePlan:
        """Images of a model that names none. Those of a later release come when it is the model's turn."""
        history = read_history(owned, owner_uid=model.metadata.uid)
        images = plan_images(model, self._release, owned, history, may_follow=False)
        if not images.waiting or not self._turns.ask(key, since=_now()):
            return images
        return plan_images(model, self._release, owned, history, may_follow=True)

    def _name_weights(self, key: ModelKey, blueprint: Blueprint, raw: Manifest, outcome: Outcome) -> CommitPlan:
        """Which commit workers load. The hub's answer, where there is none yet, causes another look."""
        ours = own_workloads(outcome.before, owner_uid=blueprint.model.metadata.uid)
        hub, request = self._hub, read_request(raw)
        model = recover(blueprint, ours, request=request, now=_now())
        asks = hub is not None and hub.policy.resolve
        question = read_question(blueprint, request)
        answer = None
        if hub is not None and asks and question is not None:
            answer = hub.ask(key, question, can_wait=can_wait(model, request))
        elif hub is not None:
            hub.forget(key)  # the model named a branch before
        needed = asks and question is not None and not is_resolved(model) and makes_workers(blueprint, ours)
        weights = plan_commit(model, answer, asks=asks, request=request, needed=needed, now=_now())
        if weights.problem is not None:
            outcome.problems.append(weights.problem)
        return weights

    def _plan_prewarm(self, blueprint: Blueprint, weights: CommitPlan, outcome: Outcome) -> PrewarmPlan:
        """What becomes of the claim."""
        plan = plan_prewarm(blueprint, outcome.before, known=weights.problem is None)
        if plan.problem is not None:
            outcome.problems.append(plan.problem)
        return plan

    async def _fill_cache(self, key: ModelKey, prewarm: PrewarmPlan, outcome: Outcome, *, uid: str) -> None:
        """Make the Job, when all that its pod needs is there, and delete what nobody waits for."""
        for child in prewarm.delete:
            await self._delete(key, child, outcome, why="no longer wanted")
        for manifest in prewarm.make:
            outcome.add(await self._make_apart(manifest, outcome, uid=uid))

    async def _ensure_keys(self, blueprint: Blueprint, raw: Manifest, outcome: Outcome) -> KeyLook:
        keys = KeyLook(usable=False)
        async with _collecting(outcome, f"Secret {keys_name(blueprint.name)}"):
            keys = await self._keeper.ensure(blueprint, rotation_request(raw))
        if keys.problem is not None:
            outcome.problems.append(keys.problem)
        self._note(Plan(waiting=keys.waiting, taken=keys.taken), outcome)
        return keys

    async def _check_certificate(self, blueprint: Blueprint, outcome: Outcome) -> None:
        """Say so where the Secret that clients' TLS wants is missing. What is in it only gateways know."""
        model = blueprint.model
        if (tls := model.spec.gateway.tls) is None or model.spec.suspend:
            return
        ours = own_workloads(outcome.before, owner_uid=model.metadata.uid)
        deployment = ours.get(workload_key(blueprint, Role.GATEWAY))
        async with _collecting(outcome, f"Secret {tls.secret_name}", doing="read"):
            if not await self._client.has(SECRET.path(model.metadata.namespace, tls.secret_name)):
                ready = dig(deployment, "status", "readyReplicas") or 0
                outcome.problems.append(missing_certificate(tls.secret_name, serving=ready > 0))

    async def _admit(self, key: ModelKey, blueprint: Blueprint, ours: Children, outcome: Outcome) -> Condition | None:
        """Set the gates of workers by what gateways report."""
        view = self._fleet.view(key)
        for admission in plan_admissions(blueprint, ours, view):
            async with _collecting(outcome, str(admission.pod), doing="admit"):
                path = POD.path(key.namespace, admission.pod.name, subresource="status")
                try:
                    await self._client.apply(path, admission.manifest(key, _now()), force=True)
                except (NotFoundError, ConflictError):
                    continue  # another pod of that name by now, or none
                metrics.WRITES.labels("admit", POD.name).inc()
        found = admission_condition(blueprint, ours, view, blueprint.model.status.conditions)
        nobody = not view.reporting and not view.unable
        if found is not None and found.reason == NO_REPORTS and nobody and is_admission_open(blueprint, ours):
            outcome.problems.append(Problem(reason=found.reason, message=found.message))
        return found

    def _draw(self, replicas: Replicas) -> Blueprint:
        return Blueprint(
            model=replicas.model, release=self._release, left=replicas.left, asleep_since=replicas.asleep_since
        )

    def forget(self, key: ModelKey) -> None:
        """The model is gone."""
        self._fleet.forget(key)
        self._scaler.forget(key)
        self._turns.give_back(key)
        self._fights.forget(key)
        self._foreign.pop(key, None)
        self._tallies.pop(key, None)
        self._statuses.pop(key, None)
        metrics.forget_model(key)

    async def _stands_off(self, key: ModelKey, raw: Manifest) -> bool:
        """Whether another operator serves this model: then it is left alone. Else notices who has written its status
        since it was written here."""
        other = await self._claims.find_other(raw)
        is_news = self._claims.is_news(key, raw, other)
        if other is None:
            written = self._statuses.get(key)
            if written is not None and written.content != _brief(raw.get("status")):
                self._foreign[key] = last_writer(raw, subresource="status")
            return False
        self.forget(key)
        if is_news and dig(raw, "spec", "managedBy") == self._claims.managed_by:
            text = (
                f"the operator of the Lease {self._claims.identity} leaves this model to {other}: two of them serve"
                " this namespace. Let one serve others (watchNamespaces), or divide models up by spec.managedBy"
            )
            uid = str(raw["metadata"]["uid"])
            await self._recorder.record(key, uid, Happening(kind="Warning", reason="ServedByAnother", message=text))
        return True

    def has_written(self, key: ModelKey, version: str) -> bool:
        """Whether this version of the object is what came of the last status that was written: no reason to look."""
        written = self._statuses.get(key)
        return written is not None and written.version == version

    async def _refuse(self, key: ModelKey, raw: Manifest, error: ModelError, outcome: Outcome) -> float | None:
        """What cannot be read stays as it is, but for `suspend`: somebody who pulls the brake means it. Pods that are
        made anew are admitted, so that what serves goes on serving."""
        problem = Problem(reason=error.reason, message=f"{error}; its pods stay as they are", stalled=True)
        self._turns.count(key, stalled=True)
        self._turns.stop_waiting(key)
        suspended, uid = dig(raw, "spec", "suspend") is True, str(raw["metadata"]["uid"])
        ours = own_workloads(outcome.before, owner_uid=uid)
        if suspended:
            problem = Problem(reason=error.reason, message=str(error), stalled=True)
            for child, workload in ours.items():
                if child.kind in WORKLOADS and dig(workload, "spec", "replicas") != 0:
                    async with _collecting(outcome, str(child), doing="scale"):
                        await self._scale(key, child, 0, outcome)
        model = None if suspended else read_past(raw)
        if model is None:
            generation, now = raw["metadata"]["generation"], _now()
            status = refused_status(problem, parse_status(raw), generation=generation, now=now, suspended=suspended)
        else:
            settled = settle_replicas(model, ours, {}, now=_now())
            blueprint = self._draw(settled)
            self._fleet.follow(key, gateway_addresses(blueprint, ours), hurry=is_admission_open(blueprint, ours))
            admitted = await self._admit(key, blueprint, ours, outcome)
            failures, more = self._creation_failures(outcome), [] if admitted is None else [admitted]
            status = held_status(blueprint, ours, problem, failures=failures, now=_now(), more=more)
        await self._report(key, raw, status, [])
        if outcome.failed:
            raise IncompleteError("; ".join(outcome.failed))
        return None if model is None else _RARELY

    def _creation_failures(self, outcome: Outcome) -> dict[ChildKey, str]:
        """Why controllers could not create pods."""
        return {
            child: failure
            for child, manifest in outcome.children.items()
            if child.kind == STATEFUL_SET.name
            and (failure := self._creations.failure(str(dig(manifest, "metadata", "uid")))) is not None
        }

    async def _steer(
        self,
        key: ModelKey,
        blueprint: Blueprint,
        raw: Manifest,
        outcome: Outcome,
        *,
        known: bool,
        images: ImagePlan,
    ) -> Course:
        """Find out which revision the workers should have, and keep it before anything is made of it. `known`: so is
        the commit that they load."""
        uid, now = blueprint.model.metadata.uid, datetime.datetime.now(datetime.UTC)
        history = read_history(outcome.before, owner_uid=uid)
        for number in missing_revisions(blueprint, history):
            path = CONTROLLER_REVISION.path(key.namespace, revision_name(blueprint.name, number))
            async with _collecting(
                outcome, f"ControllerRevision {revision_name(blueprint.name, number)}", doing="read"
            ):
                found = await self._client.find(path)
                if found is not None and (kept := kept_content(found, owner_uid=uid)) is not None:
                    history[kept[0]] = kept[1]
        ours = own_workloads(outcome.before, owner_uid=uid)
        taken, request = highest_number(outcome.before), retry_request(raw)
        await self._pace.turn()
        seen = look_at(blueprint, history, ours, request=request, taken=taken, now=now, known=known)
        while seen.record is not None and not await self._keep(key, seen.record, outcome):
            if seen.record["revision"] <= taken:
                break
            taken = seen.record["revision"]
            seen = look_at(blueprint, history, ours, request=request, taken=taken, now=now, known=known)
        await self._pace.turn()
        added, fresh = self._count(key, seen.before, now=time.monotonic())
        course = decide(seen, ours, may_roll=self._take_turn(key, seen, images), added=added, fresh=fresh, now=now)
        await self._pace.turn()
        phases = {seen.before and seen.before.phase, course.state and course.state.phase}
        if seen.before is not None and "Canary" in phases and len(phases) > 1:
            # An operator that stops in this moment must not take the pods of one revision for those of the other.
            await self._write_status(key, raw, parse_status(raw).model_copy(update={"rollout": course.state}))
        return course

    def _take_turn(self, key: ModelKey, seen: Look, images: ImagePlan) -> bool:
        if not seen.wants_turn:
            if not images.waiting:
                self._turns.give_back(key)
            return True
        is_waiting = seen.before is not None and seen.before.waiting
        return self._turns.ask(key, since=seen.before.since if seen.before is not None and is_waiting else _now())

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

    async def _keep(self, key: ModelKey, record: Manifest, outcome: Outcome) -> bool:
        """Make a ControllerRevision. False where one of that name has another content: the cache does not know it yet,
        or it is somebody else's."""
        async with _collecting(outcome, str(child_key(record)), doing="create"):
            try:
                made = await self._client.create(CONTROLLER_REVISION.path(key.namespace), record)
            except ConflictError:
                found = await self._client.find(CONTROLLER_REVISION.path(key.namespace, record["metadata"]["name"]))
                uid = dig(controller_of(record), "uid")
                return found is None or kept_content(found, owner_uid=uid) == kept_content(record, owner_uid=uid)
            outcome.children[child_key(made)] = made
            metrics.WRITES.labels("create", CONTROLLER_REVISION.name).inc()
        return True

    async def _execute(
        self, key: ModelKey, course: Course, outcome: Outcome, prewarm: PrewarmPlan, *, hold: bool
    ) -> None:
        """Do all that can be done. What fails is collected, and nothing else waits for it.

        `hold`: pods made now would find no keys, or keys that are about to go, or no model: what runs is better left
        running.
        """
        blueprint, built = course.target.blueprint, course.target.built
        uid = blueprint.model.metadata.uid
        outcome.problems += [Problem(reason=e.reason, message=str(e), stalled=True) for e in built.refused.values()]
        ours = own_workloads(outcome.before, owner_uid=uid)
        unserved = self._unserved()
        outcome.problems += [unserved_problem(kind) for kind in built.kinds & unserved]
        rolling = plan_rolling(
            blueprint,
            [child for child in course.target.desired if child["kind"] not in unserved],
            ours,
            now=datetime.datetime.now(datetime.UTC),
            limits=course.limits,
            waiting=course.waiting,
            resting=is_rolling(course.state) and is_resting(blueprint, course.state),
        )
        await self._pace.turn()
        hold = (hold or course.hold) and not blueprint.model.spec.suspend
        plan = plan_children(
            rolling.desired,
            outcome.before,
            owner_uid=uid,
            hold_workloads=hold,
            keep=frozenset(built.refused) | course.keep | prewarm.own,
        )
        workloads = [manifest for manifest in plan.apply if manifest["kind"] in WORKLOADS]
        # Pods start when all they refer to is there.
        for stage in ([manifest for manifest in plan.apply if manifest not in workloads], workloads):
            parts = await asyncio.gather(*(self._make_apart(manifest, outcome, uid=uid) for manifest in stage))
            for part in parts:
                outcome.add(part)
        self._note(plan, outcome)
        for child in plan.delete:
            if (wait := self._fights.wait(key, child, _DELETED)) > 0:
                outcome.later.append(wait)
                continue
            writer = last_writer(outcome.before.get(child))
            await self._delete(key, child, outcome, why="no longer wanted")
            self._fights.note(key, child, _DELETED, writer=writer)
        if not hold:
            for child, pods in _scaling(blueprint, built, rolling, ours):
                async with _collecting(outcome, str(child), doing="scale"):
                    await self._scale(key, child, pods, outcome)
            for pod in rolling.replace:
                await self._delete(key, pod, outcome, why="made from an older template")
        for pod, seconds in plan_hurry(blueprint, ours):
            async with _collecting(outcome, str(pod), doing="end"):
                path = KIND_BY_NAME[pod.kind].path(key.namespace, pod.name)
                await self._client.delete(path, uid=dig(ours[pod], "metadata", "uid"), grace_seconds=seconds)
        await self._fill_cache(key, prewarm, outcome, uid=uid)
        outcome.failures = self._creation_failures(outcome)

    async def _make_apart(self, manifest: Manifest, outcome: Outcome, *, uid: str) -> Outcome:
        """What came of one child: several are made at a time, and told in their order."""
        part = Outcome(before=outcome.before, children={})
        child, content = child_key(manifest), _brief(manifest)
        model = ModelKey(manifest["metadata"]["namespace"], str(manifest["metadata"]["labels"][LABEL_MODEL]))
        if (wait := self._fights.wait(model, child, content)) > 0:
            part.later.append(wait)
            return part
        async with _collecting(part, str(child)):
            writer = ""
            if self._fights.is_contested(model, child):
                writer = last_writer(await self._client.find(object_path(KIND_BY_NAME[child.kind], manifest)))
            await self._make(manifest, part, uid=uid)
            if part.applied:
                self._fights.note(model, child, content, writer=writer)
        return part

    async def _make(self, manifest: Manifest, outcome: Outcome, *, uid: str) -> None:
        """Create or change one child. What the cache does not know is created, which leaves alone what is there: that
        is read then, for it may be somebody else's."""
        key, kind = child_key(manifest), KIND_BY_NAME[manifest["kind"]]
        live = outcome.before.get(key)
        if live is None:
            try:
                made = await self._client.create(kind.path(manifest["metadata"]["namespace"]), manifest)
            except ConflictError:
                if (live := await self._client.find(object_path(kind, manifest))) is None:
                    raise
            else:
                outcome.children[key] = made
                metrics.WRITES.labels("create", key.kind).inc()
                outcome.applied.append(manifest)
                return
            step = plan_step(manifest, live, owner_uid=uid)
            if step is Step.WAIT or step is Step.TAKEN:
                self._note(Plan(waiting=(key,)) if step is Step.WAIT else Plan(taken=(key,)), outcome)
                return
            outcome.children[key] = live
            if step is Step.KEEP:
                return  # the cache is late
        await self._apply(manifest, live, outcome)

    async def _apply(self, manifest: Manifest, live: Manifest, outcome: Outcome) -> None:
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
        outcome.children[key] = answer
        outcome.applied.append(manifest)

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

    async def _scale(self, key: ModelKey, child: ChildKey, pods: int, outcome: Outcome) -> None:
        """Change the count alone."""
        path = KIND_BY_NAME[child.kind].path(key.namespace, child.name)
        outcome.children[child] = await self._client.merge(path, {"spec": {"replicas": pods}})
        metrics.WRITES.labels("scale", child.kind).inc()

    def _note(self, plan: Plan, outcome: Outcome) -> None:
        outcome.waiting += [str(key) for key in plan.waiting]
        for key in plan.taken:
            text = f"{key} exists and belongs to somebody else: rename this model, or delete that object"
            outcome.problems.append(Problem(reason="ChildNameTaken", message=text, stalled=True))

    async def _delete(self, key: ModelKey, child: ChildKey, outcome: Outcome, *, why: str) -> None:
        path = KIND_BY_NAME[child.kind].path(key.namespace, child.name)
        async with _collecting(outcome, str(child), doing="delete"):
            try:
                await self._client.delete(path, uid=dig(outcome.children[child], "metadata", "uid"))
            except ConflictError:
                return  # another object of that name by now: the next look decides about it
            del outcome.children[child]
            metrics.WRITES.labels("delete", child.kind).inc()
            log.info("deleted", extra={"model": str(key), "child": str(child), "why": why})

    async def _report(
        self, key: ModelKey, raw: Manifest, status: InferenceModelStatus, happenings: Sequence[Happening]
    ) -> float | None:
        """Write the status if it says something new, and the Events that belong to it. Returns seconds after which to
        do so, where other counts can wait: pods that come up together are told together."""
        metrics.note_conditions(key, true_conditions(status), known_conditions(status))
        before, uid = parse_status(raw), str(raw["metadata"]["uid"])
        status = status.model_copy(update={"operator": self._claims.claim})
        wait, written = 0.0, self._statuses.get(key)
        if status != before and written is not None and is_same_but_counts(before, status):
            wait = written.at + self._status_seconds - time.monotonic()
        foreign = self._foreign.get(key)
        if status != before and foreign is not None:
            wait = max(wait, self._fights.wait(key, _STATUS, _STATUS.name))
        if wait > 0:
            status = before
        elif status != before:
            if not await self._write_status(key, raw, status):
                return None
            if self._foreign.pop(key, None) is not None:
                self._fights.note(key, _STATUS, _STATUS.name, writer=foreign or "")
        told = (*happenings, *status_happenings(before, status))
        await asyncio.gather(*(self._recorder.record(key, uid, happening) for happening in told))
        return wait if wait > 0 else None

    async def _write_status(self, key: ModelKey, raw: Manifest, status: InferenceModelStatus) -> bool:
        """False where the model is gone."""
        body: Manifest = {
            "apiVersion": INFERENCE_MODEL.api_version,
            "kind": INFERENCE_MODEL.name,
            "metadata": {"name": key.name, "namespace": key.namespace, "uid": str(raw["metadata"]["uid"])},
            "status": status.model_dump(by_alias=True, exclude_none=True),
        }
        if status.operator is not None and status.operator != parse_status(raw).operator:
            # A claim is one operator's: of two that make it at a time, one finds that the object has changed.
            body["metadata"]["resourceVersion"] = str(raw["metadata"]["resourceVersion"])
        try:
            answer = await self._client.apply(
                INFERENCE_MODEL.path(key.namespace, key.name, subresource="status"), body, force=True
            )
        except NotFoundError:
            return False
        # What somebody changed since the model was read is in this version too, and a watch that was away in between
        # tells of nothing else.
        is_known = is_same_memory(parse_status(raw), status) and _wish(answer) == _wish(raw)
        version = str(dig(answer, "metadata", "resourceVersion")) if is_known else None
        self._statuses[key] = _Written(at=time.monotonic(), version=version, content=_brief(answer.get("status")))
        metrics.WRITES.labels("status", INFERENCE_MODEL.name).inc()
        return True


@asynccontextmanager
async def _collecting(outcome: Outcome, child: str, *, doing: str = "write") -> AsyncGenerator[None]:
    """A request whose failure is noted, and stops nothing else."""
    try:
        yield
    except NamespaceEndingError:
        outcome.ending = True
    except (APIError, aiohttp.ClientError, TimeoutError) as error:
        problem = refusal(child, error, doing=doing)
        outcome.problems.append(problem)
        if not problem.stalled:
            outcome.failed.append(problem.message)


def _scaling(
    blueprint: Blueprint, built: Built, rolling: Rolling, live: Mapping[ChildKey, Manifest]
) -> list[tuple[ChildKey, int]]:
    """Counts of the workloads whose template cannot be made: they are scaled and suspended nevertheless."""
    gateway = blueprint.replicas(blueprint.model.spec.gateway.replicas)
    wanted = {key: rolling.scale.get(key, gateway) for key in built.refused if key in live}
    return [(key, pods) for key, pods in wanted.items() if dig(live[key], "spec", "replicas") != pods]


def _wish(raw: Manifest) -> tuple[object, ...]:
    """Equal where nobody has changed what a look goes by, but for the status."""
    return tuple(dig(raw, "metadata", each) for each in ("generation", "annotations", "labels", "deletionTimestamp"))


def _brief(content: object) -> str:
    return digest(content)[:16]


def _now() -> str:
    return datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
