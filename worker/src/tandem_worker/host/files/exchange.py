"""A process's part in the exchange of model files: what it offers, whom it has heard of, and its figures.

Nothing is configured for it in a cluster: the headless Services of a model's roles name its pods, starting ones too,
and who asks is known from then on to whoever is asked. An exchange needs keys: files go to no stranger.
"""

from __future__ import annotations

import contextlib
import logging
import secrets
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from tandem_api import names
from tandem_api.keys import KeyRing
from tandem_api.launch import FileSharing, WorkerConfig
from tandem_api.names import Role

from tandem_worker.host.errors import ThreadStartError
from tandem_worker.host.files.layout import Layout
from tandem_worker.host.files.server import FileAnswer, FileServer
from tandem_worker.host.files.share import SharedFiles
from tandem_worker.host.files.wire import MAX_PEERS, PeerQuestion, ReplyHeader, pack_news
from tandem_worker.host.peers.dial import resolve
from tandem_worker.host.vitals import Vitals

logger = logging.getLogger(__name__)

Address = tuple[str, int]
_REMEMBER_SECONDS = 120.0
"""Who has not asked for so long is forgotten."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FileSample:
    """Figures of this moment. Counts grow only."""

    received: Mapping[str, int]
    """Bytes of the model by where they came from: `peer`, `hub`."""
    faults: Mapping[str, int]
    """What other workers did wrong as sources: `wrong`, `slow`, `lost`."""
    bytes_sent: int
    limit: float
    """Bytes per second that are sent at most."""


class FileExchange:
    """Any thread. It serves between `open` and `close`; without them it only knows its peers."""

    def __init__(
        self, sharing: FileSharing, services: Iterable[str], ring: Callable[[], KeyRing], vitals: Vitals
    ) -> None:
        """`services`: names whose addresses are peers, at the sharing's port."""
        self._sharing, self._services = sharing, tuple(services)
        self.ring, self._vitals = ring, vitals
        self.id = secrets.token_hex(8)
        """Id of this process, so that it knows itself among its peers."""
        self.received, self.faults = Counter({"peer": 0, "hub": 0}), Counter({"wrong": 0, "slow": 0, "lost": 0})
        """As in `FileSample`; whoever downloads counts."""
        self._share: SharedFiles | None = None
        self._server: FileServer | None = None
        self._heard: dict[Address, float] = {}
        self.num_heard = 0
        """Peers that were new when they were heard of. Grows only."""
        self._lock = threading.Lock()
        self._is_busy: Callable[[], bool] = lambda: False
        self.port = sharing.port

    def open(self, host: str) -> None:
        """Serve at `host`. Where that cannot be, the log says so and nothing else: files come from elsewhere then."""
        try:
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            listener = socket.create_server((host, self._sharing.port), family=family, backlog=64)
            self.port = listener.getsockname()[1]
            server = FileServer(
                listener, ring=self.ring, vitals=self._vitals, answer=self._answer, rate=lambda: self.limit
            )
            server.start()
        except (OSError, ThreadStartError) as error:
            logger.warning("this worker's files are served to nobody: port %d: %s", self._sharing.port, error)
            return
        self._server = server

    def close(self) -> None:
        """Serve nobody any more."""
        if self._server is not None:
            self._server.close()
        if self._share is not None:
            self._share.close()

    def start_thread(self, name: str, target: Callable[..., Any], *arguments: Any) -> None:
        """One that may end whenever it likes. Raises ThreadStartError."""
        self._vitals.start_thread(name, target, *arguments)

    def offer(self, share: SharedFiles) -> None:
        """From now on. The one before is offered no more."""
        self._share = share

    def offers(self, layout: Layout) -> bool:
        """Whether it is this that is offered."""
        return self._share is not None and self._share.layout.fingerprint == layout.fingerprint

    def watch(self, is_busy: Callable[[], bool]) -> None:
        """Whether streams run here, in which case files are sent at the lower rate. It is asked before every piece."""
        self._is_busy = is_busy

    @property
    def limit(self) -> float:
        """Bytes per second that are sent now, to all starters together."""
        return self._sharing.busy_bytes_per_second if self._is_busy() else self._sharing.idle_bytes_per_second

    def sample(self) -> FileSample:
        """What was counted so far, and the limit now."""
        sent = 0 if self._server is None else self._server.bytes_sent
        return FileSample(received=dict(self.received), faults=dict(self.faults), bytes_sent=sent, limit=self.limit)

    def refusals(self) -> Counter[str]:
        """Connections to the files' port that were not let through, by reason."""
        return Counter() if self._server is None else self._server.door.refusals

    def find_peers(self, seconds: float) -> set[Address]:
        """Addresses at which other processes of this model may serve; this one's may be among them.

        Resolving takes at most `seconds`; a name without addresses is none yet.
        """
        found: set[Address] = set()
        deadline = time.monotonic() + seconds
        for name in self._services:
            host, _, port = name.rpartition(":") if ":" in name else (name, "", "")
            number = int(port) if port.isdigit() else self._sharing.port
            with contextlib.suppress(OSError):
                left = max(0.01, deadline - time.monotonic())
                found |= {(entry[4][0], number) for entry in resolve(host, number, left)}
        with self._lock:
            now = time.monotonic()
            self._heard = {a: at for a, at in self._heard.items() if now - at < _REMEMBER_SECONDS}
            return found | set(self._heard)

    def hear(self, peers: Iterable[str]) -> None:
        """Take note of others, as a peer told them: `ADDRESS PORT`."""
        for text in peers:
            host, _, port = text.partition(" ")
            if port.isdigit() and 0 < int(port) < 1 << 16:
                self._remember((host, int(port)), only_new=True)

    def _remember(self, address: Address, *, only_new: bool = False) -> None:
        with self._lock:
            known = address in self._heard
            if (known and only_new) or (not known and len(self._heard) >= MAX_PEERS):
                return
            self._heard[address] = time.monotonic()
            self.num_heard += not known

    # The server's thread.

    def _answer(self, question: PeerQuestion, host: str) -> FileAnswer:
        if question.port is not None and question.asker != self.id:
            self._remember((host.removeprefix("::ffff:"), question.port))
        share = self._share
        if share is None or share.layout.fingerprint != question.layout:
            return FileAnswer(ReplyHeader(known=False, source=self.id))
        if question.kind == "chunk":
            return self._answer_chunk(share, question.chunk)
        version, changes = share.news(question.since)
        header = ReplyHeader(
            source=self.id,
            version=version,
            starting=share.starting,
            idle=share.idle,
            in_flight=share.in_flight,
            peers=[f"{host} {port}" for host, port in list(self._heard)],
        )
        return FileAnswer(header, pack_news(changes))

    def _answer_chunk(self, share: SharedFiles, index: int) -> FileAnswer:
        found = None
        try:
            if index < share.layout.num_chunks:
                found = share.locate(index)
        except OSError as error:
            logger.warning("a part of the model cannot be given to another worker: %s", error)
        if found is None:
            return FileAnswer(ReplyHeader(known=False, source=self.id))
        header = ReplyHeader(source=self.id, sum=found.sum.hex())
        return FileAnswer(header, fd=found.fd, offset=found.offset, size=found.size)


def plan_exchange(config: WorkerConfig, ring: Callable[[], KeyRing], vitals: Vitals) -> FileExchange:
    """This process's exchange, as `config.model.sharing` describes it."""
    sharing = config.model.sharing
    assert sharing is not None
    services = sharing.peers
    if services is None:
        services = [names.workload_name(config.model_name, role) for role in (Role.PREFILL, Role.DECODE)]
    return FileExchange(sharing, services, ring, vitals)
