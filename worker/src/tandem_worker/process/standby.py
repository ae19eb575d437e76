"""A worker on standby: all is loaded that needs no memory of the model's size, and the rest waits for an order.

The order is a `POST` to `names.WAKE_PATH` at the inference port, of whoever shows the model's key, and is answered once
requests are taken: who asks knows it before any probe does. An order that is lost is made good for by the launch
configuration, which is read again and again: where it does not say standby any more, the start goes on. Both may come
at any time and as often as they like. What an order begins has a limit of time, for a start that hangs is no start: the
process ends then, and comes back.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable

from starlette.types import ASGIApp, Receive, Scope, Send
from tandem_api.names import HEADER_RETRY, RETRY_WORKER, WAKE_PATH
from tandem_api.openai import error_body

from tandem_worker.host.collector import hold_collector, release_collector
from tandem_worker.process.progress import StartProgress, Switches
from tandem_worker.server.wire.http import send_bytes, send_json

logger = logging.getLogger(__name__)

LOOK_SECONDS = 2.0
"""Between two looks at the configuration."""
WAKE_SECONDS = 900.0
"""What is left of a start may take this long: reading weights, which are on the machine already."""


class Standby:
    """The place in a start where it waits for an order. `wait` is a step's, `wake` may be called on any thread."""

    def __init__(
        self, progress: StartProgress, is_ordered: Callable[[], bool], on_wake: Callable[[], None] = lambda: None
    ) -> None:
        """`is_ordered`: whether the configuration, as it is written now, says standby. `on_wake` is called when the
        start goes on, on the step's thread."""
        self._progress, self._is_ordered, self._on_wake = progress, is_ordered, on_wake
        self._order = threading.Event()
        self.reached = False
        """All is loaded that is to be loaded before an order."""

    def wake(self, why: str) -> None:
        """Go on, now or when the start has come so far."""
        if not self._order.is_set():
            logger.info("woken", extra={"why": why})
            self._order.set()

    def wait(self) -> None:
        """Until there is an order."""
        if self._order.is_set():
            return
        self._progress.rest()
        release_collector()  # what comes and goes meanwhile, for however long, is to be collected
        self.reached = True
        while not self._order.wait(LOOK_SECONDS):
            if not self._is_ordered():
                self.wake("the configuration says standby no more")
        hold_collector()
        self._progress.wake()
        self._on_wake()


class WakeDoor:
    """In front of the inference API, behind the gate: answers `POST /wake` of whoever is let through."""

    def __init__(self, app: ASGIApp, standby: Standby, switches: Switches) -> None:
        self._app, self._standby, self._switches = app, standby, switches
        self._known = asyncio.Event()
        """Whether requests will be taken."""
        self._failed = False

    def open(self) -> None:
        """Requests are taken from now on. On the event loop."""
        self._known.set()

    def fail(self) -> None:
        """None will be: nobody is to wait. On the event loop."""
        self._failed = True
        self._known.set()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] != WAKE_PATH:
            await self._app(scope, receive, send)
        elif scope["method"] != "POST":
            body = error_body(f"{scope['method']} is not allowed here; use POST.", kind="invalid_request_error")
            await send_json(send, body, status=405)
        else:
            await self._wake(receive, send)

    async def _wake(self, receive: Receive, send: Send) -> None:
        self._standby.wake("it was asked to")
        known = asyncio.ensure_future(self._known.wait())
        gone = asyncio.ensure_future(_await_end(receive))
        try:
            await asyncio.wait({known, gone}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            known.cancel()
            gone.cancel()
        if not self._known.is_set():
            return  # whoever asked has left
        if self._failed or self._switches.draining:
            body = error_body("This worker is stopping.", kind="overloaded_error")
            await send_json(send, body, status=503, headers={HEADER_RETRY: RETRY_WORKER})
            return
        await send_bytes(send, 200, b"ok\n", content_type="text/plain; charset=utf-8")


async def _await_end(receive: Receive) -> None:
    """Until the client has left; a body says nothing."""
    while (await receive())["type"] != "http.disconnect":
        pass
