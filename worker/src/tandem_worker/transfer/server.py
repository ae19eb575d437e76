"""Prefill end of the TCP transport: takes connections of decode ranks, one `Session` each.

Every rank of a prefill group has a server. The first rank's has the engine and takes orders; the others' hear from it
through a `GroupChannel` what is ready, and send their slices to who attaches.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import socket
import threading
from dataclasses import replace

from tandem_worker.transfer.base import GroupChannel, Identity, PrefillEngine, TransferStats, TransferTimeouts
from tandem_worker.transfer.blocks import BlockSpace
from tandem_worker.transfer.messages import Message, decode_message, encode_message
from tandem_worker.transfer.outbox import Outbox
from tandem_worker.transfer.session import Session, SessionTotals

logger = logging.getLogger(__name__)

MAX_SESSIONS = 1024
"""Connections at a time: a bound on what strangers can make us keep. A decode worker opens one."""


class TcpPrefillServer:
    """Implements `transfer.base.PrefillServer`."""

    def __init__(
        self,
        *,
        engine: PrefillEngine | None,
        space: BlockSpace,
        identity: Identity,
        host: str = "0.0.0.0",
        port: int,
        group: GroupChannel | None = None,
        timeouts: TransferTimeouts | None = None,
    ) -> None:
        """`engine` is None on ranks that follow, `group` is the first rank's way to them.

        Of a group, `identity.ranks` names every rank, the same way on all of them.
        """
        self._engine = engine
        self._space = space
        self._identity = replace(identity, shard=space.shard)
        self._group = group
        self._outbox = Outbox(space, None if group is None else self._tell_followers)
        self._address = (host, port)
        self._timeouts = timeouts or TransferTimeouts()
        self._totals = SessionTotals()
        self._lock = threading.Lock()
        self._sessions: set[Session] = set()
        self._numbers = itertools.count(1)
        self._draining = False
        self._closed = False
        self._listener: socket.socket | None = None
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        self._listener = socket.create_server(self._address, backlog=128)
        self._thread = threading.Thread(target=self._accept, args=(self._listener,), name="kv-accept", daemon=True)
        self._thread.start()
        logger.info("KV transport listens on port %d", self.port)

    @property
    def port(self) -> int:
        """The port in use, which the system chose when 0 was asked for."""
        assert self._listener is not None, "start comes first"
        return self._listener.getsockname()[1]

    def drain(self) -> None:
        self._draining = True

    def handle(self, message: bytes) -> None:
        """On a follower: what the first rank posted, in its place among the steps. Raises TransferError."""
        self._outbox.handle(decode_message(message))

    def stats(self) -> TransferStats:
        with self._lock:
            connections = sum(session.established for session in self._sessions)
        totals = self._totals
        with totals.lock:
            return TransferStats(
                bytes_sent=totals.bytes_sent,
                failures=totals.failures,
                resends=totals.resends,
                connections=connections,
                bytes_per_second=totals.meter.rate,
            )

    def close(self) -> None:
        with self._lock:
            self._closed = True
            sessions = list(self._sessions)
        if self._listener is not None:
            with contextlib.suppress(OSError):  # wakes the accepting thread, which `close` alone does not
                self._listener.shutdown(socket.SHUT_RDWR)
            self._listener.close()
        for session in sessions:
            session.stop()
        for session in sessions:
            session.join(timeout=2.0)
        if self._thread is not None:
            self._thread.join(timeout=2.0)

    def _accept(self, listener: socket.socket) -> None:
        while not self._closed:
            try:
                sock, address = listener.accept()
            except OSError as error:
                if self._closed:
                    return
                logger.warning("cannot accept a KV connection: %s", error)
                threading.Event().wait(0.1)  # out of descriptors, most likely: it passes, or liveness ends it
                continue
            with self._lock:
                if self._closed or len(self._sessions) >= MAX_SESSIONS:
                    sock.close()
                    continue
                session = Session(
                    sock,
                    f"{address[0]}:{address[1]}-{next(self._numbers)}",
                    engine=self._engine,
                    outbox=self._outbox,
                    space=self._space,
                    identity=self._identity,
                    draining=lambda: self._draining,
                    totals=self._totals,
                    timeouts=self._timeouts,
                    on_closed=self._forget,
                )
                self._sessions.add(session)
                session.start()  # before `close` can see it

    def _tell_followers(self, message: Message) -> None:
        assert self._group is not None
        self._group.post(encode_message(message))

    def _forget(self, session: Session) -> None:
        with self._lock:
            self._sessions.discard(session)
