"""One look at one model: what was read, what has come of it so far, and what was decided."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import aiohttp

from tandem_operator.autoscale.desired import DesiredReplicas
from tandem_operator.autoscale.scaler import Outlook
from tandem_operator.children.plan import ChildPlan
from tandem_operator.keys.keeper import KeyLook
from tandem_operator.objects.errors import APIError, NamespaceEndingError
from tandem_operator.objects.manifests import ChildKey, Children, Manifest, ModelKey, own_workloads
from tandem_operator.objects.problem import Problem
from tandem_operator.objects.refusals import refusal
from tandem_operator.rollout.images import ImagePlan
from tandem_operator.rollout.plan import RolloutPlan
from tandem_operator.weights.commits import CommitPlan
from tandem_operator.weights.prewarm import PrewarmPlan
from tandem_operator.workloads.blueprint import Blueprint

SOON, OFTEN, RARELY = 1.0, 5.0, 15.0
"""Seconds after which to look again at what no watch reports: a removal, a deadline of a canary, a refusal."""


@dataclass(slots=True, kw_only=True)
class Look:
    """Steps read `before`, and add to the rest."""

    key: ModelKey
    raw: Manifest
    """The InferenceModel as it was read."""
    before: Children
    """Children as they were."""
    children: dict[ChildKey, Manifest] = field(default_factory=dict[ChildKey, Manifest])
    """Live children with the answers to what was applied: newer than the cache."""
    problems: list[Problem] = field(default_factory=list[Problem])
    waiting: list[str] = field(default_factory=list[str])
    """Children that cannot be made before another object is gone."""
    applied: list[Manifest] = field(default_factory=list[Manifest])
    failed: list[str] = field(default_factory=list[str])
    """Requests that time may heal."""
    ending: bool = False
    """The namespace is being deleted."""
    later: list[float] = field(default_factory=list[float])
    """Seconds after which to write what somebody else writes too."""

    @property
    def uid(self) -> str:
        return str(self.raw["metadata"]["uid"])

    @property
    def own_before(self) -> dict[ChildKey, Manifest]:
        return own_workloads(self.before, owner_uid=self.uid)

    @property
    def own_now(self) -> dict[ChildKey, Manifest]:
        return own_workloads(self.children, owner_uid=self.uid)

    @property
    def again_seconds(self) -> float | None:
        """Seconds until the next look, where events alone would not cause one."""
        if self.waiting:
            return SOON
        return RARELY if self.problems else None

    def part(self) -> Look:
        """A look for one of several children that are written at a time: each is told in its place by `add`."""
        return Look(key=self.key, raw=self.raw, before=self.before)

    def add(self, part: Look) -> None:
        """Take over what came of a part of the plan."""
        self.children |= part.children
        self.problems += part.problems
        self.waiting += part.waiting
        self.applied += part.applied
        self.failed += part.failed
        self.later += part.later
        self.ending |= part.ending

    def note(self, problem: Problem | None) -> None:
        """Collect a problem, if it is one."""
        if problem is not None:
            self.problems.append(problem)

    def note_blocked(self, plan: ChildPlan) -> None:
        """Tell which children cannot be made because of other objects that have their names."""
        self.waiting += [str(key) for key in plan.waiting]
        for key in plan.taken:
            text = f"{key} exists and belongs to somebody else: rename this model, or delete that object"
            self.problems.append(Problem(reason="ChildNameTaken", message=text, stalled=True))

    @asynccontextmanager
    async def collecting(self, child: str, *, doing: str = "write") -> AsyncGenerator[None]:
        """A request whose failure is noted, and stops nothing else."""
        try:
            yield
        except NamespaceEndingError:
            self.ending = True
        except (APIError, aiohttp.ClientError, TimeoutError) as error:
            problem = refusal(child, error, doing=doing)
            self.problems.append(problem)
            if not problem.stalled:
                self.failed.append(problem.message)


@dataclass(frozen=True, slots=True, kw_only=True)
class Decisions:
    """What one look has decided before it writes any child but keys and revisions."""

    outlook: Outlook | None
    replicas: DesiredReplicas
    images: ImagePlan
    weights: CommitPlan
    keys: KeyLook
    prewarm: PrewarmPlan
    rollout: RolloutPlan

    @property
    def blueprint(self) -> Blueprint:
        """The model with the revision that its workers should have now."""
        return self.rollout.target.blueprint

    @property
    def hold(self) -> bool:
        """Pods made now would find no keys, or keys that are about to go, or no model, or nobody knows what they should
        be: what runs is better left running. A suspension holds nevertheless."""
        unsure = not self.keys.usable or self.weights.problem is not None or self.rollout.hold
        return unsure and not self.blueprint.model.spec.suspend
