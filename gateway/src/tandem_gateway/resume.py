"""Streams that outlive their worker: what is kept of them, and how they have fared.

A decode worker that was asked to writes marks between its events (`tandem_api.journal`). Events are passed on only up
to the last mark that is here, so what the client has seen and the journal never disagree. When the worker is gone, the
same request goes to another one of its revision with the journal before it, and that worker's events follow on.

Pure: no sockets, no clock. Whether a stream may move is `recovery`'s to say, and who carries it out is `exchange`.
"""

from __future__ import annotations

from typing import Any

from tandem_api.journal import MARK, MAX_JOURNAL_BYTES, MOVED, USAGE

from tandem_gateway.http.budget import FREE_BYTES, Budget
from tandem_gateway.recovery import Journal
from tandem_gateway.sse import MAX_EVENT_BYTES, TAIL_BYTES, EventStream, EventTooLarge

SECONDS = 30.0
"""A stream waits this long for somebody who takes it over: its client sees a pause."""
_LINE = b"\n" + MARK
_GROWN_BYTES = 16 * 1024
_USAGE_FIELDS = 3


class JournaledStream(EventStream):
    """Takes a stream apart: events for the client, marks for the journal. O(1) per read of one marked unit."""

    __slots__ = ("_partial", "_searched", "head", "journal", "keeps")

    def __init__(self, head: bytes) -> None:
        """`head` is what the worker said in the header."""
        super().__init__()
        self.head = head
        self.journal = bytearray()
        """Once it is not kept any more, its last line alone."""
        self.keeps = True
        self._partial: bytes = b""
        self._searched = 0
        """So many bytes of what is held have no mark."""

    def feed(self, data: bytes) -> bytes:
        """Events to pass on now, possibly none. While the journal is kept, everything returned is committed.

        Raises:
            EventTooLarge: neither a mark nor the end of an event within MAX_EVENT_BYTES.
        """
        # Most reads are the events of one mark, and the mark.
        start = data.find(_LINE) + 1
        if start and not self._partial and data.find(b"\n", start) == len(data) - 1 and not data.startswith(MARK):
            self._note(data[start:])
            data = data[:start]
        else:
            data = self._take_apart(data)
            if not data:
                return data
        self.events += data.count(b"\n\n")
        self._previous = self._last
        self._last = data if len(data) <= TAIL_BYTES else self._cut_tail(data)
        return data

    @property
    def held_bytes(self) -> int:
        return len(self._partial) + super().held_bytes

    def _take_apart(self, data: bytes) -> bytes:
        data = self._partial + data
        events: list[bytes] = []
        position = 0
        while True:
            if data.startswith(MARK, position):
                start = position
            elif (found := data.find(_LINE, max(position, self._searched))) >= 0:
                start = found + 1
            else:
                searched = len(data) - len(_LINE)
                break
            end = data.find(b"\n", start) + 1
            if not end:
                searched = start - 1
                break
            events.append(data[position:start])
            self._note(data[start:end])
            position = end
        self._partial = data[position:]
        self._searched = max(0, searched - position)
        if len(self._partial) > MAX_EVENT_BYTES:
            events.append(self._let_go())
        return b"".join(events)

    def _note(self, line: bytes) -> None:
        if not self.keeps:
            self.journal.clear()
        self.journal += line

    def _let_go(self) -> bytes:
        """Too much for one mark: its events go to the client as they come, and the stream stays where it is."""
        border = self._partial.rfind(b"\n\n") + 2
        if border < 2:
            raise EventTooLarge
        events, self._partial = self._partial[:border], self._partial[border:]
        self._searched = 0
        self.stop_keeping()
        return events

    def read_usage(self) -> dict[str, Any] | None:
        """What the worker has told this gateway alone, in the last mark."""
        line = self.journal[self.journal.rfind(b"\n", 0, -1) + 1 :]
        counts = line[len(USAGE) :].split() if line.startswith(USAGE) else []
        if len(counts) != _USAGE_FIELDS or not all(count.isdigit() for count in counts):
            return None
        prompt, cached, output = map(int, counts)
        details = {"cached_tokens": cached}
        return {"prompt_tokens": prompt, "completion_tokens": output, "prompt_tokens_details": details}

    @property
    def moved(self) -> bool:
        """The worker said that the stream is to go on elsewhere."""
        return self.journal.endswith(MOVED)

    def build_prefix(self) -> bytes:
        """What goes before the body of the request that continues this stream."""
        return b"%b\n%b" % (self.head, self.journal)

    def restart(self) -> None:
        """Another worker goes on: what the first one did not commit is dropped."""
        self._partial = b""
        self._searched = 0
        if self.moved:
            del self.journal[-len(MOVED) :]

    def stop_keeping(self) -> None:
        self.keeps = False
        self.journal = bytearray()


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

    def note_failure(self, reason: str, now: float, *, fatal: bool) -> Journal:
        """Its worker has failed it. Returns how it stands: the time for a move begins with the first failure after an
        event."""
        stream = self.stream
        if not stream.keeps:
            return Journal(kept=False)
        if stream.events != self._events_seen or not self.reason:
            self._events_seen = stream.events
            self._stalls = 0
            self.deadline = now + SECONDS
            self.reason = reason
        self._stalls += fatal
        self._deaths += fatal
        return Journal(stalls=self._stalls, deaths=self._deaths, late=now >= self.deadline)

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
