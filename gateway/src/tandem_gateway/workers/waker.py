"""Asks workers that are there and take no requests yet to take some, while requests wait for a worker.

One on standby goes on with its start when it is asked; every one answers once it serves. So nothing is waited for that
only looks now and then: no operator, no probe. An order that is lost, or whose worker has begun anew, is given again
for as long as somebody waits; one that comes twice does nothing.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from tandem_api.names import WAKE_PATH

from tandem_gateway.scheduling import Worker
from tandem_gateway.upstream.asking import Asker
from tandem_gateway.upstream.base import Failure

TICK_SECONDS = 0.05
"""Between two looks at whom to ask, while requests wait."""
PAUSES = (0.05, 0.1, 0.2, 0.4, 1.0)
"""After so many failures in a row: a pod that starts has an address before anything listens there."""
ANSWER_SECONDS = 30.0
"""Then a worker is asked again: its machine may be gone."""
AT_ONCE = 64
_UNKNOWN = 404
"""What workers answer that know no such order: they are ready when Kubernetes says so."""

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sleeper:
    """A worker that takes no requests yet."""

    worker: Worker
    pod: str
    """The uid of its pod, with the number of times that its container ended: another process is another sleeper."""


class Waker:
    """Owned by one event loop. `take` is discovery's."""

    def __init__(
        self,
        *,
        waits: Callable[[], bool],
        token_line: Callable[[], bytes],
        connect_seconds: float,
        on_awake: Callable[[Sleeper], None],
    ) -> None:
        """`waits`: whether somebody waits for one to be asked. `on_awake`: called with a worker that serves."""
        self._on_awake = on_awake
        self._waits = waits
        self.token_line = token_line
        self.connect_seconds = connect_seconds
        self._orders: dict[Sleeper, _Order] = {}
        self._poked = asyncio.Event()

    def take(self, sleepers: Iterable[Sleeper]) -> None:
        """These are there. Orders to those that stay run on."""
        before, self._orders = self._orders, {}
        for sleeper in sleepers:
            self._orders[sleeper] = before.pop(sleeper, None) or _Order(self, sleeper)
        for order in before.values():
            order.stop()

    def poke(self) -> None:
        """A request has come to wait."""
        self._poked.set()

    async def run(self) -> None:
        """Never returns."""
        loop = asyncio.get_running_loop()
        try:
            while True:
                await self._poked.wait()
                self._poked.clear()
                while self._waits():
                    self._ask(loop.time())
                    await asyncio.sleep(TICK_SECONDS)
        finally:
            self.take(())

    def _ask(self, now: float) -> None:
        asked = 0
        for order in self._orders.values():
            order.check(now)
            if asked < AT_ONCE and order.is_due(now):
                order.give(now)
            asked += order.is_open

    def on_end(self, order: _Order, *, served: bool) -> None:
        """An order has been answered, or not."""
        if served and self._orders.get(order.sleeper) is order:
            log.info("a worker serves", extra={"worker": order.sleeper.worker.name})
            self._on_awake(order.sleeper)


class _Order(Asker):
    """To one worker."""

    def __init__(self, owner: Waker, sleeper: Sleeper) -> None:
        address = sleeper.worker.address
        super().__init__(address, connect_seconds=owner.connect_seconds, most_bytes=0)
        self.sleeper = sleeper
        self._owner = owner
        self._head = f"POST {WAKE_PATH} HTTP/1.1\r\nhost: {address}\r\ncontent-length: 0\r\n".encode()
        self._failures = 0
        self._due = 0.0
        self._until = 0.0
        self._over = False
        """It serves, or knows no such order."""

    def is_due(self, now: float) -> bool:
        return not self.is_open and not self._over and now >= self._due

    def give(self, now: float) -> None:
        self._until = now + ANSWER_SECONDS
        self.send(self._head + self._owner.token_line() + b"\r\n")

    def check(self, now: float) -> None:
        """Give up one that is not answered."""
        if self.is_open and now >= self._until:
            self.give_up()

    def stop(self) -> None:
        self._over = True
        super().stop()

    def on_upstream_body(self, data: bytes, *, final: bool) -> None:
        """What it says beyond the status is nothing to anybody."""

    def on_answer(self, status: int, body: bytes) -> None:
        self._over = status in (200, _UNKNOWN)
        if not self._over:
            self._put_off()
        self._owner.on_end(self, served=status == 200)

    def on_failure(self, failure: Failure) -> None:
        self._put_off()

    def _put_off(self) -> None:
        pause = PAUSES[min(self._failures, len(PAUSES) - 1)]
        self._failures += 1
        self._due = asyncio.get_running_loop().time() + pause
