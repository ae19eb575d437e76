"""How many replicas meet both targets where each computes prompts beside answers (aggregated serving). Pure.

Such a replica takes steps of two kinds: some only decode, others compute a chunk of a prompt too and last longer, and
in both each answer gets one token. So prompts are computed at the speed that answers' tokens leave of a mixed step, and
a token takes the longer the more of the time prompts are computed in. What is measured: steps that only decode, mixed
steps, and tokens per second of a mixed step's share for prompts, which is what all of its tokens take.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf, sqrt
from statistics import NormalDist

from tandem_operator.autoscale.plan.contract import Target
from tandem_operator.autoscale.plan.sizing import (
    KV_MARGIN,
    MOST_REPLICAS,
    TPOT_MARGIN,
    Answers,
    Prompts,
    StepModel,
    share_late,
)

_ROUNDS = 60
"""In which the time of a token and the answers that run settle."""
_SETTLED = 1e-4
TTFT, TPOT, KV = "TTFT target", "TPOT target", "KV blocks"


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedReplica:
    """What a replica that does both can do."""

    steps: StepModel
    """The time of steps that only decode."""
    extra: float = inf
    """Seconds by which a step that computes prompts too is longer; inf, where that is not measured: answers are taken
    to stand still in it."""
    velocity: float
    """Tokens per second of a mixed step, those of answers counted."""
    kv_tokens: float
    """Tokens that fit into its blocks."""

    def prompt_speed(self, sequences: float, step: float) -> float:
        """Prompt tokens per second while prompts are computed, beside so many answers with decode steps of so long."""
        return self.velocity - sequences / (step + self.extra)

    def mix(self, step: float, share: float) -> float:
        """Mean seconds of a token where prompts are computed in this share of the time."""
        return 1 / ((1 - share) / step + share / (step + self.extra))

    def largest_share(self, step: float, seconds: float) -> float:
        """Share of the time in which prompts may be computed so that a token takes so long at most."""
        if step + self.extra <= seconds:
            return 1.0
        return max(0.0, (1 / step - 1 / seconds) / (1 / step - 1 / (step + self.extra)))


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedDemand:
    """What comes to all replicas together."""

    tokens: float
    """Uncached prompt tokens per second."""
    requests: float
    """Per second."""
    prompts: Prompts
    answers: Answers
    deviations: float
    """Standard deviations of what runs that are added to its mean."""
    held: float = 0.0
    """Tokens of context that are held now: fewer are not planned for."""


def size_shared(demand: SharedDemand, replica: SharedReplica, ttft: Target, tpot: Target) -> tuple[int, str]:
    """The fewest replicas that meet both targets and hold all answers, and what one fewer would miss."""
    low, high, missed = 0, 1, TTFT
    while (found := find_missed(high, demand, replica, ttft, tpot)) and high < MOST_REPLICAS:
        low, high, missed = high, min(MOST_REPLICAS, 2 * high), found
    while high - low > 1:
        count = (low + high) // 2
        if found := find_missed(count, demand, replica, ttft, tpot):
            low, missed = count, found
        else:
            high = count
    return high, missed


def find_missed(replicas: int, demand: SharedDemand, replica: SharedReplica, ttft: Target, tpot: Target) -> str:
    """What so many replicas would miss; empty: nothing.

    Answers that run follow from the time of a token (Little's law), and that from the answers that run: the fixed point
    is found from below. Of an answer's time w, prompts take the share y in the mean with the variance y S (1 + c²) / w,
    where a prompt takes S with the squared coefficient of variation c² (compound Poisson arrivals): that share is to
    stay below the largest one for as many answers as the target says.
    """
    prompts, answers = demand.prompts, demand.answers
    rate, limit = demand.tokens / replicas, TPOT_MARGIN * tpot.seconds
    seconds = step = replica.steps.base
    share = speed = 0.0
    for _ in range(_ROUNDS):
        running = demand.requests * answers.output * seconds
        running += demand.deviations * sqrt(running * (1 + answers.variation))
        context = max(running * answers.context, demand.held) / replicas
        if context > KV_MARGIN * replica.kv_tokens:
            return KV
        step = replica.steps.base + replica.steps.slope * context
        speed = replica.prompt_speed(context / answers.context, step)
        if step > limit or speed <= 0:
            return TPOT
        share = rate / speed
        if share >= 1:
            return TTFT
        longer = replica.mix(step, share)
        if longer <= seconds * (1 + _SETTLED):
            break
        seconds = longer
    if not answers.output:
        most = 1.0  # no token waits for prompts: only scores or vectors are asked for
    elif seconds > limit:
        return TPOT
    else:
        most = replica.largest_share(step, limit)
    if rate:
        if most < 1:
            service = prompts.uncached / speed
            deviation = sqrt(share * service * (1 + prompts.variation) / (answers.output * tpot.seconds))
            if share + NormalDist().inv_cdf(tpot.percentile) * deviation > most:
                return TPOT
        if share_late(replicas, demand.tokens, prompts, speed, ttft) > 1 - ttft.percentile:
            return TTFT
    return ""
