"""Which replicas may be replaced now, over both worker roles at once. Pure arithmetic.

Blocks move between workers of one *build* (`tandem.dev/revision`) only, so what serves are pairs: a build's capacity is
that of its scarcest role, as a share of what the role should have, and the model's is the sum over its builds. A plan
keeps two promises, unless they were broken before it: the capacity stays at or above what `maxUnavailable` allows, and
so does each role's number of ready replicas. It never takes what would break them further, but where a target that
changed midway left three builds whose shares do not add up: then one replica goes at a time, the one that costs least.

A replica that was ready and may be serving though nobody can tell (its node is out of reach, or its readiness blinks)
is *unsure*: a plan must keep the promises whether it serves or not. One that is *down* serves nobody and goes first.

A StatefulSet's partition says which template a pod gets that is made anew: at and above it the newest. It only ever
comes down to replicas that were released here. Where one below others goes first, the set is on `OnDelete` meanwhile.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from fractions import Fraction

from tandem_api.names import Role


class State(Enum):
    """Whether a replica serves."""

    READY = "ready"
    UNSURE = "unsure"
    DOWN = "down"


@dataclass(frozen=True, slots=True, kw_only=True)
class Replica:
    """One replica of a role, some of whose pods exist."""

    index: int
    build: str
    """Its workers exchange blocks with those of the same build."""
    state: State
    is_outdated: bool
    """Made from another template than the newest."""
    is_leaving: bool = False
    """All of its pods are on their way out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleView:
    """One role as it is and as it should be, counted in replicas."""

    wanted: int
    total: int
    """What its StatefulSet asks for at present, a surge included."""
    partition: int | None
    """At and above this index pods are made from the newest template; None: all are, and no controller replaces any."""
    replicas: Sequence[Replica]
    surge: int
    """Replicas that there may be beyond the wanted ones while some are replaced."""
    unavailable: int
    """Wanted replicas that may be missing while some are replaced."""

    @property
    def is_rolling(self) -> bool:
        """Some of what should stay is outdated."""
        return any(replica.is_outdated and replica.index < self.wanted for replica in self.replicas)


@dataclass(frozen=True, slots=True, kw_only=True)
class RolePlan:
    """What a role's StatefulSet should say, and whose pods to delete."""

    total: int
    partition: int | None
    replace: tuple[int, ...] = ()
    """Replicas that may be replaced, in order."""


def plan_rollout(
    roles: Mapping[Role, RoleView], *, paused: bool = False, gateways_first: bool = False
) -> dict[Role, RolePlan]:
    """One step of a rollout. With `gateways_first` only what is down goes: gateways know how to ask the workers of the
    release before theirs, and not what those of the next one want."""
    idle = {role: RolePlan(total=0, partition=0) for role, view in roles.items() if view.wanted == 0}
    return idle | _plan_serving(
        {role: view for role, view in roles.items() if role not in idle}, paused=paused, gateways_first=gateways_first
    )


def _plan_serving(roles: Mapping[Role, RoleView], *, paused: bool, gateways_first: bool) -> dict[Role, RolePlan]:
    serving = _Serving(roles)
    released = {role: {replica.index for replica in _in_motion(view)} for role, view in roles.items()}
    if not paused:
        for role, view in roles.items():
            released[role] |= {r.index for r in _outdated(view) if r.state is State.DOWN}
        if not gateways_first:
            _release_serving(roles, serving, released)
    totals = {
        role: _total(role, view, serving, may_surge=not paused and not gateways_first, paused=paused)
        for role, view in roles.items()
    }
    return {role: _role_plan(view, released[role], totals[role], paused=paused) for role, view in roles.items()}


def _outdated(view: RoleView) -> list[Replica]:
    """What a plan may release, the last first."""
    found = [replica for replica in view.replicas if replica.is_outdated and not replica.is_leaving]
    return sorted(found, key=lambda replica: -replica.index)


def _in_motion(view: RoleView) -> list[Replica]:
    """Released by an earlier plan: the controller may be replacing them in this moment."""
    return [r for r in _outdated(view) if view.partition is not None and r.index >= view.partition]


def _release_serving(roles: Mapping[Role, RoleView], serving: _Serving, released: Mapping[Role, set[int]]) -> None:
    """Release one after another, unsure ones before ready ones, for as long as the promises hold."""
    while True:
        for state in (State.UNSURE, State.READY):
            found = next(_candidates(roles, serving, released, state), None)
            if found is not None:
                role, replica = found
                serving.remove(role, replica)
                released[role].add(replica.index)
                break
        else:
            break
    if _is_stuck(roles, released):
        role, replica = min(
            ((role, replica) for role, view in roles.items() for replica in _outdated(view)),
            key=lambda item: serving.cost(*item),
        )
        serving.remove(role, replica)
        released[role].add(replica.index)


def _is_stuck(roles: Mapping[Role, RoleView], released: Mapping[Role, set[int]]) -> bool:
    """Everything is up, outdated replicas are left and none was spared. A target that changed midway leaves three
    builds or more, whose shares need not add up: then the promise is out of reach, and what costs least has to go."""
    everything_up = all(
        len(view.replicas) >= view.total >= view.wanted + (view.surge if view.is_rolling else 0)
        and all(r.state is State.READY and not r.is_leaving for r in view.replicas)
        for view in roles.values()
    )
    builds = {replica.build for view in roles.values() for replica in view.replicas}
    is_rolling = any(view.is_rolling for view in roles.values())
    return is_rolling and everything_up and not any(released.values()) and len(builds) > 2


def _candidates(
    roles: Mapping[Role, RoleView], serving: _Serving, released: Mapping[Role, set[int]], state: State
) -> Iterator[tuple[Role, Replica]]:
    # The role that has more of its old replicas left goes first, so that builds stay in proportion.
    for role, view in sorted(roles.items(), key=lambda item: -_share_left(item[1], released[item[0]])):
        left = [r for r in _outdated(view) if r.state is state and r.index not in released[role]]
        # The last of each build: its others are worth the same. A build that has no partner left costs nothing.
        lasts = {r.build: r for r in reversed(left)}.values()
        for replica in sorted(lasts, key=lambda replica: -replica.index):
            if serving.can_spare(role, replica):
                yield role, replica


def _share_left(view: RoleView, released: set[int]) -> Fraction:
    left = sum(replica.index not in released for replica in _outdated(view))
    return Fraction(left, max(1, view.wanted))


def _total(role: Role, view: RoleView, serving: _Serving, *, may_surge: bool, paused: bool) -> int:
    """Replicas that the StatefulSet should ask for. What is beyond the wanted ones goes when it can be spared."""
    if paused:
        return view.wanted
    goal = view.wanted
    if view.is_rolling and (view.total > view.wanted or (may_surge and _needs_surge(view))):
        goal = view.wanted + view.surge
    total = max(goal, view.total)
    by_index = {replica.index: replica for replica in view.replicas if not replica.is_leaving}
    while total > goal:
        last = by_index.get(total - 1)
        if last is not None and not serving.has_gone(role, last) and last.state is not State.DOWN:
            if not serving.can_spare(role, last):
                break
            serving.remove(role, last)
        total -= 1
    return total


def _needs_surge(view: RoleView) -> bool:
    """Something that may be serving is to be replaced, and is not in motion yet."""
    moving = _in_motion(view)
    return any(r.index < view.wanted and r.state is not State.DOWN and r not in moving for r in _outdated(view))


def _role_plan(view: RoleView, released: set[int], total: int, *, paused: bool) -> RolePlan:
    if paused:
        return RolePlan(total=total, partition=view.partition)
    outdated = {replica.index for replica in _outdated(view)}
    kept = outdated - released
    partition = max(kept, default=-1) + 1
    if any(index < partition for index in released & outdated):
        return RolePlan(total=total, partition=None, replace=tuple(sorted(released & outdated)))
    return RolePlan(total=total, partition=partition, replace=tuple(sorted(released & outdated)))


class _Serving:
    """What serves, without what earlier plans have released, and what may still be taken from it."""

    def __init__(self, roles: Mapping[Role, RoleView]) -> None:
        self._roles = roles
        gone = {(role, r.index) for role, view in roles.items() for r in _in_motion(view)}
        self._present: dict[Role, dict[int, Replica]] = {
            role: {
                r.index: r
                for r in view.replicas
                if r.state is not State.DOWN and not r.is_leaving and (role, r.index) not in gone
            }
            for role, view in roles.items()
        }
        self._floor = min(
            (Fraction(max(0, view.wanted - view.unavailable), view.wanted) for view in roles.values() if view.wanted),
            default=Fraction(0),
        )
        self._before = {sure: self._measure(self._present, sure=sure) for sure in (True, False)}

    def can_spare(self, role: Role, replica: Replica) -> bool:
        """Whether the promises hold without it, or are no further broken than they were."""
        rest = dict(self._present)
        rest[role] = {index: other for index, other in rest[role].items() if index != replica.index}
        return all(self._holds(rest, sure=sure) for sure in (True, False))

    def cost(self, role: Role, replica: Replica) -> tuple[Fraction, int]:
        """Capacity that goes with it, and its place: of equals the last goes."""
        rest = dict(self._present)
        rest[role] = {index: other for index, other in rest[role].items() if index != replica.index}
        return self._before[True][0] - self._measure(rest, sure=True)[0], -replica.index

    def remove(self, role: Role, replica: Replica) -> None:
        self._present[role].pop(replica.index, None)

    def has_gone(self, role: Role, replica: Replica) -> bool:
        return replica.index not in self._present[role]

    def _holds(self, present: Mapping[Role, Mapping[int, Replica]], *, sure: bool) -> bool:
        capacity, counts = self._measure(present, sure=sure)
        capacity_before, counts_before = self._before[sure]
        return capacity >= min(self._floor, capacity_before) and all(
            counts[role] >= min(view.wanted - view.unavailable, counts_before[role])
            for role, view in self._roles.items()
        )

    def _measure(
        self, present: Mapping[Role, Mapping[int, Replica]], *, sure: bool
    ) -> tuple[Fraction, dict[Role, int]]:
        by_role = {
            role: Counter(r.build for r in replicas.values() if not sure or r.state is State.READY)
            for role, replicas in present.items()
        }
        wanted = {role: view.wanted for role, view in self._roles.items()}
        return capacity_of(by_role, wanted), {role: counts.total() for role, counts in by_role.items()}


def capacity_of(ready: Mapping[Role, Mapping[str, int]], wanted: Mapping[Role, int]) -> Fraction:
    """The share of its promised capacity that a model has: of each build, its scarcest role."""
    if not all(wanted.values()):
        return Fraction(0)
    builds = {build for counts in ready.values() for build in counts}
    return sum(
        (min(Fraction(counts.get(build, 0), wanted[role]) for role, counts in ready.items()) for build in builds),
        start=Fraction(0),
    )
