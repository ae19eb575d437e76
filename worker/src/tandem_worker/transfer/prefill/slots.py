"""Prefill side: the slots of a peer that an engine of Mooncake writes one connection's blocks to."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

from tandem_worker.transfer.blocks import BlockReader
from tandem_worker.transfer.contract import Identity, Offer
from tandem_worker.transfer.errors import TransferError
from tandem_worker.transfer.messages import ReadyBlocks
from tandem_worker.transfer.prefill.outgoing import Outgoing
from tandem_worker.transfer.slicing import Piece
from tandem_worker.transfer.transports import Transports

if TYPE_CHECKING:
    from tandem_worker.transfer.mooncake.departure import Departures
    from tandem_worker.transfer.mooncake.frames import Landed

LOOK_SECONDS = 0.001
"""Between two looks at what is in flight through slots: polling without sleep costs a core."""


class Moved(NamedTuple):
    """What became of one slot."""

    transfer: int
    frame: bytes
    """Tells the peer."""
    num_bytes: int
    seconds: float | None
    """In which it moved; None: nothing is sure to have."""


class Slots:
    """For the connection's thread."""

    def __init__(self, transports: Transports, pieces: Mapping[int, Piece], reader: BlockReader) -> None:
        self._transports, self._pieces, self._reader = transports, pieces, reader
        self._departures: Departures | None = None
        """None where one end has no Mooncake."""
        self._next: int | None = None
        """The order that comes next, where it goes through slots."""

    def prepare_offers(self, peer: Identity) -> tuple[Offer, ...]:
        """What this peer is offered: with Mooncake an engine is put aside for it, or it is told that none is left."""
        ours = self._transports.offers
        if self._transports.stations is None or not self._pieces or not any(not each.obstacle for each in peer.offers):
            return ours
        from tandem_worker.transfer.mooncake.departure import Departures

        try:
            self._departures = Departures(self._transports.stations, self._reader, self._pieces)
        except TransferError as error:
            return tuple(replace(each, obstacle=str(error)) for each in ours)
        return ours

    def take_grant(self, transfer: int, body: bytes, peer: str) -> None:
        """Slots of the peer at `peer`; with a number, the order that comes next goes through them.

        Raises TransferError for what does not fit.
        """
        from tandem_worker.transfer.mooncake.frames import decode_grant, is_same_host

        if self._departures is None:
            raise TransferError("the peer granted slots, and this worker has not offered Mooncake")
        grant = decode_grant(body)
        if not is_same_host(grant.engine, peer):
            raise TransferError(f"the peer, {peer}, granted slots of an engine at {grant.engine}, another address")
        self._departures.take_grant(grant)
        if transfer:
            self._next = transfer

    def prepare(self, outgoing: Outgoing) -> None:
        """Note by which way an order goes that has just come."""
        named, self._next = self._next, None
        outgoing.departures = self._departures if named == outgoing.transfer else None

    @property
    def flow(self) -> tuple[bool, int]:
        """Whether blocks wait for a slot, or for one to land; and the bytes that have landed."""
        return (False, 0) if self._departures is None else (self._departures.waits, self._departures.bytes_landed)

    def settle(self, now: float) -> tuple[list[Moved], float | None]:
        """What has landed, and the seconds until the next look where something is in flight."""
        if self._departures is None or not self._departures.busy:
            return [], None
        return list(_tell(self._departures.settle(now))), 0.0 if self._departures.can_submit else LOOK_SECONDS

    def pump(self, now: float, guard: Callable[[ReadyBlocks, Callable[[], None]], bool]) -> list[Moved]:
        """Fill slots. Returns what could not even begin."""
        return [] if self._departures is None else list(_tell(self._departures.pump(now, guard)))

    def close(self) -> None:
        """The connection has ended."""
        if self._departures is not None:
            self._departures.close()


def _tell(ended: Iterable[tuple[int, Landed, int]]) -> Iterator[Moved]:
    from tandem_worker.transfer.mooncake.frames import encode_landed

    for transfer, landed, num_bytes in ended:
        yield Moved(transfer, encode_landed(transfer, landed), num_bytes, None if landed.lost else landed.micros / 1e6)
