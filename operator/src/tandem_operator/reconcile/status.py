"""The status of a model from what was observed. Pure; the time comes from the caller.

`Ready` is true while what the spec promises is served, `Available` while anything is. `Reconciling` and `Stalled` are
present only while true, and never both: Stalled means that it stays so until a person acts. The other conditions tell
where it stands. An unchanged state gives an equal status, so nothing is written.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tandem_api import names
from tandem_api.crd.status import (
    Condition,
    ImagesStatus,
    InferenceModelStatus,
    RoleStatus,
    RolloutStatus,
    ScalingStatus,
)
from tandem_api.names import Role
from tandem_api.telemetry import WeightsTelemetry
from tandem_api.version import VERSION
from tandem_api.wording import name_some

from tandem_operator.autoscale.desired import scaling_memory, scaling_to_keep
from tandem_operator.gateways.routing import plan_routing
from tandem_operator.objects.manifests import ChildKey, Children, dig, parse_time
from tandem_operator.objects.pods import is_up
from tandem_operator.objects.problem import Problem
from tandem_operator.observe.roles import (
    STALLED_BY_REQUEST,
    ObservedRole,
    observe_role,
    pods_of,
    workload_key,
)
from tandem_operator.observe.weights import describe_forms
from tandem_operator.reconcile.summary import build_condition, stalled_condition, summarize
from tandem_operator.runtime import metrics
from tandem_operator.weights.commits import CommitPlan
from tandem_operator.workloads.blueprint import Blueprint

_LONGEST = 4000
"""Characters of a condition's message: each of some twelve conditions may have as many."""
_NAMED_STARTS = 3
"""Workers that are not ready of which a message says what they are doing."""
_NO_WEIGHTS = CommitPlan()


def build_status(
    blueprint: Blueprint,
    live: Children,
    *,
    problems: Sequence[Problem],
    failures: Mapping[ChildKey, str],
    waiting: Sequence[str],
    now: str,
    weights: CommitPlan = _NO_WEIGHTS,
    images: ImagesStatus | None = None,
    more: Sequence[Condition] = (),
    rollout: RolloutStatus | None = None,
    scaling: ScalingStatus | None = None,
    trial: Problem | None = None,
    starting: Mapping[str, tuple[str, str]] | None = None,
    forms: Mapping[str, WeightsTelemetry | None] | None = None,
) -> InferenceModelStatus:
    """The whole status. `problems` are those of planning and applying, `waiting` what has to vanish first, `trial` what
    a canary, or the wait for a turn, has to say, `more` conditions of other parts, `starting` what workers that are not
    ready are doing, by pod, with its address, `forms` in which form workers keep the model's matrices, by pod."""
    model = blueprint.model
    roles, present = (*blueprint.worker_roles, Role.GATEWAY), parse_time(now)
    states = {role: observe_role(blueprint, role, live, failures, now=present) for role in roles}
    workers = [state for role, state in states.items() if role is not Role.GATEWAY]
    asleep = scaling is not None and scaling.asleep_since is not None and not model.spec.suspend
    if asleep and trial is not None and not trial.stalled:
        trial = None  # a canary begins when there is somebody to try it with
    doing = _describe_starting(blueprint, live, starting or {})
    conditions = summarize(
        blueprint, states, live, problems=problems, waiting=waiting, trial=trial, now=now, asleep=asleep, doing=doing
    )
    conditions += _resolved_condition(weights)
    conditions.append(_model_condition(blueprint, workers, weights.problem))
    conditions += [*(_role_condition(blueprint, state) for state in states.values()), *more]
    gateway = states[Role.GATEWAY]
    present = parse_time(now)
    assert present is not None

    def worker_status(role: Role) -> RoleStatus:
        last = model.status.prefill if role is Role.PREFILL else model.status.decode
        pods = (pod["metadata"]["name"] for pod in pods_of(workload_key(blueprint, role), live))
        heard = [forms[name] for name in pods if name in forms] if forms else []
        told = describe_forms(form for form in heard if form is not None)
        # Workers that are asleep, or whose gateways are silent, say nothing, and are what they were. Those that tell
        # about themselves without this are of another release or engine than the ones that told it.
        is_kept = not heard and last is not None and model.spec.engine.kind == "Tandem"
        weights = last.weights if is_kept and last is not None else told
        return states[role].to_status().model_copy(update={"weights": weights})

    return InferenceModelStatus(
        observed_generation=model.metadata.generation,
        url=names.service_url(blueprint.name, model.metadata.namespace, tls=model.spec.gateway.tls is not None),
        revision=blueprint.revision,
        model=weights.status,
        draft=weights.draft,
        images=images,
        routing=plan_routing(blueprint, now=present),
        rollout=rollout,
        scaling=scaling,
        prefill=worker_status(Role.PREFILL) if Role.PREFILL in states else None,
        decode=worker_status(blueprint.decode_role),
        gateway=gateway.to_status(),
        updated=f"{sum(state.updated for state in workers)}/{sum(state.replicas for state in workers)}",
        conditions=stamp(conditions, model.status, generation=model.metadata.generation, now=now),
    )


def refused_status(
    problem: Problem, previous: InferenceModelStatus, *, generation: int, now: str, suspended: bool = False
) -> InferenceModelStatus:
    """The status of a model that cannot be read: what was seen last, each with the generation that it was seen at.
    Suspension holds nevertheless."""
    if suspended:
        text = f"{problem.message}; spec.suspend is true, so its pods are scaled to zero"
        problem = Problem(reason=problem.reason, message=text, stalled=True)
        previous = previous.model_copy(update={"scaling": scaling_to_keep(previous.scaling)})
    kept = [c for c in previous.conditions if c.type not in ("Ready", "Reconciling", "Stalled", UNDERSTOOD)]
    fresh = [build_condition("Ready", "False", problem.reason, problem.message), stalled_condition(problem)]
    if suspended:
        kept = [c for c in kept if c.type != "Available"]
        fresh.append(
            build_condition("Available", "False", "Suspended", "spec.suspend is true; set it to false to resume")
        )
    conditions = [*stamp(fresh, previous, generation=generation, now=now), *kept]
    return previous.model_copy(update={"observed_generation": generation, "conditions": conditions})


def held_status(
    blueprint: Blueprint,
    live: Children,
    problem: Problem,
    *,
    failures: Mapping[ChildKey, str],
    now: str,
    more: Sequence[Condition],
) -> InferenceModelStatus:
    """The status of a model that has values which cannot be read, so that its pods stay as they are: what these are
    is looked at anew, all else is what was seen last. `blueprint` is what can be read."""
    previous = blueprint.model.status
    seen = build_status(
        blueprint, live, problems=(), failures=failures, waiting=(), now=now, trial=problem, more=more,
        rollout=previous.rollout, scaling=previous.scaling,
    )  # fmt: skip
    fresh = [c for c in seen.conditions if c.type not in _OF_THE_SPEC]
    told = {*(c.type for c in fresh), "Reconciling", UNDERSTOOD}
    kept = [c for c in previous.conditions if c.type not in told]
    counts = {name: getattr(seen, name) for name in ("observed_generation", "prefill", "decode", "gateway", "updated")}
    return previous.model_copy(update=counts | {"conditions": [*fresh, *kept]})


UNDERSTOOD = "SpecUnderstood"
_OF_THE_SPEC = frozenset({"ModelReady", "ModelResolved"})
"""What only the whole spec tells."""
_NAMED = 12


def understood_condition(unknown: Sequence[str]) -> list[Condition]:
    """What to say of fields that this release does not know; nothing where there are none."""
    if not unknown:
        return []
    text = (
        f"the CRD is of another release than this operator, {VERSION}, which does not know"
        f" {name_some(unknown, _NAMED)}: no effect until an operator runs that does. All else is followed"
    )
    return [build_condition(UNDERSTOOD, "False", "UnknownFields", text)]


_SUMMARY = frozenset({"Ready", "Available", "Reconciling", "Stalled"})


def is_same_but_counts(before: InferenceModelStatus, after: InferenceModelStatus) -> bool:
    """Whether two statuses differ in counts of replicas, words and detail conditions alone, so that nobody waits for
    the newer one."""
    summaries = [{(c.type, c.status, c.reason) for c in s.conditions if c.type in _SUMMARY} for s in (before, after)]
    return summaries[0] == summaries[1] and is_same_memory(before, after)


def is_same_memory(before: InferenceModelStatus, after: InferenceModelStatus) -> bool:
    """Whether the next look would decide by both alike: conditions and counts are for people."""
    return _memory(before) == _memory(after)


def _memory(status: InferenceModelStatus) -> tuple[InferenceModelStatus, object]:
    roles = {"prefill": status.prefill, "decode": status.decode, "gateway": status.gateway}
    promised = {name: None if role is None else role.promised for name, role in roles.items()}
    scaling = None if status.scaling is None else scaling_memory(status.scaling)
    told: dict[str, object] = {"conditions": [], "scaling": None, "updated": ""}
    return status.model_copy(update=dict.fromkeys(roles) | told), (promised, scaling)


def true_conditions(status: InferenceModelStatus) -> set[str]:
    """Types of the conditions that hold, for figures; one more where a model sleeps, or is stalled because somebody
    asked."""
    held = {condition.type: condition.reason for condition in status.conditions if condition.status == "True"}
    asked_for = held.get("Stalled") in STALLED_BY_REQUEST
    asleep = status.scaling is not None and status.scaling.asleep_since is not None and not asked_for
    return {*held, *([metrics.SUSPENDED] if asked_for else []), *([metrics.ASLEEP] if asleep else [])}


def known_conditions(status: InferenceModelStatus) -> set[str]:
    """Types of the conditions that have a figure. Of targets that nothing can be said about there is none: they are not
    missed."""
    return {each.type for each in status.conditions if (each.type, each.status) != ("SLOMet", "Unknown")}


def stamp(
    conditions: Sequence[Condition], previous: InferenceModelStatus, *, generation: int, now: str
) -> list[Condition]:
    """Conditions with their times: a transition is a change of `status` alone. What others say in them, webhooks above
    all, has no bounds, and an object that is too large is never written."""
    before = {condition.type: condition for condition in previous.conditions}
    stamped: list[Condition] = []
    for condition in conditions:
        old = before.get(condition.type)
        time = old.last_transition_time if old is not None and old.status == condition.status else now
        update = {"observed_generation": generation, "last_transition_time": time, "message": _cut(condition.message)}
        stamped.append(condition.model_copy(update=update))
    return stamped


def _cut(text: str) -> str:
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 1]}…"


def _describe_starting(blueprint: Blueprint, live: Children, starting: Mapping[str, tuple[str, str]]) -> str:
    """What pods say that they are doing, as far as these are the pods that are there."""
    told: list[str] = []
    for role in blueprint.worker_roles:
        for pod in pods_of(workload_key(blueprint, role), live):
            address, waits_for = starting.get(pod["metadata"]["name"], ("", ""))
            if address and address == dig(pod, "status", "podIP") and not is_up(pod):
                told.append(f"{pod['metadata']['name']} is still {waits_for}")
    rest = f", and {len(told) - _NAMED_STARTS} more" if len(told) > _NAMED_STARTS else ""
    return f"; {', '.join(sorted(told)[:_NAMED_STARTS])}{rest}" if told else ""


def _resolved_condition(weights: CommitPlan) -> list[Condition]:
    """Whether the workers load one commit that the operator knows; of `hf://` models alone."""
    if weights.finding is None:
        return []
    holds, reason, message = weights.finding
    return [
        build_condition("ModelResolved", "Unknown" if holds is None else "True" if holds else "False", reason, message)
    ]


def _model_condition(blueprint: Blueprint, workers: Sequence[ObservedRole], unresolved: Problem | None) -> Condition:
    """Whether the weights are where they should be: a worker is ready only after it has computed a token with them."""
    uri = blueprint.model.spec.model.uri
    problems = [unresolved, *(state.problem for state in workers)]
    told = next((problem for problem in problems if problem is not None and problem.from_worker), None)
    if told is not None:
        return build_condition("ModelReady", "False", told.reason, told.message)
    loaded = any(blueprint.revision_of(state.role) in state.builds for state in workers)
    if loaded:
        return build_condition("ModelReady", "True", "Loaded", f"{uri} is loaded")
    if not any(state.desired for state in workers):
        return build_condition(
            "ModelReady", "Unknown", "NoWorkers", "no worker is wanted, so none has loaded the model"
        )
    return build_condition("ModelReady", "Unknown", "Loading", f"no worker has loaded {uri} yet")


def _role_condition(blueprint: Blueprint, state: ObservedRole) -> Condition:
    kind = f"{state.component.capitalize()}Ready"
    if state.problem is not None:
        return build_condition(kind, "False", state.problem.reason, state.problem.message)
    if not state.settled:
        return build_condition(
            kind, "False", "Progressing", f"{state.summary} ready, {state.updated} of the newest template"
        )
    if state.desired == 0:
        suspended = blueprint.model.spec.suspend
        return build_condition(kind, "False", "Suspended" if suspended else "ScaledToZero", "0 replicas")
    return build_condition(kind, "True", "AllReplicasReady", f"{state.summary} ready")
