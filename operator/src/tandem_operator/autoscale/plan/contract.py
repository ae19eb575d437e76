"""What the planner is given and what it answers. Seconds, tokens and replicas throughout; times share one clock."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from tandem_api.names import Role

from tandem_operator.autoscale.plan.gpus import NO_GPUS, Gpus

COMPONENTS = {"prefill": Role.PREFILL, "decode": Role.DECODE}
"""Worker roles by the name of their field in the spec. Workers that do both have the field `decode`."""
SHARE_SECONDS = 60.0
"""The time over which `RoleState.busy` and `RoleState.transfer_share` are measured."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """So many of the requests take at most so long."""

    percentile: float = 0.95
    """Between 0 and 1."""
    seconds: float
    seconds_per_token: float = 0.0
    """For every prompt token besides, of a target for the first token."""

    def limit(self, tokens: float) -> float:
        """Seconds allowed to a request with so many prompt tokens."""
        return self.seconds + self.seconds_per_token * tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleSpec:
    """Bounds of one role."""

    min: int = 1
    max: int
    gpus: int = 1
    """What one replica takes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Behavior:
    """How eagerly replicas follow."""

    scale_down_seconds: float = 600.0
    """Replicas go only once nothing has asked for them for so long: the stabilization window."""
    falling_seconds: float = 60.0
    """The least window while demand falls, and chance does not explain it: it is as long as a start, and never longer
    than that of steady demand."""
    stale_seconds: float = 30.0
    """Older telemetry moves nothing."""
    start_seconds: float = 60.0
    """A replica's start-up time until one has been seen."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tuning:
    """Terms of the planner that can be switched off, to see what each is worth."""

    deviations: float = 1.0
    """Standard deviations of demand added to its mean (z)."""
    steady: bool = True
    """The mean is taken over as long as demand was the same."""
    trend: bool = True
    jump: bool = True
    backlog: bool = True
    bursts: bool = True
    """Nothing is ordered for bursts that are over before it comes."""
    joint: bool = True
    """Decode is sized for what prefill will send while prefill has a backlog."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalingSpec:
    """What is wanted of one model."""

    roles: Mapping[Role, RoleSpec]
    """Without `PREFILL`, decode replicas compute prompts too (aggregated serving)."""
    ttft: Target
    tpot: Target
    """Mean seconds per output token of a request, after the first."""
    gpu_budget: int | None = None
    budget_name: str = "GPU budget"
    """What a decision calls it where it limits."""
    min_ratio: float = 0.0
    """Prefill replicas per decode replica."""
    max_ratio: float = float("inf")
    queue_seconds: float = float("inf")
    """After which a request that waits in a gateway is turned away."""
    first_token_seconds: float = float("inf")
    """After which one that waits for its first token elsewhere is given up."""
    behavior: Behavior = field(default_factory=Behavior)
    tuning: Tuning = field(default_factory=Tuning)

    def __post_init__(self) -> None:
        """Raises ValueError where no number of replicas would do."""
        for role, own in self.roles.items():
            if not 1 <= own.min <= own.max:
                raise ValueError(f"{role.value}: min ({own.min}) must be at least 1 and at most max ({own.max})")
        least = sum(own.min * own.gpus for own in self.roles.values())
        if self.gpu_budget is not None and least > self.gpu_budget:
            raise ValueError(f"the minimums take {least} GPUs, and gpuBudget is {self.gpu_budget}: raise it to {least}")
        if self.min_ratio > self.max_ratio:
            raise ValueError(f"the least ratio ({self.min_ratio}) exceeds the largest ({self.max_ratio})")

    @property
    def prompt_role(self) -> Role:
        """The role whose replicas compute prompts."""
        return Role.PREFILL if Role.PREFILL in self.roles else Role.DECODE


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleState:
    """One role as telemetry tells it, summed or averaged over its ready replicas. None: nobody measures it."""

    replicas: int
    """Asked for at present."""
    ready: int
    warming: int = 0
    """Asked for and not yet ready: they are coming, and they can do nothing."""
    queued_requests: int = 0
    queued_tokens: int = 0
    """Uncached prompt tokens not yet computed, those that gateways hold included."""
    waiting_tokens: int = 0
    """Those that gateways hold."""
    running_requests: int = 0
    kv_tokens_used: int = 0
    kv_tokens_total: int = 0
    busy: float | None = None
    """Share of the time in which a replica computes."""
    tokens_per_second: float | None = None
    """Prompt tokens that a replica computes per second while it is busy: its velocity."""
    step_seconds: float | None = None
    """A decode step, in the mean over the replicas that decode; where steps make several tokens of an answer, the time
    between two of them."""
    mean_step_seconds: float | None = None
    """The same with the replicas that are `odd`: what clients get."""
    mixed_step_seconds: float | None = None
    """The same of steps that compute prompts beside answers."""
    decoding: int | None = None
    """How many replicas these are; None: all that are ready."""
    transfer_share: float | None = None
    """Share of the bandwidth of the busiest link for keys and values that is used."""
    starts: tuple[float, ...] = ()
    """Seconds that replicas took to become ready, the newest last."""
    gpus: Gpus = NO_GPUS
    odd: tuple[str, ...] = ()
    """Replicas whose velocity or steps are so unlike those of most others that they are left out of these."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Counters:
    """Totals since some moment in the past."""

    requests: int
    """Arrived at gateways."""
    prompt_tokens: int
    """Tokens of those requests' prompts."""
    prompt_squares: float
    """Sum of the squares of their prompt tokens: tells how unequal they are."""
    computed_prompt_tokens: int
    """Tokens of prompts that workers have computed, cached ones included."""
    computed_tokens: int
    """Those that were not cached."""
    finished: int
    output_tokens: int
    """Tokens of the finished answers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """A model's fleet at one moment."""

    at: float
    """When it was measured."""
    roles: Mapping[Role, RoleState]
    counters: Counters | None
    """None: no gateway tells what arrives."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleDecision:
    """What a role should have, and why."""

    replicas: int
    observed: int
    """Replicas that were asked for before."""
    required: int
    """What demand alone would take, without bounds, budget and patience."""
    limit: str
    """What decided: a target, a bound, the budget, ..."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """The planner's answer."""

    at: float
    roles: Mapping[Role, RoleDecision]
    held: str = ""
    """Why nothing may move, or empty."""
    reason: str = ""
    """The same in one CamelCase word; also of a model that sleeps, which is not held."""
    inputs: Mapping[str, float] = field(default_factory=dict[str, float])
    sentence: str = ""
    """Desired, observed, limit and inputs in words."""
    needs: Mapping[Role, int] = field(default_factory=dict[Role, int])
    """Replicas below which a scale-down would miss a target: remembered for the stabilization window."""

    @property
    def replicas(self) -> dict[Role, int]:
        return {role: decision.replicas for role, decision in self.roles.items()}
