"""Everything that happens because time passes."""

from __future__ import annotations

import asyncio
import time

from tandem_gateway.process.admin import Admin
from tandem_gateway.process.gateway import Gateway
from tandem_gateway.process.reception import Reception

TICK_SECONDS = 0.1
"""Resolution of all deadlines and of the token ledger. One timer for all requests: timers of their own would cost more
than the requests' own work."""


class Clock:
    def __init__(self, gateway: Gateway, reception: Reception, admin: Admin) -> None:
        self._gateway = gateway
        self._reception = reception
        self._admin = admin

    async def run(self) -> None:
        """Never returns."""
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(TICK_SECONDS)
            self.tick(loop.time())

    def tick(self, now: float) -> None:
        gateway = self._gateway
        gateway.follow_keys()
        if gateway.certificate is not None:
            gateway.certificate.refresh(now)
        gateway.scheduler.tick(now)
        if gateway.responses is not None:
            gateway.responses.store.expire(time.monotonic())
        for exchange in tuple(gateway.exchanges):
            exchange.tick(now)
        gateway.place_waiting()
        self._reception.tick(now)
        gateway.upstreams.reap(now)
        if gateway.access_log is not None:
            gateway.access_log.flush()
        self._admin.tick(now)
