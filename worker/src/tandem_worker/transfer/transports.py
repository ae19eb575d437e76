"""The transports of one process, as `spec.kv.transport` asks for them: both ends are built with what this opens.

TCP is always there: it carries what is said, whichever transport moves the blocks. Mooncake's library is loaded only
where it is asked for, or where Auto finds a device that makes it faster.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from tandem_api.launch import KVConfig

from tandem_worker.transfer.choice import MOONCAKE, TCP, Choice, Measured, Policy, choose, find_obstacle
from tandem_worker.transfer.contract import BandwidthMeter, Identity, Offer, TransportStats
from tandem_worker.transfer.errors import TransferError

if TYPE_CHECKING:
    from tandem_worker.transfer.mooncake.departure import StationPool
    from tandem_worker.transfer.mooncake.landing import Landing, LandingPool

logger = logging.getLogger(__name__)

_DEVICES = Path("/dev/infiniband")
"""What a device plugin gives a pod; `/sys` shows a node's devices to pods that have none."""
_MOST_UNSETTLED = 64
_LEFT_ALONE_SECONDS = 30.0
"""A peer that Mooncake could not reach is not tried again for so long."""


class Transports:
    """Any thread."""

    def __init__(
        self,
        policy: Policy | None = None,
        offers: tuple[Offer, ...] = (),
        *,
        landings: LandingPool | None = None,
        stations: StationPool | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.policy = policy or Policy()
        self.offers = offers
        """For HELLO."""
        self.stations = stations
        self._landings = landings
        self._clock = clock
        self._lock = threading.Lock()
        self._meters: dict[str, BandwidthMeter] = {}
        self._moved: dict[str, int] = {}
        self._unreached: dict[str, tuple[float, str]] = {}
        self._fallback: str | None = None
        self._last: str | None = None

    @property
    def has_mooncake(self) -> bool:
        """This end could use it."""
        return any(offer.transport == MOONCAKE and not offer.obstacle for offer in self.offers)

    def find_obstacle(self, peer: Identity, endpoint: str) -> str | None:
        """Why the blocks of an order to this peer cannot go through Mooncake."""
        with self._lock:
            until, reason = self._unreached.get(endpoint, (0.0, ""))
            if self._clock() < until:
                return reason
        return find_obstacle(self.offers, peer.offers, peer.worker)

    def choose(self, obstacle: str | None) -> Choice:
        """How the next order moves; what it falls back from is remembered for `fallback`."""
        with self._lock:
            measured = {name: Measured(self._moved[name], meter.rate) for name, meter in self._meters.items()}
            choice = choose(self.policy, obstacle, measured)
            if choice.fallback is not None and choice.fallback != self._fallback:
                logger.warning("blocks do not move through %s: %s", self.policy.wanted, choice.fallback)
            self._fallback, self._last = choice.fallback, choice.transport
            return choice

    def land(self, piece_bytes: Sequence[int]) -> Landing:
        """Slots for one connection. Raises TransferError."""
        from tandem_worker.transfer.mooncake.landing import plan_slot_bytes

        if self._landings is None:
            raise TransferError("this worker has no landing for Mooncake")
        return self._landings.take(plan_slot_bytes(piece_bytes))

    def leave(self, landing: Landing, peer: Identity) -> None:
        """Its connection has ended."""
        assert self._landings is not None, "it came from there"
        self._landings.give_back(landing, peer.instance)

    def greet(self, peer: Identity) -> None:
        """A prefill worker says HELLO: what it cannot write to any more may serve others."""
        if self._landings is not None and peer.instance:
            self._landings.settle(peer.instance, peer.unsettled)

    def sign(self, identity: Identity) -> Identity:
        """What this prefill worker says of itself to one that connects now."""
        if self.stations is None:
            return identity
        unsettled = self.stations.find_unsettled()
        if len(unsettled) > _MOST_UNSETTLED:
            return identity  # without a name nothing is taken for settled
        return replace(identity, instance=self.stations.instance, unsettled=unsettled)

    def note_unreached(self, endpoint: str, reason: str) -> None:
        """Mooncake's engines do not reach each other: its next orders are not tried for a while."""
        with self._lock:
            now = self._clock()
            self._unreached = {name: entry for name, entry in self._unreached.items() if entry[0] > now}
            self._unreached[endpoint] = (now + _LEFT_ALONE_SECONDS, reason)

    def note_moved(self, transport: str, num_bytes: int, seconds: float) -> None:
        """So much came in, in so many seconds of moving."""
        with self._lock:
            self._last = transport
            self._meters.setdefault(transport, BandwidthMeter()).observe(num_bytes, seconds)
            self._moved[transport] = self._moved.get(transport, 0) + num_bytes

    @property
    def last(self) -> str | None:
        """What the last order or block used; None before the first one, and where it was refused."""
        return self._last

    @property
    def protocol(self) -> str | None:
        """What Mooncake goes over here; None where it is not there."""
        return next((offer.protocol for offer in self.offers if not offer.obstacle), None)

    @property
    def fallback(self) -> str | None:
        """Why the last order did not go as asked for; None where it did. What this end lacks counts always."""
        lacking = None
        if self.policy.wanted == MOONCAKE:
            lacking = next((f"this worker: {offer.obstacle}" for offer in self.offers if offer.obstacle), None)
        return self._fallback or lacking

    @property
    def num_held(self) -> int:
        """Landings that nobody may use yet."""
        return 0 if self._landings is None else self._landings.num_held

    def stats(self) -> dict[str, TransportStats]:
        """What each transport has moved."""
        with self._lock:
            return {
                name: TransportStats(num_bytes=self._moved[name], bytes_per_second=meter.rate)
                for name, meter in self._meters.items()
            }


def open_transports(kv: KVConfig, host: str) -> Transports:
    """What `kv` asks for; what cannot be had is an obstacle in the offers. `host`: this pod's address."""
    policy = Policy(wanted=kv.wanted_transport, allow_fallback=kv.allow_fallback)
    if policy.wanted == TCP or (policy.wanted == "Auto" and not _has_fast_device()):
        return Transports(policy)
    return open_mooncake(policy, host)


def open_mooncake(policy: Policy, host: str) -> Transports:
    """Transports with Mooncake, whose engines begin when connections need them; the first one now, as a trial."""
    from tandem_worker.transfer.mooncake.departure import StationPool
    from tandem_worker.transfer.mooncake.engine import Engine
    from tandem_worker.transfer.mooncake.landing import LandingPool

    protocol = find_protocol()
    try:
        trial: list[Engine] = [Engine(host, protocol)]
    except TransferError as error:
        logger.warning("Mooncake's Transfer Engine is not there: %s", error)
        return Transports(policy, (Offer(MOONCAKE, protocol, str(error)),))

    def begin() -> Engine:
        try:
            return trial.pop()
        except IndexError:
            return Engine(host, protocol)

    offers = (Offer(MOONCAKE, protocol),)
    return Transports(policy, offers, landings=LandingPool(begin), stations=StationPool(begin))


def _has_fast_device() -> bool:
    if find_protocol() == TCP.lower():
        return False
    from tandem_worker.host.mooncake import find_mooncake_obstacle

    return find_mooncake_obstacle() is None


def find_protocol() -> str:
    """What Mooncake goes over: `rdma` where the machine shows this process a device, and it is not told otherwise; else
    `tcp`."""
    if os.environ.get("MC_FORCE_TCP"):
        return "tcp"
    try:
        return "rdma" if any(_DEVICES.glob("uverbs*")) else "tcp"
    except OSError:
        return "tcp"
