"""Decode side: how long an order may take. Pure.

A peer's engine that moves on is progress only for an order that it has not begun: that one waits in a queue, and its
reserved blocks are there for others. From START on only its own blocks count, and all of them have a time to come in:
by the length of the prompt and the pace that the peer has shown.
"""

from __future__ import annotations

from tandem_worker.transfer.contract import TransferTimeouts
from tandem_worker.transfer.decode.attempt import Attempt

_RATE_FLOOR = 100.0
_UNKNOWN_RATE = 1000.0
_SLACK = 10.0


class PrefillPace:
    """Prompt tokens per second of one peer, from START to the end of an order."""

    def __init__(self) -> None:
        self._rate: float | None = None

    def observe(self, num_tokens: int, seconds: float) -> None:
        """Take in a prompt that took `seconds`; it counts a fifth, all before it four fifths."""
        if seconds > 0:
            rate = num_tokens / seconds
            self._rate = rate if self._rate is None else 0.8 * self._rate + 0.2 * rate

    def allow(self, num_tokens: int) -> float:
        """Seconds in which a sound peer surely computes and sends so many tokens, whatever else it computes."""
        rate = _UNKNOWN_RATE if self._rate is None else max(self._rate, _RATE_FLOOR)
        return _SLACK * num_tokens / rate


def judge_order(
    attempt: Attempt,
    now: float,
    *,
    watching_since: float,
    engine_progressed_at: float,
    timeouts: TransferTimeouts,
    pace: PrefillPace,
) -> str | None:
    """Why an order is given up; None while it may go on. `watching_since`: nothing before that is the peer's fault."""
    assert attempt.order is not None
    begun = attempt.started_at
    progressed = attempt.last_progress
    others_bring_it = attempt.reception is not None and attempt.reception.complete
    if not attempt.arrived and (begun is None or others_bring_it):  # what has arrived needs the engine no more
        progressed = max(progressed, engine_progressed_at)
    if now - max(progressed, watching_since) > timeouts.stall:
        return f"no progress for {timeouts.stall:g} s"
    if begun is None:
        return None if waited(attempt, now, watching_since) <= timeouts.queue else f"not begun in {timeouts.queue:g} s"
    limit = timeouts.stall + pace.allow(len(attempt.order.token_ids))
    if not attempt.arrived and now - max(begun, watching_since) > limit:
        return f"not done {limit:.0f} s after it was begun"
    return None


def waited(attempt: Attempt, now: float, watching_since: float) -> float:
    """Seconds that an order has not been begun."""
    return 0.0 if attempt.started_at is not None else now - max(attempt.ordered_at, watching_since)
