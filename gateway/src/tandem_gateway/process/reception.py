"""Connections of clients: how many there may be, whose they are, and who answers what comes over them."""

from __future__ import annotations

import asyncio
import os
import re
from itertools import count, islice

from tandem_gateway.errors import GatewayFull, RequestError
from tandem_gateway.http.connection import ClientConnection
from tandem_gateway.http.fairness import Sources
from tandem_gateway.http.request import Request
from tandem_gateway.http.response import build_error
from tandem_gateway.paths import INFERENCE_PATHS, RESPONSES
from tandem_gateway.process.gateway import Gateway
from tandem_gateway.process.intake import Intake
from tandem_gateway.process.replies import Replies
from tandem_gateway.requests.cors import is_preflight
from tandem_gateway.requests.turns import LARGE_BYTES

LOOKED_AT = 64
"""Connections looked at, of who has most, for one that nobody asks over."""
REFUSALS = 64
"""Connections beyond the limit that are told so before they are closed."""
_REQUEST_ID = re.compile(rb"[\w.:/+=-]{1,128}")


class Reception:
    """Satisfies `http.connection.Handler`."""

    def __init__(self, gateway: Gateway, intake: Intake, replies: Replies, *, max_connections: int) -> None:
        self.bounds = self._gateway = gateway
        self._intake = intake
        self._replies = replies
        self.max_connections = max_connections
        self.connections, self.sources = set[ClientConnection](), Sources[ClientConnection]()
        """All of them, and by whose they are."""
        self._request_ids = _RequestIds()

    def on_connect(self, connection: ClientConnection) -> None:
        self.connections.add(connection)
        self.sources.add(connection.source, connection)
        over = len(self.connections) - self.max_connections
        if over <= 0:
            return
        excess = self.sources.find_excess(connection.source)
        if over > REFUSALS:
            connection.transport.abort()
        elif excess is not None:
            newest = [*islice(self.sources.newest(excess), LOOKED_AT)]
            leaving = next((other for other in newest if other.exchange is None), newest[0])
            if leaving.exchange is None:
                self.on_disconnect(leaving)
            else:  # it is told first, and counts until it has gone
                self.sources.remove(leaving.source, leaving)
            leaving.leave()
        else:
            connection.refuse(
                GatewayFull(f"the gateway has as many connections as it may, {self.max_connections}; try again shortly")
            )

    def on_disconnect(self, connection: ClientConnection) -> None:
        self.connections.discard(connection)
        self.sources.remove(connection.source, connection)

    def on_request(self, connection: ClientConnection, request: Request) -> None:
        given = request.headers.get(b"x-request-id")
        request_id = given if given is not None and _REQUEST_ID.fullmatch(given) else self._request_ids.next()
        gateway = self._gateway
        cors = gateway.cors
        if cors is not None:
            request.answer_fields = cors.fields(request.headers.get(b"origin"))
        try:
            if cors is not None and is_preflight(request):
                self._replies.answer_preflight(connection, request, request_id, cors)
            elif request.path in INFERENCE_PATHS:
                if len(request.body) > LARGE_BYTES:
                    self._intake.take_large(connection, request, request_id)
                elif request.path != RESPONSES or gateway.responses is None:
                    self._intake.start(connection, request, request_id)
                else:
                    self._intake.take(connection, request, request_id)
            elif request.path.startswith(f"{RESPONSES}/"):
                self._intake.answer_stored(connection, request, request_id)
            else:
                self._replies.tell(connection, request, request_id, self._replies.answer(request))
        except RequestError as error:
            self._replies.refuse(connection, request, request_id, error)

    def on_refused(self, connection: ClientConnection, error: RequestError) -> None:
        """The connection could not read a request; it closes itself after this answer."""
        request_id, cors = self._request_ids.next(), self._gateway.cors
        fields = b"" if cors is None else cors.fields(connection.refused_origin)
        answer = build_error(error, request_id, keep_alive=False, more=fields)
        self._replies.record("", error.status, request_id, error.code or error.kind, len(answer))
        connection.write(answer)

    def tick(self, now: float) -> None:
        for connection in tuple(self.connections):
            connection.tick(now)

    # shutting down

    @property
    def busy(self) -> bool:
        """Something runs, or was answered and is not on its way yet."""
        gateway, turns = self._gateway, self._intake.turns
        return bool(gateway.exchanges) or len(turns) > 0 or any(connection.unsent for connection in self.connections)

    def close_idle(self) -> bool:
        """Close connections on which nobody asks. False where a next request may be on its way."""
        now = asyncio.get_running_loop().time()
        settled = True
        for connection in tuple(self.connections):
            settled &= connection.close_if_idle(now)
        return settled

    def stop(self) -> None:
        for connection in tuple(self.connections):
            connection.transport.close()


class _RequestIds:
    """For requests whose clients name none."""

    def __init__(self) -> None:
        self._numbers = count(1)
        self._prefix = os.urandom(6).hex().encode()

    def next(self) -> bytes:
        return b"req-%b%08x" % (self._prefix, next(self._numbers))
