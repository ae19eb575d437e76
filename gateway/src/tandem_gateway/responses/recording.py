"""One answer of the Responses API on its way through: it gets the id by which clients know it, and is kept.

What a worker says of `id`, `store` and `previous_response_id` is true of the worker, which stores nothing; clients are
told what is true of the gateway. An answer is kept when its worker has called it complete, or cut at its limit of
tokens; one that fails or breaks off is not.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from typing import Any

import orjson

from tandem_gateway.http.journal import JournaledStream
from tandem_gateway.http.response import ResponseHead
from tandem_gateway.http.sse import EventStream
from tandem_gateway.requests.prompt import Said
from tandem_gateway.responses.conversation import write_head, write_output
from tandem_gateway.responses.store import ResponseStore, Turn

log = logging.getLogger(__name__)
_TELLS = re.compile(rb"^event: response\.(?:created|queued|in_progress|completed|incomplete|failed)\r?\n", re.M)
"""Events that have the response in them."""
_BORDER = re.compile(rb"\r?\n\r?\n")
_DATA = re.compile(rb"^data: ?", re.M)
_NOTHING = Said()
_ENDS = frozenset(("completed", "incomplete"))
_FAILS = frozenset(("failed", "cancelled"))


class Recording:
    """Records the response to one request. `hold` and `close` frame it."""

    __slots__ = ("_clock", "_given", "_id", "_kept", "_parent", "_previous", "_store", "_tenant")

    def __init__(
        self,
        store: ResponseStore,
        *,
        tenant: bytes,
        name: str | None,
        given: Said,
        parent: Turn | None,
        previous: str | None,
        clock: Callable[[], float],
    ) -> None:
        """`name`: the id under which the answer is kept; None: it is not."""
        self._store = store
        self._tenant = tenant
        self._id = name
        self._given = given if name is not None else _NOTHING
        self._parent = parent
        self._previous = previous
        self._clock = clock
        self._kept: bool | None = None
        """None: not yet."""

    @property
    def held_bytes(self) -> int:
        return len(self._given.items)

    def hold(self) -> None:
        """The request is under way: what it continues stays."""
        if self._parent is not None:
            self._parent.hold()

    def close(self) -> None:
        """It has ended."""
        parent, self._parent, self._given = self._parent, None, _NOTHING
        if parent is not None:
            self._store.release(parent)

    def follow(self, head: ResponseHead, stream: EventStream | None) -> EventStream | None:
        """Take part in an answer that begins. Returns the stream to read it with; None: it comes in one piece."""
        if stream is not None:
            return RecordedJournal(self, stream.head) if isinstance(stream, JournaledStream) else RecordedStream(self)
        before = head.rewrite
        head.rewrite = self.rewrite if before is None else lambda body: self.rewrite(before(body))
        return None

    def rewrite(self, body: bytes) -> bytes:
        """An answer in one piece, as the client gets it."""
        return self._rewrite(body, None)

    def rewrite_events(self, data: bytes) -> bytes:
        """Whole events of a stream, as the client gets them: those about the response as a whole are rewritten, all
        others pass as they are."""
        found = _TELLS.search(data)
        if found is None:
            return data
        parts: list[bytes] = []
        position = 0
        while found is not None:
            begins = _DATA.search(data, found.end())
            border = _BORDER.search(data, found.end())
            if begins is None or border is None or begins.end() > border.start():
                break
            told = self._rewrite(data[begins.end() : border.start()], "response")
            parts += [data[position : begins.end()], told]
            position = border.start()
            found = _TELLS.search(data, position)
        return b"".join(parts) + data[position:]

    def _rewrite(self, text: bytes, member: str | None) -> bytes:
        try:
            whole: Any = orjson.loads(text)
            response: Any = whole if member is None else whole[member]
            self._tell(response)
            return orjson.dumps(whole)
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            log.warning("a worker's response cannot be read; it is not kept", extra={"error": str(error)})
            return text

    def _tell(self, response: dict[str, Any]) -> None:
        """What is true of it here, in place."""
        if self._id is not None:
            response["id"] = self._id
        response["previous_response_id"] = self._previous
        status = response.get("status")
        response["store"] = stored = self._id is not None and status not in _FAILS and self._kept is not False
        if stored and self._kept is None and status in _ENDS:
            response["store"] = self._keep(response)

    def _keep(self, response: dict[str, Any]) -> bool:
        assert self._id is not None
        self._kept = self._store.keep(
            self._tenant,
            self._id,
            head=write_head(response),
            given=self._given,
            output=write_output(response),
            parent=self._parent,
            now=self._clock(),
        )
        self._given = _NOTHING
        return self._kept


class RecordedStream(EventStream):
    """A stream as its client gets it."""

    __slots__ = ("_recording",)

    def __init__(self, recording: Recording) -> None:
        super().__init__()
        self._recording = recording

    def feed(self, data: bytes) -> bytes:
        return self._recording.rewrite_events(super().feed(data))


class RecordedJournal(JournaledStream):
    """As `RecordedStream`, of a stream that may move: the journal is about what workers wrote."""

    __slots__ = ("_recording",)

    def __init__(self, recording: Recording, head: bytes) -> None:
        super().__init__(head)
        self._recording = recording

    def feed(self, data: bytes) -> bytes:
        return self._recording.rewrite_events(super().feed(data))
