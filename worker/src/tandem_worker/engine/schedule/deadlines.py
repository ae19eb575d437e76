"""The order of prompts where first tokens have a target: earliest deadline first, within bounds.

A deadline is at most one level of priority after the arrival, and a prompt that is late whatever happens is put behind
those that are not, as far as one level and once. So nobody is overtaken by requests of its level that come later than
that, and of two that come together the one of the higher level is first whatever their lengths.
"""

from __future__ import annotations

from tandem_api.launch import TTFTDeadline

from tandem_worker.engine.schedule.request import Request


def find_place(request: Request, target: TTFTDeadline | None, seconds_per_priority: float) -> float:
    """The time by which a request is ordered. Its arrival without a target, and where its client has tokens already."""
    level = request.arrival + request.priority * seconds_per_priority
    if target is None or request.resumed is not None:
        return level
    return level + min(seconds_per_priority, target.limit(request.num_uncached))


def find_late_place(request: Request, seconds_per_priority: float) -> float:
    """The same, of one that is late whatever happens."""
    return request.arrival + (request.priority + 1) * seconds_per_priority


def is_late(request: Request, target: TTFTDeadline, now: float, tokens_per_second: float | None) -> bool:
    """Whether the first token misses its target even if nothing else is computed from now on. A rate that is not known
    counts as endless.
    """
    tokens = request.num_uncached
    work = tokens / tokens_per_second if tokens_per_second else 0.0
    return now + work > request.arrival + target.limit(tokens)
