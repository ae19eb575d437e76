"""Who stands before the door without having proven the key, and how often somebody was refused."""

from __future__ import annotations

import ipaddress
import logging
import socket
from collections import Counter, OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field

from tandem_worker.host.peers.handshake import Acceptor, Refusal

logger = logging.getLogger(__name__)

_LOGGED_EVERY = 10.0


@dataclass(slots=True)
class Waiting:
    """A connection that has not proven anything yet."""

    sock: socket.socket
    name: str
    source: str
    acceptor: Acceptor
    deadline: float
    received: bytearray = field(default_factory=bytearray)
    challenged: bool = False


class WaitingRoom:
    """Connections by descriptor, in the order of their arrival, which is that of their deadlines."""

    def __init__(self) -> None:
        self._waiting: OrderedDict[int, Waiting] = OrderedDict()
        self._by_source: dict[str, OrderedDict[int, None]] = {}
        """Their descriptors by where they come from, in order of arrival."""

    def __len__(self) -> int:
        return len(self._waiting)

    def __contains__(self, fd: int) -> bool:
        return fd in self._waiting

    def __getitem__(self, fd: int) -> Waiting:
        return self._waiting[fd]

    @property
    def first(self) -> Waiting | None:
        """The one that waits longest."""
        return next(iter(self._waiting.values()), None)

    def add(self, waiting: Waiting) -> None:
        """It waits from now on."""
        fd = waiting.sock.fileno()
        self._waiting[fd] = waiting
        self._by_source.setdefault(waiting.source, OrderedDict())[fd] = None

    def remove(self, fd: int) -> Waiting:
        """It waits no longer; its socket stays open."""
        waiting = self._waiting.pop(fd)
        of_source = self._by_source[waiting.source]
        del of_source[fd]
        if not of_source:
            del self._by_source[waiting.source]
        return waiting

    def find_greediest(self, newcomer: str) -> int:
        """The oldest connection of the address with the most; where addresses have as many, `newcomer`'s own."""

        def size(source: str) -> tuple[int, bool]:
            return len(self._by_source[source]) + (source == newcomer), source == newcomer

        return next(iter(self._by_source[max(self._by_source, key=size)]))

    def close(self) -> None:
        """Close all that wait."""
        for waiting in self._waiting.values():
            waiting.sock.close()
        self._waiting.clear()
        self._by_source.clear()


class RefusalCount:
    """Counts refusals, and tells of them now and then: a flood must not fill the log."""

    def __init__(self, source: str, clock: Callable[[], float]) -> None:
        self.counts: Counter[str] = Counter(dict.fromkeys(Refusal, 0))
        self._source, self._clock = source, clock
        self._next_report = 0.0
        self._unreported: Counter[str] = Counter()

    def note(self, reason: Refusal, name: str, why: str) -> None:
        """The connection from `name` was refused."""
        self.counts[reason] += 1
        self._unreported[reason] += 1
        now = self._clock()
        if now >= self._next_report:
            self._next_report = now + _LOGGED_EVERY
            logger.warning(
                "%s: a connection from %s was refused: %s",
                self._source,
                name,
                why,
                extra={"refused": {str(kind): count for kind, count in self._unreported.items()}},
            )
            self._unreported.clear()


def find_source(host: str) -> str:
    """Tell whose share a connection counts to. Of IPv6, whoever has one address has all that share its first 64
    bits."""
    address = ipaddress.ip_address(host.partition("%")[0])
    if address.version == 4:
        return str(address)
    return str(address.ipv4_mapped or ipaddress.ip_network((address, 64), strict=False))
