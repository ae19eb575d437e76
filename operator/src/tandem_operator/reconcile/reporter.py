"""The last steps of a look: readiness gates, the status, whoever follows the model, and when to look again."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime

from tandem_api.crd.status import Condition, InferenceModelStatus, ScalingStatus

from tandem_operator.autoscale.observed import observe_model
from tandem_operator.autoscale.plan.words import report_attainment, report_scaling
from tandem_operator.autoscale.scaler import Outlook, Scaler
from tandem_operator.children.templates import template_condition
from tandem_operator.gateways.admission import (
    NO_REPORTS,
    admission_condition,
    gateway_addresses,
    is_admission_open,
    plan_admissions,
)
from tandem_operator.gateways.fleet import FleetWatch
from tandem_operator.gateways.routing import seconds_left
from tandem_operator.gateways.tiers import has_tiers, store_condition, tiers_condition
from tandem_operator.gateways.transports import transport_condition
from tandem_operator.objects.errors import IncompleteError
from tandem_operator.objects.manifests import Children, format_time
from tandem_operator.objects.parsing import ModelReading
from tandem_operator.objects.problem import Problem
from tandem_operator.reconcile.contention import Contention, soonest
from tandem_operator.reconcile.executor import Executor
from tandem_operator.reconcile.look import OFTEN, RARELY, Decisions, Look
from tandem_operator.reconcile.rollout import RolloutReconciler
from tandem_operator.reconcile.status import build_status, held_status, understood_condition
from tandem_operator.reconcile.status_writer import StatusWriter
from tandem_operator.reconcile.transitions import apply_happenings
from tandem_operator.rollout.plan import with_traffic
from tandem_operator.runtime.turns import LoopTurns
from tandem_operator.weights.hub import Hub
from tandem_operator.workloads.blueprint import Blueprint


class Reporter:
    """Tells gateways, people and the parts that follow models what a look has come to."""

    def __init__(
        self,
        fleet: FleetWatch,
        scaler: Scaler,
        hub: Hub | None,
        executor: Executor,
        statuses: StatusWriter,
        rollouts: RolloutReconciler,
        contention: Contention,
        loop_turns: LoopTurns,
        clock: Callable[[], datetime],
    ) -> None:
        self._fleet = fleet
        self._scaler = scaler
        self._hub = hub
        self._executor = executor
        self._statuses = statuses
        self._rollouts = rollouts
        self._contention = contention
        self._loop_turns = loop_turns
        self._clock = clock

    async def report(self, look: Look, reading: ModelReading, decided: Decisions) -> float | None:
        """Steps 12 to 15 of a look. Returns seconds until the next one, if events will not tell.

        Raises:
            APIError: the status cannot be written.
            IncompleteError: some requests failed; the status says which.
        """
        ours = look.own_now
        # 12. Readiness gates, by what gateways report: a worker counts once requests reach it.
        admitted = await self._admit(look, decided.blueprint, ours)
        await self._loop_turns.next()
        # 13. The status, of children as they are by now.
        status = self._build_status(look, reading, decided, ours, admitted)
        await self._loop_turns.next()
        status = with_traffic(status, decided.rollout, ours, now=self._clock())
        self._rollouts.note_status(look.key, status)
        # 14. Those who decide and measure follow the model as it was seen.
        moving = any(condition.type in ("Reconciling", "Stalled") for condition in status.conditions)
        fast = moving or (admitted is not None and admitted.status == "False")
        self._follow(look, decided, ours, status.scaling, fast=fast)
        # 15. People read what is new, also where some requests have failed.
        made = [] if decided.keys.happening is None else [decided.keys.happening]
        happenings = [*made, *apply_happenings(look.applied, look.before)]
        report_after = await self._statuses.report(look, status, happenings)
        if look.failed:
            raise IncompleteError("; ".join(look.failed))
        again = self._next_look(look, decided, status)
        waits = RARELY if moving or decided.images.waiting else None
        return min(
            (each for each in (report_after, look.again_seconds or waits, *again) if each is not None), default=None
        )

    def _build_status(
        self, look: Look, reading: ModelReading, decided: Decisions, ours: Children, admitted: Condition | None
    ) -> InferenceModelStatus:
        now, rollout, view = self._clock(), decided.rollout, self._fleet.view(look.key)
        scaling, scaled = _scaling_status(decided.blueprint, decided.replicas.scaling, decided.outlook, now=now)
        return build_status(
            decided.blueprint,
            ours,
            problems=look.problems,
            failures=self._executor.creation_failures(look),
            waiting=look.waiting,
            now=format_time(now),
            rollout=rollout.state,
            scaling=scaling,
            trial=rollout.problem,
            weights=decided.weights,
            images=decided.images.status,
            starting=view.starting,
            forms=view.weights,
            more=[
                *([] if admitted is None else [admitted]),
                *scaled,
                *template_condition(rollout.target.desired, ours),
                *decided.images.condition,
                *decided.prewarm.condition,
                *understood_condition(reading.unknown),
                *self._contention.condition(look.key),
                *tiers_condition(decided.blueprint, view.tiers, view.peers),
                *transport_condition(decided.blueprint, view.transports),
                *store_condition(decided.blueprint, view.stores),
            ],
        )

    def _next_look(self, look: Look, decided: Decisions, status: InferenceModelStatus) -> list[float | None]:
        """Seconds until what no watch reports: contested objects, rotating keys, the hub, former names, a canary."""
        state = decided.rollout.state
        return [
            soonest(look.later),
            decided.keys.look_after_seconds,
            None if self._hub is None else self._hub.look_after(look.key),
            seconds_left(status.routing, now=self._clock()),
            OFTEN if state is not None and state.phase == "Canary" else None,
        ]

    async def hold(self, look: Look, blueprint: Blueprint, problem: Problem) -> InferenceModelStatus:
        """The status of a model whose spec has values that cannot be read. Its workers are admitted nevertheless."""
        ours = look.own_before
        self._fleet.follow(look.key, gateway_addresses(blueprint, ours), fast=is_admission_open(blueprint, ours))
        admitted = await self._admit(look, blueprint, ours)
        more = [] if admitted is None else [admitted]
        failures, now = self._executor.creation_failures(look), format_time(self._clock())
        return held_status(blueprint, ours, problem, failures=failures, now=now, more=more)

    def _follow(
        self, look: Look, decided: Decisions, ours: Children, scaling: ScalingStatus | None, *, fast: bool
    ) -> None:
        """Tell those who decide and measure how this model was seen. `fast`: something is under way."""
        key, blueprint = look.key, decided.blueprint
        asleep = scaling is not None and scaling.asleep_since is not None and not blueprint.model.spec.suspend
        self._scaler.follow(key, observe_model(blueprint, ours, decided.rollout.state, asleep=asleep))
        fast = fast or (not asleep and (self._scaler.follows(key) or is_admission_open(blueprint, ours)))
        fast = fast or (not asleep and has_tiers(blueprint))  # which are told of within 15 s
        self._fleet.follow(key, gateway_addresses(blueprint, ours), fast=fast, asleep=asleep)

    async def _admit(self, look: Look, blueprint: Blueprint, ours: Children) -> Condition | None:
        """Set the gates of workers by what gateways report."""
        view = self._fleet.view(look.key)
        for admission in plan_admissions(blueprint, ours, view):
            await self._executor.admit(look, admission, now=format_time(self._clock()))
        found = admission_condition(blueprint, ours, view, blueprint.model.status.conditions)
        nobody = not view.reporting and not view.unable
        if found is not None and found.reason == NO_REPORTS and nobody and is_admission_open(blueprint, ours):
            look.note(Problem(reason=found.reason, message=found.message))
        return found


def _scaling_status(
    blueprint: Blueprint, scaling: ScalingStatus | None, outlook: Outlook | None, *, now: datetime
) -> tuple[ScalingStatus | None, list[Condition]]:
    """What there is to say about replicas and targets."""
    spec, before = blueprint.model.spec, blueprint.model.status
    found: list[Condition] = []
    if scaling is not None:
        scaling, found = report_scaling(
            scaling,
            None if outlook is None else outlook.decision,
            before=before.scaling,
            suspended=spec.suspend,
            dry_run=spec.autoscaling.dry_run,
            conditions=before.conditions,
            now=now,
        )
        if outlook is not None:
            scaling = scaling.model_copy(update={"start": outlook.starts.tell(scaling.start)})
    if spec.slo is None or spec.suspend:
        return scaling, found
    again = scaling is not None and (before.scaling is None or scaling.decided_at != before.scaling.decided_at)
    attained = None if outlook is None else outlook.attainment
    return scaling, [*found, *report_attainment(attained, before.conditions, again=again)]
