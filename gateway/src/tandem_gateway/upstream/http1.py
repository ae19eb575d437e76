"""The plain HTTP/1.1 link to one worker: a pool of kept-alive connections, one call on each at a time.

A connection returns to the pool only after a complete answer that allows reuse and that nothing followed; every other
end closes it. Cancelling a call closes its connection, which is how a worker learns that the client went away.

An idle connection may close under a request. One that does says that the others are dead, too: the pool is discarded,
and the request goes to another worker, or where there is none is sent once more, over a fresh connection. It may also
be the request that ended the worker: one that cannot be sent again then has failed by a reset, and `resent` tells that
two sends may have been fatal.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
from collections.abc import Callable

from tandem_gateway.upstream.base import Failure, Sink
from tandem_gateway.upstream.http1_connection import WorkerConnection

IDLE_SECONDS = 15.0
MAX_IDLE = 256
RESTART_SECONDS = 0.05
"""Before a request is sent again: a process that dies closes its connections before its listener, which accepts in
between what nobody will read, and which then cannot be told from a second death."""
_OURS = frozenset((errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM, errno.EADDRNOTAVAIL))
"""What connecting fails with when it is this process, or its machine, that lacks something."""


class Http1Link:
    """The connections between this gateway and one worker."""

    def __init__(
        self,
        address: str,
        *,
        connect_seconds: float,
        on_stale: Callable[[], None],
        idle_seconds: float = IDLE_SECONDS,
    ) -> None:
        """`on_stale` is told of every request that is sent again because its idle connection had closed. Connections
        that are idle for `idle_seconds` are closed, which is to be before the worker does."""
        host, _, port = address.rpartition(":")
        self.host = host.strip("[]")
        self.port = int(port)
        self._connect_seconds = connect_seconds
        self._on_stale = on_stale
        self._idle_seconds = idle_seconds
        self._idle: list[WorkerConnection] = []
        self._closed = False
        self._dials: set[asyncio.Task[None]] = set()

    def start(
        self,
        sink: Sink,
        head: bytes,
        body: bytes,
        *,
        fresh: bool = False,
        elsewhere: Callable[[], bool] | None = None,
    ) -> Http1Call:
        call = Http1Call(self, sink, head, body, elsewhere)
        if self._idle and not fresh:
            connection = self._idle.pop()
            if connection.is_quiet():
                connection.carry(call, reused=True)
                return call
            connection.abort()
            self.discard()
        self._start_dial(call)
        return call

    def restart(self, call: Http1Call) -> None:
        """The idle connection that got this call was dead, or is since."""
        call.restarted = True
        self.discard()
        self._on_stale()
        self._start_dial(call, RESTART_SECONDS)

    def _start_dial(self, call: Http1Call, after: float = 0.0) -> None:
        # The set keeps the task alive: the event loop holds only a weak reference.
        call.dial = task = asyncio.get_running_loop().create_task(self._dial(call, after))
        self._dials.add(task)
        task.add_done_callback(self._dials.discard)

    async def _dial(self, call: Http1Call, after: float) -> None:
        loop = asyncio.get_running_loop()
        if after:
            await asyncio.sleep(after)
        try:
            async with asyncio.timeout(self._connect_seconds):
                _, connection = await loop.create_connection(lambda: WorkerConnection(self), self.host, self.port)
        except TimeoutError:
            call.fail_to_connect(Failure.CONNECT, f"no connection within {self._connect_seconds:g} s")
            return
        except OSError as error:
            failure = Failure.LOCAL if error.errno in _OURS else Failure.CONNECT
            call.fail_to_connect(failure, error.strerror or str(error))
            return
        call.dial = None
        call.resent = call.restarted
        connection.carry(call, reused=False)

    def release(self, connection: WorkerConnection, now: float) -> None:
        """Back into the pool, youngest last: reuse keeps few connections warm and lets the others age out."""
        if self._closed or len(self._idle) >= MAX_IDLE:
            connection.abort()
            return
        connection.idle_since = now
        self._idle.append(connection)

    def forget(self, connection: WorkerConnection) -> None:
        with contextlib.suppress(ValueError):
            self._idle.remove(connection)

    def discard(self) -> None:
        """Close every idle connection."""
        while self._idle:
            self._idle.pop().abort()

    def reap(self, now: float) -> None:
        while self._idle and self._idle[0].idle_since < now - self._idle_seconds:
            self._idle.pop(0).abort()

    def close(self) -> None:
        self._closed = True
        self.discard()


class Http1Call:
    """One request on one connection. `sink` is None once the call has ended."""

    __slots__ = ("_elsewhere", "_link", "body", "connection", "dial", "head", "paused", "resent", "restarted", "sink")

    def __init__(
        self, link: Http1Link, sink: Sink, head: bytes, body: bytes, elsewhere: Callable[[], bool] | None
    ) -> None:
        self._link = link
        self.sink: Sink | None = sink
        self.head = head
        self.body = body
        self.connection: WorkerConnection | None = None
        self.dial: asyncio.Task[None] | None = None
        """Gets it a connection, which nobody wants of a call that has ended."""
        self.paused = False
        self._elsewhere = elsewhere
        self.restarted = False
        """The idle connection that it was sent over ended without a word."""
        self.resent = False
        """And it was sent over another."""

    @property
    def held_bytes(self) -> int:
        """What is not taken stays in the socket."""
        return 0

    def cancel(self) -> None:
        self.sink = None
        self.forget_request()
        if self.dial is not None:
            self.dial.cancel()
        if self.connection is not None:
            self.connection.abort()

    def forget_request(self) -> None:
        """It will not be sent again. The exchange keeps what it needs of it."""
        self.head = self.body = b""

    def fail(self, failure: Failure, detail: str) -> None:
        sink, self.sink = self.sink, None
        self.forget_request()
        if sink is not None:
            sink.on_upstream_failure(failure, detail)

    def fail_to_connect(self, failure: Failure, detail: str) -> None:
        if self.restarted and failure is not Failure.LOCAL:
            # It was sent once: who accepts nobody any more may have died of it.
            self.fail(Failure.RESET, f"the worker closed the connection and could not be reached again: {detail}")
        else:
            self.fail(failure, detail)

    def restart(self) -> None:
        if self.sink is None:
            return
        self.connection = None
        if self._elsewhere is not None and self._elsewhere():
            self._link.discard()
            self.fail(Failure.STALE, "an idle connection to the worker ended")
        else:
            self._link.restart(self)

    def pause_reading(self) -> None:
        if self.connection is not None and not self.paused:
            self.paused = True
            self.connection.transport.pause_reading()

    def resume_reading(self) -> None:
        if self.connection is not None and self.paused:
            self.paused = False
            self.connection.transport.resume_reading()
