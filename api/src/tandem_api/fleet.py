"""What a gateway knows of its workers: `GET /fleet` of its metrics port, which the operator reads from each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Literal

from pydantic import FailFast, Field, FiniteFloat, NonNegativeFloat

from tandem_api.base import Wire
from tandem_api.names import Role
from tandem_api.telemetry import Count, WorkerTelemetry

FLEET_PATH = "/fleet"
WAITING_PATH = "/fleet/waiting"
"""The same report, given as soon as a request is under way, or after `WAITING_SECONDS`."""
WAITING_SECONDS = 20.0
TTFT_BOUNDS = (0.05, 0.1, 0.25, 0.5, 1.0, 2.0, 3.0, 5.0, 10.0, 20.0, 30.0, 60.0, 120.0)
"""Upper bounds, in seconds, of the buckets of `WorkerReport.ttft_counts`; a last one has none."""
MOST_WORKERS = 10_000
"""Workers of one report. Who reads it stops at the first worker beyond, and at the first that cannot be read."""
LONGEST_TEXT = 1000
_Text = Annotated[str, Field(max_length=LONGEST_TEXT)]
"""Names of Kubernetes and addresses are shorter."""


class WorkerReport(Wire):
    """One worker as one gateway sees it. Counts run from when this gateway first saw this worker at this address."""

    name: _Text
    """The pod; of a group of pods its leader."""
    address: _Text
    role: Role
    revision: _Text
    state: Literal["Admitted", "Ejected"]
    """Whether requests may go to it now."""
    reason: _Text | None = None
    """Why it is ejected: the name of the failure, as in the metric."""
    requests: Count = 0
    """Attempts at it that have ended, whether or not another worker made good for them; but for those that clients gave
    up, and those that it declined because it is loading or stopping."""
    failures: Count = 0
    """Those that failed: no connection, 401, 5xx, connections that broke, timeouts, streams that ended in an error. Of
    prefill workers: prompts that they were named for and did not compute."""
    ttft_counts: Annotated[list[Count], Field(max_length=64), FailFast()] = Field(default_factory=list[int])
    """Streams by the seconds from sending the request to the first token, by `TTFT_BOUNDS`, each bucket by itself.
    Answers in one piece do not tell. Empty for prefill workers."""
    telemetry: WorkerTelemetry | None = None
    """The last sample that this gateway has of it."""
    telemetry_age: NonNegativeFloat | None = None
    """Seconds since that sample was read."""


class StartingReport(Wire):
    """A worker that is not ready."""

    name: _Text
    """The pod."""
    address: _Text
    waits_for: _Text
    """What it says that it is doing: `loading weights`."""


class Traffic(Wire):
    """Requests that one gateway has taken since it started, and those that wait in it now. Totals only grow."""

    requests: Count = 0
    """Arrived. One that is sent to another worker after a failure counts once."""
    prompt_tokens: Count = 0
    """Tokens of their prompts; estimated from bytes when they arrive."""
    prompt_squares: NonNegativeFloat = 0.0
    """Sum of the squares of their prompt tokens: tells how unequal they are."""
    computed_prompt_tokens: Count = 0
    """Prompt tokens of answers whose usage is known, cached ones included."""
    computed_tokens: Count = 0
    """Those of them that were not cached."""
    finished: Count = 0
    """Answers that ended well."""
    output_tokens: Count = 0
    """Tokens of these answers."""
    waiting_requests: Count = 0
    """Now, for a worker to appear."""
    waiting_tokens: Count = 0
    """Prompt tokens of those."""
    idle_seconds: NonNegativeFloat | None = None
    """Since a request was last under way, or since the gateway started; 0 while one is. Absent from gateways of a
    release that does not measure it."""


class FleetReport(Wire):
    """One gateway's view of its model."""

    gateway: _Text
    """The pod."""
    started_at: FiniteFloat
    """Unix seconds."""
    at: FiniteFloat
    """Unix seconds of this report."""
    served_names: Annotated[list[str], FailFast()] = Field(default_factory=list[str])
    """Names that this gateway takes as `model`."""
    canary_percent: float | None = None
    """Share of new requests that goes to the canary's workers, as this gateway was told."""
    workers: Annotated[list[WorkerReport], Field(max_length=MOST_WORKERS), FailFast()] = Field(
        default_factory=list[WorkerReport]
    )
    starting: Annotated[list[StartingReport], Field(max_length=MOST_WORKERS), FailFast()] = Field(
        default_factory=list[StartingReport]
    )
    """Workers that are not ready and tell what they wait for."""
    traffic: Traffic | None = None
    """Absent from gateways of a release that does not count it."""


def percentile_bounds(counts: Sequence[int], share: float) -> tuple[float, float]:
    """Seconds that the percentile `share` (0 to 1) of `WorkerReport.ttft_counts` surely lies between. Above the last
    bound there is no end.

    Raises:
        ValueError: nothing was counted.
    """
    _, index, _ = _bucket(counts, share)
    low = TTFT_BOUNDS[index - 1] if index else 0.0
    return low, TTFT_BOUNDS[index] if index < len(TTFT_BOUNDS) else float("inf")


def percentile(counts: Sequence[int], share: float) -> float:
    """The percentile in seconds, by a straight line through its bucket; of the last one its lower bound."""
    below, index, rank = _bucket(counts, share)
    low, high = percentile_bounds(counts, share)
    if high == float("inf"):
        return low
    return low + (high - low) * (rank - below) / counts[index]


def _bucket(counts: Sequence[int], share: float) -> tuple[int, int, float]:
    """Requests below the bucket that the percentile is in, its index, and the rank that is looked for."""
    rank, below = share * sum(counts), 0
    for index, count in enumerate(counts):
        if count and below + count >= rank:
            return below, index, rank
        below += count
    raise ValueError("there is no percentile of nothing")
