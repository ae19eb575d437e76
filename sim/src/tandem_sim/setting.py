"""What a replay runs on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from tandem_api.names import Role
from tandem_operator.autoscale.plan.contract import Target

from tandem_sim.fleet import StartUp
from tandem_sim.profiles import WorkerProfile
from tandem_sim.workers import NEVER


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """A worker is lost with all that it has; a new one starts in its place."""

    at: float
    role: Role
    index: int = 0
    """Position among the ready replicas."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What a replay runs on."""

    prefill: WorkerProfile | None
    """None: decode workers compute prompts themselves, in chunks beside their answers (aggregated serving)."""
    decode: WorkerProfile
    replicas: Mapping[Role, int]
    """Ready at the beginning."""
    start_up: StartUp = field(default_factory=StartUp)
    ttft: Target
    tpot: Target
    deadlines: bool = True
    """Prompts are computed by their deadlines, late ones behind; else in the order in which they come."""
    hold_seconds: float | None = 1.0
    """The gateway keeps a request while every prefill worker has more work than this; None: it keeps none."""
    queue_seconds: float = NEVER
    """A request that the gateway has kept for so long is turned away (`gateway.queue.ttl`)."""
    local_tokens: int = 0
    """Prompts of at most so many tokens are computed by their decode worker while prefill workers are behind
    (convertible decoders, by a rule of thumb)."""
    convert_step_seconds: float | None = None
    """Decode workers compute prompts where the gateway decides so, as the product's does (`hold_seconds` is None then):
    a step with a part of such a prompt takes so long, and `decode.chunk_tokens` are what fits into it."""
    failures: Sequence[Failure] = ()
    seed: int = 1
