"""From a model and what is there of it to what its workers should be at this moment. Pure.

`view_rollout` finds out which revision is wanted and what there is; `plan_rollout` what follows from it. Between them
stand a slot to roll and the gateways' figures, which somebody else has to ask for.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime

from tandem_api.crd.spec import InferenceModelSpec
from tandem_api.crd.status import CanaryFigures, InferenceModelStatus, RolloutStatus
from tandem_api.names import ANNOTATION_RETRY_CANARY, LABEL_ROLE, Role
from tandem_api.quantities import parse_duration

from tandem_operator.children.inherit import keep_what_runs
from tandem_operator.objects.errors import UnreadableRevisionError
from tandem_operator.objects.manifests import (
    CONFIG_MAP,
    NETWORK_POLICY,
    STATEFUL_SET,
    ChildKey,
    Children,
    Manifest,
    annotations_of,
    child_key,
    labels_of,
)
from tandem_operator.objects.problem import Problem
from tandem_operator.rollout.canary import (
    RolloutRequest,
    advance,
    canary_traffic,
    limits,
    rollout_problem,
    target_of,
    wants_slot,
)
from tandem_operator.rollout.figures import add_figures, judge
from tandem_operator.rollout.partners import needed_partners, with_rules, with_ways
from tandem_operator.rollout.revisions import (
    History,
    build_revision,
    content_of,
    digest_of,
    kept_revisions,
    number_of,
    numbers_in_use,
    same_shape,
    with_content,
)
from tandem_operator.rollout.statefulsets import observe_fleet
from tandem_operator.rollout.trial import TrialFleet
from tandem_operator.workloads import Blueprint, Built, build_possible
from tandem_operator.workloads.blueprint import digest
from tandem_operator.workloads.child import COMPONENT_LABEL, TEMPLATE_HASH
from tandem_operator.workloads.store import COMPONENT as STORE

_RETRY_MAX = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutTarget:
    """What is to be made, for one revision of the workers."""

    blueprint: Blueprint
    built: Built
    desired: list[Manifest]
    """What is built, with what runs and may stay so."""


class Builds:
    """What is made of a model's revisions: once for a look, in which several questions need the same."""

    def __init__(self, blueprint: Blueprint, specs: Mapping[int, InferenceModelSpec]) -> None:
        self._blueprint, self._specs = blueprint, specs
        self._made: dict[int | None, tuple[Blueprint, Built]] = {}

    def make(self, number: int | None, live: Children) -> RolloutTarget:
        """A revision that is not among those known is what the object says."""
        blueprint, built = self._of(number if number in self._specs else None)
        return RolloutTarget(blueprint=blueprint, built=built, desired=keep_what_runs(blueprint, built.children, live))

    def templates(self, number: int) -> dict[str | None, str | None]:
        """The digest, by role, of a known revision's pod template."""
        return {
            labels_of(child).get(LABEL_ROLE): annotations_of(child).get(TEMPLATE_HASH)
            for child in self._of(number)[1].children
            if child_key(child).kind == STATEFUL_SET.name
        }

    def _of(self, number: int | None) -> tuple[Blueprint, Built]:
        if number not in self._made:
            blueprint = self._blueprint if number is None else _with_spec(self._blueprint, self._specs[number])
            self._made[number] = blueprint, build_possible(blueprint)
        return self._made[number]


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutView:
    """What is wanted and what is there."""

    blueprint: Blueprint
    """As the object says."""
    specs: Mapping[int, InferenceModelSpec]
    """The revisions that are known, of those in question."""
    builds: Builds
    history: History
    request: RolloutRequest | None = None
    """None where it cannot be followed; then `problem` says why."""
    problem: Problem | None = None
    record: Manifest | None = None
    """A ControllerRevision that has to be made."""
    target: RolloutTarget
    """What was decided last."""
    fleet: TrialFleet = field(default_factory=TrialFleet)

    @property
    def before(self) -> RolloutStatus | None:
        return self.blueprint.model.status.rollout

    @property
    def wants_slot(self) -> bool:
        return self.request is not None and wants_slot(self.before, self.request, self.fleet)


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutPlan:
    """What the workers of a model should be now."""

    target: RolloutTarget
    state: RolloutStatus | None
    limits: Mapping[Role, int]
    tried: frozenset[Role]
    """Roles that the revision on trial changes."""
    problem: Problem | None
    keep: frozenset[ChildKey]
    """Children that stay though they are not among what is desired: ControllerRevisions, what the other workers start
    from during a canary, and prefill workers that are still needed."""
    hold: bool
    """What the workers should be is not known: they stay as they are."""

    @property
    def waiting(self) -> bool:
        return self.state is not None and self.state.waiting


def missing_revisions(blueprint: Blueprint, history: History) -> set[int]:
    """Revisions that are needed and not there: the cache may be late, or somebody has deleted them."""
    state, pinned = blueprint.model.status.rollout, blueprint.model.spec.rollout.revision
    needed = set[int]() if pinned is None else {pinned}
    if state is not None:
        needed |= {target_of(state), state.stable_revision}
        if pinned is None and state.digest == digest_of(content_of(blueprint)):
            needed.discard(state.revision)
    return needed - history.keys()


def view_rollout(
    blueprint: Blueprint,
    history: History,
    live: Children,
    *,
    retry: str | None,
    taken: int,
    now: datetime,
    known: bool = True,
) -> RolloutView:
    """`live` has the model's own children. `taken` is the highest number of any ControllerRevision there, `retry` the
    wish to try again. Where it is not `known` yet which commit workers are to load, there is no revision to go to: what
    was decided last goes on."""
    model, before = blueprint.model, blueprint.model.status.rollout
    pinned, content = model.spec.rollout.revision, content_of(blueprint)
    own = number_of(digest_of(content), history, before, taken=taken)
    specs, problem = _read_specs(model.spec, own, history, numbers_in_use(before) | _pinned(model.spec))
    wanted = pinned or own
    target = None if before is None else target_of(before)
    for needed in (target, wanted):
        if needed is not None and needed not in specs:
            problem = problem or _not_found(needed, history)
    builds = Builds(blueprint, specs)
    last = builds.make(target or wanted, live)
    request = record = None
    base = wanted if before is None else before.stable_revision
    if base not in specs and model.spec.rollout.canary is not None and pinned is None:
        text = f"revision {base} is not kept any more, so no canary can go back to it: remove spec.rollout.canary"
        problem = Problem(reason="RevisionNotFound", message=f"{text} to give all workers the new one", stalled=True)
    elif wanted in specs and (known or wanted != own):
        digest_wanted = digest_of(history.get(wanted, content))
        request = _read_request(model.spec, specs, base=base, wanted=wanted, digest_wanted=digest_wanted, retry=retry)
        record = build_revision(blueprint, own, content) if wanted == own and own not in history else None
    fleet = TrialFleet()
    if target is None or target in specs:
        tried = _tried_roles(blueprint, specs, builds, before)
        fleet = observe_fleet(last.blueprint, last.desired, live, tried=tried, now=now)
    return RolloutView(
        blueprint=blueprint, specs=specs, builds=builds, history=history, request=request, problem=problem,
        record=record, target=last, fleet=fleet,
    )  # fmt: skip


def _pinned(spec: InferenceModelSpec) -> set[int]:
    return set() if spec.rollout.revision is None else {spec.rollout.revision}


def _read_specs(
    spec: InferenceModelSpec, own: int, history: History, numbers: set[int]
) -> tuple[dict[int, InferenceModelSpec], Problem | None]:
    specs, problem = {own: spec}, None
    for number in sorted((numbers - {own}) & history.keys()):
        try:
            specs[number] = with_content(spec, history[number], number=number)
        except UnreadableRevisionError as error:
            problem = Problem(reason="RevisionUnreadable", message=str(error), stalled=True)
    return specs, problem


def _read_request(
    spec: InferenceModelSpec,
    specs: Mapping[int, InferenceModelSpec],
    *,
    base: int,
    wanted: int,
    digest_wanted: str,
    retry: str | None,
) -> RolloutRequest:
    """An undo has no canary: what it goes back to has served before."""
    rollout = spec.rollout
    may_try = rollout.revision is None and base in specs and same_shape(specs[base], specs[wanted])
    return RolloutRequest(
        revision=wanted,
        digest=digest_wanted,
        canary=rollout.canary if may_try else None,
        paused=rollout.paused,
        deadline_seconds=parse_duration(rollout.progress_deadline),
        retry=retry,
    )


def retry_request(model: Manifest) -> str | None:
    """The wish to try again on an InferenceModel. A long one is kept by its digest."""
    text = annotations_of(model).get(ANNOTATION_RETRY_CANARY)
    return text if text is None or len(text) <= _RETRY_MAX else digest(text)


def _not_found(number: int, history: History) -> Problem:
    kept = ", ".join(str(other) for other in history) or "none"
    text = f"revision {number} is not kept any more (kept: {kept}): write another spec.rollout.revision, or remove it"
    return Problem(reason="RevisionNotFound", message=text, stalled=True)


def _with_spec(blueprint: Blueprint, spec: InferenceModelSpec) -> Blueprint:
    """A revision that was kept names its commits itself."""
    if spec is blueprint.model.spec:
        return blueprint
    model = blueprint.model.model_copy(update={"spec": spec})
    return dataclasses.replace(blueprint, model=model, commit=None, draft_commit=None)


def _tried_roles(
    blueprint: Blueprint, specs: Mapping[int, InferenceModelSpec], builds: Builds, state: RolloutStatus | None
) -> frozenset[Role]:
    """Roles whose pods the revision on trial changes; all while none is."""
    roles = frozenset(blueprint.worker_roles)
    if state is None or state.phase != "Canary" or not {state.stable_revision, target_of(state)} <= specs.keys():
        return roles
    old, new = (builds.templates(number) for number in (state.stable_revision, target_of(state)))
    return frozenset(role for role in roles if old.get(role) != new.get(role)) or roles


def plan_rollout(
    seen: RolloutView, live: Children, *, may_roll: bool, added: Mapping[str, CanaryFigures], fresh: bool, now: datetime
) -> RolloutPlan:
    """What follows. `added` is what gateways have counted of each worker since the last look; `fresh` that they have
    told lately."""
    spec, state = seen.blueprint.model.spec, seen.before
    if seen.request is not None:
        request = dataclasses.replace(seen.request, may_roll=may_roll)
        state = _with_figures(state, seen.fleet, added)
        trial = None if state is None else state.canary
        verdict = judge(request.canary, trial and trial.figures, trial and trial.stable_figures, fresh=fresh)
        state = advance(state, request, seen.fleet, verdict=verdict, now=now)
        if _changes_nothing(seen, state):
            state = _adopted(state, request)
    number = None if state is None else target_of(state)
    told = None if number is None else seen.specs.get(number)
    is_same = seen.before is None or number == target_of(seen.before)
    target = seen.target if is_same or told is None else seen.builds.make(number, live)
    keep: frozenset[ChildKey] = frozenset()
    if state is not None and state.phase == "Canary" and state.stable_revision in seen.specs:
        target, keep = _beside(target, seen.builds.make(state.stable_revision, live))
    partners = needed_partners(target.blueprint, live)
    target = dataclasses.replace(target, desired=with_ways(target.desired, partners, live))
    problem = seen.problem or (None if told is not None or number is None else _not_found(number, seen.history))
    used = numbers_in_use(state) | _pinned(spec)
    return RolloutPlan(
        target=target,
        state=state,
        limits=limits(state, spec.rollout.canary, seen.fleet),
        tried=_tried_roles(seen.blueprint, seen.specs, seen.builds, state),
        problem=problem or rollout_problem(state, spec.rollout.canary, paused=spec.rollout.paused),
        keep=keep
        | partners
        | kept_revisions(seen.blueprint.name, seen.history, used, limit=spec.rollout.revision_history_limit),
        hold=told is None,
    )


def _beside(target: RolloutTarget, other: RolloutTarget) -> tuple[RolloutTarget, frozenset[ChildKey]]:
    """What is tried, with what the workers of the revision before need beside it: their configuration, if one of them
    is lost, connections, and the master of their store, who would forget all that they have there if it were made anew
    for what is tried."""
    before = {child_key(child): child for child in other.desired}
    stores = {key: child for key, child in before.items() if labels_of(child).get(COMPONENT_LABEL) == STORE}
    desired = [
        with_rules(child, before[child_key(child)])
        if child["kind"] == NETWORK_POLICY.name and child_key(child) in before
        else stores.get(child_key(child), child)
        for child in target.desired
    ]
    there = {child_key(child) for child in desired}
    desired += [child for key, child in stores.items() if key not in there]
    configs = frozenset(key for key in before if key.kind == CONFIG_MAP.name)
    return dataclasses.replace(target, desired=desired), configs


def _changes_nothing(seen: RolloutView, state: RolloutStatus) -> bool:
    """A revision whose pods are the same as those of the one before needs no trial."""
    is_new = state.phase == "Preparing" or (
        state.phase == "Canary" and (seen.before is None or seen.before.phase != "Canary")
    )
    if not is_new or not {state.stable_revision, state.revision} <= seen.specs.keys():
        return False
    return seen.builds.templates(state.stable_revision) == seen.builds.templates(state.revision)


def _adopted(state: RolloutStatus, request: RolloutRequest) -> RolloutStatus:
    return state.model_copy(update={"phase": "Progressing", "stable_revision": request.revision, "canary": None})


def _with_figures(
    state: RolloutStatus | None, fleet: TrialFleet, added: Mapping[str, CanaryFigures]
) -> RolloutStatus | None:
    """The state with what was counted since, of the workers on trial and of those that they are compared with."""
    if state is None or state.phase != "Canary" or state.canary is None or not fleet.is_current:
        return state
    trial = state.canary
    mine, others = trial.figures, trial.stable_figures
    for role in fleet.roles.values():
        if role.is_tried:
            for worker in role.new_workers:
                mine = add_figures(mine, added[worker]) if worker in added else mine
            for worker in role.old_workers:
                others = add_figures(others, added[worker]) if worker in added else others
    return state.model_copy(update={"canary": trial.model_copy(update={"figures": mine, "stable_figures": others})})


def with_traffic(
    status: InferenceModelStatus, rollout_plan: RolloutPlan, live: Children, *, now: datetime
) -> InferenceModelStatus:
    """The status with what gateways are told of a canary."""
    blueprint, state = rollout_plan.target.blueprint, rollout_plan.state
    before = None if blueprint.model.status.routing is None else blueprint.model.status.routing.canary
    traffic = None
    if before is not None or (state is not None and state.phase == "Canary"):
        fleet = observe_fleet(blueprint, rollout_plan.target.desired, live, tried=rollout_plan.tried, now=now)
        traffic = canary_traffic(state, fleet, before)
    routing = status.routing
    if routing is None:
        return status
    return status.model_copy(update={"routing": routing.model_copy(update={"canary": traffic})})


def is_rolling(state: RolloutStatus | None) -> bool:
    """Whether replicas are being replaced, or tried."""
    return state is None or state.phase not in ("Complete", "RolledBack")


def is_resting(blueprint: Blueprint, state: RolloutStatus | None) -> bool:
    """Whether a rollout that is not over moves nothing: it waits for its turn, is paused, or is stuck."""
    model = blueprint.model
    stalled = any(condition.type == "Stalled" for condition in model.status.conditions)
    return model.spec.rollout.paused or stalled or (state is not None and state.waiting)
