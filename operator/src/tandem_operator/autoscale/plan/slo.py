"""Whether clients get what `spec.slo` says, as far as it is measured. Pure.

Gateways count streams by seconds to the first token, in buckets and not by the length of prompts: the target is taken
at the mean prompt, and where it lies inside a bucket that decides, nothing is claimed. The time of an output token is
that of a decode step, in the mean over the workers that decode: time spent waiting between steps does not show.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from tandem_api.fleet import percentile_bounds

from tandem_operator.autoscale.plan.contract import Snapshot, Target

WINDOW_SECONDS = 120.0
FEWEST_STREAMS = 20
"""Below which a percentile says nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """What the last `WINDOW_SECONDS` measured."""

    ttft_counts: Sequence[int] = ()
    """Streams by seconds to the first token, in the buckets of the gateways' reports."""
    prompt_tokens: float | None = None
    """Mean of a prompt."""
    step_seconds: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Attainment:
    """Whether both targets are met; None: not known."""

    met: bool | None
    reason: str
    message: str

    @property
    def status(self) -> Literal["True", "False", "Unknown"]:
        return "Unknown" if self.met is None else "True" if self.met else "False"


def measure(window: Sequence[tuple[Snapshot, Sequence[int]]]) -> Measured:
    """From snapshots with the streams counted up to each, the oldest first."""
    if not window:
        return Measured()
    (first, before), (last, after) = window[0], window[-1]
    known = [*before, *[0] * (len(after) - len(before))]
    counts = [new - old for new, old in zip(after, known, strict=True)]
    requests = tokens = 0
    if first.counters is not None and last.counters is not None:
        requests = last.counters.requests - first.counters.requests
        tokens = last.counters.prompt_tokens - first.counters.prompt_tokens
    steps = [
        state.mean_step_seconds
        for snapshot, _ in window
        for state in snapshot.roles.values()
        if state.mean_step_seconds is not None
    ]
    return Measured(
        ttft_counts=counts,
        prompt_tokens=tokens / requests if requests > 0 else None,
        step_seconds=sum(steps) / len(steps) if steps else None,
    )


def judge(ttft: Target, tpot: Target, measured: Measured) -> Attainment:
    """Both targets against what was measured."""
    first, token = _judge_ttft(ttft, measured), _judge_tpot(tpot, measured)
    parts = [first, token]
    message = "; ".join(part.message for part in parts)
    if (missed := next((part for part in parts if part.met is False), None)) is not None:
        return Attainment(met=False, reason=missed.reason, message=message)
    if (unknown := next((part for part in parts if part.met is None), None)) is not None:
        return Attainment(met=None, reason=unknown.reason, message=message)
    return Attainment(met=True, reason="TargetsMet", message=message)


def _judge_ttft(target: Target, measured: Measured) -> Attainment:
    count = sum(measured.ttft_counts)
    if count < FEWEST_STREAMS or measured.prompt_tokens is None:
        text = f"{count} streams began in {WINDOW_SECONDS:.0f} s, and {FEWEST_STREAMS} tell a percentile"
        return Attainment(met=None, reason="TooFewStreams", message=text)
    limit = target.limit(measured.prompt_tokens)
    low, high = percentile_bounds(measured.ttft_counts, target.percentile)
    name = f"{100 * target.percentile:.0f}% of first tokens came within"
    goal = f"the target at {measured.prompt_tokens:.0f} prompt tokens is {limit:.3g} s"
    if high <= limit:
        return Attainment(met=True, reason="TargetsMet", message=f"{name} {high:g} s, {goal}")
    if low >= limit:
        return Attainment(met=False, reason="TTFTMissed", message=f"{name} more than {low:g} s, {goal}")
    text = f"{name} {low:g} to {high:g} s, {goal}: gateways count in no finer steps"
    return Attainment(met=None, reason="BetweenBounds", message=text)


def _judge_tpot(target: Target, measured: Measured) -> Attainment:
    if measured.step_seconds is None:
        return Attainment(met=None, reason="NothingDecoded", message="no decode step has been measured lately")
    text = f"a decode step takes {measured.step_seconds:.3g} s, the target is {target.seconds:.3g} s"
    met = measured.step_seconds <= target.seconds
    return Attainment(met=met, reason="TargetsMet" if met else "TPOTMissed", message=text)
