"""TLS for clients: OpenSSL's engine between a socket and a client connection.

The engine works on bytes in memory, so a client counts as a connection from the moment it is accepted, what is on its
way to it can be told, and half a connection can be closed; a stream over TLS behaves as one without. Handshakes are
long, so each turn of the event loop does a few of them and then lets the streams have theirs.
"""

from __future__ import annotations

import asyncio
import logging
import os
import ssl
from collections import Counter, deque
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, cast

from prometheus_client.core import GaugeMetricFamily
from prometheus_client.core import Metric as Family
from tandem_api.launch import TLSVersion
from tandem_api.telemetry import Metric

from tandem_gateway.errors import BadRequest, ConfigError
from tandem_gateway.families import by_label
from tandem_gateway.http.connection import ClientConnection, Handler

log = logging.getLogger(__name__)

CERTIFICATE_FILE = "tls.crt"
KEY_FILE = "tls.key"
"""As the keys of a Secret of type kubernetes.io/tls."""
LOOK_SECONDS = 1.0
"""Between two looks whether the files have changed."""
HANDSHAKES_PER_TURN = 4
"""Each with a key of 2,048 bits takes more than half a millisecond."""
MAX_UNFINISHED = 1024
"""Handshakes under way. Each holds twice what its connection does later: beyond this the oldest is given up."""
MAX_HANDSHAKE_BYTES = 64 * 1024
"""Kept of what a client sends while its handshake waits for its turn, and one read more; the rest stays in the socket.
"""
_READ_BYTES = 64 * 1024
_HANDSHAKE_RECORD = 0x16
_NO_CHECK_TIME = 0x200000
"""OpenSSL's X509_V_FLAG_NO_CHECK_TIME, which Python does not name."""
_VERSIONS: dict[TLSVersion, ssl.TLSVersion] = {
    "TLS1.2": ssl.TLSVersion.TLSv1_2,
    "TLS1.3": ssl.TLSVersion.TLSv1_3,
}
_Fingerprint = tuple[tuple[int, int, int], ...]


class Certificate:
    """The certificate and key in a folder, followed. What cannot be used changes nothing for who connects."""

    def __init__(self, folder: str, *, min_version: TLSVersion) -> None:
        """Raises ConfigError where the folder holds nothing to begin with."""
        self._folder = Path(folder)
        self._version = _VERSIONS[min_version]
        self._seen: _Fingerprint | None = None
        self._looked_at = 0.0
        self.loads: Counter[str] = Counter()
        """Times that changed files were read, by `ok` or `failed`."""
        self.handshakes: Counter[str] = Counter()
        """Those of clients, by how they ended: `ok`, `failed`, `unfinished`, or `plain` for a client that does not
        speak TLS."""
        try:
            self._seen = self._look()
            self.context, self.expires_at = self._load()
        except (OSError, ValueError) as error:  # an SSLError is an OSError
            raise ConfigError(self._describe(error)) from error

    def refresh(self, now: float) -> None:
        """Take over files that have changed, for connections that are accepted from now on. Called from the clock."""
        if now - self._looked_at < LOOK_SECONDS:
            return
        self._looked_at = now
        before = self._seen
        try:
            self._seen = self._look()
        except OSError as error:
            self._seen = None
            if before is not None:
                self._keep(error)
            return
        if self._seen == before:
            return
        try:
            self.context, self.expires_at = self._load()
        except (OSError, ValueError) as error:
            self._keep(error)
            return
        self.loads["ok"] += 1
        log.info("clients get another certificate from now on", extra={"expires": _format(self.expires_at)})

    def _keep(self, error: Exception) -> None:
        self.loads["failed"] += 1
        log.error(
            "the certificate for clients cannot be used; the one from before stays",
            extra={"reason": self._describe(error), "expires": _format(self.expires_at)},
        )

    def families(self) -> list[Family]:
        """For `/metrics`."""
        expires = GaugeMetricFamily(
            Metric.GATEWAY_TLS_CERTIFICATE_EXPIRY,
            "When the certificate that clients are shown expires, in seconds since 1970.",
            value=self.expires_at,
        )
        loads = by_label(
            Metric.GATEWAY_TLS_LOADS_TOTAL, "Times that the certificate had changed.", self.loads, label="result"
        )
        handshakes = by_label(
            Metric.GATEWAY_TLS_HANDSHAKES_TOTAL, "TLS handshakes of clients.", self.handshakes, label="result"
        )
        return [expires, loads, handshakes]

    def _look(self) -> _Fingerprint:
        found = [os.stat(self._folder / name) for name in (CERTIFICATE_FILE, KEY_FILE)]
        return tuple((each.st_ino, each.st_mtime_ns, each.st_size) for each in found)

    def _load(self) -> tuple[ssl.SSLContext, float]:
        """A context that has proven itself, and when its certificate expires, in seconds since 1970.

        Raises:
            OSError: the files cannot be read, or are no certificate and its key.
            ValueError: a file is empty, or wants a password.
        """
        certificate = self._folder / CERTIFICATE_FILE
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        context.minimum_version = self._version
        context.options |= ssl.OP_NO_RENEGOTIATION
        context.set_alpn_protocols(["http/1.1"])
        context.load_cert_chain(certificate, self._folder / KEY_FILE, password=_refuse_password)
        return context, ssl.cert_time_to_seconds(_try(context, certificate)["notAfter"])

    def _describe(self, error: Exception) -> str:
        words = str(error)
        if isinstance(error, ssl.SSLCertVerificationError):
            words = error.verify_message
        elif isinstance(error, ssl.SSLError):
            words = (error.reason or words).lower().replace("_", " ")
        elif isinstance(error, OSError):
            words = error.strerror or words
        return f"{CERTIFICATE_FILE} and {KEY_FILE} in {self._folder} are no certificate and its key: {words}"


def _refuse_password() -> str:
    raise ValueError(f"{KEY_FILE} is encrypted; store it without a password")


def _try(context: ssl.SSLContext, certificate: Path) -> dict[str, Any]:
    """One handshake in memory with a client that trusts this very certificate: what the certificate says.

    Raises:
        OSError: clients could not connect, whoever they trust.
    """
    client = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    client.check_hostname = False
    client.verify_flags |= ssl.VerifyFlags(_NO_CHECK_TIME | ssl.VERIFY_X509_PARTIAL_CHAIN)
    client.load_verify_locations(certificate)
    forth, back = ssl.MemoryBIO(), ssl.MemoryBIO()
    ends = [client.wrap_bio(back, forth), context.wrap_bio(forth, back, server_side=True)]
    for end in ends * 3:
        try:
            end.do_handshake()
        except ssl.SSLWantReadError:
            continue
    return ends[0].getpeercert() or {}


def _format(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


class Handshakes:
    """Those under way, and a queue of those that have something to do, a few of which get their turn at a time."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._waiting: deque[TLSConnection] = deque()
        self._unfinished: dict[TLSConnection, None] = {}
        """The oldest first."""
        self._scheduled = False

    def begin(self, connection: TLSConnection) -> None:
        self._unfinished[connection] = None
        if len(self._unfinished) > MAX_UNFINISHED:
            oldest = next(iter(self._unfinished))
            del self._unfinished[oldest]
            oldest.abort()

    def end(self, connection: TLSConnection) -> None:
        """Done, failed, or gone."""
        self._unfinished.pop(connection, None)

    def add(self, connection: TLSConnection) -> None:
        self._waiting.append(connection)
        if not self._scheduled:
            self._scheduled = True
            self._loop.call_soon(self._work)

    def _work(self) -> None:
        for _ in range(min(HANDSHAKES_PER_TURN, len(self._waiting))):
            self._loop.call_soon(self._waiting.popleft().shake)  # each by itself: one that fails stops no other
        self._scheduled = bool(self._waiting)
        if self._waiting:
            self._loop.call_soon(self._work)


# The states of a connection. Plain numbers: members of an enumeration are slow to get at.
NEW = 0
SHAKING = 1
READY = 2
PLAIN = 3
"""What arrives is not TLS, and neither is the answer that says so."""
DEAD = 4


class TLSConnection(asyncio.Protocol, asyncio.Transport):
    """Protocol of a socket, and the transport of a `ClientConnection`.

    A client's first byte tells whether it speaks TLS; one that does not is told so in plain HTTP. The deadline of the
    first header, which the client connection keeps, is that of the handshake, too.
    """

    def __init__(self, handler: Handler, certificate: Certificate, handshakes: Handshakes) -> None:
        super().__init__()
        self._certificate = certificate
        self._handshakes = handshakes
        self._app: ClientConnection | None = ClientConnection(handler)
        self._engine: ssl.SSLObject | None = None
        """None until the first byte is here: who only connects costs no more than without TLS."""
        self._in = self._out = _NOTHING
        self._state = NEW
        self._queued = self._held_back = self._ending = False
        self._early = b""
        """Written before the handshake is complete."""

    # the socket's side

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._socket = cast(asyncio.Transport, transport)
        if self._app is not None:
            self._app.connection_made(self)

    def data_received(self, data: bytes) -> None:
        if self._state == NEW:
            self._begin(data)
        if self._state == PLAIN and self._app is not None:
            self._app.data_received(data)
        elif self._state == READY:
            self._in.write(data)
            self._read()
        elif self._state == SHAKING:
            self._in.write(data)
            if not self._queued:
                self._queued = True
                self._handshakes.add(self)
            if self._in.pending > MAX_HANDSHAKE_BYTES and not self._held_back:
                self._held_back = True
                self._socket.pause_reading()

    def eof_received(self) -> bool:
        return self._app is not None and self._state in (READY, PLAIN) and self._app.eof_received()

    def connection_lost(self, exc: Exception | None) -> None:
        app, self._app = self._app, None
        if self._state == SHAKING:
            self._certificate.handshakes["unfinished"] += 1
            self._handshakes.end(self)
        self._state = DEAD
        self._engine = None
        self._in = self._out = _NOTHING
        if app is not None:
            app.connection_lost(exc)

    def pause_writing(self) -> None:
        if self._app is not None:
            self._app.pause_writing()

    def resume_writing(self) -> None:
        if self._app is not None:
            self._app.resume_writing()

    # TLS

    def _begin(self, data: bytes) -> None:
        """Find out by the first byte whether the client speaks TLS."""
        if data[0] == _HANDSHAKE_RECORD:
            self._state = SHAKING
            self._in, self._out = ssl.MemoryBIO(), ssl.MemoryBIO()
            self._engine = self._certificate.context.wrap_bio(self._in, self._out, server_side=True)
            self._handshakes.begin(self)
            return
        self._certificate.handshakes["plain"] += 1
        if self._app is not None and data[:1].isalpha():
            self._state = PLAIN
            self._app.refuse(BadRequest("this port speaks TLS: use https:// in the URL", code="tls_required"))
        else:
            self._state = DEAD
            self._socket.abort()

    def shake(self) -> None:
        """Go on with the handshake. Called in turn."""
        self._queued = False
        engine = self._engine
        if engine is None or self._state != SHAKING:
            return
        if self._held_back:
            self._held_back = False
            self._socket.resume_reading()
        try:
            engine.do_handshake()
        except ssl.SSLWantReadError:
            self._send()
            return
        except ssl.SSLError as error:
            log.debug("a client's handshake failed", extra={"reason": error.reason})
            self._fail()
            return
        self._state = READY
        self._handshakes.end(self)
        self._certificate.handshakes["ok"] += 1
        early, self._early = self._early, b""
        self.write(early)
        if self._ending:
            self.write_eof()
        self._read()

    def _fail(self) -> None:
        """The client gets OpenSSL's alert, if there is one."""
        self._handshakes.end(self)
        self._certificate.handshakes["failed"] += 1
        self._send()
        self._state = DEAD
        self._socket.close()

    def _read(self) -> None:
        """Hand on what has arrived."""
        engine, app = self._engine, self._app
        if engine is None or app is None:
            return
        parts: list[bytes] = []
        ended = False
        try:
            while part := engine.read(_READ_BYTES):
                parts.append(part)
            ended = True
        except ssl.SSLWantReadError:
            pass
        except ssl.SSLZeroReturnError:
            ended = True
        except ssl.SSLError as error:
            log.debug("a client's bytes are not what TLS allows", extra={"reason": error.reason})
            self._send()
            self._state = DEAD
            self._socket.abort()
            return
        if self._out.pending:
            self._send()
        if parts:
            app.data_received(parts[0] if len(parts) == 1 else b"".join(parts))
        if ended and not app.closed and not self._socket.is_closing() and not app.eof_received():
            self.close()

    def _send(self) -> None:
        if self._out.pending and not self._socket.is_closing():
            self._socket.write(self._out.read())

    def _say_end(self) -> None:
        if self._engine is None:
            return
        try:
            self._engine.unwrap()
        except ssl.SSLError as error:  # it wants the client's answer, which nobody waits for
            log.debug("the end of a connection", extra={"reason": error.reason})
        self._send()

    # the client connection's side

    def write(self, data: bytes | bytearray | memoryview) -> None:
        if self._state == PLAIN:
            self._socket.write(data)
        elif self._state < READY:
            self._early += data
        elif self._state == READY and self._engine is not None:
            left = memoryview(data)
            try:
                while left:
                    left = left[self._engine.write(left) :]
            except ssl.SSLError as error:
                log.debug("a client's connection cannot be written to", extra={"reason": error.reason})
                self._state = DEAD
                self._socket.abort()
                return
            self._send()

    def get_write_buffer_size(self) -> int:
        """Bytes that the kernel has not taken yet. What waits for the handshake waits for the client."""
        return self._socket.get_write_buffer_size()

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        self._socket.set_write_buffer_limits(high=high, low=low)

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return self._socket.get_extra_info(name, default)

    def pause_reading(self) -> None:
        self._socket.pause_reading()

    def resume_reading(self) -> None:
        self._socket.resume_reading()

    def is_closing(self) -> bool:
        return self._socket.is_closing()

    def can_write_eof(self) -> bool:
        return True

    def write_eof(self) -> None:
        """Nothing more comes from here: said as TLS does, and as TCP does. The client may go on."""
        self._ending = True
        if self._state == READY:
            self._say_end()
        if self._state in (READY, PLAIN):
            self._socket.write_eof()

    def close(self) -> None:
        if self._state == READY and not self._ending:
            self._ending = True
            self._say_end()
        self._socket.close()

    def abort(self) -> None:
        self._socket.abort()


_NOTHING = ssl.MemoryBIO()
"""For connections without an engine. Nothing is written to it."""


def protocol_factory(handler: Handler, certificate: Certificate) -> Callable[[], TLSConnection]:
    """For a server on the running loop."""
    handshakes = Handshakes(asyncio.get_running_loop())
    return lambda: TLSConnection(handler, certificate, handshakes)
