"""What a KV transport offers, and what two workers must agree on before any block moves.

A transport has two ends. The decode end implements `engine.contract.PrefillClient`: it is told which reserved blocks to
fill. The prefill end (`prefill.server`) takes orders from the network to `Engine.submit_prefill` and sends what the
engine reports through `engine.contract.LayerListener`.

Invariants of every transport:

- Blocks of different weights, revisions, element types or shapes never meet: both ends compare their `Identity` first.
- A block counts as received once its checksum was verified (where `KVConfig.verify` is on). What fails is sent again,
  then given up; it is never used. Everything but blocks is verified always.
- Bytes that were not verified do not stay in the block space: they are zeroed before their blocks go to others.
- When `PrefillClient.cancel` has returned, nothing of that generation is written any more.
- The prefill end keeps blocks allocated until its peer has acknowledged them or is gone, and not longer.

What is said, and who is believed, is the TCP connection's in every transport; `transports.open_transports` is the
one place that reads which of them moves the blocks.

Where a worker is a group of ranks, all of this holds of the group: its first rank orders, or takes orders, and the
others follow through a `GroupChannel`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from tandem_worker.transfer.layout import KVShard, RankAddress


@dataclass(frozen=True, slots=True)
class Offer:
    """A transport besides the connection itself that one end has, or was asked for and lacks."""

    transport: str
    protocol: str
    """What it goes over: both ends need the same."""
    obstacle: str = ""
    """Why it is missing, in words; empty where it is there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """Who speaks, and what must be equal at both ends."""

    worker: str
    """Pod name."""
    revision: str
    model_digest: str
    layout: str
    """`KVLayout.fingerprint` of the whole model, however it is spread over ranks."""
    shard: KVShard | None = None
    """What the speaking rank holds; None is the whole model."""
    ranks: tuple[RankAddress, ...] = ()
    """Prefill end: all ranks that hold an order's blocks, the first of which takes orders. Empty: the speaker alone."""
    offers: tuple[Offer, ...] = ()
    """Transports besides TCP, which every end has."""
    instance: str = ""
    """Prefill end: names the process whose Mooncake engines write; empty where it has none."""
    unsettled: tuple[str, ...] = ()
    """Prefill end: engines that something of this process may still write to."""

    def refusal(self, peer: Identity) -> str | None:
        """Why blocks of `peer` must not be mixed with ours; None when they may."""
        for name, ours, theirs in (
            ("revision", self.revision, peer.revision),
            ("model digest", self.model_digest, peer.model_digest),
            ("KV layout", self.layout, peer.layout),
        ):
            if ours != theirs:
                return f"{name} differs: {self.worker} has {ours!r}, {peer.worker} has {theirs!r}"
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferTimeouts:
    """Seconds after which a peer is given up. The kernel's keepalive notices a vanished host on idle connections."""

    connect: float = 2.0
    """Resolving a name, connecting and proving the keys, together."""
    handshake: float = 3.0
    frame: float = 10.0
    """A frame that has begun ends within this, and a second for each MB of it; time in which nobody waits is free."""
    retry_after: float = 1.0
    """A peer that could not be reached is left alone this long."""
    heartbeat: float = 1.0
    """The prefill end says this often that its engine moves on, while it has orders."""
    silence: float = 5.0
    """A peer with orders that sends nothing at all for this long is gone."""
    stall: float = 30.0
    """Without progress an order is given up after this: of the peer's engine before it has begun with it, of its own
    blocks from then on. At the prefill end: a peer that takes less than 1 MB/s for this long is given up."""
    patience: float = 5.0
    """An order that the peer has not begun for this long gives its blocks up where others lack them."""
    queue: float = 60.0
    """An order that the peer has not begun for this long goes elsewhere."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TransportStats:
    """What one transport has moved."""

    num_bytes: int
    bytes_per_second: float | None
    """While bytes were moving, of the last transfers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferStats:
    """Counters since the start."""

    bytes_sent: int = 0
    bytes_received: int = 0
    failures: int = 0
    """Transfers that were given up, whatever the reason; the engine then prefills locally."""
    resends: int = 0
    """Times that blocks were asked for again because of a bad checksum."""
    connections: int = 0
    """Open connections to or from peers."""
    bytes_per_second: float | None = None
    """Rate of the last transfers while bytes were moving; None before the first."""
    seconds_receiving: float | None = None
    """In which blocks were arriving, from however many peers at a time; None where none are received."""
    refusals: Mapping[str, int] = field(default_factory=dict[str, int])
    """Connections refused before they proved a key, by `peers.handshake.Refusal`."""
    integrity_failures: Mapping[str, int] = field(default_factory=dict[str, int])
    """Frames and blocks that were not used, by `checksums.Damage`."""
    quota_refusals: Mapping[str, int] = field(default_factory=dict[str, int])
    """What peers were refused, by `quotas.Quota`."""
    wanted: str = "TCP"
    """`spec.kv.transport`."""
    transport: str | None = None
    """What the last order used; None before the first one, and where it was refused."""
    protocol: str | None = None
    """What Mooncake goes over at this end; None where it is not there."""
    transports: Mapping[str, TransportStats] = field(default_factory=dict[str, "TransportStats"])
    """Those that have moved something, by their name."""
    fallback: str | None = None
    """Why what was asked for was not used, the last time that it was not; None where it was."""
    held_slots: int = 0
    """Landings that nobody uses because a late write may still come."""


def join_stats(one: TransferStats, other: TransferStats) -> TransferStats:
    """Counters of a process that has both ends. Rates are those of the end that has one, of `other` where both have;
    transports are those of the end that moves orders' blocks: one that only gives blocks away has none but TCP."""
    orders = one if (other.wanted, other.transport, other.fallback) == ("TCP", None, None) else other
    return TransferStats(
        bytes_sent=one.bytes_sent + other.bytes_sent,
        bytes_received=one.bytes_received + other.bytes_received,
        failures=one.failures + other.failures,
        resends=one.resends + other.resends,
        connections=one.connections + other.connections,
        bytes_per_second=one.bytes_per_second if other.bytes_per_second is None else other.bytes_per_second,
        seconds_receiving=one.seconds_receiving if other.seconds_receiving is None else other.seconds_receiving,
        refusals=_add(one.refusals, other.refusals),
        integrity_failures=_add(one.integrity_failures, other.integrity_failures),
        quota_refusals=_add(one.quota_refusals, other.quota_refusals),
        wanted=orders.wanted,
        transport=orders.transport,
        protocol=orders.protocol,
        transports=orders.transports,
        fallback=orders.fallback,
        held_slots=one.held_slots + other.held_slots,
    )


def _add(one: Mapping[str, int], other: Mapping[str, int]) -> dict[str, int]:
    return {
        kind: one.get(kind, 0) + other.get(kind, 0) for kind in [*one, *(kind for kind in other if kind not in one)]
    }


class GroupChannel(Protocol):
    """Rank 0's way to the other ranks of its worker."""

    @property
    def num_followers(self) -> int:
        """Ranks of this worker besides rank 0."""
        ...

    def post(self, message: bytes) -> None:
        """Any thread. Each follower handles `message` in the order of the posts and steps that it is sent: after the
        steps that were sent before it are computed, before those that are sent later."""
        ...


@dataclass(slots=True)
class BandwidthMeter:
    """Bytes per second while bytes move: exponentially weighted over transfers, larger ones count more."""

    half_life_bytes: float = 64e6
    _rate: float | None = field(default=None)

    def observe(self, num_bytes: int, seconds: float) -> None:
        """Take in a transfer of `num_bytes` in `seconds`; one without bytes or without duration is ignored."""
        if num_bytes <= 0 or seconds <= 0:
            return
        keep = 0.5 ** (num_bytes / self.half_life_bytes)
        sample = num_bytes / seconds
        self._rate = sample if self._rate is None else keep * self._rate + (1 - keep) * sample

    @property
    def rate(self) -> float | None:
        """Bytes per second; None before the first transfer."""
        return self._rate


class CoveredTime:
    """Seconds that at least one of several intervals covers, which come in the order of their ends.

    An interval that began before the last `_MOST` gaps counts what lies between older ones twice.
    """

    _MOST = 64

    def __init__(self) -> None:
        self.seconds = 0.0
        self._covered: deque[tuple[float, float]] = deque(maxlen=self._MOST)
        """Apart from each other, the newest last."""

    def add(self, began: float, ended: float) -> None:
        """O(1) in the mean: an interval is joined with others once."""
        known = 0.0
        while self._covered and self._covered[-1][1] >= began:
            first, last = self._covered.pop()
            known += last - first
            began, ended = min(began, first), max(ended, last)
        self.seconds += max(0.0, ended - began - known)  # rounding must not take anything back
        self._covered.append((began, ended))
