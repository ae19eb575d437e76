"""Both roles at once: ratio, what transfers allow, and one budget of GPUs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import ceil, floor

from tandem_api.names import Role

from tandem_operator.autoscale.plan.contract import ScalingSpec
from tandem_operator.autoscale.plan.sizing import MOST_REPLICAS

SATURATED = 0.9
"""Share of a link's bandwidth above which more of the other role is of no use."""
TRANSFER = "KV transfer"
NVLINK = "NVLink"


@dataclass(frozen=True, slots=True, kw_only=True)
class Proposal:
    """Replicas of a role, and what asks for so many."""

    replicas: int
    limit: str


def bound(proposals: Mapping[Role, Proposal], spec: ScalingSpec) -> dict[Role, Proposal]:
    """Within min and max of each role."""
    bounded: dict[Role, Proposal] = {}
    for role, proposal in proposals.items():
        own = spec.roles[role]
        if proposal.replicas < own.min:
            bounded[role] = Proposal(replicas=own.min, limit="minimum")
        elif proposal.replicas > own.max:
            bounded[role] = Proposal(replicas=own.max, limit="maximum")
        else:
            bounded[role] = proposal
    return bounded


def count_links(share: float | None, decodes: float) -> int:
    """Decode replicas whose links take in what those of `decodes` did, the busiest in `share` of the time, and are not
    full. 0 where that is not measured."""
    return 0 if share is None else ceil(share * decodes / SATURATED)


def limit_transfer(
    proposals: Mapping[Role, Proposal],
    *,
    share: float | None,
    computing: float,
    planned: float,
    present: int,
    decodes: float,
    limit: str = TRANSFER,
) -> dict[Role, Proposal]:
    """No more prefill replicas than decode replicas' links take in, where those are full; the `present` ones stay.

    `share` is that of the busiest link while `computing` prefill replicas, without a pause, fed `decodes`; `planned` of
    them are to. More decode replicas bring more links. `limit` is the name of what is full.
    """
    result = dict(proposals)
    if share is None or share < SATURATED or not decodes or computing <= 0:
        return result
    prefill, decode = proposals[Role.PREFILL].replicas, proposals[Role.DECODE].replicas
    taken = computing / share * decode / decodes
    if planned > taken:
        useful = max(present, floor(prefill * taken / planned))
        if prefill > useful:
            result[Role.PREFILL] = Proposal(replicas=useful, limit=limit)
        links = ceil(min(MOST_REPLICAS, share * decodes * planned / computing / SATURATED))
        if links > decode:
            result[Role.DECODE] = Proposal(replicas=links, limit=limit)
    return result


def limit_ratio(proposals: Mapping[Role, Proposal], spec: ScalingSpec) -> dict[Role, Proposal]:
    """Raise the scarce role as far as its maximum, then cut the other one."""
    result = dict(proposals)
    if Role.PREFILL not in proposals or Role.DECODE not in proposals:
        return result
    prefill, decode = proposals[Role.PREFILL].replicas, proposals[Role.DECODE].replicas
    if prefill > spec.max_ratio * decode:
        raised = min(spec.roles[Role.DECODE].max, ceil(prefill / spec.max_ratio))
        cut = max(spec.roles[Role.PREFILL].min, min(prefill, floor(spec.max_ratio * raised)))
        return _changed(result, cut, raised, "role ratio")
    if prefill < spec.min_ratio * decode:
        raised = min(spec.roles[Role.PREFILL].max, ceil(spec.min_ratio * decode))
        cut = decode if not spec.min_ratio else max(
            spec.roles[Role.DECODE].min, min(decode, floor(raised / spec.min_ratio))
        )  # fmt: skip
        return _changed(result, raised, cut, "role ratio")
    return result


def limit_budget(proposals: Mapping[Role, Proposal], spec: ScalingSpec) -> dict[Role, Proposal]:
    """Within the budget, both roles decided together: as large a share of what each wants as the scarcer one can get.

    Of equal shares the one with more GPUs, then the one with more decode replicas, is taken. A role that is alone gets
    what fits.
    """
    budget = spec.gpu_budget
    cost = sum(proposal.replicas * spec.roles[role].gpus for role, proposal in proposals.items())
    if budget is None or cost <= budget:
        return dict(proposals)
    roles = sorted(proposals, key=lambda role: role.value)
    if len(roles) == 1:
        role = roles[0]
        return {
            role: Proposal(replicas=max(spec.roles[role].min, budget // spec.roles[role].gpus), limit=spec.budget_name)
        }
    first, second = Role.PREFILL, Role.DECODE
    own, other = spec.roles[first], spec.roles[second]
    best: tuple[tuple[float, int, int], int, int] | None = None
    for count in range(own.min, proposals[first].replicas + 1):
        rest = min(proposals[second].replicas, (budget - count * own.gpus) // other.gpus)
        if rest < other.min:
            break
        share = min(count / proposals[first].replicas, rest / proposals[second].replicas)
        key = share, count * own.gpus + rest * other.gpus, rest
        if best is None or key > best[0]:
            best = key, count, rest
    assert best is not None, "the minimums fit into the budget: the spec was checked"
    return _changed(dict(proposals), best[1], best[2], spec.budget_name)


def _changed(proposals: dict[Role, Proposal], prefill: int, decode: int, limit: str) -> dict[Role, Proposal]:
    for role, count in ((Role.PREFILL, prefill), (Role.DECODE, decode)):
        if proposals[role].replicas != count:
            proposals[role] = Proposal(replicas=count, limit=limit)
    return proposals
