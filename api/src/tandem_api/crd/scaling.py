"""Service levels, and how the fleet follows them."""

from __future__ import annotations

from typing import Annotated

from pydantic import ConfigDict, Field

from tandem_api.changes import Change
from tandem_api.crd.authored import Authored
from tandem_api.crd.fields import Duration
from tandem_api.validation import RULES_KEY, Satisfies, rule


class TTFTTarget(Authored):
    percentile: Annotated[int, Field(ge=50, le=99)] = 95
    """How many of 100 requests are to meet it."""
    seconds: Annotated[float, Field(ge=0.001, le=3600)]
    """Longest time to the first token, for example 0.5."""
    seconds_per_thousand_tokens: Annotated[float, Field(ge=0, le=3600)] = 0.0
    """Longer by so much for each thousand tokens of the prompt."""

    @property
    def seconds_per_token(self) -> float:
        return self.seconds_per_thousand_tokens / 1000

    def limit(self, tokens: float) -> float:
        """Seconds allowed to a request with so many prompt tokens."""
        return self.seconds + self.seconds_per_token * tokens


class TPOTTarget(Authored):
    seconds: Annotated[float, Field(ge=0.0001, le=60)]
    """Longest mean time of an output token after the first, for example 0.05."""


class SLO(Authored):
    """What clients are to get. Requests are served in the order in which they are due by it, roles with the mode `SLO`
    are scaled for it, and the condition `SLOMet` tells whether they do."""

    ttft: TTFTTarget
    """Time to the first token."""
    tpot: TPOTTarget
    """Time per output token."""


_RATIO = "must not be above max: lower it, or raise max"


class RoleRatio(Authored):
    """Prefill replicas per decode replica."""

    model_config = ConfigDict(
        json_schema_extra={
            RULES_KEY: [rule("!has(self.min) || !has(self.max) || self.min <= self.max", _RATIO, path=".min")]
        }
    )

    min: Annotated[float, Field(ge=0, le=1000)] = 0.0
    """At least so many."""
    max: Annotated[float, Field(ge=0.001, le=1000)] | None = None
    """At most so many. Defaults to any number."""


class ScalingBehavior(Authored):
    scale_down_stabilization: Duration = "10m"
    """A role loses replicas only once nothing has asked for them for so long; where demand surely falls, for as
    long as another replica would take to come, a minute at least."""


class Standby(Authored):
    """Workers that stay while a model sleeps: libraries are loaded, no weights and no blocks."""

    replicas: Annotated[int, Field(ge=1, le=1000), Change.OPERATOR] = 1
    """Pods of each role; at most its `scaling.min`, which is what it has when the model wakes."""


class ScaleToZero(Authored):
    """No worker runs while nobody asks anything; gateways stay, and hold what comes until a worker is there."""

    idle_after: Annotated[
        Duration,
        Satisfies("!self.matches('^([0-9]+[hms])+$') || duration(self) >= duration('10s')", "must be at least 10s"),
    ] = "15m"
    """Both roles go to zero replicas when no gateway has had a request for so long. The next request wakes the model:
    each role gets its `scaling.min`."""
    standby: Annotated[Standby | None, Change.WORKERS] = None
    """Pods that stay meanwhile, with their nodes' resources, and serve as soon as they have read the weights. None stay
    where it is left out."""


class Autoscaling(Authored):
    """How roles with the mode `SLO` are scaled."""

    gpu_budget: Annotated[int, Field(ge=1, le=1_000_000)] | None = None
    """Devices that the replicas of both roles may take together; a replica has one for each rank, tensor x pipeline x
    expert x data. Without it `max` of each role is the only bound."""
    priority: Annotated[int, Field(ge=-1000, le=1000)] = 0
    """Among the models of the namespace that follow demand, where a ResourceQuota on GPUs of their kind, for example
    `requests.nvidia.com/gpu`, does not hold all that they want: higher ones grow first, and lower ones give up what
    they have beyond `scaling.min`."""
    role_ratio: RoleRatio = Field(default_factory=RoleRatio)
    """Prefill replicas per decode replica."""
    behavior: ScalingBehavior = Field(default_factory=ScalingBehavior)
    """How eagerly replicas follow."""
    scale_to_zero: ScaleToZero | None = None
    """Let the model sleep while nobody uses it. Needs both roles to have the mode `SLO`; while both are `Static` it is
    not looked at."""
    dry_run: bool = False
    """Decide and tell in `status.scaling`, and move nothing. A request still wakes a model that sleeps."""
