"""The port of the native link: who is connected and may stay, what all of them may take, and the samples they get."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import Counter
from collections.abc import Callable

from starlette.types import ASGIApp
from tandem_api import link
from tandem_api.keys import KeyRing
from tandem_api.link import Goodbye

from tandem_worker.host.errors import StartupError
from tandem_worker.server.wire.link.connection import GatewayLink
from tandem_worker.server.wire.serving import MAX_CONNECTIONS

MAX_LINKS = 128
"""Each gateway process has one. Who has not shown a key yet makes room first."""
MAX_STREAMS = MAX_CONNECTIONS
"""Requests over all links together, as over HTTP. Each link may have an equal part of them; one that is alone, all."""
_STALLED_SECONDS = 2.0
"""After so long between two ticks it was this process that stood still, not the gateways."""
WITHDRAWN_SECONDS = 600.0
"""What runs over a link whose key was withdrawn has so long to end. Its gateway asks over another one meanwhile."""
_COMPLAINT_SECONDS = 10.0
"""Links that end for the same reason are named so often in the log, however many there are."""
_log = logging.getLogger(__name__)


class LinkListener:
    """Serves an ASGI application over the native link. On one event loop."""

    def __init__(
        self,
        app: ASGIApp,
        ring: Callable[[], KeyRing],
        *,
        name: str,
        telemetry: Callable[[], bytes | None],
        max_links: int = MAX_LINKS,
        max_streams: int = MAX_STREAMS,
    ) -> None:
        """`ring` has the keys that a gateway may show; requests are the application's to judge. `telemetry` gives a
        sample as JSON, None while there is none. The application's lifespan is that of its HTTP server.
        """
        self.app = app
        self.ring = ring
        self.name = name
        self.num_streams = 0
        self.max_streams = max_streams
        self.refusals: Counter[str] = Counter(
            {Goodbye.UNAUTHORIZED: 0, Goodbye.PROTOCOL: 0, Goodbye.VERSION: 0, Goodbye.FULL: 0, "timeout": 0}
        )
        """Links that were not let in or were ended for what came over them, by reason. Grows only; read by metrics."""
        self._complain_at: dict[str, float] = {}
        self._judged_by = ring()
        """The keys by which links were last judged."""
        self._telemetry = telemetry
        self._max_links = max_links
        self._links: dict[GatewayLink, None] = {}
        self._greeted: dict[GatewayLink, None] = {}
        """Those of gateways."""
        self._server: asyncio.Server | None = None
        self._ticking: asyncio.Task[None] | None = None
        self._draining = False

    @property
    def port(self) -> int:
        """The port that it listens on."""
        assert self._server is not None
        return self._server.sockets[0].getsockname()[1]

    @property
    def num_links(self) -> int:
        """Connections, greeted or not."""
        return len(self._links)

    async def start(self, host: str, port: int) -> None:
        """Raises StartupError when the port is taken."""
        loop = asyncio.get_running_loop()
        try:
            self._server = await loop.create_server(lambda: GatewayLink(self), host, port)
        except OSError as error:
            raise StartupError("PortInUse", f"Port {port} cannot be opened at {host}: {error}") from error
        self._ticking = asyncio.create_task(self._tick())
        self._ticking.add_done_callback(_report)

    def drain(self) -> None:
        """Tell every gateway that no more requests are taken, at once."""
        self._draining = True
        for each in self._greeted:
            self._tell_draining(each)

    async def stop(self, grace_seconds: float = 1.0) -> None:
        """Take no more links, let answers end for `grace_seconds`, then end what is left."""
        if self._server is not None:
            self._server.close()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(grace_seconds):
                while self.num_streams:  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
        if self._ticking is not None:
            self._ticking.cancel()
        for each in tuple(self._links):
            each.end(Goodbye.CLOSING, "this worker ends")
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(grace_seconds):
                while self._links:  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
        for each in tuple(self._links):
            each.cancel()

    # links

    def on_open(self, connection: GatewayLink) -> bool:
        """Whether there is room; a stranger makes it."""
        if len(self._links) >= self._max_links:
            stranger = next((each for each in self._links if not each.greeted), None)
            if stranger is None:
                return False
            self._links.pop(stranger)
            stranger.end(Goodbye.FULL, "this worker has as many links as it may")
        self._links[connection] = None
        return True

    def on_greeted(self, connection: GatewayLink) -> None:
        """Tell it how this worker does."""
        self._greeted[connection] = None
        _log.info("a gateway has linked", extra={"gateway": connection.name})
        if self._draining:
            self._tell_draining(connection)
        else:
            self._tell(connection, self._sample(), asyncio.get_running_loop().time())

    def on_end(self, connection: GatewayLink) -> None:
        """Forget it."""
        self._links.pop(connection, None)
        self._greeted.pop(connection, None)

    def take_place(self, connection: GatewayLink) -> str | None:
        """A place for one more request of this link, until it returns it; else why there is none.

        No link has more than its share while there are others. One that was alone may have had more: it gives up
        requests that it never finished sending, which nobody has begun with, as others come for their shares.
        """
        share = max(1, self.max_streams // max(1, len(self._greeted)))
        if len(connection.streams) >= share and share < self.max_streams:
            return f"this link has as many requests as its share, {share}"
        if self.num_streams >= self.max_streams:
            over = (each for each in self._greeted if len(each.streams) > share)
            most = max(over, key=lambda each: len(each.unfinished), default=None)
            if most is None or not most.give_up():
                return "this worker has as many requests as it may"
        self.num_streams += 1
        return None

    def return_place(self) -> None:
        """A request has ended."""
        self.num_streams -= 1

    def count(self, reason: str) -> bool:
        """A link was refused, or ended, for this reason. Whether the log is to tell of it."""
        if reason == Goodbye.CLOSING:
            return False
        self.refusals[reason] += 1
        return self._complains(reason)

    def _complains(self, reason: str) -> bool:
        """Whether the log is to tell of it once more."""
        now = asyncio.get_running_loop().time()
        if now < self._complain_at.get(reason, now):
            return False
        self._complain_at[reason] = now + _COMPLAINT_SECONDS
        return True

    # samples

    async def _tick(self) -> None:
        loop = asyncio.get_running_loop()
        before = loop.time()
        while True:
            await asyncio.sleep(link.TELEMETRY_SECONDS / 2)
            now = loop.time()
            stalled, before = now - before > _STALLED_SECONDS, now
            self._judge(now)
            due = [each for each in self._greeted if now >= each.telemetry_due and each.withdrawn_at is None]
            sample = self._sample() if due else None
            for each in due:
                self._tell(each, sample, now)
            for each in tuple(self._links):
                if stalled:
                    each.heard_at = now
                elif each.greeted and now - each.heard_at > link.GATEWAY_SILENCE_SECONDS:
                    each.end(Goodbye.SILENT, f"nothing came for {link.GATEWAY_SILENCE_SECONDS:g} s")

    def _judge(self, now: float) -> None:
        """Links whose key was withdrawn end, as soon as nothing runs over them."""
        ring = self.ring()
        if ring is not self._judged_by:
            self._judged_by = ring
            for each in tuple(self._greeted):
                each.judge(ring, now)
        for each in tuple(self._greeted):
            if each.withdrawn_at is not None and now - each.withdrawn_at > WITHDRAWN_SECONDS:
                each.end_unauthorized()

    def _tell(self, connection: GatewayLink, sample: bytes | None, now: float) -> None:
        connection.telemetry_due = now + connection.telemetry_seconds - 0.01
        # One that takes nothing gets no samples on top: they would wait in memory.
        if sample is not None and not connection.blocked:
            connection.put(link.encode(link.TELEMETRY, 0, sample))

    def _tell_draining(self, connection: GatewayLink) -> None:
        connection.put(link.encode(link.DRAIN))
        self._tell(connection, self._sample(), asyncio.get_running_loop().time())

    def _sample(self) -> bytes | None:
        """None: there is none, and gateways read the metrics port. No link is to end for it."""
        try:
            sample = self._telemetry()
        except Exception:
            if self._complains("sample"):
                _log.exception("there is no sample to send over links")
            return None
        if sample is not None and len(sample) > link.MAX_TELEMETRY:
            if self._complains("sample"):
                _log.error("a sample of %d bytes is not sent; the link takes %d", len(sample), link.MAX_TELEMETRY)
            return None
        return sample


def _report(task: asyncio.Task[None]) -> None:
    """Gateways that get no samples any more read them from the metrics port."""
    if not task.cancelled() and (error := task.exception()) is not None:
        _log.error("samples are no longer sent over links", exc_info=error)
