"""Streams with a journal: events for the client, taken apart from what their worker notes between them.

A decode worker that was asked to writes marks between its events (`tandem_api.journal`). Events are passed on only up
to the last mark that is here, so what the client has seen and the journal never disagree.
"""

from __future__ import annotations

from typing import Any

from tandem_api.journal import MARK, MOVED, USAGE

from tandem_gateway.http.sse import MAX_EVENT_BYTES, TAIL_BYTES, EventStream, EventTooLarge

_LINE = b"\n" + MARK
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
