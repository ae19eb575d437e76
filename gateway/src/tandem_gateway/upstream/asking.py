"""One question at a time to one worker, whose whole answer comes in one call."""

from __future__ import annotations

from tandem_gateway.http.response import ResponseHead
from tandem_gateway.upstream.base import Call, Failure
from tandem_gateway.upstream.http1 import Http1Link


class Asker:
    """Base of who asks; owned by one event loop. A question ends in one call of `on_answer`, `on_too_large` or
    `on_failure`, or in none where it is given up. Satisfies `base.Sink`."""

    def __init__(self, address: str, *, connect_seconds: float, most_bytes: int) -> None:
        """An answer of more than `most_bytes` is not read to its end."""
        self.link = Http1Link(address, connect_seconds=connect_seconds, on_stale=lambda: None)
        self._most_bytes = most_bytes
        self._call: Call | None = None
        self._status = 0
        self._body = bytearray()

    @property
    def is_open(self) -> bool:
        """A question is under way."""
        return self._call is not None

    def send(self, head: bytes) -> None:
        """Ask, with a complete header of a request without a body; an open question is given up for it."""
        self.give_up()
        self._status = 0
        self._body.clear()
        self._call = self.link.start(self, head, b"")

    def give_up(self) -> None:
        """Wait for an answer no longer. Safe where none is awaited."""
        call, self._call = self._call, None
        if call is not None:
            call.cancel()

    def stop(self) -> None:
        """It is asked no more."""
        self.give_up()
        self.link.close()

    def on_answer(self, status: int, body: bytes) -> None:
        """The answer, complete."""
        raise NotImplementedError

    def on_too_large(self) -> None:
        """The answer is longer than it may be."""
        raise NotImplementedError

    def on_failure(self, failure: Failure) -> None:
        """There is no answer."""
        raise NotImplementedError

    def on_upstream_head(self, head: ResponseHead) -> None:
        self._status = head.status

    def on_upstream_body(self, data: bytes, *, final: bool) -> None:
        if len(self._body) + len(data) > self._most_bytes:
            self.give_up()
            self.on_too_large()
        else:
            self._body += data

    def on_upstream_end(self) -> None:
        self._call = None
        self.on_answer(self._status, bytes(self._body))

    def on_upstream_failure(self, failure: Failure, detail: str) -> None:
        self._call = None
        self.on_failure(failure)
