"""Requests that cost far more than the bytes that ask for them: one in each turn of the event loop, in order.

Between two of them everybody else has a turn, however many clients ask at once.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

from tandem_gateway.errors import RequestError
from tandem_gateway.http.connection import ClientConnection

LARGE_BYTES = 256 * 1024
"""What a request may have read and copied for it at once: a millisecond's work."""


class Deferred:
    """What a connection waits with until its request's turn. Satisfies `http.connection.Conversation`."""

    delivering = False

    def __init__(
        self, held_bytes: int, work: Callable[[], None], drop: Callable[[], None], abort: Callable[[], None]
    ) -> None:
        self.held_bytes = held_bytes
        self.gone = False
        self.work = work
        self.drop = drop
        self.abort = abort

    def stop(self, error: RequestError) -> None:
        self.gone = True
        self.abort()

    def on_client_gone(self) -> None:
        self.gone = True

    def on_client_slow(self) -> None: ...

    def on_client_ready(self) -> None: ...


class Turns:
    """Belongs to one event loop."""

    def __init__(self) -> None:
        self._waiting: deque[Deferred] = deque()

    def __len__(self) -> int:
        return len(self._waiting)

    def add(
        self,
        connection: ClientConnection,
        work: Callable[[], None],
        *,
        held_bytes: int = 0,
        drop: Callable[[], None] = lambda: None,
    ) -> None:
        """Do `work` in a turn of its own, which answers the connection or hands it to who does; then `drop`, also where
        the client has gone by then. `held_bytes` are held for it meanwhile."""
        connection.exchange = deferred = Deferred(held_bytes, work, drop, connection.transport.abort)
        self._waiting.append(deferred)
        if len(self._waiting) == 1:
            asyncio.get_running_loop().call_soon(self._next)

    def _next(self) -> None:
        deferred = self._waiting.popleft()
        if self._waiting:
            asyncio.get_running_loop().call_soon(self._next)
        try:
            if not deferred.gone:
                deferred.work()
        except BaseException:
            deferred.abort()  # nobody else answers it: its client would wait for as long as it likes
            raise
        finally:
            deferred.drop()
