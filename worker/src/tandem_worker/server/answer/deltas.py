"""From the engine thread to the requests on the event loop.

The engine calls `DeltaHub.deliver` once per step; one wake-up of the loop spreads that step's deltas over the inboxes
of the requests. Deltas of requests that nobody waits for any more (aborted, client gone) are dropped.

Except for `deliver` everything here runs on the event loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence

from tandem_worker.engine.schedule.params import FinishReason, TokenDelta
from tandem_worker.server.wire.http import ClientGoneError


class Inbox:
    """Deltas of one HTTP request (which may be several engine requests), in order of arrival."""

    __slots__ = ("_items", "_waiter", "gone", "request_ids")

    def __init__(self, request_ids: Iterable[str]) -> None:
        self.request_ids = tuple(request_ids)
        self.gone = False
        self._items: list[TokenDelta] = []
        self._waiter: asyncio.Future[None] | None = None

    def put(self, delta: TokenDelta) -> None:
        """Add a delta and wake whoever reads. On the event loop."""
        self._items.append(delta)
        self._wake()

    def disconnect(self) -> None:
        """The client is gone: wake whoever reads."""
        self.gone = True
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def get(self) -> list[TokenDelta]:
        """Everything that has arrived, at least one delta. Raises ClientGoneError."""
        if not self._items and not self.gone:
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
            self._waiter = None
        if self.gone:
            raise ClientGoneError
        items, self._items = self._items, []
        return items


class DeltaHub:
    """`deliver` is the engine's delivery function."""

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._inboxes: dict[str, Inbox] = {}

    @property
    def num_open(self) -> int:
        """Engine requests whose answer is being waited for."""
        return len(self._inboxes)

    def deliver(self, deltas: Sequence[TokenDelta]) -> None:
        """Called on the engine thread. Returns at once and never raises."""
        loop = self._loop
        if loop is None or not deltas:
            return
        try:
            # The engine may go on using its list.
            loop.call_soon_threadsafe(self._spread, tuple(deltas))
        except RuntimeError:  # the loop is closed: the process is on its way out
            return

    def _spread(self, deltas: Sequence[TokenDelta]) -> None:
        inboxes = self._inboxes
        for delta in deltas:
            inbox = inboxes.get(delta.request_id)
            if inbox is not None:
                inbox.put(delta)

    def open(self, request_ids: Iterable[str]) -> Inbox:
        """An inbox for these engine requests; call before submitting them."""
        self._loop = asyncio.get_running_loop()
        inbox = Inbox(request_ids)
        self._inboxes.update(dict.fromkeys(inbox.request_ids, inbox))
        return inbox

    def close(self, inbox: Inbox) -> None:
        """Take the inbox out; deltas that still come for its requests are dropped."""
        for request_id in inbox.request_ids:
            self._inboxes.pop(request_id, None)

    def abort_all(self, message: str) -> None:
        """End every open request: nothing more will come of it here, and another worker may take it."""
        for request_id, inbox in self._inboxes.items():
            inbox.put(TokenDelta(request_id=request_id, choice=0, finish_reason=FinishReason.ABORT, error=message))
