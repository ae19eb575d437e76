"""Which replicas may be replaced now, over both worker roles at once. Pure arithmetic.

Blocks move between workers of one *build* (`tandem.dev/revision`) only, so what serves are pairs: a build's capacity is
that of its scarcest role, as a share of what the role should have, and the model's is the sum over its builds. A decode
worker from before `spec.prefill` was added needs no partner, and counts as a pair. A plan keeps two promises, unless
they were broken before it: the capacity stays at or above what `maxUnavailable` allows, and so does each role's number
of ready replicas. It never takes what would break them further, but where a target that changed midway left three
builds whose shares do not add up: then one replica goes at a time, the one that costs least.

A replica that was ready and may be serving though nobody can tell (its node is out of reach, or its readiness blinks)
is *unsure*: a plan must keep the promises whether it serves or not. One that is *down* serves nobody and goes first.

A StatefulSet's partition says which template a pod gets that is made anew: at and above it the newest. It stays above
all replicas while nothing is to be replaced, and comes down only to replicas that were released here. Where one below
others goes first, the set is on `OnDelete` meanwhile. What is added while the newest template has not shown that it
serves is of the one before, but for as many replicas as may be missing or on top.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from fractions import Fraction

from tandem_api.names import Role

from tandem_operator.observe.replica import WHOLE, ObservedReplica, ReplicaState


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleView:
    """One role as it is and as it should be, counted in replicas."""

    wanted: int
    total: int
    """What its StatefulSet asks for at present, a surge included."""
    partition: int | None
    """At and above this index pods are made from the newest template, and were released to be replaced by it; None: all
    are made so, and no controller replaces any."""
    replicas: Sequence[ObservedReplica]
    surge: int
    """Replicas that there may be beyond the wanted ones while some are replaced."""
    unavailable: int
    """Wanted replicas that may be missing while some are replaced."""
    is_even: bool = False
    """Pods are made from the newest template, or from one that counts as the same, wherever the partition is."""
    standby: int = 0
    """Replicas that are to be there and serve nobody, of a role that is to have none else."""
    is_withheld: bool = False
    """All replicas went while a rollout was held: they come back from the older template before it goes on."""
    limit: int | None = None
    """Replicas of the newest template that there may be; None: any number. With a limit the new ones are the last of
    the role, and its set is never on `OnDelete`: a lost replica of the older template comes back as it was."""

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


def plan_replacement(
    roles: Mapping[Role, RoleView], *, paused: bool = False, only_down: bool = False
) -> dict[Role, RolePlan]:
    """One step of a rollout. With `only_down` nothing that serves is replaced, and nothing is put on trial."""
    idle = {role: _plan_idle(view) for role, view in roles.items() if view.wanted == 0}
    left = {role: view for role, view in roles.items() if role not in idle}
    plan = _plan_limited if any(view.limit is not None for view in left.values()) else _plan_serving
    return idle | plan(left, paused=paused, only_down=only_down)


def _plan_idle(view: RoleView) -> RolePlan:
    """A role that serves nobody, so that nothing has to be spared. Where a rollout is held, those on standby stay, and
    come back, as they were; without any, a controller takes the newest template for the one that all have as soon as
    there is none, but for a set that is on `OnDelete`."""
    if view.is_withheld and not view.is_even:
        return RolePlan(total=view.standby, partition=view.standby or None)
    outdated = tuple(sorted(replica.index for replica in _outdated(view) if replica.index < view.standby))
    return RolePlan(total=view.standby, partition=view.standby if view.is_even else 0, replace=outdated)


def _plan_limited(roles: Mapping[Role, RoleView], *, paused: bool, only_down: bool) -> dict[Role, RolePlan]:
    """A step of a trial: from the last replica on, as many as there may be are of the newest template."""
    serving = _Serving(roles)
    hold = paused or only_down
    plans: dict[Role, RolePlan] = {}
    for role, view in roles.items():
        limit = len(view.replicas) + view.total if view.limit is None else view.limit
        kept = view.total - view.wanted if hold else view.surge
        bounded = replace(view, surge=max(0, min(view.surge, limit, kept)))
        total = _total(role, bounded, serving, may_surge=not hold, paused=False)
        partition = _limited_partition(role, bounded, serving, total, limit, hold=hold)
        released = [r.index for r in _outdated(view) if partition <= r.index < total]
        plans[role] = RolePlan(total=total, partition=partition, replace=tuple(sorted(released)))
    return plans


def _limited_partition(role: Role, view: RoleView, serving: _Serving, total: int, limit: int, *, hold: bool) -> int:
    """The lowest index from which on replicas may be of the newest template."""
    by_index = {replica.index: replica for replica in view.replicas if not replica.is_leaving}
    moving = {replica.index for replica in _in_motion(view) if replica.index < total}
    newest = sum(not replica.is_outdated for replica in by_index.values() if replica.index < total)
    if view.limit is not None:
        limit = min(limit, max(1, total - 1))  # one of the revision before stays, or comes back
    room = limit - newest - len(moving)
    partition = total
    for index in reversed(range(total)):
        found = by_index.get(index)
        if found is None or (found.is_outdated and index not in moving):
            was_new = view.partition is None or view.partition <= index < view.total
            if room <= 0 or (hold and not (found is None and was_new)):
                break
            if found is not None and found.state is not ReplicaState.DOWN:
                if not serving.can_spare(role, found):
                    break
                serving.remove(role, found)
            room -= 1
        partition = index
    return partition


def _plan_serving(roles: Mapping[Role, RoleView], *, paused: bool, only_down: bool) -> dict[Role, RolePlan]:
    serving = _Serving(roles)
    released = {role: {replica.index for replica in _in_motion(view)} for role, view in roles.items()}
    if not paused:
        for role, view in roles.items():
            released[role] |= _down_to_release(view, only_down=only_down)
        if not only_down:
            _release_serving(roles, serving, released)
    totals = {
        role: _total(role, view, serving, may_surge=not paused and not only_down, paused=paused)
        for role, view in roles.items()
    }
    return {
        role: _role_plan(view, released[role], totals[role], paused=paused, only_down=only_down)
        for role, view in roles.items()
    }


def _down_to_release(view: RoleView, *, only_down: bool) -> set[int]:
    """What serves nobody goes at once, but for what is coming up by itself while the newest template is not trusted."""
    down = [r for r in _outdated(view) if r.state is ReplicaState.DOWN]
    starting = [r for r in down if r.is_starting and _keeps_old(view, only_down=only_down)]
    kept = starting[_room(view, set(), only_down=only_down) :]
    return {r.index for r in down if r not in kept}


def _keeps_old(view: RoleView, *, only_down: bool) -> bool:
    """Whether replicas that are added, or come back, are better of the older template: it serves, and the newest one
    has not shown that it does, or its turn has not come."""
    newest = [r for r in view.replicas if not r.is_outdated and not r.is_leaving]
    up = sum(r.state is ReplicaState.READY for r in newest)
    is_proven = 0 < up >= len(newest) - up
    serves = view.is_withheld or any(r.state is not ReplicaState.DOWN for r in _outdated(view))
    return serves and (only_down or not is_proven)


def _room(view: RoleView, released: set[int], *, only_down: bool) -> int:
    """How many more replicas may be put on the newest template before it has shown that it serves."""
    if only_down or view.is_withheld:
        return 0
    unproven = {r.index for r in view.replicas if not r.is_outdated and r.state is not ReplicaState.READY}
    return max(0, max(1, view.surge + view.unavailable) - len(unproven | released))


def _coming_back(view: RoleView, released: set[int], total: int, *, only_down: bool) -> set[int]:
    """Replicas of which no pod is there that are to be made from the older template."""
    if not _keeps_old(view, only_down=only_down):
        return set()
    present = {replica.index for replica in view.replicas if not replica.is_leaving}
    made_new = range(view.partition or 0, view.total)
    missing = [index for index in reversed(range(total)) if index not in present and index not in made_new]
    on_the_way = {index for index in made_new if index not in present}
    return set(missing[_room(view, released | on_the_way, only_down=only_down) :])


def _outdated(view: RoleView) -> list[ObservedReplica]:
    """What a plan may release, the last first."""
    found = [replica for replica in view.replicas if replica.is_outdated and not replica.is_leaving]
    return sorted(found, key=lambda replica: -replica.index)


def _in_motion(view: RoleView) -> list[ObservedReplica]:
    """Released by an earlier plan: the controller may be replacing them in this moment."""
    return [r for r in _outdated(view) if view.partition is not None and r.index >= view.partition]


def _release_serving(roles: Mapping[Role, RoleView], serving: _Serving, released: Mapping[Role, set[int]]) -> None:
    """Release one after another, unsure ones before ready ones, for as long as the promises hold."""
    queues = {role: _queues(view, released[role]) for role, view in roles.items()}
    while (found := _next(roles, serving, queues)) is not None:
        role, replica = found
        queues[role][replica.state][replica.build].pop()
        serving.remove(role, replica)
        released[role].add(replica.index)
    if _is_stuck(roles, released):
        role, replica = min(
            ((role, replica) for role, view in roles.items() for replica in _outdated(view)),
            key=lambda item: serving.cost(*item),
        )
        serving.remove(role, replica)
        released[role].add(replica.index)


_Queues = dict[ReplicaState, dict[str, list[ObservedReplica]]]


def _queues(view: RoleView, released: set[int]) -> _Queues:
    """What is left to release, by state and build; the last replicas at the end."""
    queues: _Queues = {ReplicaState.UNSURE: {}, ReplicaState.READY: {}}
    for replica in reversed(_outdated(view)):
        if replica.state in queues and replica.index not in released:
            queues[replica.state].setdefault(replica.build, []).append(replica)
    return queues


def _next(
    roles: Mapping[Role, RoleView], serving: _Serving, queues: Mapping[Role, _Queues]
) -> tuple[Role, ObservedReplica] | None:
    """The one that goes next: of the role that has more old replicas left, so that builds stay in proportion."""

    def share_left(role: Role) -> Fraction:
        left = sum(len(waiting) for builds in queues[role].values() for waiting in builds.values())
        return Fraction(left, max(1, roles[role].wanted))

    for state in (ReplicaState.UNSURE, ReplicaState.READY):
        for role in sorted(roles, key=share_left, reverse=True):
            # The last of each build: its others are worth the same. A build that has no partner left costs nothing.
            lasts = [waiting[-1] for waiting in queues[role][state].values() if waiting]
            for replica in sorted(lasts, key=lambda replica: -replica.index):
                if serving.can_spare(role, replica):
                    return role, replica
    return None


def _is_stuck(roles: Mapping[Role, RoleView], released: Mapping[Role, set[int]]) -> bool:
    """Everything is up, outdated replicas are left and none was spared. A target that changed midway leaves three
    builds or more, whose shares need not add up: then the promise is out of reach, and what costs least has to go."""
    everything_up = all(
        len(view.replicas) >= view.total >= view.wanted + (view.surge if view.is_rolling else 0)
        and all(r.state is ReplicaState.READY and not r.is_leaving for r in view.replicas)
        for view in roles.values()
    )
    builds = {replica.build for view in roles.values() for replica in view.replicas}
    is_rolling = any(view.is_rolling for view in roles.values())
    return is_rolling and everything_up and not any(released.values()) and len(builds) > 2


def _total(role: Role, view: RoleView, serving: _Serving, *, may_surge: bool, paused: bool) -> int:
    """Replicas that the StatefulSet should ask for. What is beyond the wanted ones goes when it can be spared."""
    goal = view.wanted
    if view.limit is not None:
        goal += view.surge  # both revisions stay side by side, whatever is lost meanwhile
    elif not paused and view.is_rolling and (view.total > view.wanted or (may_surge and _needs_surge(view))):
        goal = view.wanted + view.surge
    total = max(goal, view.total)
    by_index = {replica.index: replica for replica in view.replicas if not replica.is_leaving}
    while total > goal:
        last = by_index.get(total - 1)
        if last is not None and not serving.has_gone(role, last):
            if not serving.can_spare(role, last):
                break
            serving.remove(role, last)
        total -= 1
    return total


def _needs_surge(view: RoleView) -> bool:
    """Something that may be serving is to be replaced, and is not in motion yet."""
    moving = _in_motion(view)
    return any(r.index < view.wanted and r.state is not ReplicaState.DOWN and r not in moving for r in _outdated(view))


def _role_plan(view: RoleView, released: set[int], total: int, *, paused: bool, only_down: bool) -> RolePlan:
    if paused:
        holds = view.is_even or view.partition is None or total > view.total
        return RolePlan(total=total, partition=total if holds else view.partition)
    outdated = {replica.index for replica in _outdated(view)}
    going = released & outdated
    if view.is_even:
        return RolePlan(total=total, partition=total, replace=tuple(sorted(going)))
    back = _coming_back(view, released, total, only_down=only_down)
    partition = max((outdated - released) | back, default=-1) + 1
    if back:
        going = {index for index in going if index >= partition}  # a set that is on `OnDelete` makes all anew as newest
    elif any(index < partition for index in going):
        return RolePlan(total=total, partition=None, replace=tuple(sorted(going)))
    return RolePlan(total=total, partition=partition, replace=tuple(sorted(going)))


class _Serving:
    """What serves, without what earlier plans have released, and what may still be taken from it.

    It is counted twice: with what surely serves, and with what may.
    """

    def __init__(self, roles: Mapping[Role, RoleView]) -> None:
        self._roles = roles
        self._wanted = {role: view.wanted for role, view in roles.items()}
        self._gone = {(role, r.index) for role, view in roles.items() for r in _in_motion(view)}
        self._builds: dict[bool, dict[Role, Counter[str]]] = {
            sure: {
                role: Counter(self._build(r) for r in view.replicas if self._counts(role, r, sure=sure))
                for role, view in roles.items()
            }
            for sure in (True, False)
        }
        self._floor = min(
            (Fraction(max(0, view.wanted - view.unavailable), view.wanted) for view in roles.values()),
            default=Fraction(0),
        )
        self._before = {sure: self._measure(sure=sure) for sure in (True, False)}

    def can_spare(self, role: Role, replica: ObservedReplica) -> bool:
        """Whether the promises hold without it, or are no further broken than they were."""
        with self._without(role, replica):
            return all(self._holds(sure=sure) for sure in (True, False))

    def cost(self, role: Role, replica: ObservedReplica) -> tuple[Fraction, int]:
        """Capacity that goes with it, and its place: of equals the last goes."""
        with self._without(role, replica):
            return self._before[True][0] - self._measure(sure=True)[0], -replica.index

    def remove(self, role: Role, replica: ObservedReplica) -> None:
        self._change(role, replica, -1)
        self._gone.add((role, replica.index))

    def has_gone(self, role: Role, replica: ObservedReplica) -> bool:
        return (role, replica.index) in self._gone or replica.state is ReplicaState.DOWN or replica.is_leaving

    def _build(self, replica: ObservedReplica) -> str:
        return WHOLE if replica.is_whole and len(self._roles) > 1 else replica.build

    def _counts(self, role: Role, replica: ObservedReplica, *, sure: bool) -> bool:
        if self.has_gone(role, replica):
            return False
        return replica.state is ReplicaState.READY or not sure

    @contextmanager
    def _without(self, role: Role, replica: ObservedReplica) -> Generator[None]:
        self._change(role, replica, -1)
        yield
        self._change(role, replica, +1)

    def _change(self, role: Role, replica: ObservedReplica, by: int) -> None:
        for sure, builds in self._builds.items():
            if self._counts(role, replica, sure=sure):
                builds[role][self._build(replica)] += by

    def _holds(self, *, sure: bool) -> bool:
        (capacity, counts), (capacity_before, counts_before) = self._measure(sure=sure), self._before[sure]
        return capacity >= min(self._floor, capacity_before) and all(
            counts[role] >= min(view.wanted - view.unavailable, counts_before[role])
            for role, view in self._roles.items()
        )

    def _measure(self, *, sure: bool) -> tuple[Fraction, dict[Role, int]]:
        builds = self._builds[sure]
        return capacity_of(builds, self._wanted), {role: counts.total() for role, counts in builds.items()}


def capacity_of(ready: Mapping[Role, Mapping[str, int]], wanted: Mapping[Role, int]) -> Fraction:
    """The share of its promised capacity that a model has: of each build, its scarcest role; and `WHOLE`."""
    if not all(wanted.values()):
        return Fraction(0)
    builds = {build for counts in ready.values() for build in counts} - {WHOLE}
    whole = sum((Fraction(counts.get(WHOLE, 0), wanted[role]) for role, counts in ready.items()), start=Fraction(0))
    return sum(
        (min(Fraction(counts.get(build, 0), wanted[role]) for role, counts in ready.items()) for build in builds),
        start=whole,
    )
