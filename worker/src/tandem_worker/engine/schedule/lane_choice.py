"""Which of several batches that run side by side takes a request.

A lane has a scheduler and a block space of its own; a request stays in the lane that it was given to.
"""

from __future__ import annotations

from collections.abc import Sequence

from tandem_worker.engine.schedule.request import Request
from tandem_worker.engine.schedule.scheduler import Scheduler


def choose_lane(lanes: Sequence[Scheduler], request: Request) -> int:
    """The lane with the fewest tokens once it has the request: those in its contexts, those queued, and those of the
    request that its prefix cache does not have."""

    def tokens_with(lane: Scheduler) -> int:
        size = lane.blocks.block_size
        cached = lane.count_cached(request.prompt_chain[: (len(request.prompt) - 1) // size])
        return lane.queues.running_tokens + lane.queues.queued_prefill_tokens - cached * size

    return min(range(len(lanes)), key=lambda index: tokens_with(lanes[index]))
