"""How workers are replaced: drain, canary, surge."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import ConfigDict, Field

from tandem_api.crd.authored import Authored
from tandem_api.crd.fields import Duration, Share, count_share, is_none, is_some
from tandem_api.validation import RULES_KEY, Satisfies, rule

LONGEST_DRAIN = "1h"


class Drain(Authored):
    timeout: Annotated[
        Duration,
        Satisfies(
            f"!self.matches('^([0-9]+[hms])+$') || duration(self) <= duration('{LONGEST_DRAIN}')",
            f"must be at most {LONGEST_DRAIN}: a node that is drained, and a rollout, wait for as long",
        ),
    ] = "60s"
    """How long a pod that is being removed may finish what it runs: an hour at most."""


class CanaryStep(Authored):
    weight: Annotated[int, Field(ge=1, le=99)]
    """Percent of new requests that go to the new workers. There are as many of these as that share of each role is, and
    at least one of each; at least one of each stays of the revision before."""
    duration: Duration
    """How long the step takes. It counts from when its workers are ready, and anew when one of them was not."""


class MaxTTFT(Authored):
    model_config = ConfigDict(
        json_schema_extra={
            RULES_KEY: [
                rule(
                    "has(self.factor) != has(self.duration)",
                    "needs either a factor of what the other workers take, or a duration: write one of them",
                    path=".factor",
                )
            ]
        }
    )

    percentile: Annotated[int, Field(ge=50, le=99)] = 95
    """Which of the times to the first token is compared: 95 is the one that 95 of 100 requests do not exceed."""
    factor: Annotated[float, Field(ge=1.0, le=100.0)] | None = None
    """How many times as long as that of the other workers it may be."""
    duration: Duration | None = None
    """How long it may be, whatever the other workers take."""


_RISING = "must not fall from step to step: give each step at least the weight of the one before"


class Canary(Authored):
    steps: Annotated[
        list[CanaryStep],
        Field(min_length=1, max_length=20),
        Satisfies("self.map(step, step.weight).isSorted()", _RISING, server_only=False),
    ]
    """Shares of traffic, one after another. After the last one all workers are replaced."""
    max_error_rate: Annotated[float, Field(ge=0.0, le=100.0)] | None = None
    """Percent of the canary's requests of a step that may fail. More of them end it, and the model goes on with the
    revision before. Without it failed requests end no canary."""
    max_ttft: Annotated[MaxTTFT | None, Field(alias="maxTTFT")] = None
    """How long the canary may take to the first token. Without it slow answers end no canary."""
    min_requests: Annotated[int, Field(ge=1, le=1_000_000)] = 20
    """Requests that the canary must have answered in a step before `maxErrorRate` and `maxTTFT` are judged. A step goes
    on until there were as many; without these limits none is needed."""


_SURGE = "25%"
"""The default, as Deployments have it."""
_NO_BUDGET = "and maxUnavailable are both 0, so nothing could be replaced: raise one of them"
_NO_CANARY = "needs the type RollingUpdate, because both revisions serve side by side: remove canary or type Recreate"
NO_ROOM = (
    "has room for a canary only where each role has two replicas or a surge: raise rollout.maxSurge or remove"
    " rollout.canary"
)


class Rollout(Authored):
    model_config = ConfigDict(
        json_schema_extra={
            RULES_KEY: [
                rule(
                    "!has(self.maxSurge) || !has(self.maxUnavailable)"
                    f" || {is_some('self.maxSurge')} || {is_some('self.maxUnavailable')}",
                    _NO_BUDGET,
                    path=".maxSurge",
                ),
                rule(
                    "!has(self.canary) || self.type != 'Recreate'",
                    _NO_CANARY,
                    path=".canary",
                ),
            ]
        }
    )

    type: Literal["RollingUpdate", "Recreate"] = "RollingUpdate"
    """`RollingUpdate` replaces workers so that complete pairs of prefill and decode workers go on serving. `Recreate`
    replaces all at once, where there is room for no more than there is and an outage is no harm."""
    max_surge: Share | None = None
    """Replicas of each role that there may be beyond its number while workers are replaced, as a number or a percentage
    that is rounded up. Defaults to 25%; to 0 where `maxUnavailable` lets a replica go, but for a single replica with a
    canary."""
    max_unavailable: Share | None = None
    """Replicas of each role that may be missing while workers are replaced, as a number or a percentage that is rounded
    down. A node that is drained takes as many at a time, and one at least. Defaults to 0 for a role with a single
    replica, and else to 1, so that a rollout goes on where nothing has room beside what there is."""
    paused: bool = False
    """Replace nothing for now. Scaling, suspension and configurations that need no restart are not held up."""
    progress_deadline: Duration = "1h"
    """When nothing has come up for this long, the model is Stalled with the reason. Loading counts: let it be longer
    than a worker takes to download and load the model."""

    canary: Canary | None = None
    """Try a new revision with a part of the requests first. It is promoted by itself after the last step, and goes back
    by itself when it fails. Without it workers are replaced as fast as the budget allows. A change that adds or removes
    `spec.prefill`, or changes `nodesPerReplica`, has no canary."""
    revision: Annotated[int, Field(ge=1)] | None = None
    """Run this revision of `model`, `engine`, `kv`, `prefill` and `decode` instead of what the object says of them;
    `replicas` and `servedName` are not part of it. `kubectl get controllerrevisions` lists those that are kept. It has
    no canary. Remove it to run what the object says."""
    follow_image: bool | None = None
    """Whether a model that names no image gets that of another release of the operator once that is installed, when its
    turn comes. Without it workers and gateways keep the images that they have. Defaults to `images.follow` of the
    chart, which is false."""
    revision_history_limit: Annotated[int, Field(ge=1, le=100)] = 10
    """Revisions that are kept, besides those in use."""

    def surge_of(self, replicas: int) -> int:
        """Replicas that a role of so many may have on top while it is changed."""
        if self.type == "Recreate":
            return 0
        if self.max_surge is not None:
            return count_share(self.max_surge, replicas, up=True)
        is_tried_beside_itself = self.canary is not None and replicas == 1
        if self.max_unavailable is not None and self.unavailable_of(replicas) > 0 and not is_tried_beside_itself:
            return 0
        return max(1, count_share(_SURGE, replicas, up=True))

    def unavailable_of(self, replicas: int) -> int:
        """Replicas that a role of so many may lack while it is changed."""
        if self.type == "Recreate":
            return replicas
        has_surge = not is_none(self.max_surge)
        if self.max_unavailable is not None:
            # Rounded down to nothing without a surge, nothing could be replaced.
            return max(0 if has_surge else 1, count_share(self.max_unavailable, replicas, up=False))
        return 0 if replicas == 1 and has_surge else 1
