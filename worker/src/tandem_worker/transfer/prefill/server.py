"""Prefill end of the TCP transport: takes connections of decode ranks, one `Session` each.

Every rank of a prefill group has a server. The first rank's has the engine and takes orders; the others' hear from it
through a `GroupChannel` what is ready, and send their slices to who attaches.
"""

from __future__ import annotations

import itertools
import logging
import socket
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import replace

from tandem_api.keys import KeyRing, open_ring
from tandem_api.tracing import Tracer

from tandem_worker.engine.contract import PrefillEngine
from tandem_worker.host.errors import ThreadStartError
from tandem_worker.host.memory import trim_memory
from tandem_worker.host.peers.door import Door
from tandem_worker.host.peers.handshake import Purpose, Refusal
from tandem_worker.host.vitals import Vitals
from tandem_worker.transfer.blocks import BlockSpace
from tandem_worker.transfer.choice import TCP, Policy
from tandem_worker.transfer.contract import GroupChannel, Identity, TransferStats, TransferTimeouts
from tandem_worker.transfer.errors import QuotaError, TransferError
from tandem_worker.transfer.fetches import BlockShelf
from tandem_worker.transfer.messages import Message, decode_message, encode_message
from tandem_worker.transfer.prefill.outbox import Outbox
from tandem_worker.transfer.prefill.outgoing import SessionTotals
from tandem_worker.transfer.prefill.quotas import Account, Ledger, Quotas
from tandem_worker.transfer.prefill.session import Session
from tandem_worker.transfer.transports import Transports

logger = logging.getLogger(__name__)

_SOURCE = "KV sessions"
_ENDED_PER_TRIM = 32
"""Each session has a thread, and threads have heaps of their own, which keep what was freed in them."""


class TcpPrefillServer:
    """The prefill end of the transport: what `transfer.contract` asks of it. Methods may be called from any thread."""

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
        ring: Callable[[], KeyRing] = open_ring,
        vitals: Vitals | None = None,
        quotas: Quotas | None = None,
        shelf: BlockShelf | None = None,
        tracer: Tracer | None = None,
        transports: Transports | None = None,
    ) -> None:
        """`engine` is None on ranks that follow, `group` is the first rank's way to them. `engine` is None too of a
        worker that takes no orders and only gives away what it has computed, which is on its `shelf`; None: it gives
        nothing away.

        Of a group, `identity.ranks` names every rank, the same way on all of them. `ring` gives the keys that are good
        now: who does not prove one is not let in.
        """
        self._engine = engine
        self._space = space
        self._transports = transports or Transports(Policy(wanted=TCP))
        self._identity = replace(identity, shard=space.shard, offers=self._transports.offers)
        self._group = group
        self._outbox = Outbox(space, None if group is None else self._tell_followers)
        self._address = (host, port)
        self._timeouts = timeouts or TransferTimeouts()
        self._ring, self._vitals = ring, vitals or Vitals()
        self._ledger = Ledger(quotas or Quotas.of(space.num_slots))
        self._totals = SessionTotals()
        self._tracer, self._shelf = tracer, shelf
        self._lock = threading.Lock()
        self._sessions: set[Session] = set()
        self._numbers = itertools.count(1)
        self._num_ended = 0
        self._draining = False
        self._closed = False
        self._port = port
        self._door: Door | None = None

    def start(self) -> None:
        """Accept peers. Raises OSError when the port is taken, ThreadStartError."""
        family = socket.AF_INET6 if ":" in self._address[0] else socket.AF_INET
        listener = socket.create_server(self._address, family=family, backlog=128)
        self._port = listener.getsockname()[1]
        self._door = Door(listener, ring=self._ring, purpose=Purpose.KV, admit=self._admit, vitals=self._vitals)
        self._door.start()
        logger.info("KV transport listens on %s port %d", self._address[0], self._port)

    @property
    def port(self) -> int:
        """The port in use, which the system chose when 0 was asked for."""
        assert self._door is not None, "start comes first"
        return self._port

    def drain(self) -> None:
        """Refuse new orders; those inside go on."""
        self._draining = True

    def handle(self, message: bytes) -> None:
        """On a follower: what the first rank posted, in its place among the steps. Raises TransferError."""
        self._outbox.handle(decode_message(message))

    def stats(self) -> TransferStats:
        """What has been counted so far, over all peers. Any thread."""
        with self._lock:
            connections = sum(session.established for session in self._sessions)
        refused = Counter[Refusal]() if self._door is None else self._door.refusals
        totals = self._totals
        with totals.lock:
            return TransferStats(
                bytes_sent=totals.bytes_sent,
                failures=totals.failures,
                resends=totals.resends,
                connections=connections,
                bytes_per_second=totals.meter.rate,
                refusals={reason.value: refused[reason] for reason in Refusal},
                integrity_failures=dict(totals.damage),
                quota_refusals=self._ledger.refusals,
                wanted=self._transports.policy.wanted,
                transport=self._transports.last,
                protocol=self._transports.protocol,
                transports=self._transports.stats(),
                fallback=self._transports.fallback,
            )

    def close(self) -> None:
        """Drop every peer; their orders are aborted and released."""
        self._closed = True
        if self._door is not None:
            self._door.close()
        with self._lock:
            sessions = list(self._sessions)
        for session in sessions:
            session.stop()
        for session in sessions:
            session.join(timeout=2.0)

    def _admit(self, sock: socket.socket, name: str) -> None:
        """On the door's thread: `name` is the address of a peer that has proven the key."""
        try:
            account = self._ledger.open(name.rpartition(":")[0], proven=self._ring().authenticates)
        except QuotaError as error:
            logger.warning("a KV connection from %s is not taken: %s", name, error)
            sock.close()
            return
        try:
            self._start_session(sock, name, account)
        except (OSError, ThreadStartError, TransferError) as error:
            account.close()
            sock.close()
            if not isinstance(error, TransferError):  # that one is the peer's
                self._vitals.note(_SOURCE, f"peers are turned away: {error}")
            return
        self._vitals.clear(_SOURCE)

    def _start_session(self, sock: socket.socket, name: str, account: Account) -> None:
        """Raises OSError and ThreadStartError where the system gives no more, TransferError when the peer is gone."""
        session = Session(
            sock,
            f"{name}-{next(self._numbers)}",
            engine=self._engine,
            outbox=self._outbox,
            space=self._space,
            identity=self._identity,
            draining=lambda: self._draining,
            totals=self._totals,
            account=account,
            timeouts=self._timeouts,
            on_closed=self._forget,
            shelf=self._shelf,
            tracer=self._tracer,
            transports=self._transports,
        )
        with self._lock:
            self._sessions.add(session)
            if self._closed:
                session.stop()  # it looks at that first
        try:
            session.start(self._vitals)
        except ThreadStartError:
            self._forget(session)
            raise

    def _tell_followers(self, message: Message) -> None:
        assert self._group is not None
        self._group.post(encode_message(message))

    def _forget(self, session: Session) -> None:
        with self._lock:
            self._sessions.discard(session)
            self._num_ended += 1
            trims = self._num_ended % _ENDED_PER_TRIM == 0
        if trims:
            trim_memory()
