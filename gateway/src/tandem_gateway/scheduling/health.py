"""Which workers get no requests for a while: a circuit breaker per worker, as pure state.

A worker is *out* after a failure that speaks for itself, or after several in a row that may be the requests' fault. Its
pauses double. After a pause it is *half open*: one request at a time probes it, another one where that takes long, and
only an answer lets the others follow. That it cannot serve at all (`hard`) counts always; a suspicion never takes out
the last of its pool, nor more than half of it.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from tandem_api.names import RETRY_REQUEST

_RETRY_REQUEST = RETRY_REQUEST.encode()


class Outcome(Enum):
    """How an attempt at a worker went."""

    ANSWERED = "answered"
    """With anything that is the client's business, a 4xx included."""
    REFUSED = "refused"
    """It did not accept the connection."""
    UNAUTHORIZED = "unauthorized"
    """It does not take this gateway's key."""
    DRAINING = "draining"
    """It is about to stop."""
    RESET = "reset"
    """The connection broke, or carried something that is not HTTP. A worker that has died refuses the next one."""
    BUSY = "busy"
    """429, or 503: it takes no more for now."""
    ERROR = "error"
    """Any other 5xx."""
    TIMEOUT = "timeout"
    """Nothing came in the time that a first token may take, for this request or another."""
    LATE = "late"
    """The same, from a worker that answered others in that time."""
    SILENT = "silent"
    """It owes answers and has shown no sign of life for much longer than they should take."""
    SLOW = "slow"
    """It computes prompts at a fraction of its neighbours' speed."""
    UNUSED = "unused"
    """A prefill worker that the decode worker was told to use, and did not."""


@dataclass(frozen=True, slots=True)
class Rule:
    """What an outcome costs a worker."""

    threshold: int
    """Failures in a row, of any kind, before it is out."""
    first: float
    longest: float
    """Seconds it is out, at first and at most."""
    hard: bool = False
    """It cannot serve: out even when it is the last."""


_HARD = Rule(1, 0.5, 3.0, hard=True)
"""Short, because a model with one replica has nobody else to ask while its pod restarts in place."""
RULES = {
    Outcome.REFUSED: _HARD,
    Outcome.UNAUTHORIZED: _HARD,
    Outcome.DRAINING: _HARD,
    Outcome.RESET: Rule(1, 0.5, 3.0),
    Outcome.BUSY: Rule(1, 0.25, 2.0),
    Outcome.ERROR: Rule(3, 1.0, 30.0),
    Outcome.TIMEOUT: Rule(1, 2.0, 30.0),
    Outcome.LATE: Rule(3, 2.0, 30.0),
    Outcome.SILENT: Rule(1, 2.0, 30.0),
    Outcome.SLOW: Rule(1, 10.0, 60.0),
    Outcome.UNUSED: Rule(2, 1.0, 15.0),
}
SERVES_OLD = frozenset((Outcome.BUSY, Outcome.ERROR, Outcome.SLOW, Outcome.UNUSED))
"""Left out for these, a worker goes on with what it has: only the answer to a probe ends its pause."""


def classify_status(status: int, retry: bytes | None) -> Outcome:
    """What an answer's status says about the worker that sent it. `retry`: its `names.HEADER_RETRY`."""
    if status == 401:
        return Outcome.UNAUTHORIZED
    if status in (429, 503) and retry == _RETRY_REQUEST:
        return Outcome.ERROR
    if status == 503 and retry is not None:
        return Outcome.DRAINING
    if status in (429, 503):
        return Outcome.BUSY
    if status >= 500:
        return Outcome.ERROR
    return Outcome.ANSWERED


class Health:
    """Failures and pauses of one worker."""

    __slots__ = ("ejections", "failures", "pauses", "probe", "probe_until", "reason", "total", "until")

    def __init__(self) -> None:
        self.failures = 0
        """In a row."""
        self.pauses = 0
        """In a row, without an answer between them."""
        self.total = 0
        """Failures ever."""
        self.ejections = 0
        """Ever."""
        self.until = 0.0
        """When the pause ends."""
        self.reason: Outcome | None = None
        """Why the last pause was made."""
        self.probe: object | None = None
        """While half open: the request that tries, or `WANTED`."""
        self.probe_until = 0.0
        """When another request tries."""

    def fail(self, outcome: Outcome) -> float:
        """Count a failure; the seconds for which the worker is to be left out, or 0."""
        rule = RULES[outcome]
        self.failures += 1
        self.total += 1
        if self.failures < rule.threshold and self.probe is None:
            return 0.0
        return min(rule.longest, rule.first * 2.0 ** min(self.pauses, 16))

    def open(self, until: float, reason: Outcome) -> None:
        """Leave it out."""
        self.reason = reason
        self.pauses += 1
        self.ejections += 1
        self.until = until
        self.probe = None

    def half_open(self) -> None:
        self.probe = WANTED

    def succeed(self) -> None:
        self.failures = self.pauses = 0
        self.until = 0.0
        self.probe = None


WANTED = object()
"""The worker is half open and nobody has tried yet."""
