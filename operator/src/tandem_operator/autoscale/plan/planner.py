"""One decision about replicas: `(spec, fleet, history, now) → decision`. Pure and deterministic.

Replicas are ordered as soon as demand asks for them, and go only once nothing has asked for them for the whole
stabilization window, demand taken higher than for ordering: so one replica fewer still meets every target. Replicas on
their way count as coming and never as capacity: the backlog until they are there is foreseen instead.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import inf

from tandem_api.names import Role

from tandem_operator.autoscale.plan.backlog import count_clearing, foresee_backlog
from tandem_operator.autoscale.plan.contract import (
    SHARE_SECONDS,
    Decision,
    RoleDecision,
    RoleState,
    ScalingSpec,
    Snapshot,
)
from tandem_operator.autoscale.plan.history import History
from tandem_operator.autoscale.plan.joint import Proposal, bound, count_links, limit_budget, limit_ratio, limit_transfer
from tandem_operator.autoscale.plan.load import FEWEST_REQUESTS, Load, learn_start, read_load
from tandem_operator.autoscale.plan.rates import LONG_SECONDS
from tandem_operator.autoscale.plan.sentences import (
    busiest_link,
    explain,
    explain_shared,
    report_demand,
    report_gpus,
    say_gpus,
    say_odd,
    say_passing,
    say_roles,
)
from tandem_operator.autoscale.plan.shared import SharedDemand, SharedReplica, size_shared
from tandem_operator.autoscale.plan.sizing import (
    KV_MARGIN,
    VRAM,
    DecodeRoom,
    StepModel,
    bound_room,
    count_resident,
    find_room,
    fit_steps,
    size_decode,
    size_prefill,
)

DOWN_DEVIATIONS = 1.0
"""Standard deviations that scaling down adds to those of scaling up."""
BACKLOG = "backlog"
NOTHING_MEASURED = "NothingMeasured"


def plan(spec: ScalingSpec, fleet: Snapshot | None, history: History, now: float) -> Decision:
    """The replicas that each role should have now. `history` has `fleet` as its newest snapshot."""
    held = _find_obstacle(spec, fleet, now)
    if held is not None or fleet is None:
        return _hold(spec, fleet, now, *(held or ("NoTelemetry", "nothing is known of the fleet")))
    load = read_load(spec, history)
    if load is None and is_idle(fleet, history):
        return _plan_idle(spec, fleet, history, now)
    if load is None:
        return _hold(spec, fleet, now, NOTHING_MEASURED, "too few requests have been seen to know what they are like")
    velocity = fleet.roles[spec.prompt_role].tokens_per_second
    steps = _read_steps(fleet, history)
    if velocity is None or steps is None:
        missing = (
            f"a {spec.prompt_role.value} replica's velocity" if velocity is None else "a decode replica's step time"
        )
        return _hold(spec, fleet, now, NOTHING_MEASURED, f"{missing} has not been measured yet")
    z = spec.tuning.deviations
    if spec.prompt_role is Role.DECODE:
        return _plan_shared(spec, fleet, history, load, _build_shared(fleet, history, steps, velocity), now)
    prefill, decode = fleet.roles[Role.PREFILL], fleet.roles[Role.DECODE]
    room = find_room(steps, _kv_tokens_each(fleet), spec.tpot)
    if decode.gpus.is_full:
        room = bound_room(room, steps, history.most_held(Role.DECODE))
    share, link = busiest_link(decode, history)
    up = _size(spec, fleet, history, load, velocity, room, deviations=z, ahead=True)
    down = _size(spec, fleet, history, load, velocity, room, deviations=z + DOWN_DEVIATIONS, ahead=False)
    proposals, needs = _keep(spec, fleet, history, load, up, down, now)
    proposals = limit_transfer(
        bound(proposals, spec),  # links of decode replicas that there may not be take nothing in
        share=share,
        limit=link,
        computing=history.mean_ready(Role.PREFILL, SHARE_SECONDS) * (1.0 if prefill.busy is None else prefill.busy),
        planned=_plan_computing(proposals[Role.PREFILL], load, velocity, deviations=z),
        present=prefill.replicas,
        decodes=history.mean_ready(Role.DECODE, SHARE_SECONDS),
    )
    proposals = _within_limits(proposals, spec)
    inputs = report_demand(load) | {
        "prefill_tokens_per_second": round(velocity, 1),
        "queued_tokens": float(prefill.queued_tokens),
        "requests_per_second": round(load.requests.now, 3),
        "output_tokens": round(load.answers.output, 1),
        "decode_tokens_per_second": round(room.tokens_per_second(load.answers.context), 1),
        "kv_share": round(decode.kv_tokens_used / max(1, decode.kv_tokens_total), 3),
        **report_gpus(decode, history),
    }
    roles = _decide(proposals, fleet, required={role: proposal.replicas for role, proposal in up.items()})
    sentence = explain(roles, inputs) + say_passing(load) + say_gpus(fleet, history) + say_odd(fleet)
    return Decision(at=now, roles=roles, inputs=inputs, sentence=sentence, needs=needs)


def _keep(
    spec: ScalingSpec, fleet: Snapshot, history: History, load: Load, up: Mapping[Role, Proposal],
    down: Mapping[Role, Proposal], now: float,
) -> tuple[dict[Role, Proposal], dict[Role, int]]:  # fmt: skip
    """What is wished, with the patience of scaling down; and below how many replicas a target would be missed."""
    needs = {role: max(up[role].replicas, down[role].replicas) for role in up}
    falls = load.tokens.falls or load.requests.falls
    proposals: dict[Role, Proposal] = {}
    for role, proposal in up.items():
        present = fleet.roles[role].replicas
        window = _find_window(spec, fleet.roles[role], history, role, falls=falls)
        floor = max(needs[role], history.most_needed(role, now - window))
        if (state := fleet.roles[role]).warming:
            floor = min(floor, _keep_coming(spec, state, history, role, needs[role], now))
        if proposal.replicas > present:
            proposals[role] = proposal
        elif floor < present:
            limit = "stabilization" if floor > needs[role] else down[role].limit
            proposals[role] = Proposal(replicas=max(proposal.replicas, floor), limit=limit)
        else:
            proposals[role] = Proposal(
                replicas=present, limit="stabilization" if needs[role] < present else proposal.limit
            )
    return proposals, needs


def _find_window(spec: ScalingSpec, state: RoleState, history: History, role: Role, *, falls: bool) -> float:
    """Seconds for which a replica stays that nothing asks for. While demand falls, for as long as another one would
    take to come: who does not know when demand returns pays at most twice what somebody would who does (the ski rental
    problem, with a start as the price of the skis).
    """
    behavior = spec.behavior
    if not falls:
        return behavior.scale_down_seconds
    start = learn_start(state, spec, history.waited(role))
    return min(behavior.scale_down_seconds, max(behavior.falling_seconds, start))


def _keep_coming(
    spec: ScalingSpec, state: RoleState, history: History, role: Role, needed: int, now: float
) -> int:  # fmt: skip
    """Replicas below which none goes that is still on its way. It has done nothing yet, so that the window of steady
    demand is not for it: it goes once most of what comes has not been needed for as long as while demand falls."""
    patience = _find_window(spec, state, history, role, falls=True)
    kept = max(needed, history.most_needed(role, now - patience), state.ready)
    return kept if 2 * (kept - state.ready) <= state.replicas - state.ready else state.replicas


def _plan_shared(
    spec: ScalingSpec, fleet: Snapshot, history: History, load: Load, replica: SharedReplica, now: float
) -> Decision:
    """One decision about a model whose decode replicas compute prompts too."""
    state = fleet.roles[Role.DECODE]
    z = spec.tuning.deviations
    speed = _prompt_speed(state, load, replica)
    up = _size_shared(spec, fleet, history, load, replica, speed, deviations=z, ahead=True)
    down = _size_shared(spec, fleet, history, load, replica, speed, deviations=z + DOWN_DEVIATIONS, ahead=False)
    proposals, needs = _keep(spec, fleet, history, load, up, down, now)
    inputs = report_demand(load) | {
        "prompt_tokens_per_second_per_replica": round(speed, 1),
        "queued_tokens": float(state.queued_tokens),
        "requests_per_second": round(load.requests.now, 3),
        "output_tokens": round(load.answers.output, 1),
        "decode_step_seconds": round(replica.steps.base + replica.steps.slope * _held_each(state), 5),
        "mixed_step_seconds": round(state.mixed_step_seconds or 0.0, 5),
        "prompt_share": round(load.tokens.now / speed / max(1, state.ready), 3),
        "kv_share": round(state.kv_tokens_used / max(1, state.kv_tokens_total), 3),
    }
    roles = _decide(
        _within_limits(proposals, spec), fleet, required={role: proposal.replicas for role, proposal in up.items()}
    )
    sentence = explain_shared(roles, inputs) + say_passing(load) + say_gpus(fleet, history) + say_odd(fleet)
    return Decision(at=now, roles=roles, inputs=inputs, sentence=sentence, needs=needs)


def _build_shared(fleet: Snapshot, history: History, steps: StepModel, velocity: float) -> SharedReplica:
    longer = [
        one.mixed_step_seconds - steps.base - steps.slope * _held_each(one)
        for snapshot in history.lately()
        if (one := snapshot.roles.get(Role.DECODE)) is not None and one.mixed_step_seconds is not None and one.ready
    ]
    held = history.most_held(Role.DECODE) / KV_MARGIN
    full = fleet.roles[Role.DECODE].gpus.is_full and held > 0
    return SharedReplica(
        steps=steps,
        extra=max(0.0, sum(longer) / len(longer)) if longer else inf,
        velocity=velocity,
        kv_tokens=_kv_tokens_each(fleet) if not full else min(_kv_tokens_each(fleet), held),
    )


def _held_each(state: RoleState) -> float:
    """Tokens of context of a replica that decodes."""
    return state.kv_tokens_used / max(1, state.decoding or state.ready)


def _prompt_speed(state: RoleState, load: Load, replica: SharedReplica) -> float:
    """Tokens per second of a replica now; at least a tenth of what it would have without answers."""
    held = _held_each(state)
    speed = replica.prompt_speed(held / load.answers.context, replica.steps.base + replica.steps.slope * held)
    return max(0.1 * replica.velocity, speed)


def _size_shared(
    spec: ScalingSpec, fleet: Snapshot, history: History, load: Load, replica: SharedReplica, speed: float,
    *, deviations: float, ahead: bool,
) -> dict[Role, Proposal]:  # fmt: skip
    """What demand asks for, with so many standard deviations of it on top. `speed`: of a replica's prompts now."""
    state, tokens, requests = fleet.roles[Role.DECODE], load.tokens, load.requests
    demand = SharedDemand(
        tokens=(tokens.ahead if ahead else tokens.now) + deviations * tokens.deviation,
        requests=(requests.ahead if ahead else requests.now) + deviations * requests.deviation,
        prompts=load.prompts,
        answers=load.answers,
        deviations=deviations,
        held=0.0 if ahead and load.passing else float(state.kv_tokens_used),
    )
    count, limit = size_shared(demand, replica, spec.ttft, spec.tpot)
    proposal = Proposal(replicas=count, limit=limit)
    if spec.tuning.backlog:
        waited = history.waited(Role.DECODE)
        backlog = foresee_backlog(spec, state, load, speed, waited)
        clearing = count_clearing(spec, state, load, speed, backlog, waited, enough=count)
        if clearing > count:
            proposal = Proposal(replicas=clearing, limit=BACKLOG)
    return {Role.DECODE: proposal}


def _size(
    spec: ScalingSpec, fleet: Snapshot, history: History, load: Load, velocity: float, room: DecodeRoom,
    *, deviations: float, ahead: bool,
) -> dict[Role, Proposal]:  # fmt: skip
    """What demand asks of each role, with so many standard deviations of it on top."""
    prefill, decode = fleet.roles[Role.PREFILL], fleet.roles[Role.DECODE]
    rate = (load.tokens.ahead if ahead else load.tokens.now) + deviations * load.tokens.deviation
    proposal = Proposal(replicas=size_prefill(rate, load.prompts, velocity, spec.ttft), limit="TTFT target")
    backlog = 0.0
    if spec.tuning.backlog:
        waited = history.waited(Role.PREFILL)
        backlog = foresee_backlog(spec, prefill, load, velocity, waited)
        clearing = count_clearing(spec, prefill, load, velocity, backlog, waited, enough=proposal.replicas)
        if clearing > proposal.replicas:
            proposal = Proposal(replicas=clearing, limit=BACKLOG)
    requests = (load.requests.ahead if ahead else load.requests.now) + deviations * load.requests.deviation
    limit = room.limit
    if spec.tuning.joint and backlog > 0:
        own = spec.roles[Role.PREFILL]
        outflow = min(proposal.replicas, own.max) * velocity / max(1.0, load.prompts.uncached)
        if outflow > requests:
            requests, limit = outflow, "prefill's outflow"
    # What a replica held at most has its deviation in it.
    resident = count_resident(requests, load.answers, room, 0.0 if room.limit == VRAM else deviations)
    if decode.kv_tokens_used > resident and not (ahead and load.passing):
        resident = float(decode.kv_tokens_used)
    needed = size_decode(resident, room)
    share, link = busiest_link(decode, history)
    links = count_links(share, history.mean_ready(Role.DECODE, SHARE_SECONDS))
    if links > needed:
        needed, limit = links, link
    return {Role.PREFILL: proposal, Role.DECODE: Proposal(replicas=needed, limit=limit)}


def _plan_computing(proposal: Proposal, load: Load, velocity: float, *, deviations: float) -> float:
    """How many of the prefill replicas would compute at a time."""
    if proposal.limit == BACKLOG:
        return proposal.replicas
    return min(proposal.replicas, (load.tokens.ahead + deviations * load.tokens.deviation) / velocity)


def _read_steps(fleet: Snapshot, history: History) -> StepModel | None:
    """Decode steps as they were measured. None where they were not, or nothing is known of replicas' memory now."""
    decode = fleet.roles[Role.DECODE]
    if not decode.ready or not decode.kv_tokens_total:
        return None
    samples: list[tuple[float, float]] = []
    for snapshot in history.snapshots:
        state = snapshot.roles.get(Role.DECODE)
        if state is not None and state.step_seconds is not None and state.ready:
            samples.append((state.kv_tokens_used / (state.decoding or state.ready), state.step_seconds))
    return fit_steps(samples)


def _kv_tokens_each(fleet: Snapshot) -> float:
    """Tokens that fit into the blocks of a replica that decodes, where `_read_steps` has found one."""
    decode = fleet.roles[Role.DECODE]
    return decode.kv_tokens_total / decode.ready


def is_idle(fleet: Snapshot, history: History) -> bool:
    """Whether it is known that nearly nothing has come for minutes, and that nothing waits."""
    snapshots = history.lately()
    begin = next((one for one in reversed(snapshots) if fleet.at - one.at >= 2 * LONG_SECONDS), None)
    if begin is None or begin.counters is None or fleet.counters is None:
        return False
    if fleet.counters.requests - begin.counters.requests >= FEWEST_REQUESTS:
        return False
    return not any(state.queued_requests or state.queued_tokens for state in fleet.roles.values())


def _plan_idle(spec: ScalingSpec, fleet: Snapshot, history: History, now: float) -> Decision:
    """Too little comes to be measured: half of what there is, each time nothing has asked for more for long. What came
    before and still runs keeps its room."""
    needs = {role: max(spec.roles[role].min, fleet.roles[role].replicas // 2) for role in spec.roles}
    decode, steps = fleet.roles[Role.DECODE], _read_steps(fleet, history)
    if steps is not None:
        room = find_room(steps, _kv_tokens_each(fleet), spec.tpot)
        held = min(decode.replicas, size_decode(float(decode.kv_tokens_used), room))
        needs[Role.DECODE] = max(needs[Role.DECODE], held)
    since = now - spec.behavior.scale_down_seconds
    proposals: dict[Role, Proposal] = {}
    for role, need in needs.items():
        present = fleet.roles[role].replicas
        count = min(present, max(need, history.most_needed(role, since)))
        proposals[role] = Proposal(replicas=count, limit="stabilization" if count > need else "idle")
    roles = _decide(_within_limits(proposals, spec), fleet, required=needs)
    sentence = f"{say_roles(roles)}. Fewer than {FEWEST_REQUESTS} requests have come in {2 * LONG_SECONDS:.0f} s."
    return Decision(at=now, roles=roles, sentence=sentence, needs=needs)


def _within_limits(proposals: Mapping[Role, Proposal], spec: ScalingSpec) -> dict[Role, Proposal]:
    """Bounds, ratio and budget; what the ratio asks for keeps to the bounds too."""
    return limit_budget(bound(limit_ratio(bound(proposals, spec), spec), spec), spec)


def _decide(
    proposals: Mapping[Role, Proposal], fleet: Snapshot, *, required: Mapping[Role, int]
) -> dict[Role, RoleDecision]:
    return {
        role: RoleDecision(
            replicas=proposal.replicas,
            observed=fleet.roles[role].replicas,
            required=required[role],
            limit=proposal.limit,
        )
        for role, proposal in proposals.items()
    }


def _find_obstacle(spec: ScalingSpec, fleet: Snapshot | None, now: float) -> tuple[str, str] | None:
    """Why nothing may be decided: in a word, and in a sentence."""
    if fleet is None:
        return "NoTelemetry", "no gateway has told about the fleet"
    age = now - fleet.at
    if age > spec.behavior.stale_seconds:
        text = f"telemetry is {age:.0f} s old, and after {spec.behavior.stale_seconds:.0f} s it moves nothing"
        return "TelemetryStale", text
    if fleet.counters is None:
        return "NoTelemetry", "no gateway tells what arrives"
    for role in sorted(spec.roles, reverse=True):
        state = fleet.roles.get(role)
        if state is None:
            return "NoTelemetry", f"nothing is known of {role.value} replicas"
        if not state.ready:
            return NOTHING_MEASURED, f"no {role.value} replica is ready to be measured"
    return None


def _hold(spec: ScalingSpec, fleet: Snapshot | None, now: float, reason: str, text: str) -> Decision:
    """Nothing moves."""
    states: Mapping[Role, RoleState] = fleet.roles if fleet is not None else {}
    roles = {
        role: RoleDecision(replicas=state.replicas, observed=state.replicas, required=state.replicas, limit="held")
        for role, state in states.items()
        if role in spec.roles
    }
    return Decision(at=now, roles=roles, held=text, reason=reason, sentence=f"Nothing moves: {text}.")
