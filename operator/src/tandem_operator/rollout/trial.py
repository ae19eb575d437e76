"""The workers of a model as a canary is decided by them, by role and by template. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from tandem_api.names import Role

from tandem_operator.objects.problem import Problem


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleFleet:
    """The workers of one role, counted in replicas. New ones are those of the template that its StatefulSet has."""

    wanted: int
    surge: int = 0
    new: int = 0
    new_ready: int = 0
    new_up: int = 0
    """New ones that serve, or may."""
    old: int = 0
    old_up: int = 0
    is_current: bool = True
    """The StatefulSet has the template that it should have, and its controller has seen it."""
    keeps_old: bool = False
    """Its controller still knows another template, for replicas below the partition."""
    is_tried: bool = True
    """The revision on trial changes this role."""
    trouble: Problem | None = None
    """Why a new replica is not up, where that has lasted a while and waiting does not help."""
    new_workers: tuple[str, ...] = ()
    """The pods that lead the new replicas."""
    old_workers: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialFleet:
    """The workers of a model."""

    roles: Mapping[Role, RoleFleet] = field(default_factory=dict[Role, RoleFleet])

    @property
    def is_current(self) -> bool:
        return all(role.is_current for role in self.roles.values())

    @property
    def is_even(self) -> bool:
        """All replicas are of one template, and a lost one would come back from it."""
        return self.is_current and not any(role.old or role.keeps_old for role in self.roles.values())

    @property
    def is_complete(self) -> bool:
        return (
            bool(self.roles)
            and self.is_even
            and all(role.new == role.new_ready == role.wanted for role in self.roles.values())
        )

    @property
    def num_old(self) -> int:
        return sum(role.old for role in self.roles.values())

    @property
    def is_up(self) -> bool:
        """Something decodes, or may."""
        return any(role.new_up or role.old_up for role in self._decoding())

    @property
    def has_new_up(self) -> bool:
        """Something decodes, or may, that has the template that all should have."""
        return any(role.new_up for role in self._decoding())

    @property
    def serves_nothing(self) -> bool:
        """Nothing is meant to decode."""
        return not any(role.wanted for role in self._decoding())

    @property
    def is_mostly_old(self) -> bool:
        return sum(role.old_up for role in self._decoding()) > sum(role.new_up for role in self._decoding())

    @property
    def trouble(self) -> Problem | None:
        return next((role.trouble for role in self._tried() if role.trouble is not None), None)

    @property
    def has_lost_old(self) -> bool:
        """Replicas of the revision before would come back as new ones: all were gone for a moment."""
        return any(role.is_current and role.wanted and not role.keeps_old for role in self._tried())

    def is_ready_for(self, weight: int) -> bool:
        """The new replicas that this share of requests needs are ready."""
        return self.is_current and all(role.new_ready >= replicas_for(role, weight) for role in self._tried())

    def _decoding(self) -> list[RoleFleet]:
        return [role for name, role in self.roles.items() if name is not Role.PREFILL]

    def _tried(self) -> list[RoleFleet]:
        return [role for role in self.roles.values() if role.is_tried]


def replicas_for(role: RoleFleet, weight: int) -> int:
    """New replicas that this share of requests needs: that share of the role, and one of each revision at least."""
    if not role.wanted:
        return 0
    return max(1, min(math.ceil(role.wanted * weight / 100), role.wanted + role.surge - 1))
