"""The metrics port: probes, Prometheus text and a look at the scheduler. Not on the data path, so kept plain.

Probes, metrics and how the workers do are for whoever reaches the port. What the scheduler believes is for people who
may forward a port into the pod: those arrive over the loopback interface.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from ipaddress import IPv6Address, ip_address
from typing import Any

import orjson
from prometheus_client import CONTENT_TYPE_PLAIN_0_0_4
from tandem_api.fleet import FLEET_PATH, WAITING_PATH, WAITING_SECONDS
from tandem_api.launch import GatewayTimeouts

from tandem_gateway.errors import RequestError
from tandem_gateway.http.budget import Budget
from tandem_gateway.http.connection import ClientConnection
from tandem_gateway.http.fairness import Sources
from tandem_gateway.http.request import Request
from tandem_gateway.http.response import build_plain
from tandem_gateway.process.gateway import Gateway
from tandem_gateway.process.reports import Reports
from tandem_gateway.requests.prompt import guess_path

MAX_CONNECTIONS = 64
MAX_BODY_BYTES = 1024 * 1024
"""A request of which somebody asks where it would go."""
DEBUG_ENDPOINTS, DEBUG_ROUTE, DEBUG_RESPONSES = "/debug/endpoints", "/debug/route", "/debug/responses"
_DEBUG = (DEBUG_ENDPOINTS, DEBUG_ROUTE, DEBUG_RESPONSES)
_SECONDS = 5.0
_LOCAL = frozenset((ip_address("127.0.0.1"), ip_address("::1")))


@dataclass(frozen=True, slots=True)
class _Question:
    """What a connection waits with until a request is under way. Satisfies `http.connection.Conversation`."""

    until: float
    """When it is answered whatever there is."""
    held_bytes: int = 0
    delivering: bool = False

    def stop(self, error: RequestError) -> None: ...

    def on_client_gone(self) -> None: ...

    def on_client_slow(self) -> None: ...

    def on_client_ready(self) -> None: ...


@dataclass(slots=True)
class _Bounds:
    """Satisfies `http.connection.Bounds`."""

    timeouts: GatewayTimeouts
    max_body_bytes: int
    budget: Budget


class Admin:
    """Handler of the connections to the metrics port. `ready` says whether discovery has spoken once; draining makes
    the process unready before it stops."""

    def __init__(self, gateway: Gateway, reports: Reports, *, knows_routing: Callable[[], bool]) -> None:
        """`knows_routing`: whether what the gateway follows of its model has been asked for once."""
        self._gateway = gateway
        self._reports = reports
        self._knows_routing = knows_routing
        self._connections: set[ClientConnection] = set()
        self._sources: Sources[ClientConnection] = Sources()
        self._questions: dict[ClientConnection, tuple[_Question, Request]] = {}
        timeouts = GatewayTimeouts(header_seconds=_SECONDS, body_seconds=_SECONDS, idle_seconds=_SECONDS)
        self.bounds = _Bounds(timeouts, MAX_BODY_BYTES, Budget(4 * MAX_BODY_BYTES))
        self.discovered = False

    @property
    def ready(self) -> bool:
        return self.discovered and self._knows_routing() and not self._gateway.draining

    def answer(self, method: bytes, path: str, *, from_here: bool) -> tuple[int, str, bytes]:
        """Status, content type and body. `from_here`: it came over the loopback interface."""
        if path in _DEBUG and not from_here:
            return 403, "text/plain", b"over the loopback interface only: kubectl port-forward, then localhost\n"
        if method != b"GET":
            return 405, "text/plain", b"only GET\n"
        if path == "/metrics":
            return 200, CONTENT_TYPE_PLAIN_0_0_4, self._reports.render_metrics()
        if path == "/healthz":
            return 200, "text/plain", b"ok\n"
        if path == "/readyz":
            return (200, "text/plain", b"ok\n") if self.ready else (503, "text/plain", self._unready())
        if path in (FLEET_PATH, WAITING_PATH):
            return 200, "application/json", self._reports.describe_fleet().to_json().encode()
        if path == DEBUG_ENDPOINTS:
            return _show({"endpoints": self._reports.describe_endpoints()})
        if path == DEBUG_ROUTE:
            return _show({"decisions": self._reports.describe_decisions()})
        if path == DEBUG_RESPONSES:
            return _show(self._reports.describe_responses())
        paths = "/metrics, /healthz, /readyz, /fleet, /fleet/waiting, " + " or ".join(_DEBUG)
        return 404, "text/plain", f"try {paths}\n".encode()

    def _preview(self, request: Request) -> tuple[int, str, bytes]:
        """Tell where the gateway would send this request, by its body; nothing is sent."""
        try:
            found = self._reports.preview(replace(request, path=guess_path(request.body)))
        except RequestError as error:
            return error.status, "text/plain", f"{error.message}\n".encode()
        return _show(found)

    def _unready(self) -> bytes:
        if self._gateway.draining:
            return b"draining\n"
        return b"the model has not been read yet\n" if self.discovered else b"the workers have not been listed yet\n"

    # connections

    def on_connect(self, connection: ClientConnection) -> None:
        """There is always room for one more, which may be a probe: the one that has waited longest of whoever has most
        goes for it. A probe is answered when it has asked, and so has gone by itself."""
        self._connections.add(connection)
        self._sources.add(connection.source, connection)
        if len(self._connections) > MAX_CONNECTIONS:
            oldest = self._sources.oldest(self._sources.find_most())
            self.on_disconnect(oldest)
            oldest.transport.abort()

    def on_disconnect(self, connection: ClientConnection) -> None:
        self._connections.discard(connection)
        self._sources.remove(connection.source, connection)
        self._questions.pop(connection, None)

    def on_request(self, connection: ClientConnection, request: Request) -> None:
        if request.path == WAITING_PATH and request.method == b"GET" and not self._gateway.exchanges:
            connection.exchange = question = _Question(connection.loop.time() + WAITING_SECONDS)
            self._questions[connection] = question, request
            self._gateway.idle_watchers.add(self._answer_questions)
            return
        self._answer(connection, request)

    def _answer(self, connection: ClientConnection, request: Request) -> None:
        from_here = is_loopback(connection.transport.get_extra_info("peername"))
        if from_here and request.method == b"POST" and request.path == DEBUG_ROUTE:
            status, kind, body = self._preview(request)
        else:
            status, kind, body = self.answer(request.method, request.path, from_here=from_here)
        connection.write(build_plain(status, kind, body, keep_alive=request.keep_alive))
        connection.finish(keep_alive=request.keep_alive)

    def on_refused(self, connection: ClientConnection, error: RequestError) -> None:
        connection.write(build_plain(error.status, "text/plain", f"{error.message}\n".encode(), keep_alive=False))

    def _answer_questions(self) -> None:
        """A request is under way."""
        for connection, (_, request) in tuple(self._questions.items()):
            del self._questions[connection]
            self._answer(connection, request)

    def tick(self, now: float) -> None:
        for connection, (question, request) in tuple(self._questions.items()):
            if now >= question.until:
                del self._questions[connection]
                self._answer(connection, request)
        for connection in tuple(self._connections):
            connection.tick(now)

    def stop(self) -> None:
        for connection in tuple(self._connections):
            connection.transport.close()


def _show(value: object) -> tuple[int, str, bytes]:
    return 200, "application/json", orjson.dumps(value, option=orjson.OPT_INDENT_2)


def is_loopback(peer: Any) -> bool:
    """Whether a socket's peer has come as a forwarded port does. The rest of 127.0.0.0/8 is not: a service mesh's proxy
    passes on what it gets for others from 127.0.0.6. None is one that has gone already."""
    if not peer:
        return False
    address = ip_address(peer[0].partition("%")[0])
    mapped = address.ipv4_mapped if isinstance(address, IPv6Address) else None
    return (mapped or address) in _LOCAL
