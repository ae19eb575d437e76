"""parse → observe → plan → apply → status, for one model, whatever the reason to look at it.

Level-triggered: nothing is remembered between two looks, so a restart, a lost event and a repeated one are the same.
Children come from the cache; the InferenceModel itself is read anew each time, so that a deleted one is never rebuilt.

Its fifteen steps are numbered where they happen, in `Reconciler.reconcile`, `_decide` and `Reporter.report`, each with
the reason for its place. What they decide is decided by pure functions of the rooms below.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from datetime import UTC, datetime

from tandem_api.names import Role, keys_name

from tandem_operator.autoscale.desired import DesiredReplicas, settle_replicas
from tandem_operator.autoscale.scaler import Outlook, Scaler
from tandem_operator.children.plan import ChildPlan, plan_children
from tandem_operator.gateways.fleet import FleetWatch
from tandem_operator.keys.keeper import KeyKeeper, KeyLook
from tandem_operator.keys.secret import rotation_request
from tandem_operator.kube.client import KubeClient
from tandem_operator.kube.events import CreationEvents
from tandem_operator.kube.recorder import EventRecorder
from tandem_operator.kube.store import ChildStore
from tandem_operator.objects.errors import IncompleteError, ModelError
from tandem_operator.objects.happening import Happening
from tandem_operator.objects.manifests import (
    INFERENCE_MODEL,
    SECRET,
    WORKLOADS,
    ChildKey,
    Children,
    Manifest,
    ModelKey,
    dig,
    format_time,
)
from tandem_operator.objects.parsing import ModelReading, parse_status, read_model, read_past
from tandem_operator.objects.problem import Problem
from tandem_operator.objects.refusals import unserved_problem
from tandem_operator.observe.causes import missing_certificate
from tandem_operator.observe.roles import workload_key
from tandem_operator.reconcile.claims import LOOK_SECONDS, Claims
from tandem_operator.reconcile.contention import Contention
from tandem_operator.reconcile.executor import Actions, Executor
from tandem_operator.reconcile.look import RARELY, Decisions, Look
from tandem_operator.reconcile.reporter import Reporter
from tandem_operator.reconcile.rollout import RolloutReconciler
from tandem_operator.reconcile.status import refused_status
from tandem_operator.reconcile.status_writer import STATUS_SECONDS, StatusWriter
from tandem_operator.rollout.images import with_images
from tandem_operator.rollout.plan import RolloutPlan, is_resting, is_rolling
from tandem_operator.rollout.queue import RolloutQueue
from tandem_operator.rollout.statefulsets import StatefulSetPlan, plan_drain_limits, plan_stateful_sets
from tandem_operator.runtime import metrics
from tandem_operator.runtime.turns import LoopTurns
from tandem_operator.weights import drafts
from tandem_operator.weights.commits import (
    MODEL_PATH,
    CommitPlan,
    can_wait,
    is_resolved,
    makes_workers,
    plan_commit,
    read_question,
    read_request,
    recover,
)
from tandem_operator.weights.hub import Hub
from tandem_operator.weights.prewarm import plan_prewarm
from tandem_operator.workloads.blueprint import Blueprint
from tandem_operator.workloads.release import Release

_STAY = "its pods stay as they are"


class Reconciler:
    """The steps of a look. Not thread-safe: it belongs to one event loop, and looks at a model once at a time."""

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
        rollouts: RolloutQueue | None = None,
        scaler: Scaler | None = None,
        claims: Claims | None = None,
        *,
        unserved: Callable[[], frozenset[str]] = frozenset,
        on_gone: Callable[[ModelKey], None] = lambda key: None,
        status_seconds: float = STATUS_SECONDS,
        loop_turns: LoopTurns | None = None,
        clock: Callable[[], datetime] = lambda: datetime.now(UTC),
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
        self._unserved = unserved
        self._on_gone = on_gone
        self._loop_turns = loop_turns or LoopTurns()
        self._clock = clock
        self._hub = hub
        self._fleet = fleet or FleetWatch()
        self._scaler = scaler or Scaler(self._fleet)
        self._claims = claims or Claims(client)
        self._contention = Contention()
        self._executor = Executor(client, creations or CreationEvents(), self._contention)
        self._statuses = StatusWriter(client, recorder, self._claims, self._contention, status_seconds=status_seconds)
        self._rollouts = RolloutReconciler(
            client, release, self._fleet, rollouts or RolloutQueue(), self._executor, self._statuses,
            self._loop_turns, clock,
        )  # fmt: skip
        self._reporter = Reporter(
            self._fleet, self._scaler, hub, self._executor, self._statuses, self._rollouts, self._contention,
            self._loop_turns, clock,
        )  # fmt: skip

    async def reconcile(self, key: ModelKey) -> float | None:
        """Bring one model to what it asks for. Returns seconds after which to look again, if events will not tell.

        Raises:
            APIError: the model cannot be read, or its status cannot be written; the caller tries again later.
            IncompleteError: some requests failed; the rest is done, the status says which.
        """
        # 1. The object itself, not the cache: of one that was deleted nothing is rebuilt.
        raw = await self._client.find(INFERENCE_MODEL.path(key.namespace, key.name))
        if raw is None or dig(raw, "metadata", "deletionTimestamp") is not None:
            self.forget(key)
            if raw is None:
                self._on_gone(key)
            return None  # the garbage collector removes the children
        # 2. Two operators that write the same objects would put each other's right for ever.
        if await self._stands_off(key, raw):
            return LOOK_SECONDS
        before = await self._store.read(key)
        look = Look(key=key, raw=raw, before=before, children=dict(before))
        # 3. What cannot be read changes nothing.
        try:
            reading = read_model(raw)
        except ModelError as error:
            return await self._refuse(look, error)
        # 4. to 10. What there should be.
        decided = await self._decide(look, reading)
        if decided is None:
            return RARELY  # the namespace's controller removes everything, this model too
        # 11. Children: all that can be done is done, what fails is told.
        await self._executor.execute(look, await self._plan_actions(look, decided))
        if look.ending:
            return RARELY
        await self._loop_turns.next()  # a look at a thousand pods is long
        # 12. to 15. What is told of it, to workers, people and the other parts.
        return await self._reporter.report(look, reading, decided)

    async def _decide(self, look: Look, reading: ModelReading) -> Decisions | None:
        """Steps 4 to 10. None where the namespace is about to go."""
        # 4. Replicas come first: everything after goes by the number in force, whoever has set it.
        outlook, replicas = await self._settle_replicas(look, reading)
        # 5. Images, 6. weights: they are part of the revision, so both are known before it is.
        images = self._rollouts.choose_images(look, replicas.model)
        blueprint = with_images(_draw(replicas, self._release), images)
        weights = self._name_weights(look, blueprint)
        head = None if weights.draft is None else weights.draft.commit
        blueprint = dataclasses.replace(blueprint, commit=weights.commit, draft_commit=head)
        # 7. Keys before pods that mount them.
        keys = await self._ensure_keys(look, blueprint)
        if look.ending:
            return None
        # 8. What only a person can provide, and 9. what has to be fetched before anything is made to wait for it.
        await self._check_certificate(look, blueprint)
        prewarm = plan_prewarm(blueprint, look.before, known=weights.problem is None)
        look.note(prewarm.problem)
        # 10. The revision last: its digest covers all of the above.
        known = weights.problem is None and not prewarm.hold
        rollout = await self._rollouts.plan(look, blueprint, images, known=known)
        return Decisions(
            outlook=outlook, replicas=replicas, images=images, weights=weights, keys=keys, prewarm=prewarm,
            rollout=rollout,
        )  # fmt: skip

    async def _settle_replicas(self, look: Look, reading: ModelReading) -> tuple[Outlook | None, DesiredReplicas]:
        model = reading.model
        outlook = self._scaler.outlook(look.key, model.metadata.generation)
        replicas = settle_replicas(
            model,
            look.own_before,
            outlook.recommendations if outlook is not None else {},
            now=format_time(self._clock()),
            rest=outlook.asleep if outlook is not None else None,
        )
        if replicas.moved:
            # An operator that stops in this moment must not decide anew.
            status = parse_status(look.raw).model_copy(update={"scaling": replicas.scaling})
            await self._statuses.write(look, status)
        return outlook, replicas

    def _name_weights(self, look: Look, blueprint: Blueprint) -> CommitPlan:
        """Which commit workers load. The hub's answer, where there is none yet, causes another look."""
        ours, hub, request = look.own_before, self._hub, read_request(look.raw)
        model = recover(blueprint, ours, request=request, now=format_time(self._clock()))
        asks = hub is not None and hub.policy.resolve
        question = read_question(blueprint, request)
        answer = None
        if hub is not None and asks and question is not None:
            answer = hub.ask(look.key, question, can_wait=can_wait(model, request))
        elif hub is not None:
            hub.forget(look.key, MODEL_PATH)  # the model named a branch before
        needed = asks and question is not None and not is_resolved(model) and makes_workers(blueprint, ours)
        weights = plan_commit(model, answer, asks=asks, request=request, needed=needed, now=format_time(self._clock()))
        head = self._name_draft(look, dataclasses.replace(blueprint, commit=weights.commit), asks=asks)
        problem = weights.problem or head.problem
        look.note(problem)
        return dataclasses.replace(weights, draft=head.status, problem=problem)

    def _name_draft(self, look: Look, blueprint: Blueprint, *, asks: bool) -> CommitPlan:
        """The same of the draft head's files."""
        ours, hub, question = look.own_before, self._hub, drafts.read_question(blueprint)
        known = drafts.find_known(blueprint, ours)
        asks = asks and question is not None and known is None
        answer = None
        if hub is not None and asks and question is not None:
            answer = hub.ask(look.key, question)
        elif hub is not None:
            hub.forget(look.key, drafts.PATH)
        needed = asks and makes_workers(blueprint, ours)
        now = format_time(self._clock())
        return drafts.plan_draft(blueprint.model, known, answer, asks=asks, needed=needed, now=now)

    async def _ensure_keys(self, look: Look, blueprint: Blueprint) -> KeyLook:
        keys = KeyLook(usable=False)
        async with look.collecting(f"Secret {keys_name(blueprint.name)}"):
            keys = await self._keeper.ensure(blueprint, rotation_request(look.raw))
        look.note(keys.problem)
        look.note_blocked(ChildPlan(waiting=keys.waiting, taken=keys.taken))
        return keys

    async def _check_certificate(self, look: Look, blueprint: Blueprint) -> None:
        """Say so where the Secret that clients' TLS wants is missing. What is in it only gateways know."""
        model = blueprint.model
        if (tls := model.spec.gateway.tls) is None or model.spec.suspend:
            return
        deployment = look.own_before.get(workload_key(blueprint, Role.GATEWAY))
        async with look.collecting(f"Secret {tls.secret_name}", doing="read"):
            if not await self._client.has(SECRET.path(model.metadata.namespace, tls.secret_name)):
                ready = dig(deployment, "status", "readyReplicas") or 0
                look.note(missing_certificate(tls.secret_name, serving=ready > 0))

    async def _plan_actions(self, look: Look, decided: Decisions) -> Actions:
        """From what workers should be to what is to be written and deleted now."""
        blueprint, target, rollout = decided.blueprint, decided.rollout.target, decided.rollout
        built, ours, unserved = target.built, look.own_before, self._unserved()
        look.problems += [Problem(reason=e.reason, message=str(e), stalled=True) for e in built.refused.values()]
        look.problems += [unserved_problem(kind) for kind in built.kinds & unserved]
        # Counts and partitions of this moment of a rollout, then child by child what differs from that.
        sets = plan_stateful_sets(
            blueprint,
            [child for child in target.desired if child["kind"] not in unserved],
            ours,
            now=self._clock(),
            limits=rollout.limits,
            waiting=rollout.waiting,
            resting=is_rolling(rollout.state) and is_resting(blueprint, rollout.state),
        )
        await self._loop_turns.next()
        plan = plan_children(
            sets.desired,
            look.before,
            owner_uid=look.uid,
            hold_workloads=decided.hold,
            keep=frozenset(built.refused) | rollout.keep | decided.prewarm.own,
        )
        return Actions(
            children=plan,
            scale=[] if decided.hold else _counts_of_refused(rollout, sets, ours),
            replace=() if decided.hold else sets.replace,
            drain_limits=plan_drain_limits(blueprint, ours),
            prewarm=decided.prewarm,
        )

    async def _refuse(self, look: Look, error: ModelError) -> float | None:
        """What cannot be read stays as it is, but for `suspend`: somebody who pulls the brake means it."""
        self._rollouts.note_refused(look.key)
        is_suspended, now = dig(look.raw, "spec", "suspend") is True, format_time(self._clock())
        past = None if is_suspended else read_past(look.raw)
        if past is not None:
            # Pods that are made anew are admitted, so that what serves goes on serving.
            problem = Problem(reason=error.reason, message=f"{error}; {_STAY}", stalled=True)
            replicas = settle_replicas(past, look.own_before, {}, now=now)
            status = await self._reporter.hold(look, _draw(replicas, self._release), problem)
        else:
            said = str(error) if is_suspended else f"{error}; {_STAY}"
            problem = Problem(reason=error.reason, message=said, stalled=True)
            for child, workload in look.own_before.items() if is_suspended else ():
                if child.kind in WORKLOADS and dig(workload, "spec", "replicas") != 0:
                    await self._executor.scale(look, child, 0)
            status = refused_status(
                problem, parse_status(look.raw), generation=look.raw["metadata"]["generation"], now=now,
                suspended=is_suspended,
            )  # fmt: skip
        await self._statuses.report(look, status, [])
        if look.failed:
            raise IncompleteError("; ".join(look.failed))
        return None if past is None else RARELY

    async def _stands_off(self, key: ModelKey, raw: Manifest) -> bool:
        """Whether another operator serves this model: then it is left alone."""
        other = await self._claims.find_other(raw)
        is_news = self._claims.is_news(key, raw, other)
        if other is None:
            self._statuses.notice_foreign(key, raw)
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
        return self._statuses.has_written(key, version)

    def forget(self, key: ModelKey) -> None:
        """The model is gone, or somebody else's."""
        self._fleet.forget(key)
        self._scaler.forget(key)
        self._rollouts.forget(key)
        self._contention.forget(key)
        self._statuses.forget(key)
        metrics.forget_model(key)


def _draw(replicas: DesiredReplicas, release: Release) -> Blueprint:
    return Blueprint(model=replicas.model, release=release, left=replicas.left, asleep_since=replicas.asleep_since)


def _counts_of_refused(rollout: RolloutPlan, sets: StatefulSetPlan, live: Children) -> list[tuple[ChildKey, int]]:
    """Counts of workloads whose template cannot be made: they are scaled and suspended nevertheless."""
    blueprint, refused = rollout.target.blueprint, rollout.target.built.refused
    gateway = blueprint.replicas(blueprint.model.spec.gateway.replicas)
    wanted = {key: sets.scale.get(key, gateway) for key in refused if key in live}
    return [(key, pods) for key, pods in wanted.items() if dig(live[key], "spec", "replicas") != pods]
