"""The native link to one worker: one connection for all calls, kept open, and what happens while there is none.

A call that finds no connection waits for the one that is being made, as long as connecting may take. A worker that does
not speak this version of the link is asked over HTTP from then on, calls that wait included: it says so itself, and the
log, the metrics and `/debug/endpoints` say it, too. What is at its address may be replaced, so that the link is tried
again now and then. Whatever else goes wrong fails the calls, as it would over HTTP, and the link is tried again.

When this gateway's key changes it greets anew, over another connection, and asks over the former one until the worker
has answered: what runs there ends there.
"""

from __future__ import annotations

import asyncio
import errno
import logging
from collections.abc import Callable
from typing import Protocol

from tandem_api import link
from tandem_api.link import Goodbye, Hello

from tandem_gateway.http.response import ResponseHead
from tandem_gateway.scheduling import Worker
from tandem_gateway.upstream.base import Call, Failure, Link, Sink
from tandem_gateway.upstream.native_connection import LinkConnection, LinkEnded, NativeCall

BACKOFF_FIRST, BACKOFF_LONGEST = 0.25, 5.0
"""Seconds before a lost link is made again while nobody needs it: a call that does begins at once."""
REFUSED_FIRST, REFUSED_LONGEST = 1.0, 30.0
"""The same where the worker speaks another version."""
_OURS = frozenset((errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM, errno.EADDRNOTAVAIL))
log = logging.getLogger(__name__)


class Watcher(Protocol):
    """Who hears what workers say of their own accord."""

    def on_link_sample(self, worker: Worker, payload: bytes) -> None:
        """The JSON of a sample."""
        ...

    def on_link_drain(self, worker: Worker) -> None:
        """It takes no new requests."""
        ...

    def on_link_end(self, worker: Worker, code: str) -> None:
        """A link has ended, or did not come about."""
        ...


class NativeLink:
    def __init__(
        self, worker: Worker, http: Link, *, greet: Callable[[], Hello], connect_seconds: float, watcher: Watcher
    ) -> None:
        """`http`: the link to the same worker that takes over where it cannot speak this one. `greet` gives what
        to begin with."""
        host, _, port = worker.link_address.rpartition(":")
        self._host, self._port = host.strip("[]"), int(port)
        self.worker = worker
        self._http = http
        self._greet = greet
        self._connect_seconds = connect_seconds
        self._watcher = watcher
        self._connection: LinkConnection | None = None
        """The one that carries new calls."""
        self._former: set[LinkConnection] = set()
        """Others, until their last calls have ended."""
        self._outdated = False
        """The connection was greeted with another key than this gateway's present one."""
        self._waiting: dict[_Waiting, None] = {}
        self._dialing: asyncio.Task[None] | None = None
        self._retry_at = 0.0
        self._pause = BACKOFF_FIRST
        self._closed = False
        self.refused: str | None = None
        """Why HTTP is used instead."""

    @property
    def state(self) -> str:
        """`native`, `connecting`, or `http_version` where the worker speaks another version."""
        if self.refused is not None:
            return "http_version"
        return "connecting" if self._connection is None else "native"

    @property
    def ping_seconds(self) -> float | None:
        """How long the worker took for its last sign of life."""
        return None if self._connection is None else self._connection.ping_seconds

    def start(
        self,
        sink: Sink,
        head: bytes,
        body: bytes,
        *,
        fresh: bool = False,
        elsewhere: Callable[[], bool] | None = None,
    ) -> Call:
        if self.refused is not None or len(head) > link.MAX_PAYLOAD:
            return self._http.start(sink, head, body, fresh=fresh, elsewhere=elsewhere)
        connection = self._connection
        if connection is None or connection.worn:
            waiting = _Waiting(self._waiting, sink, head, body)
            self._dial_now()
            return waiting
        call = NativeCall(sink, head, body)
        if connection.full:
            detail = f"the worker takes {len(connection.calls)} requests at a time"
            asyncio.get_running_loop().call_soon(call.fail, Failure.CONNECT, detail)
        else:
            connection.carry(call)
        return call

    def renew(self) -> None:
        """This gateway's key has changed: greet anew with it, be there a connection or not."""
        self._outdated = True
        self._pause, self._retry_at = BACKOFF_FIRST, 0.0

    def reap(self, now: float) -> None:
        self._http.reap(now)
        self._tick(now)
        if (self._connection is None or self._outdated) and now >= self._retry_at and not self._closed:
            self._dial_now()

    def _tick(self, now: float) -> None:
        if self._connection is not None:
            self._connection.tick(now)
        for each in tuple(self._former):
            each.tick(now)

    def close(self) -> None:
        self._closed = True
        self._http.close()
        if self._dialing is not None and not self._waiting:
            self._dialing.cancel()
        connection = self._connection
        if connection is not None and not connection.calls:
            connection.end(LinkEnded(Goodbye.CLOSING, "this gateway has no more requests"))
        self._watch_on()

    def _watch_on(self) -> None:
        """Nobody calls `reap` any more, and calls are still under way: the worker has to hear of this gateway."""
        loop = asyncio.get_running_loop()
        if self._connection is not None or self._former:
            self._tick(loop.time())
            loop.call_later(link.PING_SECONDS / 2, self._watch_on)

    # connecting

    def _dial_now(self) -> None:
        if self._dialing is None:
            self._dialing = asyncio.get_running_loop().create_task(self._dial())

    async def _dial(self) -> None:
        loop = asyncio.get_running_loop()
        connection: LinkConnection | None = None
        try:
            async with asyncio.timeout(self._connect_seconds):
                _, connection = await loop.create_connection(self._build_connection, self._host, self._port)
                self._know(connection, await connection.greeted)
            if connection.ended is not None:
                raise connection.ended
        except TimeoutError:
            step = "connection" if connection is None else "greeting"
            self._on_refused(LinkEnded("connect", f"no {step} within {self._connect_seconds:g} s"))
        except OSError as error:
            code = "local" if error.errno in _OURS else "connect"
            self._on_refused(LinkEnded(code, error.strerror or str(error)))
        except LinkEnded as end:
            self._on_refused(end)
        else:
            self._on_greeted(connection)
            return
        finally:
            self._dialing = None
        if connection is not None and connection.ended is None:
            connection.transport.abort()

    def _build_connection(self) -> LinkConnection:
        self._outdated = False
        return LinkConnection(self, self._greet())

    def _know(self, connection: LinkConnection, hello: Hello) -> None:
        """An address is given to the next pod before everybody has heard that the last one has gone."""
        expected = self.worker.pod_name
        if expected and hello.name and hello.name != expected:
            text = f"pod {hello.name!r} answers at the address of {expected!r}"
            connection.end(LinkEnded("stranger", text))

    def _on_greeted(self, connection: LinkConnection) -> None:
        former, self._connection = self._connection, connection
        self._pause, self.refused = BACKOFF_FIRST, None
        if former is not None:
            self._former.add(former)
            self.on_idle(former)
        log.info("a worker is linked", extra={"worker": self.worker.name})
        self._resolve(self.start)
        if self._closed:
            self.close()

    def _on_refused(self, end: LinkEnded) -> None:
        """No link came about."""
        self._outdated = True
        self._watcher.on_link_end(self.worker, end.code)
        known, self.refused = self.refused, str(end) if end.code == Goodbye.VERSION else self.refused
        self._back_off()
        if known is not None:
            return
        if self.refused is not None:
            log.warning(
                "a worker does not speak this version of the link; it is asked over HTTP",
                extra={"worker": self.worker.name, "reason": str(end)},
            )
            self._resolve(self._http.start)
            return
        log.warning("no link to a worker", extra={"worker": self.worker.name, "reason": str(end), "code": end.code})
        waiting, self._waiting = self._waiting, {}
        for each in tuple(waiting):
            if end.code == Goodbye.UNAUTHORIZED:
                each.answer(ResponseHead(401, [], {}))
            else:
                each.fail(Failure.LOCAL if end.code == "local" else Failure.CONNECT, str(end))

    def _resolve(self, start: Callable[[Sink, bytes, bytes], Call]) -> None:
        """Those that waited are on their way."""
        waiting, self._waiting = self._waiting, {}
        for each in waiting:
            if each.sink is None:
                continue
            each.call = start(each.sink, each.head, each.body)
            each.head = each.body = b""
            if each.paused:
                each.call.pause_reading()

    def _back_off(self) -> None:
        refused = self.refused is not None
        pause = max(self._pause, REFUSED_FIRST) if refused else self._pause
        self._retry_at = asyncio.get_running_loop().time() + pause
        self._pause = min(REFUSED_LONGEST if refused else BACKOFF_LONGEST, 2 * pause)

    # of the connection

    def on_sample(self, payload: bytes) -> None:
        self._watcher.on_link_sample(self.worker, payload)

    def on_drain(self) -> None:
        self._watcher.on_link_drain(self.worker)

    def on_idle(self, connection: LinkConnection) -> None:
        if not connection.calls and (self._closed or connection is not self._connection):
            connection.end(LinkEnded(Goodbye.CLOSING, "this gateway has no more requests"))

    def on_lost(self, connection: LinkConnection, end: LinkEnded, calls: list[NativeCall]) -> None:
        self._former.discard(connection)
        if connection is self._connection:
            self._connection = None
            self._back_off()
        elif not calls:
            return
        if not self._closed:
            self._watcher.on_link_end(self.worker, end.code)
            told = {"worker": self.worker.name, "reason": str(end), "code": end.code, "requests": len(calls)}
            log.log(logging.INFO if end.code == Goodbye.CLOSING else logging.WARNING, "a link has ended", extra=told)
        for call in calls:
            call.fail(Failure.RESET, str(end))


class _Waiting:
    """A call while its link is made, and then the one who is asked in its stead."""

    __slots__ = ("_among", "body", "call", "head", "paused", "sink")

    def __init__(self, among: dict[_Waiting, None], sink: Sink, head: bytes, body: bytes) -> None:
        self.sink: Sink | None = sink
        """None: it was given up, or has ended."""
        self.head = head
        self.body = body
        self.call: Call | None = None
        self.paused = False
        self._among = among
        among[self] = None

    @property
    def held_bytes(self) -> int:
        return 0 if self.call is None else self.call.held_bytes

    @property
    def resent(self) -> bool:
        return self.call is not None and self.call.resent

    def cancel(self) -> None:
        self.sink = None
        self.head = self.body = b""
        self._among.pop(self, None)
        if self.call is not None:
            self.call.cancel()

    def pause_reading(self) -> None:
        self.paused = True
        if self.call is not None:
            self.call.pause_reading()

    def resume_reading(self) -> None:
        self.paused = False
        if self.call is not None:
            self.call.resume_reading()

    def fail(self, failure: Failure, detail: str) -> None:
        sink, self.sink = self.sink, None
        if sink is not None:
            sink.on_upstream_failure(failure, detail)

    def answer(self, head: ResponseHead) -> None:
        """In the worker's stead, without a body."""
        if self.sink is not None:
            self.sink.on_upstream_head(head)
        sink, self.sink = self.sink, None
        if sink is not None:
            sink.on_upstream_end()
