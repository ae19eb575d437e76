"""Decides, again and again, how many replicas the roles of models with the mode `SLO` should have.

The decisions are those of `tandem_operator.autoscale.plan`, which is pure; here are the clock, the reports of gateways
and what is remembered between two decisions. Nothing is written here: a decision that moves something, or that says
something new, causes a look at the model, which follows it and tells it.

What is remembered is no more than measurements. A process that begins anew keeps the replicas that `status.scaling`
has, and takes away none before it has watched for as long as `scaleDownStabilization` says.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from tandem_api.names import Role

from tandem_operator.autoscale.desired import Recommendation
from tandem_operator.autoscale.observed import ObservedModel, claim_gpus, count_model_gpus
from tandem_operator.autoscale.plan.allotment import Claim, allot
from tandem_operator.autoscale.plan.contract import Decision, RoleDecision, ScalingSpec, Snapshot
from tandem_operator.autoscale.plan.history import History
from tandem_operator.autoscale.plan.planner import plan
from tandem_operator.autoscale.plan.shares import Shares
from tandem_operator.autoscale.plan.sleep import ASLEEP, SLEEP_LIMIT, WAKE_LIMIT, Rest, Sight, decide_rest, follow_quiet
from tandem_operator.autoscale.plan.slo import WINDOW_SECONDS, Attainment, judge, measure
from tandem_operator.autoscale.plan.snapshots import (
    STALE_SECONDS,
    Heard,
    Totals,
    add_up,
    take_shares,
    take_snapshot,
    take_starts,
)
from tandem_operator.autoscale.plan.starts import Starts
from tandem_operator.autoscale.plan.temper import only_grow, temper
from tandem_operator.autoscale.plan.words import REPORTED_AGAIN_SECONDS
from tandem_operator.autoscale.quotas import NO_BUDGET, GPUBudget, GPUPool
from tandem_operator.gateways.fleet import FleetView, FleetWatch
from tandem_operator.objects.manifests import ModelKey
from tandem_operator.runtime import metrics
from tandem_operator.runtime.turns import LoopTurns

PERIOD_SECONDS = 5.0
_FRESH_SECONDS = 3 * PERIOD_SECONDS
"""A decision that is older is not followed any more."""
_NAMED = 3
QUOTA_LIMIT = "GPU quota"

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Outlook:
    """What was decided last about one model."""

    generation: int
    """The spec's, for which it was decided."""
    decision: Decision | None
    """None where no role of it has the mode `SLO`."""
    attainment: Attainment
    recommendations: Mapping[Role, Recommendation] = field(default_factory=dict[Role, Recommendation])
    """What is to be followed; empty in a dry run, and once it is too old."""
    asleep: bool | None = None
    """Whether the model is to sleep; None: as it does."""
    starts: Starts = field(default_factory=Starts)
    """What starts took."""


@dataclass(slots=True)
class _ScaledModel:
    observed: ObservedModel
    totals: Totals
    history: History
    part: History | None = None
    """What is known of demand while some gateways do not report: the others' part."""
    shares: Shares = field(default_factory=Shares)
    starts: Starts = field(default_factory=Starts)
    window: deque[tuple[Snapshot, tuple[int, ...]]] = field(
        default_factory=deque[tuple[Snapshot, tuple[int, ...]]]
    )  # fmt: skip
    outlook: Outlook | None = None
    decided_at: float = 0.0
    active_at: float = 0.0
    """When a decision was last not held."""
    quiet_since: float | None = None
    """Since when it has served and nobody has used it; None: it does not serve."""
    reported: object = None
    reported_figures: object = None
    reported_at: float = 0.0
    failed: bool = False
    claim: Claim | None = None
    """What it has and wants of the namespace's GPU quota; None: nothing."""


class Scaler:
    """Not thread-safe: it belongs to one event loop. It decides only while `run` runs, which is the leader's."""

    def __init__(
        self,
        fleet: FleetWatch,
        on_change: Callable[[ModelKey], None] = lambda key: None,
        *,
        clock: Callable[[], float] = time.monotonic,
        loop_turns: LoopTurns | None = None,
        budget: Callable[[GPUPool], GPUBudget] = lambda pool: NO_BUDGET,
    ) -> None:
        """`on_change` is called when a decision is to be followed or told; `budget` tells a namespace's GPUs."""
        self._fleet = fleet
        self._on_change = on_change
        self._clock = clock
        self._loop_turns = loop_turns or LoopTurns()
        self._budget = budget
        self._models: dict[ModelKey, _ScaledModel] = {}

    def present(self) -> dict[GPUPool, int]:
        """What models take GPUs of that a quota may bound, and how many their pods take now."""
        found: dict[GPUPool, int] = {}
        for key, model in self._models.items():
            if model.observed.gpu_resource and model.observed.circumstances.followed:
                pool = GPUPool(key.namespace, model.observed.gpu_resource)
                found[pool] = found.get(pool, 0) + count_model_gpus(
                    model.observed, {role: count.present for role, count in model.observed.counts.items()}
                )
        return found

    def follow(self, key: ModelKey, observed: ObservedModel | None) -> None:
        """This is how a model was seen last; None: nothing of it is decided or measured."""
        if observed is None:
            self.forget(key)
            return
        model = self._models.get(key)
        if model is None:
            model = _ScaledModel(observed=observed, totals=Totals(since=self._clock()), history=History())
            self._models[key] = model
            metrics.SCALED_MODELS.set(len(self._models))
        elif observed.circumstances.followed == model.observed.circumstances.followed:
            model.observed = observed
            return
        model.observed, model.outlook, model.claim, model.active_at = observed, None, None, self._clock()
        self._remember_present(model, model.active_at)

    def forget(self, key: ModelKey) -> None:
        """The model is gone, or has no targets."""
        if self._models.pop(key, None) is not None:
            metrics.SCALED_MODELS.set(len(self._models))
            metrics.forget_replicas(key)

    def follows(self, key: ModelKey) -> bool:
        return key in self._models

    def outlook(self, key: ModelKey, generation: int) -> Outlook | None:
        """What was decided last for this generation of the spec; None before the first time."""
        model = self._models.get(key)
        if model is None or model.outlook is None or model.outlook.generation != generation:
            return None
        is_fresh = self._clock() - model.decided_at <= _FRESH_SECONDS
        return model.outlook if is_fresh else replace(model.outlook, recommendations={}, asleep=None)

    async def run(self) -> None:
        """Decide until cancelled."""
        while True:
            await asyncio.sleep(PERIOD_SECONDS)
            await self.decide_all()

    async def decide_all(self) -> None:
        """One decision about every model, each in a turn of its own."""
        for key in list(self._models):
            await self._loop_turns.next()
            self.decide(key)

    def decide(self, key: ModelKey) -> None:
        """One decision, now: also when a request waits for a model that sleeps."""
        if (model := self._models.get(key)) is None:
            return
        try:
            self._decide(key, model)
            model.failed = False
        except Exception as error:
            # A defect met by one model must not stop the others. It moves nothing.
            metrics.SCALING_DECISIONS.labels("error").inc()
            if not model.failed:
                log.exception("cannot decide about replicas; will try again", extra={"model": str(key)})
                self._fail(key, model, error)
            model.failed = True

    def _decide(self, key: ModelKey, model: _ScaledModel) -> None:
        now, observed = self._clock(), model.observed
        heard = [Heard(report=report, age=age) for report, age in self._fleet.heard(key)]
        model.totals = add_up(model.totals, heard, now=now)
        model.shares = take_shares(model.shares, heard, now=now)
        model.starts = take_starts(model.starts, heard, observed.counts)
        snapshot = take_snapshot(heard, observed.counts, model.totals, model.shares, model.starts, now=now)
        silent = _silent(self._fleet.view(key))
        if snapshot is not None and silent:
            # What the silent ones count meanwhile comes at once when they are back: it is no demand of that moment.
            model.part = (model.part or model.history).observe(snapshot)
        elif snapshot is not None:
            model.part, model.history = None, model.history.observe(snapshot)
            model.window.append((snapshot, model.totals.ttft_counts))
        while model.window and model.window[0][0].at < now - WINDOW_SECONDS:
            model.window.popleft()
        decision, rest = None, None
        if observed.circumstances.followed:
            rest = _decide_rest(model, heard, silent, now)
            if now - model.active_at > STALE_SECONDS:
                self._remember_present(model, now)  # nobody knows what has been needed meanwhile
            resting = _decision_at_rest(observed, rest, now)
            if resting is not None:
                model.claim = claim_gpus(key, observed, None)
            decision = resting or self._plan(key, model, snapshot, silent, now)
            model.history = model.history.record(decision)
            if not decision.held and not silent:
                model.active_at = now
            _count(key, decision, dry_run=observed.dry_run, flips=rest.asleep != observed.asleep)
        attainment = judge(observed.ttft, observed.tpot, measure(model.window))
        if observed.asleep:
            attainment = Attainment(met=None, reason=ASLEEP, message="the model sleeps, so nothing is measured")
        asleep = None if rest is None or rest.asleep == observed.asleep or _is_dry(observed, rest) else rest.asleep
        is_followed = not observed.dry_run and asleep is None
        recommendations = _recommendations(decision) if decision is not None and is_followed else {}
        model.outlook = Outlook(
            generation=observed.generation,
            decision=decision,
            attainment=attainment,
            recommendations=recommendations,
            asleep=asleep,
            starts=model.starts,
        )
        model.decided_at = now
        said, figures = _substance(decision, attainment), _figures(decision)
        is_due = now - model.reported_at >= REPORTED_AGAIN_SECONDS and figures != model.reported_figures
        if recommendations or asleep is not None or said != model.reported or is_due:
            model.reported, model.reported_figures, model.reported_at = said, figures, now
            self._on_change(key)

    @staticmethod
    def _remember_present(model: _ScaledModel, now: float) -> None:
        """What is there counts as needed until now."""
        present = {role: count.replicas for role, count in model.observed.counts.items()}
        model.history = model.history.record(Decision(at=now, roles={}, needs=present))

    def _fail(self, key: ModelKey, model: _ScaledModel, error: Exception) -> None:
        text = f"the planner has failed ({type(error).__name__}: {error}); the operator's log has more"
        decision = _held(self._clock(), "PlannerFailed", text) if model.observed.circumstances.followed else None
        unknown = Attainment(met=None, reason="PlannerFailed", message=text)
        model.outlook = Outlook(generation=model.observed.generation, decision=decision, attainment=unknown)
        model.decided_at, model.reported = 0.0, None
        self._on_change(key)

    def _plan(
        self, key: ModelKey, model: _ScaledModel, snapshot: Snapshot | None, silent: Mapping[str, str], now: float
    ) -> Decision:
        observed = model.observed
        model.claim = claim_gpus(key, observed, None)
        if observed.spec is None:
            return _held(now, "CannotBeSized", observed.problem)
        if silent and (snapshot is None or snapshot.counters is None):
            return _held(now, "NoTelemetry", f"{_name_silent(silent)}, so demand is not known")
        history = model.part if silent and model.part is not None else model.history
        decision, spec = plan(observed.spec, snapshot, history, now), observed.spec
        if not decision.held and observed.gpu_resource:
            model.claim = claim_gpus(key, observed, decision)
            spec, said = self._limit(key, model, spec, decision)
            if spec is not observed.spec:
                decision = plan(spec, snapshot, history, now)
            decision = replace(decision, sentence=f"{decision.sentence}{said}")
        decision = temper(spec, decision, observed.circumstances)
        if not silent:
            return decision
        why = "demand is at least what the others tell, so replicas may come and none goes"
        return only_grow(decision, f"{_name_silent(silent)}: {why}.")

    def _limit(
        self, key: ModelKey, model: _ScaledModel, spec: ScalingSpec, decision: Decision
    ) -> tuple[ScalingSpec, str]:
        """The spec within what the namespace's GPU quota leaves this model, and a sentence about it. `decision`: what
        was decided without the quota."""
        resource = model.observed.gpu_resource
        budget, claim = self._budget(GPUPool(key.namespace, resource)), model.claim
        assert claim is not None, "it takes GPUs of a quota"
        if budget.gpus is None:
            return spec, f" The namespace's GPU quota is not known: {budget.problem}." if budget.problem else ""
        claims = [
            one.claim
            for other, one in self._models.items()
            if other.namespace == key.namespace and one.observed.gpu_resource == resource and one.claim is not None
        ]
        own = allot(claims, budget.gpus)[claim.name]
        # What is granted now is not granted to another model before this one has asked for it.
        model.claim = replace(claim, held=max(claim.held, min(own.granted, claim.wanted)))
        least = sum(one.least for one in claims)
        said = ""
        if least > budget.gpus:
            said = (
                f" The namespace's models take {least} GPUs at least, by scaling.min or because they are held for now,"
                f" and its quota leaves them {budget.gpus}: raise the quota, or lower scaling.min."
            )
        if own.granted >= claim.wanted:
            return spec, said
        later = f", {own.target} once others have let go of theirs" if own.target > own.granted else ""
        said += (
            f" Limited by the namespace's GPU quota: {own.granted} of {claim.wanted}{later}"
            f" (priority {claim.priority}; the quota leaves models {budget.gpus})."
        )
        roles = {
            role: replace(one, max=max(one.min, min(one.max, decision.replicas[role])), gpus=model.observed.gpus[role])
            for role, one in spec.roles.items()
        }
        return replace(spec, roles=roles, gpu_budget=own.granted, budget_name=QUOTA_LIMIT), said


def _decide_rest(model: _ScaledModel, heard: Sequence[Heard], silent: Mapping[str, str], now: float) -> Rest:
    observed = model.observed
    sight = Sight(
        at=now,
        asleep=observed.asleep,
        woken=observed.woken,
        reports=tuple(heard),
        silent=silent,
        serves=observed.spec is not None and all(count.ready for count in observed.counts.values()),
        rolling=observed.circumstances.rolling,
    )
    model.quiet_since = follow_quiet(model.quiet_since, sight)
    return decide_rest(observed.idle_after, sight, model.quiet_since)


def _is_dry(observed: ObservedModel, rest: Rest) -> bool:
    """A dry run puts nothing to sleep. It keeps no request waiting either."""
    return observed.dry_run and rest.asleep


def _decision_at_rest(observed: ObservedModel, rest: Rest, now: float) -> Decision | None:
    """What is told of a model that sleeps, falls asleep or wakes up; None: it is awake, and the planner decides."""
    if not rest.asleep and not observed.asleep:
        return None
    if rest.unknown:
        return Decision(at=now, roles={}, held=rest.unknown, reason="NoTelemetry", sentence=rest.sentence)
    limit = SLEEP_LIMIT if rest.asleep else WAKE_LIMIT
    roles = {
        role: RoleDecision(
            replicas=0 if rest.asleep else observed.fewest.get(role, 1),
            observed=count.replicas,
            required=0 if rest.asleep else 1,
            limit=limit,
        )
        for role, count in observed.counts.items()
        if role in observed.circumstances.followed
    }
    reason = "" if _is_dry(observed, rest) and not observed.asleep else ASLEEP if rest.asleep else "WakingUp"
    return Decision(at=now, roles=roles, reason=reason, sentence=rest.sentence)


def _silent(view: FleetView) -> dict[str, str]:
    """Gateways that take requests and do not say how many."""
    return {**view.silent, **dict.fromkeys(view.unable, "its release has no reports")}


def _name_silent(silent: Mapping[str, str]) -> str:
    named = "; ".join(f"{name}: {silent[name]}" for name in sorted(silent)[:_NAMED])
    return f"{len(silent)} of the gateways do not report ({named})"


def _held(now: float, reason: str, text: str) -> Decision:
    return Decision(at=now, roles={}, held=text, reason=reason, sentence=f"Nothing moves: {text}.")


def _recommendations(decision: Decision) -> dict[Role, Recommendation]:
    return {
        role: Recommendation(observed=one.observed, replicas=one.replicas)
        for role, one in decision.roles.items()
        if one.replicas != one.observed
    }


def _substance(decision: Decision | None, attainment: Attainment) -> object:
    """What is told at once when it changes."""
    moved = None if decision is None else (decision.reason, decision.replicas)
    return moved, attainment.status, attainment.reason


def _figures(decision: Decision | None) -> object:
    """What is told when it has changed, after a while."""
    return None if decision is None else [(one.limit, one.required) for one in decision.roles.values()]


def _count(key: ModelKey, decision: Decision, *, dry_run: bool, flips: bool = False) -> None:
    ups = [one.replicas - one.observed for one in decision.roles.values()]
    result = "held" if decision.held else "up" if max(ups, default=0) > 0 else "down" if min(ups, default=0) else "same"
    result = "dry_run" if dry_run and result in ("up", "down") else result
    if flips and result in ("up", "down"):
        result = "wake" if result == "up" else "sleep"
    metrics.SCALING_DECISIONS.labels(result).inc()
    for role, one in decision.roles.items():
        metrics.note_replicas(key, role.value, desired=one.replicas, required=one.required)
