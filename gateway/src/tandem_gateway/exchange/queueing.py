"""Requests that wait in this gateway while no worker serves: who may, until when, and when they are sent on.

`scheduling.queue` decides; what waits here is counted, bounded in number by the settings and in bytes by the budget of
all bodies, which holds a body from when it is read until its answer begins, whether or not it waits in between.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Protocol

from tandem_api.launch import GatewayQueue

from tandem_gateway.errors import NoEndpoint, QueueFull, RequestError
from tandem_gateway.records.metrics import Metrics
from tandem_gateway.scheduling import Endpoint, Scheduler, missing_role
from tandem_gateway.scheduling.queue import DeadlineQueue, Ramp, Slot, Ticket, find_due

MOST_AT_ONCE = 256
"""Requests sent on in one turn of the event loop: some 10 ms of it."""


class Waiter(Protocol):
    """An exchange, as its queue sees it."""

    __slots__ = ()

    def dispatch(self, full: Collection[str] = ...) -> bool:
        """Send the request to a worker that is not `full`, give back its ticket by `RequestQueue.take`. False: there is
        none."""
        ...

    def turn_away(self, error: RequestError) -> None:
        """Its place is somebody else's."""
        ...


class RequestQueue:
    """The queue of one gateway."""

    def __init__(
        self, settings: GatewayQueue, scheduler: Scheduler, metrics: Metrics, *, on_join: Callable[[], None]
    ) -> None:
        """`on_join`: called when a request has come to wait."""
        self.settings = settings
        """A change holds for who comes to wait from then on."""
        self.line: DeadlineQueue[Waiter] = DeadlineQueue()
        self._ramp = Ramp()
        self._scheduler = scheduler
        self._metrics = metrics
        self._on_join = on_join

    @property
    def enabled(self) -> bool:
        """Whether anybody may come to wait."""
        return self.settings.max_requests > 0 and self.settings.ttl_seconds > 0

    def join(self, waiter: Waiter, *, arrived: float, tokens: int, now: float, source: str = "") -> Ticket[Waiter]:
        """Let it wait. Where as many wait as may, somebody of a source with more places goes instead.

        Raises:
            NoEndpoint: nobody may wait.
            QueueFull: as many wait as may, and no source has more places than `source`.
        """
        if not self.enabled:
            raise self.refuse()
        settings = self.settings
        if not self.line.size:
            self._ramp.forget()  # the last one before may have left by itself
        full = self.line.size >= settings.max_requests
        excess = self.line.find_excess(source) if full else None
        if full and excess is None:
            self._metrics.queue_waits["full"] += 1
            raise QueueFull(
                f"{self.line.size} requests wait for a worker of this model already, as many as may; try again shortly",
                self.find_backlog(),
            )
        ticket = self.line.add(waiter, find_due(arrived, tokens, settings.ttft_target), tokens, now, source)
        if excess is not None and excess.item is not None:
            # Afterwards: what its client asks next must not find a free place.
            excess.item.turn_away(
                QueueFull(
                    "as many requests wait as may, and most of them are of this client's address; try again shortly",
                    self.find_backlog(),
                )
            )
        self._on_join()
        return ticket

    def refuse(self) -> NoEndpoint:
        """What a request is told that waits no longer."""
        return NoEndpoint(f"{self.explain()}; try again shortly", self.find_backlog())

    def find_backlog(self) -> float | None:
        """Seconds that what waits here and at workers will take them."""
        return self._scheduler.find_backlog(self.line.tokens)

    def explain(self) -> str:
        """Why nobody serves."""
        return missing_role(self._scheduler.endpoints.values())

    def leave(self, ticket: Ticket[Waiter], outcome: str, now: float) -> float:
        """It waits no more. Returns the seconds that it did."""
        self.line.remove(ticket)
        seconds = max(0.0, now - ticket.since)
        self._metrics.count_wait(outcome, seconds)
        return seconds

    def take(self, endpoint: Endpoint, now: float, *, stream: bool) -> Slot:
        """A request that waited goes to this decode worker."""
        return self._ramp.take(endpoint, now, stream=stream)

    def place(self, now: float) -> None:
        """Send on who waits, the first due first, as far as workers take more. O(log n) each."""
        ramp, line = self._ramp, self.line
        ramp.begin_turn(now)
        for _ in range(MOST_AT_ONCE):
            waiter = line.first()
            if waiter is None:
                ramp.forget()
                return
            if not waiter.dispatch(ramp.full):
                return
