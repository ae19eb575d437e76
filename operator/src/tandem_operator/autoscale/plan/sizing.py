"""How many replicas of a role meet a target: queueing for prefill, concurrency for decode. Pure arithmetic."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, exp, sqrt

from tandem_operator.autoscale.plan.contract import Target

TPOT_MARGIN = 0.85
"""Share of the target for a token: steps are planned for this, because replicas of one role are never equally full."""
KV_MARGIN = 0.85
"""Share of a replica's blocks: above it requests begin to wait for memory."""
MOST_REPLICAS = 4096
VRAM = "VRAM"


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompts:
    """What prompts are like."""

    tokens: float
    """Mean, cached ones included."""
    uncached: float
    """Mean."""
    squares: float
    """Mean square of the uncached tokens."""

    @property
    def variation(self) -> float:
        """Squared coefficient of variation of the work."""
        return max(0.0, self.squares / self.uncached**2 - 1) if self.uncached else 0.0


def size_prefill(rate: float, prompts: Prompts, velocity: float, target: Target) -> int:
    """The fewest replicas with which so many uncached tokens per second wait short enough.

    An M/G/n queue: P(wait > t) = C(n, a) exp(-2 (n - a) t / (s (1 + c²))) with Erlang's C, the offered load a, the mean
    service time s and its squared coefficient of variation c² (Allen and Cunneen's approximation of the mean wait, with
    an exponential tail). `target` counts from arrival to first token: its own computing is taken off.
    """
    if rate <= 0:
        return 0
    service = prompts.uncached / velocity
    slack = max(0.1 * service, target.limit(prompts.tokens) - service)
    load = rate / velocity
    missed = 1 - target.percentile
    blocked = 1.0  # Erlang's B, by its recursion
    for replicas in range(1, MOST_REPLICAS):
        blocked = load * blocked / (replicas + load * blocked)
        if replicas <= load:
            continue
        if _wait_longer(blocked, replicas, load, slack / (service * (1 + prompts.variation))) <= missed:
            return replicas
    return MOST_REPLICAS


def _wait_longer(blocked: float, replicas: int, load: float, slack: float) -> float:
    """P(wait > t): of Erlang's B, and t in services of 1 + c²."""
    waits = blocked / (1 - load / replicas * (1 - blocked))
    return waits * exp(-2 * (replicas - load) * slack)


def share_late(replicas: int, rate: float, prompts: Prompts, velocity: float, target: Target) -> float:
    """Share of prompts that wait too long for the target, by the queue of `size_prefill`: 1 where they pile up."""
    load = rate / velocity
    if replicas <= load:
        return 1.0
    service = prompts.uncached / velocity
    slack = max(0.1 * service, target.limit(prompts.tokens) - service)
    blocked = 1.0
    for count in range(1, replicas + 1):
        blocked = load * blocked / (count + load * blocked)
    return _wait_longer(blocked, replicas, load, slack / (service * (1 + prompts.variation)))


@dataclass(frozen=True, slots=True, kw_only=True)
class StepModel:
    """Seconds of a decode step on a replica with so many tokens of context: `base + slope * context`."""

    base: float
    slope: float

    def context_at(self, seconds: float) -> float:
        """Tokens of context with which a step takes so long."""
        return max(0.0, (seconds - self.base) / self.slope) if self.slope > 0 else float("inf")


def fit_steps(samples: Sequence[tuple[float, float]]) -> StepModel | None:
    """From (context per replica, step seconds). None without a sample.

    Ridge regression towards a line on which half of the mean step is for its context: where all samples are alike,
    they tell no slope, and half is more than measured steps show: no replica is thought larger than it is.
    """
    seen = [(context, step) for context, step in samples if context > 0]
    if not seen:
        return None
    mean_context = sum(context for context, _ in seen) / len(seen)
    mean_step = sum(step for _, step in seen) / len(seen)
    prior = 0.5 * mean_step / mean_context
    variance = sum((context - mean_context) ** 2 for context, _ in seen) / len(seen)
    covariance = sum((context - mean_context) * (step - mean_step) for context, step in seen) / len(seen)
    weight = (0.1 * mean_context) ** 2
    slope = max(0.02 * prior, (covariance + weight * prior) / (variance + weight))
    slope = min(slope, mean_step / mean_context)
    return StepModel(base=mean_step - slope * mean_context, slope=slope)


@dataclass(frozen=True, slots=True, kw_only=True)
class Answers:
    """What answers are like."""

    context: float
    """Mean tokens of a sequence halfway through its answer."""
    output: float
    """Mean tokens."""
    variation: float
    """Squared coefficient of variation of the context."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeRoom:
    """What one decode replica can hold."""

    context: float
    """Tokens."""
    step: float
    """Seconds of a step with so many."""
    limit: str
    """Which bound it is: TPOT or KV."""

    def tokens_per_second(self, context: float) -> float:
        """Its velocity: output tokens, where sequences have so much context each."""
        return self.context / context / self.step


def find_room(model: StepModel, kv_tokens: float, target: Target) -> DecodeRoom:
    """The largest batch that meets the target and fits into the blocks."""
    room, memory = model.context_at(TPOT_MARGIN * target.seconds), KV_MARGIN * kv_tokens
    limit = "TPOT target" if room <= memory else "KV blocks"
    context = max(0.02 * memory, min(room, memory))
    return DecodeRoom(context=context, step=model.base + model.slope * context, limit=limit)


def bound_room(room: DecodeRoom, model: StepModel, held: float) -> DecodeRoom:
    """The room where the GPUs' memory is full: no more than a replica has held at most, since nobody knows that more
    fits."""
    if held <= 0 or held >= room.context:
        return room
    return DecodeRoom(context=held, step=model.base + model.slope * held, limit=VRAM)


def count_resident(rate: float, answers: Answers, room: DecodeRoom, deviations: float) -> float:
    """Tokens of context that so many requests per second hold together: Little's law, and `deviations` more.

    Sequences in service are Poisson distributed (M/G/∞), each with the context's own variance.
    """
    sequences = rate * answers.output * room.step
    return answers.context * (sequences + deviations * sqrt(sequences * (1 + answers.variation)))


def size_decode(resident: float, room: DecodeRoom) -> int:
    """The fewest replicas that hold so many tokens of context."""
    return min(MOST_REPLICAS, ceil(resident / room.context))
