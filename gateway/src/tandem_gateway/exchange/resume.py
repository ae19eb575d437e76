"""Streams that outlive their worker: what is kept of them, and how they have fared.

When a decode worker is gone, the same request goes to another one of its revision with the journal of its stream
(`http.journal`) before it, and that worker's events follow on.

Pure: no sockets, no clock. Whether a stream may move is `recovery`'s to say, and who carries it out is `exchange`.
"""

from __future__ import annotations

from tandem_api.journal import MAX_JOURNAL_BYTES

from tandem_gateway.exchange.recovery import JournalState
from tandem_gateway.http.budget import FREE_BYTES, Budget
from tandem_gateway.http.journal import JournaledStream

SECONDS = 30.0
"""A stream waits this long for somebody who takes it over: its client sees a pause."""
_GROWN_BYTES = 16 * 1024


class Continuation:
    """How one stream has moved, and what its next move goes by. It has begun: its client has seen an event."""

    __slots__ = (
        "_accounted",
        "_deaths",
        "_events_seen",
        "_stalls",
        "deadline",
        "moves",
        "reason",
        "revision",
        "stream",
    )

    def __init__(self, stream: JournaledStream, revision: str) -> None:
        self.stream = stream
        self.revision = revision
        """The only one whose workers can go on."""
        self.moves = 0
        """Times that another worker took it over."""
        self.reason = ""
        """Why the stream moves now."""
        self.deadline = 0.0
        """When the move under way has to be over."""
        self._events_seen = 0
        self._stalls = 0
        self._deaths = 0
        self._accounted = 0

    @property
    def held_bytes(self) -> int:
        return len(self.stream.journal)

    def note_failure(self, reason: str, now: float, *, fatal: bool) -> JournalState:
        """Its worker has failed it. Returns how it stands: the time for a move begins with the first failure after an
        event."""
        stream = self.stream
        if not stream.keeps:
            return JournalState(kept=False)
        if stream.events != self._events_seen or not self.reason:
            self._events_seen = stream.events
            self._stalls = 0
            self.deadline = now + SECONDS
            self.reason = reason
        self._stalls += fatal
        self._deaths += fatal
        return JournalState(stalls=self._stalls, deaths=self._deaths, late=now >= self.deadline)

    def end_move(self) -> str:
        """Another worker goes on. Returns why it had to."""
        self.moves += 1
        return self.reason

    def has_changed(self) -> bool:
        """The journal has grown by enough to be accounted for, or is not kept any more. Called now and then."""
        size = len(self.stream.journal)
        if size > MAX_JOURNAL_BYTES:
            self.stream.stop_keeping()
        if not self.stream.keeps:
            return True
        grown = size > self._accounted + _GROWN_BYTES
        if grown:
            self._accounted = size
        return grown


def may_keep(budget: Budget, body_bytes: int) -> bool:
    """Whether a request's body may be kept after its stream began: others' requests come first."""
    return body_bytes <= FREE_BYTES or budget.used <= budget.limit // 2
