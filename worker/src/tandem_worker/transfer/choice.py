"""Which transport an order's blocks move by. Pure.

What `spec.kv.transport` asks for is used or named as missing; TCP stands in for it where `allowFallback` says so. Under
Auto what both ends offer is measured, each over some megabytes, and the fastest is used from then on.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from tandem_api.launch import WantedKVTransport

from tandem_worker.transfer.contract import Offer

TCP, MOONCAKE = "TCP", "Mooncake"

MEASURED_BYTES = 32 << 20
"""So much has to be moved before a rate is believed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """`spec.kv.transport` and `spec.kv.allowFallback`."""

    wanted: WantedKVTransport = "Auto"
    allow_fallback: bool = False


@dataclass(frozen=True, slots=True)
class Choice:
    transport: str | None
    """None: the order is not given to this peer."""
    fallback: str | None = None
    """Why it is not what was asked for."""


@dataclass(frozen=True, slots=True)
class Measured:
    """What a transport has moved, and how fast while it moved."""

    num_bytes: int = 0
    bytes_per_second: float | None = None


def find_obstacle(ours: tuple[Offer, ...], theirs: tuple[Offer, ...], peer: str) -> str | None:
    """Why two ends cannot move blocks through Mooncake; None where they can."""
    sides = [_find(ours, "this worker"), _find(theirs, peer)]
    for side in sides:
        if isinstance(side, str):
            return side
    protocols = [side.protocol for side in sides if isinstance(side, Offer)]
    if protocols[0] != protocols[1]:
        return f"Mooncake goes over {protocols[0]} here and over {protocols[1]} at {peer}"
    return None


def _find(offers: tuple[Offer, ...], who: str) -> Offer | str:
    offer = next((each for each in offers if each.transport == MOONCAKE), None)
    if offer is None:
        return f"{who} does not offer Mooncake"
    return f"{who}: {offer.obstacle}" if offer.obstacle else offer


def choose(policy: Policy, obstacle: str | None, measured: Mapping[str, Measured]) -> Choice:
    """`obstacle`: why Mooncake is out of the question with this peer; None where it is not."""
    if policy.wanted == TCP:
        return Choice(TCP)
    if policy.wanted == MOONCAKE:
        if obstacle is None:
            return Choice(MOONCAKE)
        return Choice(TCP if policy.allow_fallback else None, obstacle)
    if obstacle is not None:
        return Choice(TCP)
    for transport in (MOONCAKE, TCP):  # it is offered under Auto only where it goes over something faster
        seen = measured.get(transport, Measured())
        if seen.bytes_per_second is None or seen.num_bytes < MEASURED_BYTES:
            return Choice(transport)
    return Choice(max((MOONCAKE, TCP), key=lambda transport: measured[transport].bytes_per_second or 0.0))
